"""Time the invariant mode, and count how often a request's bits depend on other requests without it.

    bench.py invariance --prompt 4096 --texts 32 --dtype bfloat16
    bench.py invariance --model m3 --prompt 2048    # 4 layers at M3's own widths, for a GPU of 80 GB

Prefill and steps of 1, 8 and 32 rows are timed by turns, fast and invariant, the best of some rounds. Then, of the
embedded checkpoint, texts are continued greedily: alone, all at once, and with two drafts.
"""

import itertools
import time

import numpy as np

import m3jax
from benchmarks.harness import Option
from benchmarks.models import build, greedy, random_tokens
from m3jax.assets import embedded_path
from m3jax.decoding import Engine
from m3jax.model import M3

REPEATS, STEPS = 3, 32
ASKED = greedy(2 * STEPS, stop_ids=())
OPTIONS = dict(
    prompt=Option(4096, "Tokens of the long prompt", smoke=100),
    texts=Option(32, "Number of greedy texts", smoke=2),
    dtype=Option("bfloat16", "Dtype of the embedded checkpoint"),
    model=Option("tiny", "Weights", choices=("tiny", "m3")),
    rows=Option([1, 8, 32], "Live requests, one run each", smoke=[1]),
)


def measure(args):
    """Yield the times of both modes, then the counts of changed texts."""
    model = build(args.model, dtype=args.dtype)
    seeds = itertools.count()
    for rows in args.rows:
        length = args.prompt if rows == 1 else min(args.prompt, 512)
        engines = [warm_engine(model, is_invariant, rows, length) for is_invariant in (False, True)]
        best = np.full((2, 2), np.inf)  # [mode, prefill or step]
        for _ in range(args.repeats):
            texts = [random_tokens(model.config, length, next(seeds)) for _ in range(rows)]
            best = np.minimum(best, [prefill_and_step(engine, texts) for engine in engines])
        for what, (fast, invariant) in zip((f"prefill {rows} x {length}", f"step of {rows} rows"), best.T, strict=True):
            yield {"what": what, "fast, ms": 1e3 * fast, "invariant, ms": 1e3 * invariant, "ratio": invariant / fast}
    if args.model == "tiny":
        yield from changes(model, args.texts)


def warm_engine(model: M3, is_invariant: bool, rows: int, prompt: int, **more) -> Engine:
    """Return an engine without a prefix cache, compiled."""
    blocks = -(-(prompt + 4 * STEPS) // model.config.index_block_size)
    engine = Engine(
        model, pages=rows * blocks, max_batch=rows, prefill_chunk=min(prompt, 2048), prefix_cache=False,
        max_length=blocks * model.config.index_block_size, steps_per_call=STEPS, invariant=is_invariant, **more,
    )  # fmt: skip
    engine.warmup()
    return engine


def prefill_and_step(engine: Engine, texts: list[list[int]]) -> tuple[float, float]:
    """Return the seconds of the prefill of texts side by side, and of a step behind it."""
    handles, began = [engine.add(text, ASKED) for text in texts], time.perf_counter()
    while engine.prefill():
        pass
    middle = time.perf_counter()
    engine.run()
    end = time.perf_counter()
    for handle in handles:
        engine.forget(handle)
    return middle - began, (end - middle) / (2 * STEPS)


def changes(model: M3, count: int):
    """Yield how many texts, and log-probabilities of texts, differ from those of the text alone and undrafted."""
    tokenizer, rng = m3jax.Tokenizer.from_pretrained(embedded_path()), np.random.default_rng(1)
    words = ["import os", "class Reader", "def main(", "for line in", "return self", "x = [", "if not", "raise Value"]
    texts = [tokenizer.encode(" ".join(rng.permutation(words)[: 2 + i % 6].tolist()) + "\n") for i in range(count)]

    def results(is_invariant: bool, rows: int, **more):
        engine = warm_engine(model, is_invariant, rows, max(map(len, texts)), **more)
        if rows == 1:
            return [engine.result(handle) for text in texts for handle in [engine.add(text, ASKED)] if engine.run()]
        handles = [engine.add(text, ASKED) for text in texts]
        engine.run()
        return [engine.result(handle) for handle in handles]

    alone = {is_invariant: results(is_invariant, 1) for is_invariant in (False, True)}
    for name, more in (("all at once", {}), ("EAGLE3", dict(draft="builtin")), ("lookup", dict(draft="ngram"))):
        row = {"changed": f"{name}, of {count}"}
        for mode, is_invariant in (("fast", False), ("invariant", True)):
            pairs = list(zip(results(is_invariant, 8, **more), alone[is_invariant], strict=True))
            row[f"texts, {mode}"] = sum(a.tokens != b.tokens for a, b in pairs)
            row[f"log-prob., {mode}"] = sum(a.logprobs != b.logprobs for a, b in pairs)
        yield row
