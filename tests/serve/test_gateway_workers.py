"""Several workers over gRPC: which one a request goes to, and what clients see of one that is lost."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.serving import NAME, ScriptedWorker, clients, running

from m3jax.serve.gateway import workers as workers_module
from m3jax.serve.gateway.workers import RemoteWorker
from m3jax.serve.worker.server import start

LONG = "A beginning that many prompts share. " * 30


class GrpcServers:
    """gRPC servers of scripted workers, in an event loop on a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def start(self, worker, port=0):
        return self.run(start(worker, "127.0.0.1", port))

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@contextmanager
def two_workers() -> Iterator[tuple]:
    """A gateway in front of two workers, the workers, and what serves them."""
    servers = GrpcServers()
    scripted = [ScriptedWorker(), ScriptedWorker()]
    served = [servers.start(worker) for worker in scripted]
    remote = [f"127.0.0.1:{port}" for _, port in served]
    # A channel of gRPC belongs to the event loop that uses it.
    gateway = running(lambda: [RemoteWorker(address) for address in remote])
    try:
        with gateway as server:
            yield server, scripted, served, servers
    finally:
        for grpc_server, _ in served:
            servers.run(grpc_server.stop(0))
        servers.close()


def ask(server, text, **fields):
    return server.openai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": text}], **fields)


def test_two_workers(monkeypatch, unchecked):
    """Prompts that begin alike stay together, others go where less is done; a worker that was lost comes back."""
    monkeypatch.setattr(workers_module, "_RETRY_SECONDS", 0.05)
    with two_workers() as (server, scripted, served, servers):
        count = lambda: [len(worker.requests) for worker in scripted]
        for number in range(4):
            ask(server, f"{LONG} Question {number}?")
        assert sorted(count()) == [0, 4]
        first = scripted[0] if scripted[0].requests else scripted[1]
        other = scripted[1] if first is scripted[0] else scripted[0]
        # While the first has work, a prompt of another beginning goes to the second, and one of that beginning not.
        first.gate, first.tokens_per_chunk = threading.Event(), 2
        held = ask(server, f"{LONG} Held?", stream=True)
        ask(server, "Something else.")
        assert len(other.requests) == 1
        first.gate.set()
        list(held)
        with pytest.raises(clients.openai.BadRequestError, match="seed"):  # refused over gRPC by its name too
            ask(server, "Hi", seed=666)
        # The first is killed within a stream: the client gets an error, and the second one serves all.
        first.gate, first.script = threading.Event(), lambda request, index: "One sentence that is long enough. " * 4
        first.tokens_per_chunk = 16
        held = iter(ask(server, f"{LONG} Lost?", stream=True))
        next(held)
        index = scripted.index(first)
        grpc_server, port = served[index]
        servers.run(grpc_server.stop(0))
        with pytest.raises(clients.openai.APIError, match="lost"):
            list(held)
        before = len(other.requests)
        assert ask(server, f"{LONG} And now?").choices[0].message.content == "All is well."
        assert len(other.requests) == before + 1
        served[index] = servers.start(first, port)
        end = time.monotonic() + 20
        while server.gateway.workers.down:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert server.ask("/health")[0] == 200 and server.gateway.running == 0
        assert 'm3jax_worker_up{worker="127.0.0.1' in server.ask("/metrics")[2]
