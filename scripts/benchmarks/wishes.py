"""Time what a request may ask for besides tokens: records, log-probabilities, biases, a grammar's mask.

    bench.py wishes                                          # the embedded checkpoint, steps of 8 rows
    bench.py wishes --model m3 --prefix 60000 --rows 1 32    # 4 layers at M3's own widths, on a GPU

A row is a decode step in which every request asks for the same thing, and how much longer it takes than one in which
they ask for nothing: the median of ratios by turns, and their range. A guide is a mask of the vocabulary that the host
gives anew for each token, as a grammar does: it takes one step a call, and so does the step beside it.
"""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks import models
from benchmarks.harness import Option
from m3jax.decoding import Engine, Params, Sampling

REPEATS = 5
OPTIONS = dict(
    model=Option("tiny", "Weights", choices=models.NAMES),
    prefix=Option(3500, "Tokens of the prefix that all requests share", smoke=200),
    rows=Option([8], "Requests of a step, an engine for each number", smoke=[2]),
    steps=Option(16, "Decode steps of a device call", smoke=4),
    calls=Option(6, "Device calls of one measurement", smoke=2),
    only=Option("", "Text that the names of the wishes have, which leaves the guide out", smoke="nothing"),
)


class HalfOfVocabulary:
    """A guide by which the lower half of the vocabulary may come next."""

    def __init__(self, vocab_size: int):
        self.mask = np.zeros(-(-vocab_size // 32), np.uint32)
        self.mask[: vocab_size // 64] = 0xFFFFFFFF

    def bits(self, new: Sequence[int]) -> np.ndarray:
        """Return a bit for each token."""
        return self.mask


def wishes(new_tokens: int) -> dict[str, Params]:
    """Return what every request of a step asks for, by name; the first asks for nothing."""
    plain = models.greedy(new_tokens)
    with_knobs = lambda **knobs: dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, **knobs))
    recording = lambda *names: dataclasses.replace(plain, record=names)
    drawn = lambda **knobs: dataclasses.replace(plain, sampling=Sampling(temperature=1.0, **knobs))
    return {
        "nothing": plain,
        "experts recorded": recording("expert_ids"),
        "blocks recorded": recording("blocks"),
        "experts and blocks recorded": recording("expert_ids", "blocks"),
        "20 top log-probabilities": dataclasses.replace(plain, top_logprobs=20),
        "64 biases": with_knobs(logit_bias={models.FIRST_TOKEN + i: -1.0 for i in range(64)}),
        "three penalties": with_knobs(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
        "temperature 1": drawn(),
        "temperature 1, top-p 0.9": drawn(top_p=0.9),
        "the same, support recorded": dataclasses.replace(drawn(top_p=0.9), record=("support",)),
    }


def measure(args):
    """Yield a row for each wish."""
    model = models.build(args.model)
    prefix = models.random_tokens(model.config, args.prefix, 0)
    asked = wishes(args.steps * (args.calls + 2))
    chosen = {name: params for name, params in asked.items() if args.only in name}
    guided = {} if args.only else {"a guide, one step a call": models.greedy(4 * args.calls)}
    for rows in args.rows:
        kinds = [(args.steps, chosen, asked["nothing"]), *((1, guided, plain) for plain in guided.values())]
        for steps, of_engine, plain in kinds:
            sizes = models.engine_sizes(model.config, args.prefix, asked["nothing"].max_new_tokens, 2 * rows)
            engine = Engine(model, **sizes | dict(max_batch=rows, prefill_chunk=2048, steps_per_call=steps))
            models.first_token(engine, models.prompt(model.config, prefix, 0))
            for name, params in of_engine.items():
                yield compare(engine, prefix, rows, name, plain, params, args.repeats, steps == 1)


def compare(
    engine: Engine, prefix: list[int], rows: int, name: str, plain: Params, params: Params, repeats: int,
    is_guided: bool,
) -> dict:  # fmt: skip
    """Return the row of one wish, which is timed by turns with the plain step."""
    times = []
    for turn in range(repeats + 1):
        times.append((step(engine, prefix, rows, plain, False), step(engine, prefix, rows, params, is_guided)))
        times = times if turn else []  # the first ones compile
    more = [of_wish / of_plain - 1 for of_plain, of_wish in times]
    milliseconds = 1e3 * statistics.median(of_wish for _, of_wish in times)
    return {"wish": name, "rows": rows, "ms": milliseconds, "more": statistics.median(more), "least": min(more),
            "most": max(more)}  # fmt: skip


def step(engine: Engine, prefix: list[int], rows: int, params: Params, is_guided: bool) -> float:
    """Return the seconds of a decode step of so many rows, from the first token of all of them to their last."""
    for row in range(rows):
        guide = HalfOfVocabulary(engine.config.vocab_size) if is_guided else None
        # Rows with one seed would draw the same token, and all read the same experts.
        own_seed = dataclasses.replace(params, sampling=dataclasses.replace(params.sampling, seed=row))
        engine.add(models.prompt(engine.config, prefix, 100 + row), own_seed, guide=guide)
    while engine.prefill():
        pass
    before, decoded = engine.timings.decode_seconds, engine.timings.decoded_tokens
    engine.run()
    return (engine.timings.decode_seconds - before) / (engine.timings.decoded_tokens - decoded) * rows
