"""What a draft brings on the embedded checkpoint: acceptance, tokens a call of the model, tokens a second.

    python scripts/bench_speculative.py --batches 1 8 32                    # on the default device
    python scripts/bench_speculative.py --batches 1 --draft-tokens 1 2 5 7  # other K
    python scripts/bench_speculative.py --temperatures 0 0.7 1 --drawn      # sampled rows, both rules

Prompts are held-out code of the standard library (docs/tiny.md). Each kind of decoding is run in turn, then all again;
the faster of the two runs counts. A ratio is to plain decoding in the same process.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint import load_draft
from m3jax.decoding import Eagle3Drafter, Engine, Params, PromptLookup, Sampling
from m3jax.text import Tokenizer
from m3jax.train.data import Corpus

PROMPT, NEW, RUNS = 256, 256, 2
LEAST = 8  # prompts, one after the other where the batch is smaller: how much is accepted hangs on the text


def main(argv: list[str] | None = None) -> None:
    """Measure all, print a table row for each."""
    args = _parser().parse_args(argv)
    model = m3jax.load(dtype=args.dtype)
    draft = load_draft(None, model.config, dtype=args.dtype)
    drafters = {"eagle3": Eagle3Drafter(draft), "lookup": PromptLookup()}
    if args.drawn:
        drafters["eagle3, drawn"] = Eagle3Drafter(draft, sample=True)
    corpus = Corpus.build(Tokenizer.from_pretrained(embedded_path()), "validation", root=args.sources)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}", flush=True)
    print("| batch | temperature | draft | K | accepted by position | mean length | tokens/s | times plain |")
    for batch in args.batches:
        kinds = [("none", None, 1)] + [(name, d, k) for k in args.draft_tokens for name, d in drafters.items()]
        engines = {(name, k): _engine(model, batch, d, k) for name, d, k in kinds}
        for temperature in args.temperatures:
            measure(engines, corpus, batch, temperature)


def measure(engines: dict, corpus: Corpus, batch: int, temperature: float) -> None:
    """All kinds of decoding on the same prompts."""
    rng = np.random.default_rng(11)
    starts = [corpus.draw_start(rng, PROMPT) for _ in range(max(batch, LEAST))]
    prompts = [corpus.tokens[start : start + PROMPT].tolist() for start in starts]
    rates, found = {}, {}
    for _ in range(RUNS):
        for kind, engine in engines.items():
            rate, found[kind] = _run(engine, prompts, temperature)
            rates[kind] = max(rate, rates.get(kind, 0.0))
    for (name, count), rate in rates.items():
        shares, length = found[name, count]
        row = batch, temperature, name, count if length else "", shares, length, f"{rate:.0f}"
        print("|", " | ".join(map(str, row)), f"| {rate / rates['none', 1]:.2f} |", flush=True)


def _engine(model, batch: int, draft, count: int) -> Engine:
    size = model.config.index_block_size
    blocks = -(-(PROMPT + NEW) // size)
    engine = Engine(
        model, pages=batch * blocks, max_batch=batch, prefill_chunk=PROMPT, prefill_rows=batch,
        max_length=blocks * size, steps_per_call=32, prefix_cache=False, draft=draft, draft_tokens=count,
    )  # fmt: skip
    engine.warmup()
    return engine


def _run(engine: Engine, prompts, temperature: float) -> tuple[float, tuple[str, str]]:
    """(new tokens a second, (acceptance, mean length)) of one run."""
    before = engine.timings.decoded_tokens, engine.timings.decode_seconds
    forwards, accepted = engine.drafting.forwards, np.array(engine.drafting.accepted or 0)
    handles = [
        engine.add(prompt, Params(max_new_tokens=NEW, sampling=Sampling(temperature=temperature, seed=i)))
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    for handle in handles:
        engine.forget(handle)
    tokens, seconds = engine.timings.decoded_tokens - before[0], engine.timings.decode_seconds - before[1]
    if not engine.drafting.forwards:
        return tokens / seconds, ("", "")
    shares = (np.array(engine.drafting.accepted) - accepted) / (engine.drafting.forwards - forwards)
    return tokens / seconds, (", ".join(f"{x:.0%}" for x in shares), f"{1 + shares.sum():.2f}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--drawn", action="store_true", help="also proposals that are drawn from the draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sources", type=Path, help="a standard library's folder; the running Python's by default")
    return parser


if __name__ == "__main__":
    sys.exit(main())
