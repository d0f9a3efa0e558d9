"""HTTP around the protocols' handlers: keys, limits, errors, streams that end when their client is gone."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.fields import Fields, Table, parsed_body
from m3jax.serve.gateway.gateway import Gateway, deadline_error, within
from m3jax.serve.gateway.sampling import Model

_LOG = logging.getLogger("m3jax.serve")
_BODY_SECONDS = 60.0  # in which a body has to come
_FIRST_SECONDS = 1.0  # in which a stream's first event decides the status; after that it has begun
_LARGE = 1 << 20  # bytes of a body that is parsed on a thread
_MOST_AHEAD = 16  # events that are made before the client has taken those in front of them
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Style:
    """The form of one protocol's errors and streams.

    Attributes:
      error_body: of an error.
      error_event: the same as the last event of a stream that has begun.
      ping: what a stream says while there is nothing to say.
    """

    error_body: Callable[[ApiError], dict[str, Any]]
    error_event: Callable[[ApiError], str]
    ping: str = ": ping\n\n"


def data_event(value: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event of a JSON object, which no line break parts; lone surrogates are escaped."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json_text(value)}\n\n"


def json_text(value: Any) -> str:
    """Return compact JSON that UTF-8 can encode."""
    text = _JSON.encode(value)
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)


class Json(JSONResponse):
    """A response of JSON, written as streams write it."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json_text(content).encode()


OPENAI = Style(ApiError.as_openai, lambda error: data_event(error.as_openai()) + "data: [DONE]\n\n")
RESPONSES = Style(
    ApiError.as_openai, lambda error: data_event({"type": "error", **error.as_openai()["error"]}, "error")
)
ANTHROPIC = Style(
    ApiError.as_anthropic,
    lambda error: data_event(error.as_anthropic(), "error"),
    ping=data_event({"type": "ping"}, "ping"),
)

# A handler takes the gateway, the request's fields and the route's name; it returns the answer, or a stream's events.
Handler = Callable[[Gateway, Fields, str], Awaitable[dict[str, Any] | AsyncIterator[str]]]


@dataclass(frozen=True)
class Endpoint:
    """An endpoint that takes a JSON object.

    Attributes:
      path: under which it is found and counted.
      handler: answers a request.
      table: makes the table of its fields for a model.
      style: of its protocol.
    """

    path: str
    handler: Handler
    table: Callable[[Model], Table]
    style: Style

    def route(self, gateway: Gateway) -> Route:
        """Return the endpoint of a gateway, as Starlette takes it."""
        return Route(self.path, partial(_answered, gateway, self), methods=["POST"])


async def _answered(gateway: Gateway, endpoint: Endpoint, request: Request) -> Response:
    """Answer one request: with JSON, or with a stream, which then takes over the place that the request has."""
    style = endpoint.style
    place = _Place(gateway, endpoint.path)
    try:
        check_key(gateway, request.headers)
        gateway.check_ready()
        # A body that never ends must not keep a place.
        raw = await within(_BODY_SECONDS, _body(request, gateway.settings.max_body_bytes))
        body = await asyncio.to_thread(parsed_body, raw) if len(raw) > _LARGE else parsed_body(raw)
        place.take()
        started = time.monotonic()
        seconds = gateway.settings.deadline_seconds
        fields = gateway.read(body, endpoint.table)
        answer = await _unless_gone(request, within(seconds, _begun(gateway, endpoint, fields)))
        if isinstance(answer, dict):
            return place.left(Json(answer, headers=dict(gateway.headers)))
        events = lively(answer, style, gateway.settings.ping_seconds, started, seconds)
        return EventStream(events, dict(gateway.headers), place)
    except ApiError as error:
        return place.left(error_response(error, style, gateway.headers))
    except ClientDisconnect:
        return place.left(Response(status_code=499))
    except BaseException as error:
        place.leave("500" if isinstance(error, Exception) else "499")
        if not isinstance(error, Exception):
            raise
        _LOG.exception("a request to %s failed", endpoint.path)
        return error_response(ApiError(500, "the server failed on this request; its log says why"), style, {})


async def _begun(gateway: Gateway, endpoint: Endpoint, fields: Fields) -> Any:
    """Return a handler's answer; of a stream the first event is there, so that a refusal still has a status of HTTP."""
    answer = await endpoint.handler(gateway, fields, endpoint.path)
    if isinstance(answer, dict):
        return answer
    first = asyncio.ensure_future(anext(answer))
    try:
        await asyncio.wait({first}, timeout=_FIRST_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        with suppress(BaseException):
            await first
        await answer.aclose()
        raise
    return _from(first, answer)


async def _from(first: asyncio.Future[str], events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield an event that is awaited already, and those that follow it."""
    try:
        yield await first
        async for event in events:
            yield event
    finally:
        if not first.done():
            first.cancel()
            with suppress(BaseException):
                await first
        await events.aclose()


async def lively(
    events: AsyncIterator[str], style: Style, ping_seconds: float, started: float, most_seconds: float
) -> AsyncIterator[str]:
    """Yield a stream's events, a sign of life where it is silent, and an error as its last event.

    Events that came while the client took those in front of them are one text.

    Args:
      events: of the stream.
      style: of its protocol.
      ping_seconds: of silence before a sign of life.
      started: of `time.monotonic`, when the request came.
      most_seconds: that it may take; then the stream ends with an error.
    """
    deadline = started + most_seconds
    ahead = _Ahead(events)
    try:
        while True:
            seconds = min(ping_seconds, deadline - time.monotonic())
            if seconds <= 0:
                raise deadline_error(most_seconds)
            if (text := await ahead.take(seconds)) is not None:
                yield text
            elif ahead.is_over:
                ahead.task.result()  # raises what ended the stream too early
                return
            elif time.monotonic() < deadline:
                yield style.ping
    except ApiError as error:
        yield style.error_event(error)
    except Exception:
        _LOG.exception("a stream failed")
        yield style.error_event(ApiError(500, "the server failed on this request; its log says why"))
    finally:
        ahead.task.cancel()
        with suppress(BaseException):
            await ahead.task
        await events.aclose()


class _Ahead:
    """A stream's events, made by one task a little ahead of their reader: a task for each would cost more than it does.

    Args:
      events: of the stream; it is not closed here.
    """

    def __init__(self, events: AsyncIterator[str]):
        self._made: list[str] = []
        self._changed: asyncio.Future[None] | None = None  # that the reader, or the task, awaits
        self.task = asyncio.create_task(self._make(events))
        self.task.add_done_callback(lambda _: self._notify())

    @property
    def is_over(self) -> bool:
        """True if the stream has ended, and all its events were taken."""
        return self.task.done() and not self._made

    async def take(self, seconds: float) -> str | None:
        """Return all events that were made, as one text; None if none is within so many seconds, or none will be."""
        if not self._made and not self.task.done():
            self._changed = waiting = asyncio.get_running_loop().create_future()
            timer = waiting.get_loop().call_later(seconds, self._notify)
            try:
                await waiting
            finally:
                timer.cancel()
        made, self._made = self._made, []
        if len(made) >= _MOST_AHEAD:
            self._notify()  # the task waits for room
        return "".join(made) if made else None

    async def _make(self, events: AsyncIterator[str]) -> None:
        async for event in events:
            self._made.append(event)
            self._notify()
            if len(self._made) >= _MOST_AHEAD:
                self._changed = asyncio.get_running_loop().create_future()
                await self._changed

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class _Place:
    """A request's place among those that are worked on; however the request ends, it is given back once."""

    def __init__(self, gateway: Gateway, route: str):
        self._gateway, self._route = gateway, route
        self._is_taken = self._is_counted = False

    def take(self) -> None:
        """Take the place.

        Raises:
          ApiError: 429, there is none.
        """
        most = self._gateway.settings.max_requests
        if self._gateway.running >= most:
            raise ApiError(429, f"{most} requests are worked on: try again", code="queue_full", retry_after=1)
        self._gateway.running += 1
        self._is_taken = True

    def leave(self, status: str) -> None:
        """Give the place back, if it was taken and not given back yet, and count the request."""
        if self._is_taken:
            self._gateway.running -= 1
            self._is_taken = False
        if not self._is_counted:
            self._is_counted = True
            self._gateway.figures.requests.labels(self._route, status).inc()

    def left(self, response: Response) -> Response:
        """Give the place back, and return the response that ends the request."""
        self.leave(str(response.status_code))
        return response


class EventStream(Response):
    """A response of server-sent events, which stops the work behind it when its client is gone.

    Args:
      events: their text.
      headers: besides those of a stream.
      place: given back at the end.
    """

    def __init__(self, events: AsyncIterator[str], headers: Mapping[str, str], place: _Place):
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**own, **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._place = events, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client is gone."""
        sending = asyncio.ensure_future(self._send(send))
        listening = asyncio.ensure_future(_gone(receive))
        status = "499"
        try:
            await asyncio.wait({sending, listening}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                status = "200"
        except OSError:
            pass  # the client went away while it was written to
        finally:
            for task in (sending, listening):
                task.cancel()
                with suppress(BaseException):
                    await task
            await self._events.aclose()
            self._place.leave(status)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """Return what a coroutine returns; if the client goes away before, it is cancelled.

    Raises:
      ClientDisconnect: the client is gone.
    """
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, listening):
            if not task.done():
                task.cancel()
                with suppress(BaseException):
                    await task


async def _body(request: Request, most: int) -> bytes:
    """Return a request's body, of which no more than `most` bytes are ever held.

    Raises:
      ApiError: 413, it is larger.
    """
    too_large = ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise too_large
    return bytes(body)


def check_key(gateway: Gateway, headers: Mapping[str, str]) -> None:
    """Raise ApiError 401 unless the request has the server's key, as a bearer token or as x-api-key.

    The comparison takes the same time wherever two keys differ. Headers are bytes, which Starlette reads as Latin-1.
    """
    expected = gateway.settings.api_key
    if expected is None:
        return
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not hmac.compare_digest(given.encode("latin-1"), expected.encode()):
        raise ApiError(
            401, "no valid API key: give it as Authorization: Bearer KEY, or x-api-key", code="invalid_api_key"
        )


def error_response(error: ApiError, style: Style, headers: Mapping[str, str]) -> Response:
    """Return an error as a response of its protocol."""
    return Json(style.error_body(error), error.status, headers={**headers, **error.headers})
