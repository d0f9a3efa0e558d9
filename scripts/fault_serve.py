"""Clients that break things, and a worker that dies: what our server has lost afterwards (docs/serving.md).

    python scripts/fault_serve.py                         # every fault at its full size, three rounds
    python scripts/fault_serve.py --only vanish deep      # some of them
    python scripts/fault_serve.py --small --rounds 1      # seconds

Servers are processes of their own on this machine's loopback, with the embedded model, and serve nobody else. After
each fault nothing may go on, no page may be in use, `Engine.check` must find nothing wrong, and an ordinary request
must be answered as it was before; else the exit status is 1. Memory and open files are those of the process: what a
third round still adds is a leak.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clients import HOST, ServerProcess, Streamed, ask, free_port, request_bytes, streamed

CHAT = "/v1/chat/completions"
CONTEXT, MAX_BATCH = 512, 8
BODY_LIMIT, DEPTH = 64 << 20, 100_000
HI = [{"role": "user", "content": "What is a context manager?"}]
LONG = {"messages": HI, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
SHORT = {"messages": HI, "max_tokens": 12, "temperature": 0}
TOGETHER, WORKER = "serve", "worker"


class FaultError(Exception):
    """Raised where a server did not stand a fault: what was seen, and what should have been."""


@dataclass(frozen=True)
class Sizes:
    """The size of each fault."""

    clients: int = 1000
    readers: int = 32
    half_sent: int = 200
    large: int = 8
    messages: int = 500
    streams: int = 200


SMALL = Sizes(clients=20, readers=2, half_sent=10, large=1, messages=40, streams=10)


# Servers that can be asked about their engine


def serve_with_a_door(door: int, words: Sequence[str]) -> int:
    """Run a command line of `m3jax.serve` whose engine tells at a second port how it is.

    Args:
      door: the port; each connection gets one line of JSON.
      words: of the command line.
    """
    from m3jax.serve.command import main as serve_main
    from m3jax.serve.worker import Worker

    workers: list[Worker] = []
    make = Worker.__init__

    def noted(self: Worker, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        workers.append(self)

    Worker.__init__ = noted
    listener = socket.create_server((HOST, door))

    def answer() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(json.dumps(state_of(workers[0]) if workers else {"wrong": "no engine"}).encode())

    threading.Thread(target=answer, daemon=True).start()
    return serve_main(list(words))


def state_of(worker: Any) -> dict[str, Any]:
    """Return what an engine has in use, and what `Engine.check` finds wrong with it."""

    def look() -> dict[str, Any]:
        wrong = None
        try:
            worker.engine.check()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        return {"busy": worker.engine.busy, "used": worker.engine.pages["used"], "wrong": wrong}

    return worker._loop.call(look) | {"requests": len(worker._active)}


@dataclass(eq=False)
class Target:
    """A server under faults.

    Attributes:
      process: of it.
      door: the port at which its engine tells how it is; None for a gateway alone.
    """

    process: ServerProcess
    door: int | None

    @property
    def port(self) -> int:
        """The port of its protocol."""
        return self.process.port

    def state(self) -> dict[str, Any]:
        """Return what its engine tells."""
        with socket.create_connection((HOST, self.door), timeout=60) as connection:
            data = b"".join(iter(lambda: connection.recv(4096), b""))
        return json.loads(data)

    def check_is_as_new(self, seconds: float = 60.0) -> None:
        """Wait until nothing goes on, and see that nothing was lost.

        Raises:
          FaultError: something goes on still, a page is in use, or `Engine.check` finds something.
        """
        end = time.monotonic() + seconds
        while (state := self.state())["busy"] or state["requests"] or state["used"]:
            if time.monotonic() > end:
                raise FaultError(f"{seconds:g} s after the fault: {state}")
            time.sleep(0.05)
        if state["wrong"]:
            raise FaultError(f"Engine.check: {state['wrong']}")


@contextlib.contextmanager
def target(kind: str, *more: str) -> Iterator[Target]:
    """Run a server with a door: "serve" is gateway and worker in one process, "worker" the worker alone."""
    port, door = free_port(), free_port()
    context = "--max-length" if kind == WORKER else "--context"
    words = [*([WORKER] if kind == WORKER else []), "--port", str(port), "--dtype", "float32"]
    words += [context, str(CONTEXT), "--max-batch", str(MAX_BATCH), *more]
    process = ServerProcess(f"m3jax {kind}", [sys.executable, __file__, "--door", str(door), *words], port)
    try:
        if kind == WORKER:
            wait_for_worker(process)
        else:
            process.wait_until_ready(300)
        yield Target(process, door)
    finally:
        process.close()


def wait_for_worker(process: ServerProcess) -> None:
    """Wait until a worker says by gRPC that it is healthy."""
    import grpc
    from smg_grpc_proto import vllm_engine_pb2 as protocol
    from smg_grpc_proto import vllm_engine_pb2_grpc as services

    with grpc.insecure_channel(f"{HOST}:{process.port}") as channel:
        stub = services.VllmEngineStub(channel)
        for _ in range(600):
            with contextlib.suppress(grpc.RpcError):
                if stub.HealthCheck(protocol.HealthCheckRequest(), timeout=5).healthy:
                    return
            if not process.is_running:
                break
            time.sleep(0.2)
    raise FaultError(f"the worker does not serve: {process.last_line()}")


def answer_of(port: int) -> str:
    """Return the text of an ordinary request, which must be answered."""
    status, text = ask(port, CHAT, SHORT)
    if status != 200:
        raise FaultError(f"an ordinary request is answered with {status}: {text[:200]}")
    return json.loads(text)["choices"][0]["message"]["content"]


# Faults, each a coroutine that returns a line on what it did


async def vanish(served: Target, sizes: Sizes, rng: random.Random) -> str:
    """Clients connect and go away without a word: at once, within their request, before or within the answer."""
    data = request_bytes(CHAT, json.dumps(LONG).encode())

    async def one() -> str:
        _, writer = await asyncio.open_connection(HOST, served.port)
        sent = rng.choice((0, 10, len(data) - 5, len(data)))
        writer.write(data[:sent])
        with contextlib.suppress(OSError):
            await writer.drain()
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.1)))
        writer.transport.abort()
        return "in the request" if sent < len(data) else "before the answer"

    async def within() -> str:
        await streamed(served.port, CHAT, LONG, most_events=rng.randint(1, 8), seconds=60)
        return "in the answer"

    places = asyncio.Semaphore(64)

    async def in_turn(work: Callable[[], Awaitable[str]]) -> str:
        async with places:
            return await work()

    works = [one if rng.random() < 0.8 else within for _ in range(sizes.clients)]
    counts = Counter(await asyncio.gather(*map(in_turn, works)))
    return ", ".join(f"{count} {when}" for when, count in sorted(counts.items()))


async def slow(served: Target, sizes: Sizes, rng: random.Random) -> str:
    """Streams are read an event at a time with pauses, while others are read as they come."""
    read_slowly = lambda: streamed(served.port, CHAT, LONG, pause=0.05, seconds=120)
    waiting = asyncio.gather(*(read_slowly() for _ in range(sizes.readers)))
    await asyncio.sleep(0.5)
    body = {**LONG, "max_tokens": 20}
    others = await asyncio.gather(*(streamed(served.port, CHAT, body, seconds=120) for _ in range(4)))
    slow_answers = await waiting
    check_whole([*slow_answers, *others])
    if len({answer.text for answer in slow_answers}) != 1:
        raise FaultError("slow readers of one greedy request got different texts")
    longest = max(answer.ended - answer.sent for answer in others)
    return f"{sizes.readers} slow readers have their whole answers, 4 others theirs within {longest:.1f} s"


async def half_sent(served: Target, sizes: Sizes, rng: random.Random) -> str:
    """Bodies stop in the middle and their connections stay open, while an ordinary request is answered."""
    held = []
    for _ in range(sizes.half_sent):
        _, writer = await asyncio.open_connection(HOST, served.port)
        writer.write(request_bytes(CHAT, b'{"messages": ', length=1000))
        await writer.drain()
        held.append(writer)
    began = time.perf_counter()
    await asyncio.to_thread(answer_of, served.port)
    seconds = time.perf_counter() - began
    for writer in held:
        writer.transport.abort()
    return f"{len(held)} open, an ordinary request took {seconds:.1f} s"


async def large(served: Target, sizes: Sizes, rng: random.Random) -> str:
    """Bodies of 64 MiB and of more: what is too large is refused before it is held, the rest is read and judged."""
    statuses: Counter[str] = Counter()
    filler = b"a" * (1 << 20)

    async def send(length: int, announced: bool) -> None:
        reader, writer = await asyncio.open_connection(HOST, served.port)
        begin, end = b'{"messages": [{"role": "user", "content": "', b'"}], "max_tokens": 4}'
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        head += f"Content-Length: {length}\r\n\r\n" if announced else "Transfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        pieces, left = [begin], length - len(begin) - len(end)
        pieces += [filler[: min(len(filler), left - start)] for start in range(0, left, len(filler))] + [end]
        with contextlib.suppress(OSError):  # the server has refused it and closed
            for piece in pieces:
                writer.write(piece if announced else f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
            writer.write(b"" if announced else b"0\r\n\r\n")
            await writer.drain()
        line = b""
        with contextlib.suppress(OSError):
            line = await asyncio.wait_for(reader.readline(), 120)
        statuses[line.split()[1].decode() if line else "closed"] += 1
        writer.transport.abort()

    for _ in range(sizes.large):
        await send(BODY_LIMIT, True)  # as large as may be: read, and then refused for its tokens
        await send(BODY_LIMIT + 1, True)
        await send(BODY_LIMIT + (2 << 20), False)  # of an unknown length
    if not set(statuses) <= {"400", "413", "closed"} or statuses["400"] != sizes.large:
        raise FaultError(f"bodies of 64 MiB got {dict(statuses)}")
    return f"statuses {dict(statuses)}"


async def deep(served: Target, sizes: Sizes, rng: random.Random) -> str:
    """JSON is nested 100,000 levels deep: as the body, and wherever a field takes objects."""
    nested = "[" * DEPTH + "]" * DEPTH
    objects = '{"a":' * DEPTH + "1" + "}" * DEPTH
    hi = json.dumps(HI)
    bodies = [
        nested, objects, "[" * DEPTH,
        f'{{"messages": {nested}}}',
        f'{{"messages": [{{"role": "user", "content": {nested}}}]}}',
        f'{{"messages": {hi}, "tools": [{{"type": "function", "function": {{"parameters": {objects}}}}}]}}',
        f'{{"messages": {hi}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": {objects}}}}}}}',
    ]  # fmt: skip
    # Schemas that may be, that are deeper than any may be, and nearly as deep as Python's own stack.
    for depth in (20, 100, 900):
        schema = '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
        bodies += [
            f'{{"messages": {hi}, "max_tokens": 4, "tools": [{tool}]}}',
            f'{{"messages": {hi}, "max_tokens": 4, "tools": [{tool}], "tool_choice": "required"}}',
            f'{{"messages": {hi}, "max_tokens": 4, "response_format": {{"type": "json_schema", "json_schema": '
            f'{{"name": "a", "schema": {schema}}}}}}}',
        ]
    statuses: Counter[int] = Counter()
    for path in (CHAT, "/v1/messages", "/v1/responses", "/v1/completions", "/tokenize"):
        for body in bodies:
            status, text = await asyncio.to_thread(ask, served.port, path, body.encode())
            statuses[status] += 1
            if status >= 500:
                raise FaultError(f"{path} answers {body[:80]}... with {status}: {text[:200]}")
    return f"statuses {dict(statuses)}"


async def streams(served: Target, sizes: Sizes, rng: random.Random) -> str:
    """So many streams at once, of which the engine has room for eight at a time."""
    bodies = [
        {**LONG, "max_tokens": 24, "messages": [{"role": "user", "content": f"What is {number}?"}]}
        for number in range(sizes.streams)
    ]
    began = time.perf_counter()
    answers = await asyncio.gather(*(streamed(served.port, CHAT, body, seconds=300) for body in bodies))
    check_whole(answers)
    return f"{len(answers)} whole in {time.perf_counter() - began:.1f} s"


def check_whole(answers: Sequence[Streamed]) -> None:
    """Raise FaultError unless every stream has come to its end, without an error."""
    for answer in answers:
        if not answer.is_whole or answer.status != 200 or answer.error or answer.events[-1][1] != b"[DONE]":
            raise FaultError(
                f"a stream ended with status {answer.status} after {len(answer.events)} events: {answer.error}"
            )


async def protobuf(worker: Target, sizes: Sizes, rng: random.Random) -> str:
    """A worker gets bytes that are no message, and messages with bytes changed, cut off or added."""
    import grpc
    from smg_grpc_proto import vllm_engine_pb2 as protocol

    params = protocol.SamplingParams(temperature=0.0, max_tokens=4)
    tokens = protocol.TokenizedInput(input_ids=range(300, 320))
    valid = protocol.GenerateRequest(sampling_params=params, stream=True, tokenized=tokens).SerializeToString()
    statuses: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(f"{HOST}:{worker.port}") as channel:

        async def send(method: str, data: bytes) -> None:
            call = channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{method}")
            try:
                async for _ in call(data, timeout=30):
                    pass
                statuses["OK"] += 1
            except grpc.aio.AioRpcError as error:
                statuses[error.code().name] += 1
                if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE):
                    raise FaultError(f"{method} of {data[:40].hex()}: {error.code().name} {error.details()}") from None

        for _ in range(sizes.messages):
            data = bytearray(valid)
            kind = rng.randrange(4)
            if kind == 0:
                data = rng.randbytes(rng.randint(0, 200))
            elif kind == 1:
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            elif kind == 2:
                data = data[: rng.randrange(len(data))]
            else:
                data += rng.randbytes(rng.randint(1, 20))
            await send(
                "Generate" if rng.random() < 0.8 else rng.choice(("Abort", "GetLoads", "HealthCheck")), bytes(data)
            )
        await send("Generate", valid)
    if statuses["INVALID_ARGUMENT"] == 0:
        raise FaultError("no garbage was refused")
    return ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))


async def killed(worker: Target, sizes: Sizes, rng: random.Random) -> str:
    """The only worker of a gateway is killed within streams, and another one begins at its port."""
    port = free_port()
    command = [sys.executable, "-m", "m3jax.serve", "gateway", "--worker", f"grpc://{HOST}:{worker.port}"]
    gateway = ServerProcess("m3jax gateway", [*command, "--port", str(port)], port)
    try:
        gateway.wait_until_ready(60)
        before = await asyncio.to_thread(answer_of, port)
        waiting = [asyncio.create_task(streamed(port, CHAT, LONG, seconds=60)) for _ in range(MAX_BATCH)]
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        worker.process.kill()
        answers = await asyncio.gather(*waiting)
        seconds = max(answer.ended for answer in answers) - began
        told = sum(answer.error is not None and "lost" in answer.error for answer in answers)
        if told + sum(answer.error is None and answer.is_whole for answer in answers) != len(answers) or not told:
            raise FaultError(f"{told} of {len(answers)} streams were told: {[answer.error for answer in answers]}")
        status, _ = await asyncio.to_thread(ask, port, "/health")
        refused, _ = await asyncio.to_thread(ask, port, CHAT, SHORT)
        if (status, refused) != (503, 503):
            raise FaultError(f"without a worker /health says {status}, and a request gets {refused}")
        # Another process at the same port.
        worker.process = ServerProcess("m3jax worker", worker.process.command, worker.port)
        await asyncio.to_thread(wait_for_worker, worker.process)
        began = time.perf_counter()
        while (await asyncio.to_thread(ask, port, "/health"))[0] != 200:
            if time.perf_counter() > began + 20:
                raise FaultError("the gateway does not take its worker back")
            await asyncio.sleep(0.05)
        back = time.perf_counter() - began
        if await asyncio.to_thread(answer_of, port) != before:
            raise FaultError("the worker that came back answers otherwise")
        return f"{told} streams were told within {seconds:.1f} s; taken back {back:.1f} s after the worker was there"
    finally:
        gateway.close()


Fault = Callable[[Target, Sizes, random.Random], Awaitable[str]]
FAULTS: dict[str, dict[str, Fault]] = {
    TOGETHER: {"vanish": vanish, "slow": slow, "half": half_sent, "large": large, "deep": deep, "streams": streams},
    WORKER: {"protobuf": protobuf, "killed": killed},
}


def run_faults(kind: str, names: Sequence[str], sizes: Sizes, args: argparse.Namespace) -> None:
    """Run faults against one server, round by round, and print a line for each.

    Raises:
      FaultError: the server did not stand one.
    """
    # A small run compiles what it needs and no more.
    more = ("--no-warmup", "--prefill-chunk", "64", "--max-batch", "2") if args.small and kind == TOGETHER else ()
    with target(kind, *more) as served:
        expected = answer_of(served.port) if kind == TOGETHER else None
        for number in range(1, args.rounds + 1):
            for name in names:
                began = time.perf_counter()
                what = asyncio.run(FAULTS[kind][name](served, sizes, random.Random(number)))
                served.check_is_as_new()
                if expected is not None and answer_of(served.port) != expected:
                    raise FaultError(f"after {name} an ordinary request is answered otherwise")
                seconds, process = time.perf_counter() - began, served.process
                print(f"{name:9s} {number:5d} {seconds:8.1f} {process.resident_bytes() / 1e6:9.0f} "
                      f"{process.open_files():6d}  {what}", flush=True)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults; return 1 if a server did not stand one, 2 where one did not begin."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--door"]:  # this script as the server
        return serve_with_a_door(int(words[1]), words[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name for of_kind in FAULTS.values() for name in of_kind]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these faults (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="of all faults, one after the other (default: 3)")
    parser.add_argument("--small", action="store_true", help="few of everything")
    args = parser.parse_args(words)
    print(f"{'fault':9s} {'round':>5s} {'seconds':>8s} {'memory MB':>9s} {'files':>6s}", flush=True)
    try:
        for kind, of_kind in FAULTS.items():
            chosen = [name for name in of_kind if name in args.only]
            if chosen:
                run_faults(kind, chosen, SMALL if args.small else Sizes(), args)
    except FaultError as error:
        print(f"fault_serve: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"fault_serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
