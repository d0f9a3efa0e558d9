"""Prompts read by one process, answers drawn by another: beside one engine that does both (docs/performance.md).

    python scripts/bench_disaggregated.py                                         # the embedded checkpoint
    python scripts/bench_disaggregated.py --model m3 --prompt 16384 --new-tokens 128 --chunk 8192    # two GPUs
    python scripts/bench_disaggregated.py --smoke                                 # seconds: sees that it runs

First one process with one engine, on the first of `--devices`; then two, an engine that reads prompts on the first and
one that decodes on the second, joined by gRPC. Both get the same prompts, `--concurrent` at a time, no two of which
begin alike. A line has, over all requests: seconds to the first token (median, and what nine in ten do not exceed),
milliseconds a token after it (likewise), and new tokens a second of all together. Where pages travel it has the bytes
that a token of a prompt took on the wire, and the seconds from the question for pages until the last one was there.
Then come the answers whose tokens are those of the one engine, and those whose log-probabilities are so to the bit: in
the invariant mode (`--invariant`) all of them, or the run fails.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

STEPS_PER_CALL = 4


def main() -> None:
    """Run both ways and print a table, or run one part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--model", choices=("tiny", "bench", "m3"), default="tiny", help="as in bench_engine.py")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=8, help="for each number of --concurrent")
    parser.add_argument("--concurrent", type=numbers, default=[1, 4], help="requests that go on at once")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill call")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--devices", default="0,1", help="CUDA_VISIBLE_DEVICES of the two processes")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    parser.add_argument("--smoke", action="store_true", help="two short requests")
    parser.add_argument("--part", choices=("alone", "prefill", "decode"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.prompt, args.new_tokens, args.requests, args.concurrent, args.chunk = 100, 6, 2, [2], 64
    if args.part == "prefill":
        return read_prompts(args)
    if args.part:
        return print(json.dumps(answer(args)))

    first, second = args.devices.split(",")
    with _started("alone", first) as process:
        alone = _result(process)
    with _started("prefill", first) as reading:
        address = reading.stdout.readline().strip()
        try:
            with _started("decode", second, "--address", address) as process:
                apart = _result(process)
        finally:
            reading.stdin.close()  # it ends then
    _print_table(args, alone, apart)
    if args.json:
        args.json.write_text(json.dumps(dict(alone=alone, apart=apart, settings=vars(args) | dict(json=None))))


def _started(part: str, device: str, *more: str) -> subprocess.Popen:
    """Start one part in a process of its own, which sees one GPU."""
    words = [sys.executable, __file__, *sys.argv[1:], "--part", part, *more]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": device}
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _result(process: subprocess.Popen) -> dict:
    """Wait for a part, and return what it measured."""
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"a part of the benchmark failed with exit status {process.returncode}")
    return json.loads(output.splitlines()[-1])


def _print_table(args: argparse.Namespace, alone: dict, apart: dict) -> None:
    device = alone["device"] if alone["device"] == apart["device"] else f"{alone['device']} and {apart['device']}"
    mode = ", invariant mode" if args.invariant else ""
    print(f"{args.model} on {device}, jax {alone['jax']}{mode}")
    print(f"prompts of {args.prompt} tokens, {args.new_tokens} new, chunks of {args.chunk}, {args.requests} requests")
    for concurrent in map(str, args.concurrent):
        for name, run in (("one engine", alone), ("two", apart)):
            requests, seconds = run["runs"][concurrent]["requests"], run["runs"][concurrent]["seconds"]
            to_first = [request["first"] for request in requests]
            a_token = [1e3 * (request["last"] - request["first"]) / (args.new_tokens - 1) for request in requests]
            new_tokens = sum(len(request["tokens"]) for request in requests)
            line = (
                f"{concurrent:>3} at once, {name:<10}  first token {statistics.median(to_first):7.3f} s "
                f"({_ninety(to_first):.3f})  a token {statistics.median(a_token):7.2f} ms ({_ninety(a_token):.2f})  "
                f"{new_tokens / seconds:8.1f} tokens/s"
            )
            if name == "two":
                num_bytes = sum(request["bytes"] for request in requests) / sum(r["sent"] for r in requests)
                fetched = statistics.median(request["fetched"] for request in requests)
                line += f"  {num_bytes:,.0f} bytes a token, pages there after {fetched:.3f} s"
            print(line)
        pairs = list(zip(*(run["runs"][concurrent]["requests"] for run in (alone, apart)), strict=True))
        same = [sum(one[key] == other[key] for one, other in pairs) for key in ("tokens", "logprobs")]
        print(
            f"    of {len(pairs)} answers {same[0]} have the same tokens, {same[1]} the same bits of log-probabilities"
        )
        if args.invariant and same != [len(pairs)] * 2:
            raise SystemExit("in the invariant mode every answer has the bits of one engine's")


def _ninety(values: list[float]) -> float:
    """The value that nine in ten are not above."""
    return sorted(values)[max(0, -(-9 * len(values) // 10) - 1)]


# In the processes that have an engine


def new_engine(args: argparse.Namespace):
    """An engine with room for all requests that go on at once, compiled."""
    import bench_engine

    from m3jax.decoding import Engine

    model = bench_engine.build(args.model)
    rows = max(args.concurrent)
    length = args.prompt + args.new_tokens
    pages = (rows + 1) * (-(-length // model.config.index_block_size) + 1)
    engine = Engine(
        model, pages=pages, max_batch=rows, max_length=length + 1, prefill_chunk=min(args.chunk, args.prompt),
        steps_per_call=STEPS_PER_CALL, invariant=args.invariant, media_patches=(),
    )  # fmt: skip
    programs = {"prefill": ("prefill", "pages"), "alone": ("prefill", "decode"), "decode": ("decode", "pages")}
    engine.warmup(programs=programs[args.part])
    return engine


def read_prompts(args: argparse.Namespace) -> None:
    """Read prompts until the standard input ends; the address is printed first."""
    from m3jax.transfer import Prefiller
    from m3jax.transfer.service import start

    prefiller = Prefiller(new_engine(args))
    server, port = start(prefiller)
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(0).wait()
    prefiller.close()


def answer(args: argparse.Namespace) -> dict:
    """Answer all requests, by one engine or with pages from another, and return what was measured."""
    import bench_engine
    import jax

    from m3jax.decoding import EngineLoop
    from m3jax.transfer import PrefillClient

    engine = new_engine(args)
    client = PrefillClient([args.address], engine) if args.part == "decode" else None
    if client is not None:
        client.check(600)
    params = bench_engine.params(args.new_tokens)
    runs = {}
    with EngineLoop(engine) as loop:
        # One that is not counted: the first call of a connection, and of programs that warmup left out.
        _answer_one(loop, client, bench_engine.random_tokens(engine.config, args.prompt, 10**6), params)
        for concurrent in args.concurrent:
            prompts = [
                bench_engine.random_tokens(engine.config, args.prompt, 1000 * concurrent + number)
                for number in range(args.requests)
            ]
            began = time.perf_counter()
            found = _side_by_side(loop, client, prompts, params, concurrent)
            runs[str(concurrent)] = dict(requests=found, seconds=time.perf_counter() - began)
    engine.check()
    return dict(device=jax.devices()[0].device_kind, jax=jax.__version__, runs=runs)


def _side_by_side(loop, client, prompts: list, params, concurrent: int) -> list[dict]:
    """Answer prompts on so many threads, each of which takes the next one when it is through."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for item in enumerate(prompts):
        waiting.put(item)
    found: list = [None] * len(prompts)

    def work() -> None:
        while True:
            try:
                number, prompt = waiting.get_nowait()
            except queue.Empty:
                return
            found[number] = _answer_one(loop, client, prompt, params)

    threads = [threading.Thread(target=work) for _ in range(concurrent)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if None in found:
        raise SystemExit("a request failed: its reason stands above")
    return found


def _answer_one(loop, client, prompt: list[int], params) -> dict:
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
    generation = event.generation
    last = time.perf_counter() - began
    return dict(first=first, last=last, tokens=generation.tokens, logprobs=generation.logprobs) | moved


if __name__ == "__main__":
    main()
