"""The cost of driving an engine: a group beside one request, events and the loop's thread beside bare device calls.

    python scripts/bench_driving.py                      # the embedded model on a CPU, float32
    python scripts/bench_driving.py --prompt 4000 --group 4

All figures are ratios of one run. "group" is the time until every request of a group has its first tokens, over that
of one request. "events" is what rounds of decoding take besides their device calls: scheduling, pages and events.
"loop" is the same requests through `EngineLoop`, each submitted by a thread of its own, over the same through
`Engine.run`, in turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import m3jax
from m3jax.decoding import Engine, EngineLoop, Params, Sampling

FIRST_TOKEN = 256  # that is drawn: below are marks and placeholders


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the group's prompt")
    parser.add_argument("--group", type=int, default=8, help="requests of the group")
    parser.add_argument("--new-tokens", type=int, default=160, help="of each request of the loop")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = m3jax.load(dtype="float32", progress=False)
    pages = 4 * -(-(args.prompt + 192) // model.config.index_block_size)
    engine = Engine(
        model,
        pages=pages,
        max_batch=args.group,
        prefill_chunk=(256, 2048),
        steps_per_call=16,
        max_length=args.prompt + 192,
    )
    engine.warmup()
    draw = np.random.default_rng(0)
    prompt = lambda length: draw.integers(FIRST_TOKEN, model.config.vocab_size, length).tolist()

    alone, group = [], []
    for _ in range(args.rounds):
        alone.append(_first_tokens(engine, prompt(args.prompt), None))
        before = engine.timings.prompt_tokens
        group.append(_first_tokens(engine, prompt(args.prompt), args.group))
        computed = engine.timings.prompt_tokens - before
    ratio = statistics.median(group) / statistics.median(alone)
    print(f"group: {args.group} requests of a prompt of {args.prompt} tokens take {ratio:.3f} of one; {computed} "
          f"tokens computed; one takes {statistics.median(alone):.2f} s")  # fmt: skip

    prompts = [prompt(64) for _ in range(args.group)]
    params = Params(max_new_tokens=args.new_tokens, sampling=Sampling.greedy(), stop_ids=())
    by_steps, by_loop, shares = [], [], []
    for _ in range(args.rounds):
        shares.append(_share_beside_calls(engine, prompts, params))
        began = time.perf_counter()
        for prompt_of_row in prompts:
            engine.add(prompt_of_row, params)
        engine.run()
        by_steps.append(time.perf_counter() - began)
        with EngineLoop(engine) as loop, ThreadPoolExecutor(len(prompts)) as pool:
            began = time.perf_counter()
            list(pool.map(lambda prompt, loop=loop: loop.submit(prompt, params).result(), prompts))
            by_loop.append(time.perf_counter() - began)
    print(f"events: {statistics.median(shares):.1%} of the rounds of {len(prompts)} rows at 16 steps a call is not in "
          f"device calls; the run takes {statistics.median(by_steps):.2f} s")  # fmt: skip
    print(f"loop: {statistics.median(by_loop) / statistics.median(by_steps):.3f} of the time by steps")


def _first_tokens(engine: Engine, prompt: list[int], n: int | None) -> float:
    """Return the seconds until a request, or each of a group, has 17 tokens, one call of steps; no page stays known."""
    began = time.perf_counter()
    engine.add(prompt, Params(max_new_tokens=17, sampling=Sampling.greedy(), stop_ids=()), n=n)
    engine.run()
    seconds = time.perf_counter() - began
    engine._pages.forget()
    return seconds


def _share_beside_calls(engine: Engine, prompts: list[list[int]], params: Params) -> float:
    """Return the share of the rounds of decoding that is not spent in their device calls."""
    of_calls = 0.0

    def timed(call: Callable) -> Callable:
        def run(*args, **kwargs):
            nonlocal of_calls
            began = time.perf_counter()
            out = call(*args, **kwargs)
            of_calls += time.perf_counter() - began
            return out

        return run

    engine._runner.launch, engine._runner.read = timed(engine._runner.launch), timed(engine._runner.read)
    try:
        for prompt in prompts:
            engine.add(prompt, params)
        while engine.prefill():
            pass
        began = time.perf_counter()
        while engine.busy:
            engine.step()
        return 1 - of_calls / (time.perf_counter() - began)
    finally:
        del engine._runner.launch, engine._runner.read


if __name__ == "__main__":
    main()
