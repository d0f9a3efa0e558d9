"""The cost of what a request may ask for besides tokens: records, log-probabilities, biases, a grammar's mask.

    python scripts/bench_wishes.py                                    # the embedded checkpoint, steps of 8 rows
    python scripts/bench_wishes.py --model m3 --prefix 60000 --rows 1,32     # 4 layers at M3's own widths, on a GPU

A line is a decode step in which every row asks for the same thing, and how much longer it takes than one in which the
rows ask for nothing. Each wish is timed in turns with the plain step, several times, so that a machine that becomes
slower does so for both; the line has the median of the ratios and their range. A guide is a mask of the vocabulary that
the host gives anew for each token, as a grammar does: its rows take one step a call, and so does the step beside it.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence

import jax
import numpy as np
from bench_engine import FIRST_TOKEN, build, first_token, prompt, random_tokens, sizes

import m3jax
from m3jax.decoding import Engine, Params, Sampling


class HalfOfVocabulary:
    """A guide by which the lower half of the vocabulary may come next."""

    def __init__(self, vocab_size: int):
        self.mask = np.zeros(-(-vocab_size // 32), np.uint32)
        self.mask[: vocab_size // 64] = 0xFFFFFFFF

    def bits(self, new: Sequence[int]) -> np.ndarray:
        """Return a bit for each token."""
        return self.mask


def wishes(new_tokens: int) -> dict[str, Params]:
    """Return what every row of a step asks for, by name; the first asks for nothing."""
    plain = Params(max_new_tokens=new_tokens, sampling=Sampling.greedy())
    greedy = lambda **knobs: dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, **knobs))
    drawn = lambda **knobs: dataclasses.replace(plain, sampling=Sampling(temperature=1.0, **knobs))
    biases = {token: -1.0 for token in range(FIRST_TOKEN, FIRST_TOKEN + 64)}
    return {
        "nothing": plain,
        "experts recorded": dataclasses.replace(plain, record=("expert_ids",)),
        "blocks recorded": dataclasses.replace(plain, record=("blocks",)),
        "experts and blocks recorded": dataclasses.replace(plain, record=("expert_ids", "blocks")),
        "20 top log-probabilities": dataclasses.replace(plain, top_logprobs=20),
        "64 biases": greedy(logit_bias=biases),
        "three penalties": greedy(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
        "temperature 1": drawn(),
        "temperature 1, top-p 0.9": drawn(top_p=0.9),
        "the same, support recorded": dataclasses.replace(drawn(top_p=0.9), record=("support",)),
    }


def main() -> None:
    """Time each wish and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "bench", "m3"), default="tiny")
    parser.add_argument("--weights", choices=("dequantize", "mxfp8"), default="dequantize", help="mxfp8 quantises them")
    parser.add_argument("--prefix", type=int, default=3500, help="tokens of the prefix that all rows share")
    parser.add_argument("--rows", type=lambda text: [int(rows) for rows in text.split(",")], default=[8])
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a device call")
    parser.add_argument("--calls", type=int, default=6, help="calls of so many steps that one measurement takes")
    parser.add_argument("--only", default="", metavar="TEXT", help="wishes with this in their names, and no guide")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each wish")
    args = parser.parse_args()
    model = build(args.model) if args.weights == "dequantize" else m3jax.quantize(build(args.model))
    args.chunks, args.kv_dtype, args.index_dtype, args.device_pages = [2048], None, None, None  # for `sizes`
    args.new_tokens = args.steps * (args.calls + 2)
    print(f"{args.model}, {args.weights}, on {jax.devices()[0].device_kind}, jax {jax.__version__}: "
          f"{args.prefix} tokens of context, {args.steps} steps a call")  # fmt: skip
    for rows in args.rows:
        engine = Engine(model, **sizes(model, args, 2 * rows) | dict(max_batch=rows))
        prefix = random_tokens(model.config, args.prefix, 0)
        first_token(engine, prompt(engine, prefix, 0))
        table(engine, prefix, rows, args)
        if args.only:
            continue
        one_step = Engine(model, **sizes(model, args, 2 * rows) | dict(max_batch=rows, steps_per_call=1))
        first_token(one_step, prompt(one_step, prefix, 0))
        params = dataclasses.replace(wishes(args.new_tokens)["nothing"], max_new_tokens=4 * args.calls)
        compare(one_step, prefix, rows, args, "a guide, one step a call", params, params, is_guided=True)


def table(engine: Engine, prefix: list[int], rows: int, args: argparse.Namespace) -> None:
    """Print a line for each wish, as it is known."""
    asked = wishes(args.new_tokens)
    for name, params in asked.items():
        if args.only not in name:
            continue
        compare(engine, prefix, rows, args, name, asked["nothing"], params)


def compare(
    engine: Engine, prefix: list[int], rows: int, args: argparse.Namespace, name: str, plain: Params, params: Params,
    is_guided: bool = False,
) -> None:  # fmt: skip
    """Time one wish in turns with the plain step, and print its line."""
    step(engine, prefix, rows, plain, False)  # compiles, and the next one too
    step(engine, prefix, rows, params, is_guided)
    ratios, seconds = [], []
    for _ in range(args.rounds):
        of_plain = step(engine, prefix, rows, plain, False)
        seconds.append(step(engine, prefix, rows, params, is_guided))
        ratios.append(seconds[-1] / of_plain - 1)
    more = f"{statistics.median(ratios):+7.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"
    print(f"{rows:4d} rows  {name:32s} {statistics.median(seconds) * 1e3:8.2f} ms {more}", flush=True)


def step(engine: Engine, prefix: list[int], rows: int, params: Params, is_guided: bool) -> float:
    """Return the seconds of a decode step of so many rows, from the first token of all of them to their last."""
    vocab_size = engine.config.vocab_size
    for row in range(rows):
        guide = HalfOfVocabulary(vocab_size) if is_guided else None
        # Rows with one seed would draw the same token, and all read the same experts.
        own_seed = dataclasses.replace(params, sampling=dataclasses.replace(params.sampling, seed=row))
        engine.add(prompt(engine, prefix, 100 + row), own_seed, guide=guide)
    while engine.prefill():
        pass
    before = engine.timings.decode_seconds
    handled = engine.timings.decoded_tokens
    engine.run()
    return (engine.timings.decode_seconds - before) / (engine.timings.decoded_tokens - handled) * rows


if __name__ == "__main__":
    main()
