"""HTTP around the protocols' handlers: keys, limits, errors, streams that end when their client is gone."""

import asyncio
import hmac
import json
import logging
import math
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
_PING_PAUSE = 0.01  # at least between two looks at whether a stream is silent
_LARGE = 1 << 20  # bytes of a body that is parsed on a thread
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


class EventOfText:
    """A server-sent event of which one text changes from one to the next; all around it is encoded once.

    Args:
      value: the event's JSON object with a text in it, once or more.
      name: of the event.
    """

    _HOLE = "\0a text\0"

    def __init__(self, value: Callable[[str], Mapping[str, Any]], name: str | None = None):
        self._around = data_event(value(self._HOLE), name).split(json_text(self._HOLE))

    def filled(self, text: str) -> str:
        """Return the event with this text."""
        return json_text(text).join(self._around)


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
        started = asyncio.get_running_loop().time()
        seconds = gateway.settings.deadline_seconds
        fields = gateway.read(body, endpoint.table)
        answer = await _unless_gone(request, within(seconds, _begun(gateway, endpoint, fields)))
        if isinstance(answer, dict):
            return place.left(Json(answer, headers=dict(gateway.headers)))
        pace = Pace(gateway.settings.ping_seconds, seconds, started)
        return EventStream(answer, style, pace, dict(gateway.headers), place.leave)
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


@dataclass(frozen=True)
class Pace:
    """The times that a stream keeps to.

    Attributes:
      ping_seconds: of silence, after which it says that it is alive.
      most_seconds: that it may take; then it ends with an error.
      started: of the event loop's clock, when the request came.
    """

    ping_seconds: float
    most_seconds: float
    started: float


class EventStream(Response):
    """A response of server-sent events, which stops the work behind it when its client is gone.

    One task takes each event from its source and writes it, so that a token costs one turn of the event loop, and a
    client that reads slowly holds up what it does not read. Signs of life come from a second task, which sleeps while
    there are events.

    Args:
      events: their text.
      style: of their protocol.
      pace: of the stream.
      headers: besides those of a stream.
      leave: called once at the end with the status that is counted.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        style: Style,
        pace: Pace,
        headers: Mapping[str, str],
        leave: Callable[[str], None],
    ):
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**own, **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._style, self._pace, self._leave = events, style, pace, leave
        self._is_writing, self._written = True, 0.0  # the head comes first; the latter is the time of the last event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client is gone."""
        sending = asyncio.ensure_future(self._send(send))
        listening = asyncio.ensure_future(_gone(receive))
        pinging = asyncio.ensure_future(self._ping(send))
        status = "499"
        try:
            await asyncio.wait({sending, listening}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                status = "200"
        except OSError:
            pass  # the client went away while it was written to
        finally:
            for task in (sending, listening, pinging):
                task.cancel()
                with suppress(BaseException):
                    await task
            await self._events.aclose()
            self._leave(status)

    async def _send(self, send: Send) -> None:
        """Write the head, each event as it comes, and an error as the last one if the stream ends too early."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._is_writing = False
        pace = self._pace
        deadline = None if math.isinf(pace.most_seconds) else pace.started + pace.most_seconds
        error = None
        try:
            async with asyncio.timeout_at(deadline):
                async for event in self._events:
                    await self._write(send, event)
        except TimeoutError:
            error = deadline_error(pace.most_seconds)
        except ApiError as found:
            error = found
        except OSError:
            raise  # of the connection
        except Exception:
            _LOG.exception("a stream failed")
            error = ApiError(500, "the server failed on this request; its log says why")
        if error is not None:
            await self._write(send, self._style.error_event(error))
        self._is_writing = True  # nothing comes behind the end
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, event: str) -> None:
        self._is_writing = True
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        self._is_writing, self._written = False, asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        """Write a sign of life whenever the stream was silent for a while, and no event waits for its client."""
        clock = asyncio.get_running_loop().time
        self._written = clock()
        with suppress(OSError):
            while True:
                silence = clock() - self._written
                if silence >= self._pace.ping_seconds and not self._is_writing:
                    await self._write(send, self._style.ping)
                    silence = 0.0
                await asyncio.sleep(max(self._pace.ping_seconds - silence, _PING_PAUSE))


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
