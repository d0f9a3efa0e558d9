"""Trains a dense model here, converts it to MSA by `python -m m3jax.train convert`, and measures and plots both.

    python scripts/tiny/convert_curve.py --out runs/convert                                # on two cores
    python scripts/tiny/convert_curve.py --out runs/convert0 --scale 0                     # a few minutes of them
    python scripts/tiny/convert_curve.py --out runs/convert --scale 10 --dtype bfloat16    # one GPU, ten times the size
    python scripts/tiny/convert_curve.py --out runs/llama0 --scale 0 --source llama        # heads without norms

What it learns is made here: bytes of this repository's documents and code, and between them records, symbols that are
no bytes: one of 8 values of a key. Somewhere behind it the key is asked for, and its value follows: it can be told by
whoever finds the record, which is anywhere before it, mostly outside of what a window of the same budget holds. A query
keeps an eighth of the context. A stage that was stopped goes on, one that is whole is not run again.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
VALUES = 8  # that a key can have; key k with value v is the token 256 + 8 k + v, the question for it comes behind all
PER_RECORD = 16  # tokens of a row for each record
# Stages of the dense model: times that their rows are shorter than the context, and tokens of a row for each record. To
# look back is learnt fast where there is little to look at.
STAGES = {"records": (16, 4), "short": (4, PER_RECORD), "whole": (1, PER_RECORD)}
NUM_BINS = 8  # of distance, each as wide as a query's budget


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
      hidden: D, width of the model; its heads are 32 wide.
      layers: of the model.
      context: tokens of a row.
      block_size: P.
      topk_blocks: J; J P is an eighth of the context.
      rows: of a step.
      dense_steps: of the dense model, of each of `STAGES`.
      steps: of the conversion, both phases together.
      warm_up_steps: of these, in which the index branch learns alone.
      documents: rows that the conversion learns from.
      held_out: rows to measure on.
    """

    hidden: int
    layers: int
    context: int
    block_size: int
    topk_blocks: int
    rows: int
    dense_steps: tuple[int, int, int]
    steps: int
    warm_up_steps: int
    documents: int
    held_out: int

    @property
    def keys(self) -> int:
        """Keys that records have: as many as a row of the context has records."""
        return self.context // PER_RECORD

    def config(self, source: str) -> dict:
        """Return the config.json of the dense model.

        Args:
          source: its model_type.
        """
        return {
            "model_type": source, "vocab_size": 256 + (VALUES + 1) * self.keys, "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": self.context, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        }  # fmt: skip


SIZES = {
    # Four minutes of a core.
    0: Sizes(64, 2, 256, 8, 4, 8, (400, 400, 250), 200, 80, 600, 32),
    1: Sizes(128, 3, 1024, 16, 8, 8, (600, 500, 200), 350, 150, 1600, 32),
    # Ten times the parameters of 1.
    10: Sizes(384, 4, 4096, 32, 16, 8, (2000, 1500, 800), 1200, 500, 4000, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the run")
    parser.add_argument("--scale", type=int, choices=SIZES, default=1, help="sizes of the run (default: 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--source", choices=("qwen3", "llama"), default="qwen3", help="the dense model")
    parser.add_argument("--json", type=Path, default=Path("docs/data/convert.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/data/convert.png"))
    parser.add_argument("--stage", choices=("dense", "measure"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = SIZES[args.scale]
    if args.stage == "dense":
        return train_dense(args.out, sizes, args.source, args.dtype)
    if args.stage == "measure":
        return measure(args.out, sizes)
    run(args.out, sizes, args.scale, args.source, args.dtype)
    found = collect(args.out, sizes, args.source)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    plot(found, args.plot)
    print(f"{args.json}\n{args.plot}")


def run(out: Path, sizes: Sizes, scale: int, source: str, dtype: str) -> None:
    """Run the stages that are not whole, each as a process of its own: a device is one process's at a time."""
    out.mkdir(parents=True, exist_ok=True)
    again = [sys.executable, __file__, "--out", str(out), "--scale", str(scale), "--source", source, "--dtype", dtype]
    if not (out / "dense" / "model" / "config.json").is_file():
        timed(out, "dense", [*again, "--stage", "dense"])
    if not (out / "data.jsonl").is_file():
        rows = [row for row, _ in (*drawn_rows(2, sizes.documents, sizes), *drawn_rows(3, sizes.held_out, sizes))]
        (out / "data.jsonl").write_text("".join(json.dumps({"tokens": row.tolist()}) + "\n" for row in rows))
    if not (out / "msa" / "report.json").is_file():
        timed(out, "convert", [
            sys.executable, "-m", "m3jax.train", "convert", "--model", str(out / "dense" / "model"),
            "--data", str(out / "data.jsonl"), "--out", str(out / "msa"), "--steps", str(sizes.steps),
            "--warm-up-steps", str(sizes.warm_up_steps), "--block-size", str(sizes.block_size),
            "--topk-blocks", str(sizes.topk_blocks), "--rows", str(sizes.rows), "--held-out", str(sizes.held_out),
            "--index-rate", "1e-3", "--learning-rate", "3e-4", "--dtype", dtype, "--no-remat", "--save-every", "50",
        ])  # fmt: skip
    timed(out, "measure", [*again, "--stage", "measure"])


def timed(out: Path, name: str, command: list[str]) -> None:
    """Run a stage, and write down how long it took: all its runs together, where it was stopped."""
    path, began = out / "seconds.json", time.perf_counter()
    seconds = json.loads(path.read_text()) if path.is_file() else {}
    try:
        subprocess.run(command, check=True)
    finally:
        seconds[name] = seconds.get(name, 0.0) * (name != "measure") + time.perf_counter() - began
        path.write_text(json.dumps(seconds) + "\n")


# What is learnt


@cache
def text() -> np.ndarray:
    """Return the bytes of this repository's documents and code."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("m3jax/**/*.py")])
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def draw_row(
    rng: np.random.Generator, length: int, keys: int, per_record: int = PER_RECORD
) -> tuple[np.ndarray, np.ndarray]:
    """Return a row of text with records in it, and the distance of each answer to its record.

    Args:
      rng: of the row.
      length: T.
      keys: that records can have; each has one record in a row at most.
      per_record: tokens of the row for each record: itself, the question with its answer, and text.

    Returns:
      Tokens int32 [T], and int32 [T]: how far before an answer its record stands; 0 of all other tokens.
    """
    count = length // per_record
    key = rng.permutation(keys)[:count]
    records = 256 + VALUES * key + rng.integers(0, VALUES, count)
    questions = 256 + VALUES * keys + key
    # Of half of the rows any two places, which are often near; of the others one before the middle and one behind it.
    halves = [rng.permutation(count) for _ in range(2)]
    order = rng.permutation(np.concatenate(halves)) if rng.random() < 0.5 else np.concatenate(halves)
    plain = length - 3 * count
    gaps = np.sort(rng.integers(0, plain + 1, len(order)))  # text before each record or question
    row, distances, place = np.zeros(length, np.int32), np.zeros(length, np.int32), {}
    is_text, at = np.ones(length, bool), 0
    for more, number in zip(np.diff(gaps, prepend=0), order, strict=True):
        at += more
        if number in place:
            row[at], is_text[at] = questions[number], False
            at += 1
            distances[at] = at - place[number]
        row[at], is_text[at] = records[number], False
        place.setdefault(number, at)
        at += 1
    start = rng.integers(len(text()) - plain)
    row[is_text] = text()[start : start + plain]
    return row, distances


def drawn_rows(seed: int, count: int, sizes: Sizes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows of the context: of seed 2 those that the conversion learns from, of 3 those to measure on."""
    for i in range(count):
        yield draw_row(np.random.default_rng((seed, i)), sizes.context, sizes.keys)


class Rows:
    """Batches of new rows: batch i is a function of the seed and i alone.

    Args:
      seed: of all batches.
      rows: of a batch.
      length: T.
      keys, per_record: as of `draw_row`.
    """

    def __init__(self, seed: int, rows: int, length: int, keys: int, per_record: int):
        self.seed, self.rows, self.length, self.keys, self.per_record = seed, rows, length, keys, per_record

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.seed, step))
        drawn = [draw_row(rng, self.length, self.keys, self.per_record)[0] for _ in range(self.rows)]
        rows = np.stack(drawn)[None]  # [1 B T]
        weights = np.ones(rows.shape, np.float32)
        weights[..., -1] = 0
        positions = np.broadcast_to(np.arange(self.length, dtype=np.int32), rows.shape)
        return {
            "tokens": rows, "positions": positions, "targets": np.roll(rows, -1, axis=-1), "weights": weights,
            "num_targets": np.float32(weights.sum()), "num_tokens": np.float32(rows.size),
        }  # fmt: skip


# The stages


def train_dense(out: Path, sizes: Sizes, source: str, dtype: str) -> None:
    """Train the dense model, on rows of the context at last, and write it as what it is."""
    from m3jax.checkpoint import tree
    from m3jax.compile_cache import compile_cache
    from m3jax.model import init
    from m3jax.train.dense import dense_config, in_model_units, write_dense
    from m3jax.train.sft import SFTLoss, SFTSettings, fine_tune
    from m3jax.train.step import init_state, make_optimizer

    data = sizes.config(source)
    config = dense_config(data, block_size=sizes.block_size, dense_layers=data["num_hidden_layers"])
    peak = 0.256 / sizes.hidden
    model, before = init(config), 0
    model = tree.replace(model, in_model_units(tree.flatten(model), config))
    with compile_cache():
        for number, (name, (times, per_record)) in enumerate(STAGES.items()):
            is_last, steps = times == 1, sizes.dense_steps[number]
            settings = SFTSettings(
                steps=steps, length=sizes.context // times, rows=sizes.rows * times // (1 if is_last else 2),
                learning_rate=peak, schedule="linear" if is_last else "constant",
                warmup_steps=0 if number else min(100, steps // 4), compute_dtype=dtype, remat=False, weight_decay=0.1,
            )  # fmt: skip
            optimizer = make_optimizer(settings.rate, settings.weight_decay)
            batches = Rows(number, settings.rows, settings.length, sizes.keys, per_record)
            loss_fn = SFTLoss(compute_dtype=dtype, remat=False)
            state = fine_tune(
                init_state(model, optimizer), batches, optimizer, loss_fn, settings, out / "dense" / name,
                out / "dense.jsonl", about={"rows": name}, steps_before=before, save_every=100,
            )  # fmt: skip
            model, before = state.model, before + steps
    write_dense(model, out / "dense" / "model")


def measure(out: Path, sizes: Sizes) -> None:
    """Write down how often the dense model and the MSA model answer a question, by the distance of its record."""
    import jax
    import jax.numpy as jnp

    from m3jax.checkpoint import load
    from m3jax.train.dense import read_dense

    rows = drawn_rows(3, sizes.held_out, sizes)
    tokens, distances = (np.stack(arrays) for arrays in zip(*rows, strict=True))
    dense = read_dense(out / "dense" / "model", block_size=sizes.block_size, topk_blocks=sizes.topk_blocks)
    converted = load(out / "msa" / "model", dtype="float32")
    models = {"dense": dense.with_dense(), "dense, selection untrained": dense, "msa": converted}

    @jax.jit
    def read(model, tokens):
        logits = model(tokens)[:, :-1]
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return losses, jnp.argmax(logits, -1) == tokens[:, 1:]

    found, width = {}, sizes.context // NUM_BINS
    bins = (distances[:, 1:] - 1) // width  # -1 of what is no answer
    for name, model in models.items():
        pieces = [read(model, jnp.asarray(tokens[i : i + sizes.rows])) for i in range(0, len(tokens), sizes.rows)]
        losses, is_right = (np.concatenate([np.asarray(x) for x in of_all]) for of_all in zip(*pieces, strict=True))
        is_answer = distances[:, 1:] > 0
        found[name] = {
            "loss": float(losses.mean()), "loss_of_answers": float(losses[is_answer].mean()),
            "recall": [float(is_right[bins == i].mean()) if (bins == i).any() else None for i in range(NUM_BINS)],
            "asked": [int((bins == i).sum()) for i in range(NUM_BINS)],
        }  # fmt: skip
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
    (out / "recall.json").write_text(json.dumps({**about, "models": found}) + "\n")


def collect(out: Path, sizes: Sizes, source: str) -> dict:
    """Return all that was measured in a run."""
    lines = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
    short = lambda value: round(value, 4) if isinstance(value, float) else value
    pick = lambda path, names: {name: [short(line.get(name)) for line in lines(path)] for name in names}
    measured = json.loads((out / "recall.json").read_text())
    return {
        **{name: measured[name] for name in ("device", "jax", "date")},
        "config": sizes.config(source), "context": sizes.context, "block_size": sizes.block_size,
        "topk_blocks": sizes.topk_blocks, "rows": sizes.rows, "seconds": json.loads((out / "seconds.json").read_text()),
        "dense": pick(out / "dense.jsonl", ("step", "rows", "loss")),
        "convert": pick(out / "msa" / "metrics.jsonl", ("step", "phase", "loss", "kl")),
        "report": json.loads((out / "msa" / "report.json").read_text()), "models": measured["models"],
    }  # fmt: skip


def plot(found: dict, path: Path) -> None:
    """Draw the losses of both trainings, and recall by distance."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for name, color in zip(STAGES, ("#CCCCCC", "#888888", "#000000"), strict=True):
        of = [i for i, rows in enumerate(found["dense"]["rows"]) if rows == name]
        left.plot([found["dense"]["step"][i] for i in of], [found["dense"]["loss"][i] for i in of], color=color,
                  label=name)  # fmt: skip
    left.set(xlabel="step", ylabel="loss, nats a token", title="The dense model")
    left.legend(frameon=False)
    convert = found["convert"]
    of = [i for i, phase in enumerate(convert["phase"]) if phase == "sparse"]
    steps = [convert["step"][i] for i in of]
    middle.plot(steps, [convert["loss"][i] for i in of], color="#0072B2", label="loss, with selection")
    middle.plot(convert["step"], convert["kl"], color="#D55E00", label="index loss (KL)")
    middle.axhline(found["report"]["before"]["dense_loss"], color="#000000", linestyle=":", label="dense, held out")
    middle.set(xlabel="step", ylabel="nats", title="The conversion", ylim=(0, None))
    middle.legend(frameon=False)
    width = found["context"] // NUM_BINS
    colors = {"dense": "#000000", "dense, selection untrained": "#999999", "msa": "#0072B2"}
    for name, of_model in found["models"].items():
        recall = [np.nan if share is None else share for share in of_model["recall"]]
        right.plot((np.arange(NUM_BINS) + 0.5) * width, recall, marker="o", color=colors[name], label=name)
    right.axvline(found["block_size"] * found["topk_blocks"], color="#999999", linestyle=":")
    right.set(xlabel="tokens back to the record", ylabel="questions answered", title="Recall", ylim=(0, 1.02))
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
