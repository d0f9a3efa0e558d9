"""Measures a draft's gain on the embedded checkpoint: acceptance, tokens a call of the model, tokens a second.

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
from tiny.corpus import Corpus

import m3jax
from m3jax.assets import embedded_path
from m3jax.checkpoint import load_draft
from m3jax.decoding import Eagle3Drafter, Engine, Params, PromptLookup, Sampling
from m3jax.model import M3
from m3jax.text import Tokenizer

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
        engines = {("none", 1): _engine(model, batch, draft=None, draft_tokens=1)}
        for draft_tokens in args.draft_tokens:
            for name, drafter in drafters.items():
                engines[name, draft_tokens] = _engine(model, batch, drafter, draft_tokens)
        for temperature in args.temperatures:
            measure(engines, corpus, batch, temperature)


def measure(engines: dict[tuple[str, int], Engine], corpus: Corpus, batch: int, temperature: float) -> None:
    """Measure all kinds of decoding on the same prompts; engines by (name of the draft, tokens that it proposes)."""
    rng = np.random.default_rng(11)
    starts = [corpus.draw_start(rng, PROMPT) for _ in range(max(batch, LEAST))]
    prompts = [corpus.tokens[start : start + PROMPT].tolist() for start in starts]
    rates, acceptance = {}, {}
    for _ in range(RUNS):
        for key, engine in engines.items():
            rate, acceptance[key] = _run(engine, prompts, temperature)
            rates[key] = max(rate, rates.get(key, 0.0))
    for (name, draft_tokens), rate in rates.items():
        shares, mean_length = acceptance[name, draft_tokens]
        columns = batch, temperature, name, draft_tokens if mean_length else "", shares, mean_length, f"{rate:.0f}"
        print("|", " | ".join(map(str, columns)), f"| {rate / rates['none', 1]:.2f} |", flush=True)


def _engine(model: M3, batch: int, draft: Eagle3Drafter | PromptLookup | None, draft_tokens: int) -> Engine:
    """An engine with room for a batch of the script's prompts, compiled."""
    block_size = model.config.index_block_size
    blocks = -(-(PROMPT + NEW) // block_size)
    engine = Engine(
        model, pages=batch * blocks, max_batch=batch, prefill_chunk=PROMPT, prefill_rows=batch,
        max_length=PROMPT + NEW, steps_per_call=32, prefix_cache=False, draft=draft, draft_tokens=draft_tokens,
    )  # fmt: skip
    engine.warmup()
    return engine


def _run(engine: Engine, prompts: list[list[int]], temperature: float) -> tuple[float, tuple[str, str]]:
    """Return (new tokens a second, (share accepted by position, mean length)) of one run."""
    tokens_before, seconds_before = engine.timings.decoded_tokens, engine.timings.decode_seconds
    forwards_before, accepted_before = engine.drafting.forwards, np.array(engine.drafting.accepted or 0)
    handles = [
        engine.add(prompt, Params(max_new_tokens=NEW, sampling=Sampling(temperature=temperature, seed=i)))
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    for handle in handles:
        engine.forget(handle)
    tokens_a_second = (engine.timings.decoded_tokens - tokens_before) / (engine.timings.decode_seconds - seconds_before)
    if not engine.drafting.forwards:
        return tokens_a_second, ("", "")
    forwards = engine.drafting.forwards - forwards_before
    shares = (np.array(engine.drafting.accepted) - accepted_before) / forwards
    return tokens_a_second, (", ".join(f"{x:.0%}" for x in shares), f"{1 + shares.sum():.2f}")


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
