"""The embedded checkpoint's answers to five prompts: makes vectors/tiny, dumps what engines answer.

python scripts/tiny_oracle.py make --out DIR                       # the stored answers again, in float64
python scripts/tiny_oracle.py dump m3jax out.safetensors --dtype bfloat16 --backend xla
python scripts/tiny_oracle.py dump transformers out.safetensors
python scripts/tiny_oracle.py dump m3.gguf out.safetensors         # llama.cpp, by scripts/peer_llama_cpp.py convert
python vectors/check_numpy.py --tiny out.safetensors               # the line that says how far apart they are
"""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import m3jax
from m3jax.assets import embedded_path
from m3jax.compare.live import run_transformers
from m3jax.compare.sides import Source, side
from m3jax.config import M3Config
from m3jax.decoding import Params, Sampling, build_engine
from m3jax.evaluate.words import WORDS
from m3jax.files.tensors import packed
from m3jax.model import M3
from m3jax.ops import interpret
from m3jax.text import Tokenizer
from m3jax.vectors.files import write_new
from m3jax.vectors.making import made_on
from m3jax.vectors.margins import cut

VERSION = "0.1.0"
NEW_TOKENS = 32
LENGTHS = {"p200": 200, "p500": 500, "p1000": 1000, "p2000": 2000, "p4000": 4000}
STORED = Path(__file__).resolve().parents[1] / "vectors" / "tiny" / "tiny.json"
UNUSED = 255  # in the place of -1; the last block of 4,031 tokens is 251


def prompts() -> dict[str, list[int]]:
    """Return prompts in the manner of what the model was trained on: lines of code with records, and a question.

    Every word and name is drawn by a seed, so that the text is the same wherever it is made, and nobody's.
    """
    tokenizer = Tokenizer.from_pretrained(embedded_path())
    found = {}
    for seed, (name, length) in enumerate(LENGTHS.items()):
        rng = np.random.default_rng(500 + seed)
        word = lambda rng=rng: WORDS[int(rng.integers(len(WORDS)))]
        records = {word(): word() for _ in range(6)}
        lines, records_left = [f'"""{word().title()} and {word()}."""', "import os", ""], list(records.items())
        # A token is more than one character here, so there are enough lines; what is too much is cut at the front.
        while len(lines) < length // 6:
            a, b, c = word(), word(), word()
            lines += [f"def {a}_{b}({c}, size={rng.integers(99)}):", f"    if {c} is None:",
                      f"        return {a}[{rng.integers(9)}:{rng.integers(9, 99)}]"]  # fmt: skip
            if rng.random() < 0.5:
                lines += [f"    for {b} in range(size):", f"        self.{a}.append({b} + {rng.integers(9)})"]
            lines += [f"    return {b}({c}, {word()}=size)", ""]
            if rng.random() < 0.4:
                key, value = records_left[int(rng.integers(len(records_left)))]
                lines.append(f"# {key} -> {value}")
        asked = next(iter(records))
        head, tail = tokenizer.encode("\n".join([*lines[:3], f"# {asked} -> {records[asked]}", ""])), []
        tail = tokenizer.encode("\n".join(lines[3:]) + f"\n# {asked} ->")
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        room = length - len(begin) - len(head)
        if len(tail) < room:
            raise ValueError(f"{name}: {len(tail)} tokens of text, and {room} are needed; draw more lines")
        found[name] = [*begin, *head, *tail[len(tail) - room :]]
    return found


def greedy(model: M3, tokens: Sequence[int]) -> list[int]:
    """Return the next tokens, by the engine, each the one with the largest logit."""
    engine = build_engine(
        model, rows=1, length=len(tokens) + NEW_TOKENS, prefill_chunk=512, steps_per_call=NEW_TOKENS,
        prefix_cache=False, progress=False,
    )  # fmt: skip
    handle = engine.add(tokens, Params(max_new_tokens=NEW_TOKENS, sampling=Sampling.greedy(), stop_ids=()))
    engine.run()
    return list(engine.result(handle).tokens)


def answers(logits: Any, tokens: Sequence[int], blocks: Any, expert_ids: Any) -> dict[str, np.ndarray]:
    """Return what is stored of a run over a prompt and all but the last of its new tokens.

    Args:
      logits: of every position [T V].
      tokens: all that were read [T].
      blocks: of each sparse layer [L K T J].
      expert_ids: of each layer with experts [L T A].
    """
    logits = np.asarray(logits, np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    logprobs = logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))
    following = np.asarray(tokens)[1:]
    return {
        "blocks": np.where(np.asarray(blocks) < 0, UNUSED, blocks).astype(np.uint8),
        "expert_ids": np.sort(np.asarray(expert_ids), axis=-1).astype(np.uint8),
        "tokens": logits[-NEW_TOKENS:].argmax(axis=-1).astype(np.int32),
        "logits": logits[-NEW_TOKENS:].astype(np.float32),
        "logprobs": logprobs[np.arange(len(following)), following].astype(np.float32),
    }


def of_m3jax(model: M3, tokens: Sequence[int]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a run's answers, and each selection's margin: between the scores on both sides of the cut [L K T]."""
    row = jnp.asarray([tokens], jnp.int32)
    values = jax.jit(lambda model, row: model.intermediates(row))(model, row)
    where = jnp.arange(row.shape[1])[None], jnp.asarray([row.shape[1]])
    sparse = [layer for layer in values["layers"] if "blocks" in layer]
    rule = {"block_size": model.config.index_block_size}
    cuts = [cut(layer["block_scores"], layer["blocks"], *where, rule) for layer in sparse]
    stacked = lambda name: np.stack([np.asarray(layer[name][0]) for layer in values["layers"] if name in layer])
    found = answers(values["logits"][0], tokens, stacked("blocks"), stacked("expert_ids"))
    # Infinite where nothing is dropped; a float16 ends at 65,504.
    margin = np.stack([np.asarray(x["last_kept"][0] - x["first_dropped"][0], np.float64) for x in cuts])
    return found, {"margin": np.minimum(margin, 6e4).astype(np.float16)}


def of_source(source: Source, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the answers in another engine's values, by whatever names it has for them."""
    values = side(source, source.config, [len(tokens)], {}).values
    stacked = lambda kind: np.stack(
        [
            x.array
            for _, x in sorted((int(name.split(".")[1]), x) for name, x in values.items() if name.endswith(f".{kind}"))
        ]
    )
    blocks = np.moveaxis(stacked("blocks"), 1, 2)  # [L T K J] -> [L K T J]
    return answers(values["logits"].array, tokens, blocks, stacked("expert_ids"))


def make(folder: Path) -> None:
    """Write tiny.json and tiny.safetensors; raise ValueError if float64 disagrees with the tokens that float32 drew."""
    checkpoint, entries, arrays = embedded_path(), [], {}
    in_float32 = m3jax.load(dtype="float32", progress=False)
    drawn = {name: greedy(in_float32, tokens) for name, tokens in prompts().items()}
    with jax.enable_x64(True):
        model = m3jax.load(dtype="float64", progress=False)
        for name, prompt in prompts().items():
            found, margin = of_m3jax(model, [*prompt, *drawn[name][:-1]])
            if found["tokens"].tolist() != drawn[name]:
                raise ValueError(f"{name}: greedy tokens in float32 are not those of float64; draw another prompt")
            if not (found["blocks"][..., -1] != UNUSED).any() or len(prompt) <= model.config.index_block_size * 8:
                raise ValueError(f"{name}: no block is dropped")
            arrays |= {f"{name}/{key}": x for key, x in (found | margin).items() if key != "tokens"}
            entries.append({"name": name, "prompt": prompt, "tokens": drawn[name]})
            print(f"{name}: {Tokenizer.from_pretrained(checkpoint).decode(drawn[name])!r}", flush=True)
    data = packed(arrays)
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(checkpoint.iterdir())
             if file.name in ("config.json", "model.safetensors")}  # fmt: skip
    head = {"version": VERSION, "made": made_on(), "checkpoint": files, "unused": UNUSED,
            "sha256": hashlib.sha256(data).hexdigest()}  # fmt: skip
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    write_new(folder / "tiny.safetensors", data)
    write_new(folder / "tiny.json", f'{json.dumps(head)[:-1]},\n "prompts": [\n{lines}]}}\n'.encode())


def dump(engine: str, out: Path, dtype: str, backend: str, only: Sequence[str]) -> None:
    """Write what an engine answers, by the names that `check_numpy.py --tiny` reads; kernels run interpreted here."""
    arrays: dict[str, np.ndarray] = {}
    asked = json.loads(STORED.read_text(encoding="utf-8"))["prompts"]
    model = m3jax.load(dtype=dtype, progress=False).with_backend(backend) if engine == "m3jax" else None
    for entry in (entry for entry in asked if not only or entry["name"] in only):
        tokens = [*entry["prompt"], *entry["tokens"][:-1]]
        if model is not None:
            with interpret() if backend not in ("auto", "xla") else nullcontext():
                found, _ = of_m3jax(model, tokens)
        elif engine == "transformers":
            found = of_source(run_transformers("transformers", str(embedded_path()), [tokens], dtype), tokens)
        else:
            found = of_source(run_llama_cpp(Path(engine), tokens), tokens)
        wide = {"bfloat16": jnp.bfloat16}.get(dtype, np.float32)
        found["logits"] = found["logits"].astype(wide)  # its dtype says that of the computation
        arrays |= {f"{entry['name']}/{key}": x for key, x in found.items()}
        print(entry["name"], flush=True)
    out.write_bytes(packed(arrays))


def run_llama_cpp(path: Path, tokens: Sequence[int]) -> Source:
    """Return llama.cpp's values of a prompt, by its names."""
    from peer_llama_cpp import LlamaCpp, values_of

    peer = LlamaCpp(path, len(tokens), threads=2, keep=True)
    try:
        values: Mapping[str, np.ndarray] = values_of(peer, tokens)
    finally:
        peer.close()
    return Source(str(path), {name: [x] for name, x in values.items()}, M3Config.from_pretrained(embedded_path()))


def main() -> None:
    """Make the stored answers, or dump an engine's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make").add_argument("--out", type=Path, required=True)
    dumping = commands.add_parser("dump")
    dumping.add_argument("engine", help="m3jax, transformers, or a GGUF file for llama.cpp")
    dumping.add_argument("out", type=Path)
    dumping.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    dumping.add_argument("--backend", default="auto", help="of m3jax: auto, xla, triton or mosaic_tpu")
    dumping.add_argument("--only", action="append", default=[], choices=LENGTHS, help="a prompt; may be repeated")
    args = parser.parse_args()
    if args.command == "make":
        make(args.out)
    else:
        dump(args.engine, args.out, args.dtype, args.backend, args.only)


if __name__ == "__main__":
    main()
