"""A thread that owns an engine, so that any thread and any coroutine can have requests served."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, TypeVar

from m3jax.decoding.engine import Engine, Generation, Guide, Params, Snapshot, TokenEvent
from m3jax.decoding.sampling import HostOrDevice

_Result = TypeVar("_Result")


class LoopClosed(RuntimeError):
    """Raised for a request to a loop that was closed, or whose engine failed."""


class LoopFull(RuntimeError):
    """Raised where a loop has as many requests as it may have, for as long as the caller would wait."""


class RequestStream:
    """The events of one request, for one reader on any thread or in any event loop.

    Events that nobody has read yet are joined into one: a reader who is slow, or gone, costs no more than the tokens.

    Attributes:
      handle: of the request in its engine.
    """

    def __init__(self, loop: "EngineLoop", handle: int):
        self.handle = handle
        self._loop = loop
        self._changed = threading.Condition()
        self._event: TokenEvent | None = None  # not read yet
        self._error: BaseException | None = None
        self._is_over = False  # whether the last event has been read
        self._reader: asyncio.Future[None] | None = None  # that a coroutine awaits

    def __iter__(self) -> Iterator[TokenEvent]:
        """Yield the events, the last one with the request's `generation`; on this thread, which waits for each."""
        while not self._is_over:
            yield self.get()

    def get(self, timeout: int | float | None = None) -> TokenEvent:
        """Wait for the next event.

        Args:
          timeout: seconds; None for ever.

        Raises:
          TimeoutError: nothing came.
          ValueError: the last event has been read.
          LoopClosed: the engine failed, with what it raised as the cause.
        """
        with self._changed:
            if self._is_over:
                raise ValueError(f"request {self.handle} has ended, and its last event was read")
            if not self._changed.wait_for(self._has_news, timeout):
                raise TimeoutError(f"request {self.handle} had no event in {timeout} s")
            return self._take()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Yield the events in a coroutine, whose event loop goes on between them. One coroutine may read a stream."""
        running = asyncio.get_running_loop()
        try:
            while not self._is_over:
                with self._changed:
                    arrived = self._reader = None if self._has_news() else running.create_future()
                if arrived is not None:
                    await arrived
                with self._changed:
                    event = self._take()
                yield event
        finally:
            self._reader = None

    def result(self) -> Generation:
        """Wait until the request has ended, and return its continuation; events not read before are gone then."""
        last = None
        for event in self:
            last = event
        if last is None or last.generation is None:
            raise ValueError(f"the last event of request {self.handle} was read already: it had the result")
        return last.generation

    def cancel(self) -> None:
        """End the request, if it has not ended: its last event will say "aborted"."""
        self._loop._cancel(self.handle)

    def _has_news(self) -> bool:
        return self._event is not None or self._error is not None

    def _take(self) -> TokenEvent:
        """Return what came, with the condition held."""
        if self._event is None:
            self._is_over = True
            raise LoopClosed(f"request {self.handle} was lost: the engine failed") from self._error
        event, self._event = self._event, None
        self._is_over = event.generation is not None
        return event

    def _put(self, event: TokenEvent | None, error: BaseException | None = None) -> asyncio.Future[None] | None:
        """Add an event to what was not read, on the engine's thread; return what a coroutine awaits, for `_wake`."""
        with self._changed:
            if event is not None:
                self._event = event if self._event is None else joined(self._event, event)
            self._error = error
            self._changed.notify_all()
            reader, self._reader = self._reader, None
        return reader


class EngineLoop:
    """A thread that works an engine, and a front that any thread may call. Leaving it as a context closes it.

    Only the loop's thread touches the engine: each call here becomes an order that it carries out between two rounds,
    so an answer may take as long as a round. Requests that the engine refuses are refused where they are made.

    Args:
      engine: from now on the loop's alone.
      max_requests: that go on at once; one more waits in `submit` for one to end.

    Example:
      with EngineLoop(engine) as loop:
          for event in loop.submit(prompt, params):
              print(event.tokens)
    """

    def __init__(self, engine: Engine, max_requests: int = 256):
        if isinstance(max_requests, bool) or not isinstance(max_requests, int) or max_requests < 1:
            raise ValueError(f"max_requests = {max_requests!r}: must be an integer of at least 1")
        self._engine, self._max_requests = engine, max_requests
        self._changed = threading.Condition()
        self._orders: deque[tuple[Callable[[], Any], Future]] = deque()
        self._streams: dict[int, RequestStream] = {}
        self._admitted = 0  # requests that go on, or are about to be added
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="m3jax engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int] | HostOrDevice,
        params: Params,
        *args: Any,
        timeout: int | float | None = None,
        n: int | None = None,
        **kwargs: Any,
    ) -> RequestStream | list[RequestStream]:
        """Queue a request, or a group of them, as `Engine.add` does.

        Args:
          prompt, params: as in `Engine.add`.
          *args: likewise.
          **kwargs: likewise.
          timeout: seconds to wait for room; None for ever, 0 not at all.
          n: requests of the group, which take n places; None makes a single request.

        Returns:
          The stream of its events; with `n` a list of them.

        Raises:
          ValueError: what the engine refuses, or a group larger than `max_requests`.
          LoopFull: no room came.
          LoopClosed: the loop was closed, or its engine failed.
        """
        return self._submit(n, timeout, lambda: self._engine.add(prompt, params, *args, n=n, **kwargs))

    def submit_snapshot(
        self,
        snapshot: Snapshot,
        guide: Guide | None = None,
        *,
        timeout: int | float | None = None,
        n: int | None = None,
        cached_tokens: int | None = None,
        left_out: int = 0,
    ) -> RequestStream | list[RequestStream]:
        """Queue a request that another engine exported, or a group of them, as `Engine.import_request` does.

        Args:
          snapshot, guide, cached_tokens, left_out: as in `Engine.import_request`.
          timeout, n: as in `submit`.

        Returns:
          The stream of its events; with `n` a list of them.

        Raises:
          ValueError: what the engine refuses, or a group larger than `max_requests`.
          OutOfPages: its pages do not fit at the moment.
          UnknownPages: pages that were left out are known no longer.
          LoopFull: no room came.
          LoopClosed: the loop was closed, or its engine failed.
        """
        order = lambda: self._engine.import_request(
            snapshot, guide, n=n, cached_tokens=cached_tokens, left_out=left_out
        )
        return self._submit(n, timeout, order)

    def _submit(
        self, n: int | None, timeout: int | float | None, order: Callable[[], int | list[int]]
    ) -> RequestStream | list[RequestStream]:
        """Carry out an order of the engine that queues requests, and return their streams."""
        count = n if isinstance(n, int) and n > 0 else 1
        if count > self._max_requests:
            raise ValueError(f"n = {n}: this loop takes {self._max_requests} requests at once (max_requests)")
        with self._changed:
            has_room = lambda: self._is_closing or self._admitted + count <= self._max_requests
            if not self._changed.wait_for(has_room, timeout):
                raise LoopFull(f"{self._admitted} requests go on, and the loop takes {self._max_requests}: try again")
            self._check_open()
            self._admitted += count

        def add() -> RequestStream | list[RequestStream]:
            try:
                handles = order()
            except BaseException:
                self._leave(count)
                raise
            streams = [RequestStream(self, handle) for handle in ([handles] if n is None else handles)]
            self._streams |= {stream.handle: stream for stream in streams}
            return streams[0] if n is None else streams

        return self.call(add)

    def call(self, order: Callable[[], _Result]) -> _Result:
        """Run a function on the engine's thread, between two rounds, and return what it returns.

        Args:
          order: it may use the engine: `lambda: engine.pages`.

        Raises:
          LoopClosed: the loop was closed, or its engine failed.
          Exception: what the function raised.
        """
        if threading.current_thread() is self._thread:
            return order()
        future: Future = Future()
        with self._changed:
            self._check_open()
            self._orders.append((order, future))
            self._changed.notify_all()
        return future.result()

    def update(self, *args: Any, **kwargs: Any) -> int:
        """Serve new weights from the next round on, as `Engine.update` does, and return their version."""
        return self.call(lambda: self._engine.update(*args, **kwargs))

    def close(self, pending: Literal["finish", "abort"] = "finish") -> None:
        """End the thread. Nothing more can be asked of the loop then; the engine can be used again by this thread.

        Args:
          pending: "finish" lets requests that go on end first, "abort" ends them now. Either way each stream gets its
            last event.
        """
        if pending not in ("finish", "abort"):
            raise ValueError(f"pending = {pending!r}: must be 'finish' or 'abort'")
        with self._changed:
            self._is_closing = True
            if pending == "abort":
                self._orders.append((lambda: [self._abort(handle) for handle in self._streams], Future()))
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "EngineLoop":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("finish" if kind is None else "abort")

    @property
    def is_closed(self) -> bool:
        """True if the loop takes no more requests."""
        return self._is_closing

    # On the engine's thread

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._orders or self._is_closing or self._engine.busy)
                    orders, self._orders = self._orders, deque()
                    if not orders and not self._streams and not self._engine.busy:
                        return  # it is closing, and all have ended
                for order, future in orders:
                    _carry_out(order, future)
                _wake([self._give(event) for event in self._engine.step()])
        except BaseException as error:  # whatever the engine raised: every reader is told, none waits for ever
            self._fail(error)

    def _give(self, event: TokenEvent) -> asyncio.Future[None] | None:
        stream = self._streams.get(event.handle)
        if stream is None:
            return None
        if event.generation is not None:
            del self._streams[event.handle]
            self._engine.forget(event.handle)
            self._leave(1)
        return stream._put(event)

    def _abort(self, handle: int) -> None:
        if handle in self._streams and self._engine.reason(handle) == "unfinished":
            self._engine.abort(handle)

    def _leave(self, count: int) -> None:
        with self._changed:
            self._admitted -= count
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error, self._is_closing = error, True
            orders, self._orders = self._orders, deque()
            streams, self._streams = list(self._streams.values()), {}
            self._changed.notify_all()
        for _, future in orders:
            future.set_exception(LoopClosed("the engine failed"))
        _wake([stream._put(None, error) for stream in streams])

    # On any thread

    def _cancel(self, handle: int) -> None:
        with self._changed:
            if self._error is None and self._thread.is_alive():
                self._orders.append((lambda: self._abort(handle), Future()))
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._error is not None:
            raise LoopClosed("the engine failed: make a new one") from self._error
        if self._is_closing:
            raise LoopClosed("the loop was closed: make a new one")


def joined(first: TokenEvent, second: TokenEvent) -> TokenEvent:
    """Return two events of a request as one; tokens that the second one takes back are not in it."""
    keep = second.start - first.start
    if keep < 0:
        return second
    return TokenEvent(
        handle=second.handle,
        start=first.start,
        tokens=first.tokens[:keep] + second.tokens,
        logprobs=first.logprobs[:keep] + second.logprobs,
        top_logprobs=first.top_logprobs[:keep] + second.top_logprobs,
        versions=first.versions[:keep] + second.versions,
        stop_reason=second.stop_reason,
        generation=second.generation,
        cached_tokens=second.cached_tokens,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )


def _wake(readers: Sequence[asyncio.Future[None] | None]) -> None:
    """Wake coroutines, those of one event loop by one call: each call is a system call, and a turn of that loop.

    Args:
      readers: what they await; None for a stream that no coroutine waits for.
    """
    of_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for reader in readers:
        if reader is not None:
            of_loop.setdefault(reader.get_loop(), []).append(reader)
    for loop, awaited in of_loop.items():
        with suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(_arrive, awaited)


def _arrive(awaited: Sequence[asyncio.Future[None]]) -> None:
    for reader in awaited:
        if not reader.done():  # a coroutine that was cancelled
            reader.set_result(None)


def _carry_out(order: Callable[[], Any], future: Future) -> None:
    """Run an order; what it raises is its caller's."""
    try:
        future.set_result(order())
    except BaseException as error:
        future.set_exception(error)
