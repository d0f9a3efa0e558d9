"""Counts greedy texts that differ from plain decoding one at a time: batched, drafted, both (docs/speculative.md).

    python scripts/check_greedy.py                     # the embedded checkpoint, bfloat16 and float32
    python scripts/check_greedy.py --dtype bfloat16 --texts 64

Prompts are 64 tokens of held-out code, 64 new ones each. Where a text first parts from its plain one, the gap is that
between the two best logits of one call of the model on all that stands before.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny.corpus import Corpus

import m3jax
from m3jax.assets import embedded_path
from m3jax.decoding import Engine, Params, Sampling
from m3jax.model import M3
from m3jax.text import Tokenizer

PROMPT, NEW, DRAFT_TOKENS = 64, 64, 3
DRAFTS = {"no draft": None, "EAGLE3": "builtin", "prompt lookup": "ngram"}


def main(argv: list[str] | None = None) -> None:
    """Print a line for each draft and batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--sources", type=Path, help="a standard library's folder; the running Python's by default")
    args = parser.parse_args(argv)
    corpus = Corpus.build(Tokenizer.from_pretrained(embedded_path()), "validation", root=args.sources)
    rng = np.random.default_rng(11)
    starts = [corpus.draw_start(rng, PROMPT) for _ in range(args.texts)]
    prompts = [corpus.tokens[start : start + PROMPT].tolist() for start in starts]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.texts} greedy texts of {NEW} tokens")
    for dtype in args.dtype:
        model = m3jax.load(dtype=dtype, progress=False)
        plain = continuations(model, prompts, batch=1, draft=None)
        for batch in (1, args.texts):
            for name, draft in DRAFTS.items():
                if batch == 1 and draft is None:
                    continue
                texts = continuations(model, prompts, batch, draft)
                gaps = [gap(model, prompt + a, len(prompt) + first_difference(a, b))
                        for prompt, a, b in zip(prompts, plain, texts, strict=True) if a != b]  # fmt: skip
                apart = f", two best logits {min(gaps):.2g} to {max(gaps):.2g} apart" if gaps else ""
                print(f"{dtype}, {batch} at a time, {name}: {len(gaps)} changed{apart}", flush=True)


def continuations(model: M3, prompts: list[list[int]], batch: int, draft: str | None) -> list[list[int]]:
    """The new tokens of each prompt, greedily; no text ends before its last one."""
    blocks = -(-(PROMPT + NEW) // model.config.index_block_size)
    engine = Engine(
        model, pages=batch * blocks, max_batch=batch, prefill_chunk=PROMPT, max_length=PROMPT + NEW, steps_per_call=32,
        prefix_cache=False, draft=draft, draft_tokens=DRAFT_TOKENS,
    )  # fmt: skip
    engine.warmup()
    asked = Params(max_new_tokens=NEW, sampling=Sampling.greedy(), stop_ids=())
    handles = [engine.add(prompt, asked) for prompt in prompts]
    engine.run()
    return [list(engine.result(handle).tokens) for handle in handles]


def first_difference(tokens: list[int], others: list[int]) -> int:
    """Return the index of the first token in which two texts differ."""
    return next(i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b)


def gap(model: M3, tokens: list[int], position: int) -> float:
    """Return the difference of the two best logits for the token at a position, in a call without a cache."""
    logits = model(jnp.asarray([tokens], jnp.int32))[0, position - 1]  # [V]; what comes after it is not seen
    best, second = jax.lax.top_k(logits, 2)[0]
    return float(best - second)


if __name__ == "__main__":
    sys.exit(main())
