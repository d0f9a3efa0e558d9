"""What lies around the protocols: keys, limits, loading and draining, clients that go away, and broken requests."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest
from support.serving import NAME, Running, ScriptedWorker, clients, running

from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.http import OPENAI, EventOfText, EventStream, Pace, check_key, data_event

HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def connection(server: Running, request: bytes) -> socket.socket:
    host, port = urlsplit(server.url).netloc.split(":")
    found = socket.create_connection((host, int(port)), timeout=20)
    found.sendall(request)
    return found


def post(body: bytes, path: str = CHAT, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


def test_key_and_limits():
    """A key is asked for everywhere but at / and /health; beyond the limits are 413 and 429 with Retry-After."""
    worker = ScriptedWorker(gate=threading.Event())
    settings = Settings(api_key="sécret", max_requests=2, max_body_bytes=2000, ping_seconds=0.05, deadline_seconds=2.0)
    with running(worker, settings) as server:
        key = {"Authorization": "Bearer sécret".encode().decode("latin-1")}
        for headers in ({}, {"Authorization": "Bearer other"}, {"x-api-key": "other"}):
            status, found, text = server.ask(CHAT, {"messages": HI}, headers=headers)
            assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
            assert found["www-authenticate"] == "Bearer"
        assert server.ask("/v1/models")[0] == server.ask("/metrics")[0] == 401
        assert server.ask("/health")[0] == server.ask("/")[0] == 200
        with pytest.raises(clients.anthropic.AuthenticationError):
            server.anthropic.messages.create(model=NAME, max_tokens=5, messages=HI)
        with pytest.raises(clients.openai.AuthenticationError):
            server.openai.models.list()
        status, _, text = server.ask(CHAT, "x" * 2001, headers=key)
        assert (status, json.loads(text)["error"]["code"]) == (413, "request_too_large")
        # So many bytes are read and no more, whether their number is announced or not.
        authorized = b"Host: x\r\nAuthorization: Bearer " + "sécret".encode()
        chunked = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        for request, expected in (
            (post(b"", length=2001), b"413"), (post(b"x" * 2000), b"400"),
            (chunked + b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n", b"400"),
            (chunked + b"7d1\r\n" + b"x" * 2001 + b"\r\n", b"413"),
        ):  # fmt: skip
            with connection(server, request.replace(b"Host: x", authorized)) as sent:
                assert sent.recv(12) == b"HTTP/1.1 " + expected, request
        # Two streams hold both places, silent but for pings, until they have taken too long.
        body = json.dumps({"messages": HI, "stream": True}).encode()
        head = post(body).replace(b"Host: x", authorized)
        held = [connection(server, head) for _ in range(2)]
        wait_for(lambda: len(worker.requests) == 2)
        status, found, text = server.ask(CHAT, {"messages": HI}, headers=key)
        assert (status, found["retry-after"], json.loads(text)["error"]["type"]) == (429, "1", "rate_limit_error")
        for each in held:
            received = b""
            while b"[DONE]" not in received:
                received += each.recv(65536)
            assert received.count(b": ping\n\n") > 3 and b"deadline_exceeded" in received
            each.close()
        wait_for(lambda: len(worker.left) == 2 and server.gateway.running == 0)
        assert server.ask(CHAT, {"messages": HI}, headers=key)[0] == 504


def test_states():
    """Until it is loaded, and when it drains, /health and requests say 503 with Retry-After."""
    with running(ScriptedWorker()) as server:
        for state in ("loading", "draining"):
            server.gateway.state = state
            assert server.ask("/health")[0] == 503
            status, found, text = server.ask(CHAT, {"messages": HI})
            assert (status, json.loads(text)["error"]["code"]) == (503, state) and "retry-after" in found
        server.gateway.state = "ready"
        assert server.ask("/health")[0] == 200


GARBAGE = (
    *(b"", b"{", b"[]", b"null", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"model": 5}'),
    b'{"messages": 5, "input": 5, "prompt": 5, "max_tokens": 5}',
    b'{"messages": [[]], "input": [[]], "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5, "input": [{"role": []}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}], "input": "\\ud800", "prompt": "\\ud800", "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": "a"}], "tools": 7, "tool_choice": [], "input": "a", "max_tokens": 1e9}',
)


PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", GARBAGE)
def test_garbage_is_refused(scripted, path, body):
    """Whatever is sent, the answer is an error of the protocol, below 500."""
    server, _ = scripted
    status, _, text = server.ask(path, body)
    assert 400 <= status < 500, text
    error = json.loads(text)["error"]
    assert error["type"] == "invalid_request_error" and error["message"]


def test_unknown_paths(scripted):
    server, _ = scripted
    status, _, text = server.ask("/v1/embeddings", {"input": "a"})
    assert status == 404 and json.loads(text)["error"]["type"] == "not_found_error"
    assert server.ask(CHAT, method="GET")[0] == 405
    with pytest.raises(clients.openai.NotFoundError) as raised:
        server.openai.chat.completions.create(model="other", messages=HI)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_vanish(scripted, path, stream):
    """However a client goes, before its answer or within it, the worker's request ends and the place is given back."""
    server, worker = scripted
    worker.gate, worker.tokens_per_chunk = threading.Event(), 16
    worker.script = lambda request, index: "One sentence that is long enough. " * 4
    fields = {"messages": HI, "input": "Hi", "prompt": "Hi", "max_tokens": 100}
    names = {"/v1/responses": ("input",), "/v1/completions": ("prompt", "max_tokens")}
    body = {name: fields[name] for name in names.get(path, ("messages", "max_tokens"))}
    for count in range(1, 6):
        held = connection(server, post(json.dumps({**body, "stream": stream}).encode(), path))
        wait_for(lambda count=count: len(worker.requests) == count)
        if stream:
            assert held.recv(10)
        held.close()
    wait_for(lambda: len(worker.left) == 5 and server.gateway.running == 0)


def test_half_sent_bodies_hold_no_place(scripted):
    server, worker = scripted
    held = [connection(server, post(b'{"messages": ', length=100)) for _ in range(20)]
    time.sleep(0.1)
    assert server.gateway.running == 0
    for each in held:
        each.close()
    assert server.ask(CHAT, {"messages": HI})[0] == 200 and len(worker.requests) == 1


def test_a_large_body_is_read_as_a_small_one(scripted):
    server, _ = scripted
    assert server.ask(CHAT, {"messages": HI, "user": "a" * (2 << 20)})[0] == 200


def test_a_stream_has_begun_after_a_second_of_silence(scripted):
    """Its status is 200 then. A client that leaves before or after that ends the work."""
    server, worker = scripted
    worker.reading_seconds = 60.0
    request, began = post(json.dumps({"messages": HI, "stream": True}).encode()), time.monotonic()
    early, late = connection(server, request), connection(server, request)
    wait_for(lambda: len(worker.requests) == 2)
    early.close()
    wait_for(lambda: len(worker.left) == 1)
    assert time.monotonic() - began < 1 and late.recv(12) == b"HTTP/1.1 200"
    assert 0.9 < time.monotonic() - began < 4
    late.close()
    wait_for(lambda: len(worker.left) == 2 and server.gateway.running == 0)


def test_what_is_refused_before_a_stream_has_begun_has_a_status(scripted):
    server, _ = scripted
    status, _, text = server.ask(CHAT, {"messages": HI, "seed": 666, "stream": True})
    assert (status, json.loads(text)["error"]["message"]) == (400, "seed = 666: not this one")


def test_errors_that_nobody_foresaw(scripted, caplog):
    """A worker fails before an answer or in the middle: the client gets an error, and the log has all of it."""
    server, worker = scripted

    worker.tokens_per_chunk = 16
    worker.script = lambda request, index: "One sentence that is long enough. " * 4

    async def fail(request, **_):
        async for response in ScriptedWorker.Generate(worker, request):
            yield response
            raise RuntimeError("the device is gone")

    worker.Generate = fail
    try:
        stream = server.openai.chat.completions.create(model=NAME, messages=HI, stream=True)
        with pytest.raises(clients.openai.APIError, match="failed"):
            list(stream)
        status, _, text = server.ask(CHAT, {"messages": HI})
        error = json.loads(text)["error"]
        assert (status, error["message"]) == (500, "the server failed on this request; its log says why")
    finally:
        del worker.Generate
    assert "a stream failed" in caplog.text and f"a request to {CHAT} failed" in caplog.text
    assert caplog.text.count("RuntimeError: the device is gone") == 2


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"authorization": "Bearer kéy"}, True), ({"authorization": "bearer  kéy "}, True),
        ({"x-api-key": "kéy"}, True),
        ({"authorization": "Basic kéy", "x-api-key": "kéy"}, True), ({"authorization": "Basic kéy"}, False),
        ({"authorization": "Bearer key", "x-api-key": "kéy"}, False), ({"authorization": "kéy"}, False), ({}, False),
        ({"authorization": "Bearer kéyy"}, False), ({"authorization": "Bearer"}, False), ({"x-api-key": "k"}, False),
    ],
)  # fmt: skip
def test_keys(headers, is_let_in):
    sent = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    check_key(Gateway(settings=Settings()), sent)  # which asks for none
    own = Gateway(settings=Settings(api_key="kéy"))
    if is_let_in:
        check_key(own, sent)
    else:
        with pytest.raises(ApiError, match="no valid API key") as caught:
            check_key(own, sent)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_cors():
    origin = {"Origin": "https://page.example"}
    for origins, allowed in (((), None), (("https://page.example",), "https://page.example")):
        with running(ScriptedWorker(), Settings(origins=origins)) as server:
            assert server.ask("/v1/models", headers=origin)[1].get("access-control-allow-origin") == allowed


def streamed(events: AsyncIterator[str], ping_seconds: float, most_seconds: float) -> list[str]:
    """Return what a stream writes, and the status that is counted for it."""
    written: list[str] = []

    async def send(message: dict) -> None:
        written.append(message.get("body", b"").decode())

    async def run() -> None:
        pace = Pace(ping_seconds, most_seconds, asyncio.get_running_loop().time())
        stream = EventStream(events, OPENAI, pace, {}, written.append)
        await stream({}, asyncio.get_running_loop().create_future, send)

    asyncio.run(run())
    return written


def test_silence_and_errors_in_a_stream():
    """A stream speaks where it is silent, takes nothing back, and ends with the error that ended it."""

    async def events():
        yield "one"
        await asyncio.sleep(0.1)
        yield "two"
        raise ApiError(503, "gone")

    head, *found, error, end, status = streamed(events(), 0.02, 60.0)
    assert (head, end, status) == ("", "", "200")
    assert [event for event in found if event != OPENAI.ping] == ["one", "two"]
    assert found.count(OPENAI.ping) >= 2 and found[-1] == "two"
    assert "gone" in error and error.endswith("data: [DONE]\n\n")


def test_a_stream_ends_at_its_deadline():
    """Whatever it waits for is ended, and the client is told."""
    left = []

    async def events():
        try:
            yield "one"
            await asyncio.sleep(60.0)
        finally:
            left.append(True)

    _, one, error, _, _ = streamed(events(), 10.0, 0.05)
    assert one == "one" and "deadline_exceeded" in error and left == [True]


def test_nothing_comes_behind_the_end_of_a_stream():
    """Nor between the pieces of a write that takes long: its client is slow, and knows that the server is alive."""
    written = []

    async def events():
        yield "one"

    async def send(message: dict) -> None:
        written.append((message.get("body"), message.get("more_body")))
        await asyncio.sleep(0.05)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        await EventStream(events(), OPENAI, Pace(0.001, 60.0, loop.time()), {}, written.append)(
            {}, loop.create_future, send
        )

    asyncio.run(run())
    assert written == [(None, None), (b"one", True), (b"", False), "200"]


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_connection_that_breaks_is_a_client_that_went_away(fails_at):
    sent, left, closed = [], [], []

    async def events():
        try:
            yield "one"
            yield "two"
        finally:
            closed.append(True)

    async def send(message: dict) -> None:
        if len(sent) == fails_at:
            raise OSError("broken")
        sent.append(message)

    async def run() -> None:
        loop, stream = asyncio.get_running_loop(), events()
        await EventStream(stream, OPENAI, Pace(10.0, 60.0, loop.time()), {}, left.append)({}, loop.create_future, send)

    asyncio.run(run())
    bodies = [message["body"] for message in sent[1:]]
    assert left == ["499"] and bodies == [b"one", b"two"][: max(0, fails_at - 1)] and (closed or fails_at == 0)


def test_an_event_of_text_is_the_event():
    """What is encoded once around a text gives the event of the whole object, with the text once or twice in it."""
    value = lambda text: {"choices": [{"text": text, "logprobs": None}], "again": text, "name": "a text"}
    for text in ("", 'a "quoted"\nline', "\ud800 alone", "\0", "é"):
        assert EventOfText(value, "delta").filled(text) == data_event(value(text), "delta")
