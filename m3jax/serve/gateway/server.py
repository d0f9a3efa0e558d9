"""The process of a gateway: it listens at once, says "loading" until its workers are there, and drains at its end."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import uvicorn

from m3jax.console import say
from m3jax.serve.gateway.app import app
from m3jax.serve.gateway.gateway import Gateway
from m3jax.serve.gateway.pixels import PixelPool

PROG = "m3jax.serve"


@dataclass(frozen=True)
class Address:
    """The address that a server listens at.

    Attributes:
      host: a name or an address; 127.0.0.1 is this machine alone.
      port: 0 takes a free one.
      drain_seconds: that requests have to end once the server is told to.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_seconds: float = 30.0

    def bound(self) -> socket.socket:
        """Return a socket that is bound to the address.

        Raises:
          ValueError: it is taken, or not this machine's.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
            listener.listen(2048)  # who connects from now on waits for the event loop, and is not refused
        except OSError as error:
            listener.close()
            raise ValueError(f"--host {self.host} --port {self.port}: {error.strerror}; give another") from None
        listener.set_inheritable(True)
        return listener


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals `serve` handles: its own way out would end the process by the signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(eq=False)
class Opened:
    """The parts of a gateway that are closed at its end.

    Attributes:
      pool: of processes.
      closing: awaited in order, last.
    """

    pool: PixelPool
    closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)


async def serve(gateway: Gateway, address: Address, load: Callable[[Gateway], Awaitable[Opened]]) -> None:
    """Serve until the process is told to end by SIGTERM or SIGINT, then let what goes on end first.

    Args:
      gateway: not loaded yet.
      address: to listen at.
      load: gives the gateway its model and workers.

    Raises:
      ValueError: the address is taken.
      Exception: what `load` raised; nothing can be served then.
    """
    listener = address.bound()
    config = uvicorn.Config(
        app(gateway), log_level="warning", lifespan="off", timeout_keep_alive=60,
        timeout_graceful_shutdown=address.drain_seconds, server_header=False, h11_max_incomplete_event_size=1 << 16,
    )  # fmt: skip
    server = _Server(config)
    loop = asyncio.get_running_loop()

    def drain() -> None:
        if gateway.state == "draining":
            server.force_exit = True  # told twice
        gateway.state, server.should_exit = "draining", True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    serving = asyncio.ensure_future(server.serve([listener]))
    port = listener.getsockname()[1]
    say(f"{PROG}: http://{address.host}:{port} (loading)")
    loading = asyncio.ensure_future(load(gateway))
    opened = None
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            opened = loading.result()
            if gateway.state == "loading":
                gateway.state = "ready"
                say(f"{PROG}: ready: {gateway.model.name} at http://{address.host}:{port}")
        await serving
    finally:
        gateway.state, server.should_exit = "draining", True
        await asyncio.gather(serving, return_exceptions=True)
        if opened is None:  # told to end while it loaded, or the load failed
            loading.cancel()
            opened = (await asyncio.gather(loading, return_exceptions=True))[0]
        if isinstance(opened, Opened):
            opened.pool.close()
            for close in opened.closing:
                await close()
        listener.close()
