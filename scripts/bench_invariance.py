"""Measures the cost of the invariant mode, and how often a request's bits depend on other requests without it.

    python scripts/bench_invariance.py [--prompt 4096] [--texts 32] [--dtype bfloat16]
    python scripts/bench_invariance.py --model m3 --prompt 2048    # 4 layers at M3's own widths, for a GPU of 80 GB

Prefill and steps of 1, 8 and 32 rows are timed in turns, fast and invariant, the best of some rounds. Then, of the
embedded checkpoint, texts are continued greedily: alone, all at once, and with two drafts. Costs are ratios of times
in one run.
"""

import argparse
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from bench_engine import build, random_tokens

import m3jax
from m3jax.assets import embedded_path
from m3jax.decoding import Engine, Params, Sampling

ROUNDS = 3
STEPS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt (default: 4096)")
    parser.add_argument("--texts", type=int, default=32, help="how many greedy texts (default: 32)")
    parser.add_argument("--dtype", default="bfloat16", help="of the embedded checkpoint")
    parser.add_argument("--model", choices=("tiny", "m3"), default="tiny")
    parser.add_argument("--rows", default="1,8,32", help="live requests, one run each")
    parser.add_argument("--jobs", type=int, default=1, help="programs that are compiled at a time")
    args = parser.parse_args()
    model = m3jax.load(dtype=args.dtype, progress=False) if args.model == "tiny" else build("m3")
    print(f"{args.model} in {model.dtype} on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"ms, best of {ROUNDS} in turns\n{'':24}{'fast':>10}{'invariant':>11}{'ratio':>8}")
    _print_times(model, args.prompt, [int(n) for n in args.rows.split(",")], args.jobs)
    if args.model == "m3":
        return
    print(f"\n{args.texts} greedy texts of {STEPS * 2} tokens: how many differ from themselves alone, undrafted")
    print(f"{'':24}{'fast':>16}{'invariant':>16}\n{'':24}{'text  log-prob.':>16}{'text  log-prob.':>16}")
    _print_changes(model, args.texts)


def _engine(model, invariant: bool, rows: int, prompt: int, **more) -> Engine:
    blocks = -(-(prompt + 4 * STEPS) // model.config.index_block_size)
    # Not by `build_engine`: engines are made side by side, and its compile cache is a setting of the whole process.
    served = Engine(
        model, pages=rows * blocks, max_batch=rows, prefill_chunk=min(prompt, 2048), prefix_cache=False,
        max_length=blocks * model.config.index_block_size, steps_per_call=STEPS, invariant=invariant, **more,
    )  # fmt: skip
    served.warmup()
    return served


def _print_times(model, prompt: int, rows_of_runs: list[int], jobs: int) -> None:
    seeds = itertools.count()
    length_of = lambda rows: prompt if rows == 1 else min(prompt, 512)
    with ThreadPoolExecutor(jobs) as pool:
        shapes = itertools.product(rows_of_runs, (False, True))
        built = list(pool.map(lambda shape: _engine(model, shape[1], shape[0], length_of(shape[0])), shapes))
    for rows, engines in zip(rows_of_runs, zip(built[::2], built[1::2], strict=True), strict=True):
        length = length_of(rows)
        prefill, step = [[], []], [[], []]
        for _ in range(ROUNDS):
            texts = [random_tokens(model.config, length, next(seeds)) for _ in range(rows)]
            for mode, served in enumerate(engines):
                asked = Params(max_new_tokens=2 * STEPS, sampling=Sampling.greedy(), stop_ids=())
                handles = [served.add(text, asked) for text in texts]
                start = time.perf_counter()
                while served.prefill():
                    pass
                prefill[mode].append(time.perf_counter() - start)
                start = time.perf_counter()
                served.run()
                step[mode].append((time.perf_counter() - start) / (2 * STEPS))
                for handle in handles:
                    served.forget(handle)
        of_tokens = f"prefill {rows} x {length}"
        for name, times in ((of_tokens, prefill), (f"step of {rows} rows", step)):
            fast, invariant = (1000 * min(x) for x in times)
            print(f"{name:24}{fast:10.2f}{invariant:11.2f}{invariant / fast:8.2f}", flush=True)


def _print_changes(model, count: int) -> None:
    tokenizer = m3jax.Tokenizer.from_pretrained(embedded_path())
    rng = np.random.default_rng(1)
    words = ["import os", "class Reader", "def main(", "for line in", "return self", "x = [", "if not", "raise Value"]
    texts = [tokenizer.encode(" ".join(rng.permutation(words)[: 2 + i % 6].tolist()) + "\n") for i in range(count)]
    asked = Params(max_new_tokens=2 * STEPS, sampling=Sampling.greedy(), stop_ids=())
    longest = max(map(len, texts))

    def results(invariant, rows, **more):
        served = _engine(model, invariant, rows, longest, **more)
        if rows == 1:
            return [served.result(handle) for text in texts for handle in [served.add(text, asked)] if served.run()]
        handles = [served.add(text, asked) for text in texts]
        served.run()
        return [served.result(handle) for handle in handles]

    alone = [results(invariant, 1) for invariant in (False, True)]
    for name, more in (("all at once", {}), ("EAGLE3", dict(draft="builtin")), ("lookup", dict(draft="ngram"))):
        cells = []
        for invariant in (False, True):
            found = results(invariant, 8, **more)
            pairs = list(zip(found, alone[invariant], strict=True))
            changed = sum(a.tokens != b.tokens for a, b in pairs)
            differing = sum(a.logprobs != b.logprobs for a, b in pairs)
            cells.append(f"{changed:8}{differing:8}")
        print(f"{name:24}{cells[0]}{cells[1]}", flush=True)


if __name__ == "__main__":
    main()
