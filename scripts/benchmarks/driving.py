"""Time driving an engine: a group beside one request, events and the loop's thread beside bare device calls.

    bench.py driving                      # the embedded model on a CPU, float32
    bench.py driving --prompt 4000 --group 4

All figures are ratios of one run. "group" is the time until every request of a group has its first tokens, over that
of one request. "events" is the share of decode rounds that is not in their device calls: scheduling, pages, events.
"loop" is the same requests through `EngineLoop`, each submitted by a thread of its own, over the same through
`Engine.run`, by turns.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import m3jax
from benchmarks.harness import Option
from benchmarks.models import greedy, random_tokens
from m3jax.decoding import Engine, EngineLoop, Params

REPEATS = 5
OPTIONS = dict(
    prompt=Option(8000, "Tokens of the group's prompt", smoke=300),
    group=Option(8, "Requests of the group", smoke=2),
    new_tokens=Option(160, "New tokens of each request of the loop", smoke=20),
)


def measure(args):
    """Yield the three ratios."""
    model = m3jax.load(dtype="float32", progress=False)
    pages = 4 * -(-(args.prompt + 192) // model.config.index_block_size)
    engine = Engine(
        model, pages=pages, max_batch=args.group, prefill_chunk=(256, 2048), steps_per_call=16,
        max_length=args.prompt + 192,
    )  # fmt: skip
    engine.warmup()
    seeds = iter(range(10**6))
    prompt = lambda length: random_tokens(model.config, length, next(seeds))
    alone, group, by_steps, by_loop, shares = [], [], [], [], []
    for _ in range(args.repeats):
        alone.append(first_tokens(engine, prompt(args.prompt), None))
        before = engine.timings.prompt_tokens
        group.append(first_tokens(engine, prompt(args.prompt), args.group))
        computed = engine.timings.prompt_tokens - before
    ratio = lambda one, other: statistics.median(one) / statistics.median(other)
    note = f"{args.group} requests of {args.prompt} tokens, of which {computed} are computed, beside one"
    yield {"what": "group", "ratio": ratio(group, alone), "s": statistics.median(alone), "note": note}

    prompts, params = [prompt(64) for _ in range(args.group)], greedy(args.new_tokens, stop_ids=())
    for _ in range(args.repeats):
        shares.append(share_beside_calls(engine, prompts, params))
        began = time.perf_counter()
        for prompt_of_row in prompts:
            engine.add(prompt_of_row, params)
        engine.run()
        by_steps.append(time.perf_counter() - began)
        with EngineLoop(engine) as loop, ThreadPoolExecutor(len(prompts)) as pool:
            began = time.perf_counter()
            list(pool.map(lambda prompt, loop=loop: loop.submit(prompt, params).result(), prompts))
            by_loop.append(time.perf_counter() - began)
    seconds, note = statistics.median(by_steps), f"outside device calls, {len(prompts)} rows at 16 steps a call"
    yield {"what": "events", "ratio": statistics.median(shares), "s": seconds, "note": note}
    yield {"what": "loop", "ratio": ratio(by_loop, by_steps), "s": statistics.median(by_loop), "note": "beside steps"}


def first_tokens(engine: Engine, prompt: list[int], n: int | None) -> float:
    """Return the seconds until a request, or each of a group, has 17 tokens, one call of steps; no page stays known."""
    began = time.perf_counter()
    engine.add(prompt, greedy(17, stop_ids=()), n=n)
    engine.run()
    seconds = time.perf_counter() - began
    engine._pages.forget()
    return seconds


def share_beside_calls(engine: Engine, prompts: list[list[int]], params: Params) -> float:
    """Return the share of the rounds of decoding that is not spent in their device calls."""
    of_calls, runner = 0.0, engine._runner

    def timed(call):
        def run(*args, **kwargs):
            nonlocal of_calls
            began = time.perf_counter()
            out = call(*args, **kwargs)
            of_calls += time.perf_counter() - began
            return out

        return run

    with mock.patch.multiple(runner, launch=timed(runner.launch), read=timed(runner.read)):
        for prompt in prompts:
            engine.add(prompt, params)
        while engine.prefill():
            pass
        of_calls, began = 0.0, time.perf_counter()
        while engine.busy:
            engine.step()
        return 1 - of_calls / (time.perf_counter() - began)
