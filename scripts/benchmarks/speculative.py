"""Measure a draft's gain on the embedded checkpoint: acceptance, tokens a call of the model, tokens a second.

    bench.py speculative --batches 1 8 32                    # on the default device
    bench.py speculative --batches 1 --draft-tokens 1 2 5 7  # other K

Prompts are held-out code of the standard library (docs/tiny.md). The kinds of decoding take turns, and the fastest run
of each counts; a ratio is to plain decoding in the same process.
"""

import numpy as np
from tiny.corpus import Corpus

import m3jax
from benchmarks.harness import Option
from benchmarks.models import greedy
from m3jax.assets import embedded_path
from m3jax.checkpoint import load_draft
from m3jax.decoding import Eagle3Drafter, Engine, PromptLookup, build_engine
from m3jax.text import Tokenizer

PROMPT, NEW, REPEATS = 256, 256, 2
LEAST = 8  # prompts, one after the other where the batch is smaller: how much is accepted hangs on the text
OPTIONS = dict(
    batches=Option([1, 8, 32], "Requests side by side", smoke=[8]),
    draft_tokens=Option([3], "Proposals of a round", smoke=[2]),
    dtype=Option("bfloat16", "Dtype of the weights"),
)


def measure(args):
    """Yield a row for each batch and kind of decoding."""
    model = m3jax.load(dtype=args.dtype, progress=False)
    draft = load_draft(None, model.config, dtype=args.dtype)
    drafters = {"eagle3": Eagle3Drafter(draft), "lookup": PromptLookup()}
    corpus = Corpus.build(Tokenizer.from_pretrained(embedded_path()), "validation")
    kinds = [("none", 1), *((name, draft_tokens) for draft_tokens in args.draft_tokens for name in drafters)]
    for batch in args.batches:
        engines = {
            (name, draft_tokens): build_engine(
                model, rows=batch, length=PROMPT + NEW, prefill_chunk=PROMPT, prefill_rows=batch, steps_per_call=32,
                prefix_cache=False, draft=drafters.get(name), draft_tokens=draft_tokens, progress=False,
            )
            for name, draft_tokens in kinds
        }  # fmt: skip
        yield from compare(engines, corpus, batch, args.repeats)


def compare(engines: dict[tuple[str, int], Engine], corpus: Corpus, batch: int, repeats: int):
    """Yield a row for each engine, by its draft and number of proposals, on the same prompts."""
    rng = np.random.default_rng(11)
    starts = [corpus.draw_start(rng, PROMPT) for _ in range(max(batch, LEAST))]
    prompts = [corpus.tokens[start : start + PROMPT].tolist() for start in starts]
    rates, shares = dict.fromkeys(engines, 0.0), {}
    for _ in range(repeats):
        for key, engine in engines.items():
            rate, shares[key] = run(engine, prompts)
            rates[key] = max(rate, rates[key])
    for (name, draft_tokens), rate in rates.items():
        accepted = shares[name, draft_tokens]
        yield {
            "batch": batch, "draft": name,
            "K": draft_tokens if len(accepted) else None, "tokens/s": rate, "times plain": rate / rates["none", 1],
            "mean length": 1 + float(sum(accepted)), "accepted by position": ", ".join(f"{x:.0%}" for x in accepted),
        }  # fmt: skip


def run(engine: Engine, prompts: list[list[int]]) -> tuple[float, np.ndarray]:
    """Return new tokens a second, and the accepted share of each position's proposals, of one run."""
    tokens_before, seconds_before = engine.timings.decoded_tokens, engine.timings.decode_seconds
    forwards_before, accepted_before = engine.drafting.forwards, np.array(engine.drafting.accepted or 0)
    handles = [engine.add(prompt, greedy(NEW)) for prompt in prompts]
    engine.run()
    for handle in handles:
        engine.forget(handle)
    rate = (engine.timings.decoded_tokens - tokens_before) / (engine.timings.decode_seconds - seconds_before)
    if not engine.drafting.forwards:
        return rate, np.empty(0)
    forwards = engine.drafting.forwards - forwards_before
    return rate, (np.array(engine.drafting.accepted) - accepted_before) / forwards
