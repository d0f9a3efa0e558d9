"""Prompts read by one process, answers drawn by another: beside one engine that does both (docs/disaggregated.md).

    bench.py disaggregated                                         # the embedded checkpoint
    bench.py disaggregated --model m3 --prompt 16384 --new-tokens 128 --chunk 8192    # two GPUs

First one process with one engine, on the first of `--devices`; then two, an engine that reads prompts on the first and
one that decodes on the second, joined by gRPC. Both get the same prompts, `--concurrent` at a time, no two of which
begin alike. A row has, over all requests: median seconds to the first token and milliseconds a token behind it, and new
tokens a second. Where pages travel it has the bytes received per token of a
prompt, and the seconds from the question for pages until the last one was there. Then come the answers whose tokens are
those of the one engine, and those whose log-probabilities are so to the bit: in the invariant mode all of them, or the
status is 1.
"""

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness import Option, rows_of, start_part

USES_DEVICE = False  # the parts have it
STEPS_PER_CALL = 4
OPTIONS = dict(
    model=Option("tiny", "Weights", choices=("tiny", "bench", "m3")),
    prompt=Option(1000, "Tokens of a prompt", smoke=100),
    new_tokens=Option(32, "New tokens of an answer", smoke=6),
    requests=Option(8, "Requests for each number of --concurrent", smoke=2),
    concurrent=Option([1, 4], "Requests that go on at once", smoke=[2]),
    chunk=Option(256, "Tokens of a prefill call", smoke=64),
    invariant=Option(False, "Use the invariant mode"),
    devices=Option("0,1", "CUDA_VISIBLE_DEVICES of the two processes"),
)


def measure(args):
    """Yield the rows of both ways."""
    first, second = ({"CUDA_VISIBLE_DEVICES": device} for device in args.devices.split(","))
    found = {}
    with start_part(args, "alone", env=first) as process:
        found["one engine"] = rows_of(process)
    with start_part(args, "prefill", env=first) as reading:
        address = reading.stdout.readline().strip()
        try:
            with start_part(args, "decode", "--address", address, env=second) as process:
                found["two"] = rows_of(process)
        finally:
            reading.stdin.close()  # it ends then
    for number, concurrent in enumerate(args.concurrent):
        for name, runs in found.items():
            run = runs[number]
            first_tokens = [request["first"] for request in run["requests"]]
            steps = [1e3 * (r["last"] - r["first"]) / (args.new_tokens - 1) for r in run["requests"]]
            row = {
                "at once": f"{concurrent}, {name}", "first token, s": statistics.median(first_tokens),
                "ms a token": statistics.median(steps),
                "tokens/s": sum(len(r["tokens"]) for r in run["requests"]) / run["seconds"], "bytes a token": None,
                "pages after, s": None, "device": run["device"],
            }  # fmt: skip
            if name == "two":
                num_bytes, sent = (sum(r[key] for r in run["requests"]) for key in ("bytes", "sent"))
                row["bytes a token"] = num_bytes / sent
                row["pages after, s"] = statistics.median(r["fetched"] for r in run["requests"])
            yield row
        pairs = list(zip(*(runs[number]["requests"] for runs in found.values()), strict=True))
        same = [sum(one[key] == other[key] for one, other in pairs) for key in ("tokens", "logprobs")]
        yield f"of {len(pairs)} answers {same[0]} have the same tokens, {same[1]} the same bits of log-probabilities"
        if args.invariant and same != [len(pairs)] * 2:
            raise SystemExit("in the invariant mode every answer has the bits of one engine's")


# In the processes that have an engine


def new_engine(args):
    """Return an engine with room for all requests that go on at once, compiled."""
    from benchmarks import models
    from m3jax.decoding import Engine

    model, rows = models.build(args.model), max(args.concurrent)
    length = args.prompt + args.new_tokens
    engine = Engine(
        model, pages=(rows + 1) * (-(-length // model.config.index_block_size) + 1), max_batch=rows,
        max_length=length + 1, prefill_chunk=min(args.chunk, args.prompt), steps_per_call=STEPS_PER_CALL,
        invariant=args.invariant, media_patches=(),
    )  # fmt: skip
    programs = {"prefill": ("prefill", "pages"), "alone": ("prefill", "decode"), "decode": ("decode", "pages")}
    engine.warmup(programs=programs[args.part])
    return engine


def part(args):
    """Yield what the requests of each number of --concurrent took; or read prompts until the standard input ends."""
    if args.part == "prefill":
        read_prompts(args)
        return
    import jax

    from benchmarks import models
    from m3jax.decoding import EngineLoop
    from m3jax.transfer import PrefillClient

    engine = new_engine(args)
    client = PrefillClient([args.address], engine) if args.part == "decode" else None
    if client is not None:
        client.check(600)
    params, random_tokens = models.greedy(args.new_tokens), models.random_tokens
    with EngineLoop(engine) as loop:
        # One that is not counted: the first call of a connection, and of programs that warmup left out.
        answer(loop, client, random_tokens(engine.config, args.prompt, 10**6), params)
        for concurrent in args.concurrent:
            seeds = range(1000 * concurrent, 1000 * concurrent + args.requests)
            prompts = [random_tokens(engine.config, args.prompt, seed) for seed in seeds]
            began = time.perf_counter()
            with ThreadPoolExecutor(concurrent) as pool:
                found = list(pool.map(lambda prompt: answer(loop, client, prompt, params), prompts))
            seconds = time.perf_counter() - began
            yield dict(requests=found, seconds=seconds, device=jax.devices()[0].device_kind)
    engine.check()


def read_prompts(args) -> None:
    """Print the address, and read prompts until the standard input ends."""
    from m3jax.transfer import Prefiller
    from m3jax.transfer.service import start

    prefiller = Prefiller(new_engine(args))
    server, port = start(prefiller)
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(0).wait()
    prefiller.close()


def answer(loop, client, prompt: list[int], params) -> dict:
    """Answer one prompt; times are in seconds from its arrival."""
    began, moved = time.perf_counter(), {}
    if client is None:
        stream = loop.submit(prompt, params)
    else:
        fetched = client.fetch(prompt, params)
        moved = dict(bytes=fetched.num_bytes, sent=len(prompt) - 1, fetched=fetched.seconds)
        stream = loop.submit_snapshot(fetched.snapshot)
    first = None
    for event in stream:
        first = time.perf_counter() - began if first is None and event.tokens else first
    generation, last = event.generation, time.perf_counter() - began
    return dict(first=first, last=last, tokens=generation.tokens, logprobs=generation.logprobs) | moved
