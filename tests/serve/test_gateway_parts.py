"""Parts of the gateway without a server: begun streams, places, keys, bodies, the life of the process, the document."""

import asyncio
import dataclasses
import math
import signal
import socket
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from m3jax.serve.gateway import completions, http, server, tokenizing
from m3jax.serve.gateway import gateway as gateways
from m3jax.serve.gateway.app import ENDPOINTS
from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.openapi import ERRORS, SCHEMAS, document
from m3jax.serve.gateway.sampling import Model
from m3jax.serve.gateway.server import Address, Opened, serve

pytestmark = pytest.mark.usefixtures("unchecked")  # handlers and workers here are none


# The begin of a stream


class Stream:
    """A handler's events: each is given after its pause; what it is asked at its end is noted."""

    def __init__(self, *events, is_endless=False):
        self.events, self.is_closed, self.is_endless = events, False, is_endless

    async def __call__(self, gateway, fields, route):
        return self.run()

    async def run(self):
        try:
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                yield event
            if self.is_endless:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


def begun(handler):
    return http._begun(None, SimpleNamespace(handler=handler, path="/x"), None)


def test_a_stream_has_begun_with_its_first_event():
    """Or after a second without one; what is refused before is an error of HTTP, and its stream is closed."""

    async def run():
        whole = Stream("a", "b")
        assert [event async for event in await begun(whole)] == ["a", "b"] and whole.is_closed
        refused = Stream(ApiError(400, "no"))
        with pytest.raises(ApiError, match="no"):
            await begun(refused)
        assert refused.is_closed
        later = Stream("a", ApiError(503, "gone"))
        events = await begun(later)
        assert await anext(events) == "a"
        with pytest.raises(ApiError, match="gone"):
            await anext(events)

        async def answered(*_):
            return {"whole": 1}

        assert await begun(answered) == {"whole": 1}

    asyncio.run(run())
    assert http._FIRST_SECONDS == 1.0


def test_a_stream_that_is_silent_at_first_goes_on(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_SECONDS", 0.01)

    async def run():
        silent = Stream(is_endless=True)
        events = await asyncio.wait_for(begun(silent), 5)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.wait({waiting}, timeout=0.02)
        assert not waiting.done() and not silent.is_closed
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=5)
        assert silent.is_closed

    asyncio.run(run())


def test_who_leaves_before_the_first_event_ends_the_work():
    """At once: nothing waits for an event that may never come."""

    async def run():
        silent = Stream(is_endless=True)
        beginning = asyncio.ensure_future(begun(silent))
        await asyncio.sleep(0.01)
        beginning.cancel()
        done, _ = await asyncio.wait({beginning}, timeout=5)
        try:
            assert done and beginning.cancelled() and silent.is_closed
        finally:
            beginning.cancel()
            await asyncio.wait({beginning}, timeout=5)

    asyncio.run(run())


@pytest.mark.parametrize(("fails_at", "status"), [(None, "200"), (0, "499"), (1, "499"), (3, "499")])
def test_a_stream_ends_its_response_or_its_client_is_gone(fails_at, status):
    """The last message says that it is the last; a connection that breaks counts as a client that went away."""
    sent, left = [], []

    async def send(message):
        if len(sent) == fails_at:
            raise OSError("broken")
        sent.append(message)

    async def run():
        stream, loop = Stream("a", "b"), asyncio.get_running_loop()
        pace = http.Pace(10.0, math.inf, loop.time())
        await http.EventStream(stream.run(), http.OPENAI, pace, {}, left.append)({}, loop.create_future, send)

    asyncio.run(run())
    bodies = [(each["body"], each["more_body"]) for each in sent if each["type"] == "http.response.body"]
    whole = [(b"a", True), (b"b", True), (b"", False)]
    assert left == [status] and bodies == (whole if fails_at is None else whole[: max(0, fails_at - 1)])


# Places, keys and bodies


def gateway(**settings) -> Gateway:
    return Gateway(
        settings=Settings(**settings), state="ready",
        model=Model("m", 100, 50, (1,), can_see=False, block_size=8, defaults={}),
    )  # fmt: skip


def test_a_place_is_taken_once_and_given_back_once():
    own = gateway(max_requests=2)
    counted = lambda status: own.figures.requests.labels("/x", status)._value.get()
    first, second, third, never = (http._Place(own, "/x") for _ in range(4))
    first.take(), second.take()
    with pytest.raises(ApiError) as caught:
        third.take()
    error = caught.value
    assert (error.status, error.code, error.retry_after) == (429, "queue_full", 1) and "2 requests" in str(error)
    third.leave("429")
    assert own.running == 2
    for _ in range(2):
        first.leave("200")
        assert own.running == 1 and counted("200") == 1
    first.leave("499")
    never.leave("401")
    assert (own.running, counted("499"), counted("401"), counted("429")) == (1, 0, 1, 1)
    third.take()
    assert own.running == 2
    assert second.left(SimpleNamespace(status_code=200)).status_code == 200 and counted("200") == 2


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
    http.check_key(gateway(), sent)  # which asks for none
    own = gateway(api_key="kéy")
    if is_let_in:
        http.check_key(own, sent)
    else:
        with pytest.raises(ApiError, match="no valid API key") as caught:
            http.check_key(own, sent)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("pieces", "announced", "is_taken"),
    [
        ((b"12", b"34"), None, True), ((b"1234",), "4", True), ((b"12", b"345"), None, False), ((b"",), "5", False),
        ((b"1234",), "x", True), ((b"", b""), "0", True), ((b"1234",), "-5", True),
    ],
)  # fmt: skip
def test_no_more_of_a_body_is_held_than_may_be(pieces, announced, is_taken):
    left = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    left[-1]["more_body"] = False

    async def receive():
        return left.pop(0)

    headers = [] if announced is None else [(b"content-length", announced.encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    if is_taken:
        assert asyncio.run(http._body(request, 4)) == b"".join(pieces)
    else:
        with pytest.raises(ApiError, match="larger than 4 bytes") as caught:
            asyncio.run(http._body(request, 4))
        assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def answered(handler, *, body=b"{}", is_gone=False, **settings):
    """The response to a request, by the handler of its endpoint, and the gateway; the client may be gone by then."""
    own = gateway(**settings)
    own.workers, own.headers = SimpleNamespace(is_up=True), {"X-Own": "1"}
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if left:
            return left.pop()
        if not is_gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def run():
        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        endpoint = http.Endpoint("/x", handler, lambda model: {}, http.OPENAI)
        return await asyncio.wait_for(http._answered(own, endpoint, request), 10)

    return own, run


def test_how_a_request_is_answered(monkeypatch, caplog):
    """With JSON, an error of the protocol, or a stream; whatever happens its place is given back, and it is counted.

    What nobody foresaw is an error of the server that says nothing of itself, and the log has it all.
    """

    async def whole(*_):
        return {"a": 1}

    async def refused(*_):
        raise ApiError(400, "no", "n")

    async def broken(*_):
        raise RuntimeError("a secret")

    async def slow(*_):
        await asyncio.Event().wait()

    async def cancelled(*_):
        raise asyncio.CancelledError

    for handler, more, status, part in (
        (whole, {}, 200, '{"a":1}'), (refused, {}, 400, '"param":"n"'), (whole, {"body": b"["}, 400, "not valid JSON"),
        (whole, {"body": b'{"k": 1}'}, 400, "unknown field"), (whole, {"max_requests": 0}, 429, "0 requests are"),
        (whole, {"body": b"{}   ", "max_body_bytes": 4}, 413, "larger than 4 bytes"),
        (whole, {"api_key": "k"}, 401, "no valid API key"), (slow, {"deadline_seconds": 0.01}, 504, "more than 0.01"),
        (slow, {"is_gone": True}, 499, ""), (broken, {}, 500, "the server failed on this request; its log says why"),
    ):  # fmt: skip
        own, run = answered(handler, **more)
        response = asyncio.run(run())
        assert response.status_code == status and part in response.body.decode(), (handler, more)
        assert own.running == 0 and own.figures.requests.labels("/x", str(status))._value.get() == 1, status
        assert ("x-own" in response.headers) == (status not in (499, 500))
    assert "secret" not in response.body.decode() and "a secret" in caplog.text and "/x failed" in caplog.text
    own, run = answered(whole)
    own.state = "draining"
    assert asyncio.run(run()).status_code == 503
    monkeypatch.setattr(http, "_LARGE", 1)  # a thread parses what is larger
    own, run = answered(Stream("a", is_endless=True), ping_seconds=3.0, deadline_seconds=7.0)
    stream = asyncio.run(run())
    assert isinstance(stream, http.EventStream) and own.running == 1 and stream.headers["x-own"] == "1"
    assert (stream._pace.ping_seconds, stream._pace.most_seconds) == (3.0, 7.0) and stream._pace.started > 0
    assert stream._style is http.OPENAI and hasattr(stream._events, "aclose")
    own, run = answered(cancelled)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert own.running == 0 and own.figures.requests.labels("/x", "499")._value.get() == 1


def test_a_stream_that_breaks_ends_with_an_error(caplog):
    """What was refused says why; of anything else only the log does."""
    for error, part in (
        (ApiError(503, "gone", code="worker_lost"), '"gone"'), (RuntimeError("a secret"), "its log says why"),
    ):  # fmt: skip
        sent, left, statuses = [], [], []
        noting = lambda error, statuses=statuses: statuses.append(error.status) or http.OPENAI.error_event(error)
        style = SimpleNamespace(error_event=noting)

        async def send(message, sent=sent):
            sent.append(message)

        async def run(error=error, left=left, send=send, style=style):
            stream, loop = Stream("a", error), asyncio.get_running_loop()
            pace = http.Pace(10.0, math.inf, loop.time())
            await http.EventStream(stream.run(), style, pace, {}, left.append)({}, loop.create_future, send)

        asyncio.run(run())
        bodies = [message["body"].decode() for message in sent[1:]]
        assert bodies[0] == "a" and part in bodies[1] and "secret" not in bodies[1] and bodies[2:] == [""]
        assert statuses == [getattr(error, "status", 500)]
        assert left == ["200"] and [message.get("more_body") for message in sent[1:]] == [True, True, False]
    assert "a stream failed" in caplog.text and "a secret" in caplog.text


def test_progress_comes_before_the_first_news_and_where_it_has_changed(monkeypatch):
    """Its milliseconds are those since the request began."""
    monkeypatch.setattr(gateways, "_PROGRESS_SECONDS", 0.001)
    clock = iter([10.0, 10.25, 12.0])
    monkeypatch.setattr(gateways, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    own, looks, first = gateway(), iter([None, (9, 2, 4), (9, 2, 4), None, (9, 2, 8)]), asyncio.Event()

    async def progress(name):
        found = next(looks, "none")
        if found == "none":
            first.set()
            return None
        return found

    async def run(ask, route):
        await first.wait()
        yield "one"
        yield "two"

    own.run, own.workers = run, SimpleNamespace(progress=progress)

    async def read():
        ask = SimpleNamespace(request=SimpleNamespace(request_id="a"))
        return [news async for news in own.run_with_progress(ask, "/x")]

    expected = [gateways.Progress(9, 2, 4, 250), gateways.Progress(9, 2, 8, 2000), "one", "two"]
    assert asyncio.run(asyncio.wait_for(read(), 10)) == expected


def test_ids_that_are_made_text_are_of_the_vocabulary_and_fit_into_the_context():
    """Which is no limit of the ids themselves, nor the vocabulary of their number."""
    decoded = []
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: decoded.append(ids) or f"{len(ids)}")
    for vocab_size, context in ((100, 50), (50, 100)):
        own = gateway()
        own.model = dataclasses.replace(own.model, vocab_size=vocab_size, context=context)
        own.renderer = SimpleNamespace(tokenizer=tokenizer)
        of = lambda ids, own=own: asyncio.run(tokenizing.detokenize(own, {"tokens": ids}, "/x"))
        for ids in ([vocab_size - 1], [0] * context, []):
            assert of(ids) == {"prompt": f"{len(ids)}", "content": f"{len(ids)}"} and decoded[-1] == ids
        with pytest.raises(ApiError, match=f"integers from 0 to {vocab_size - 1}"):
            of([vocab_size])
        with pytest.raises(ApiError, match=f"{context + 1} token ids, and the model's context is {context}"):
            of([0] * (context + 1))


async def drawn_apart(monkeypatch, reads_slowly=False, breaks=False):
    """Return the news of two prompts, three each; one that breaks does so while the other has more to come."""

    async def news(gateway, order, route, number):
        for index in range(3):
            yield number, index
        if breaks and number == 1:
            raise ApiError(500, "broken")
        if breaks:
            await asyncio.sleep(60)

    monkeypatch.setattr(completions, "_news_of", news)
    found = []
    async for numbered in completions._news_of_several(None, SimpleNamespace(asks=["a", "b"]), "route"):
        await asyncio.sleep(0.01 if reads_slowly else 0)
        found.append(numbered)
    return sorted(found)


@pytest.mark.parametrize("reads_slowly", [False, True])
def test_all_news_of_prompts_side_by_side_come(reads_slowly, monkeypatch):
    """Also what waits when the prompts have ended."""
    found = asyncio.run(drawn_apart(monkeypatch, reads_slowly))
    assert found == [(number, index) for number in range(2) for index in range(3)]


def test_prompts_side_by_side_end_where_one_breaks(monkeypatch):
    with pytest.raises(ApiError, match="broken"):
        asyncio.run(asyncio.wait_for(drawn_apart(monkeypatch, breaks=True), 30))


@pytest.mark.parametrize("best_of", [None, 1, 2, 3, 4])
def test_all_answers_that_are_drawn_come_back(best_of, monkeypatch):
    """So the best of them are as many as are asked for, or one is meant of each."""
    params = SimpleNamespace(n=3)
    monkeypatch.setattr(completions, "sampling_params", lambda fields, model: params)
    monkeypatch.setattr(completions, "set_constraints", lambda fields, params: None)
    own = gateway()
    own.renderer, own.ask_plain = SimpleNamespace(tokenizer=None), lambda prompt, *given: (prompt, *given)
    fields = dict(echo=True, max_tokens=0, logprobs=None, best_of=best_of, skip_special_tokens=True, prompt=[[1], [2]])
    if best_of in (2, 4):
        with pytest.raises(ApiError, match=f"best_of = {best_of}: n answers are drawn, and all come back"):
            asyncio.run(completions._order(own, fields))
        return
    order = asyncio.run(completions._order(own, fields))
    assert order.asks == [([token], params, 1, "prompt", True) for token in (1, 2)]
    assert (order.n, order.echoes, order.has_new) == (3, True, False)
    order = asyncio.run(completions._order(own, fields | dict(max_tokens=2, echo=False)))
    assert order.has_new and order.asks[0][2] == 2
    with pytest.raises(ApiError, match="max_tokens = 0: must be at least 1, unless the prompt comes back"):
        asyncio.run(completions._order(own, fields | dict(echo=False)))


# The process


@pytest.fixture
def process(monkeypatch):
    """What a served process does without a network: its server, its signals' handlers and what it says."""
    found = SimpleNamespace(handlers={}, said=[], server=None, options=None)

    class Server:
        def __init__(self, options):
            self.should_exit = self.force_exit = False
            found.server, found.options = self, options

        async def serve(self, sockets):
            found.sockets = sockets
            while not self.should_exit:
                await asyncio.sleep(0)

    listener = SimpleNamespace(getsockname=lambda: ("h", 81), close=lambda: found.said.append("closed"))
    monkeypatch.setattr(server, "_Server", Server)
    monkeypatch.setattr(server.uvicorn, "Config", lambda app, **options: options)
    monkeypatch.setattr(server, "app", lambda gateway: gateway)
    monkeypatch.setattr(Address, "bound", lambda self: listener)
    monkeypatch.setattr(server, "say", found.said.append)
    add = lambda loop, number, handler: found.handlers.update({number: handler})
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", add)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_loads_serves_and_drains(process, number):
    """It says each; told to end it drains, told twice it ends at once; then all is closed in order."""
    own = gateway()
    own.state = "loading"

    async def load(given):
        assert given is own and own.state == "loading" and process.said == ["m3jax.serve: http://h:81 (loading)"]
        closing = lambda name: lambda: asyncio.sleep(0, process.said.append(name))
        loop.create_task(tell())
        return Opened(SimpleNamespace(close=lambda: process.said.append("pool")), [closing("first"), closing("last")])

    async def tell():
        while own.state == "loading":
            await asyncio.sleep(0)
        assert (own.state, process.server.should_exit) == ("ready", False)
        process.handlers[number]()
        assert (own.state, process.server.should_exit, process.server.force_exit) == ("draining", True, False)
        process.handlers[number]()
        assert process.server.force_exit

    async def run():
        nonlocal loop
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(serve(own, Address("h", 0, 7.0), load), 10)

    loop = None
    asyncio.run(run())
    assert process.said[1:] == ["m3jax.serve: ready: m at http://h:81", "pool", "first", "last", "closed"]
    assert process.options["timeout_graceful_shutdown"] == 7.0 and process.options["log_level"] == "warning"
    assert process.options["server_header"] is False and process.options["lifespan"] == "off"
    assert process.options["h11_max_incomplete_event_size"] == 65536 and process.options["timeout_keep_alive"] == 60


def test_a_process_that_is_ended_or_fails_while_it_loads(process):
    """The load is cancelled, and what it had opened is closed; its own error is the process's."""
    own = gateway()
    own.state = "loading"

    async def load_for_ever(_):
        process.handlers[signal.SIGTERM]()
        try:
            await asyncio.Event().wait()
        finally:
            process.said.append("cancelled")

    asyncio.run(asyncio.wait_for(serve(own, Address(), load_for_ever), 10))
    assert process.said[1:] == ["cancelled", "closed"] and own.state == "draining"

    async def fail(_):
        raise ValueError("no weights")

    own.state = "loading"
    with pytest.raises(ValueError, match="no weights"):
        asyncio.run(asyncio.wait_for(serve(own, Address(), fail), 10))
    assert own.state == "draining" and process.server.should_exit

    async def late(_):  # told to end while the last of it loads
        process.handlers[signal.SIGINT]()
        return Opened(SimpleNamespace(close=lambda: process.said.append("pool")))

    own.state = "loading"
    process.said.clear()
    asyncio.run(asyncio.wait_for(serve(own, Address(), late), 10))
    assert process.said[1:] == ["pool", "closed"] and own.state == "draining"  # and was never ready


def test_an_address_is_bound_once():
    with Address(port=0).bound() as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1" and listener.get_inheritable()
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        with socket.create_connection((host, port), timeout=5):  # it waits to be served, and is not refused
            pass
        with pytest.raises(ValueError, match=f"--host 127.0.0.1 --port {port}: Address already in use; give another"):
            Address(port=port).bound()
    assert (Address().host, Address().port, Address().drain_seconds) == ("127.0.0.1", 8000, 30.0)
    assert Settings().deadline_seconds == math.inf


# The document


@pytest.mark.parametrize("key", [None, "k"])
def test_the_document_says_what_is_taken_and_what_may_come(key):
    """Of each endpoint: that it needs a body, its statuses, when to try again, and where a key is asked for."""
    own = gateway(api_key=key)
    found = document(own, ENDPOINTS)
    posts = {path: item["post"] for path, item in found["paths"].items() if "post" in item}
    gets = {path: item["get"] for path, item in found["paths"].items() if "get" in item}
    assert posts.keys() == {endpoint.path for endpoint in ENDPOINTS} and set(ERRORS) == {
        400, 401, 404, 413, 429, 500, 503, 504,
    }  # fmt: skip
    for path, post in posts.items():
        assert post["requestBody"]["required"] is True, path
        assert post["responses"].keys() == {"200", *map(str, ERRORS)} and "security" not in post
    statuses = {path: {status for status in get["responses"] if status != "200"} for path, get in gets.items()}
    assert statuses == {
        "/health": {"503"}, "/metrics": {"401"}, "/": set(), "/v1/models/{name}": {"401", "404", "503"},
        "/v1/models": {"401", "503"}, "/tokenizer_info": {"401", "503"}, "/openapi.json": {"401", "503"},
    }  # fmt: skip
    for path, each in (*posts.items(), *gets.items()):
        for status, answer in each["responses"].items():
            assert ("headers" in answer) == (status in ("429", "503")), (path, status)
            assert not answer.get("headers") or answer["headers"]["Retry-After"]["schema"] == {"type": "integer"}
    assert {path for path, get in gets.items() if get.get("security") == []} == {"/health", "/"}
    (named,) = gets["/v1/models/{name}"]["parameters"]
    assert (named["name"], named["in"], named["required"]) == ("name", "path", True)
    assert not [path for path, get in gets.items() if "parameters" in get and "{" not in path]
    content = {path: get["responses"]["200"]["content"] for path, get in gets.items()}
    refers = {path: {kind: "$ref" in each["schema"] for kind, each in kinds.items()} for path, kinds in content.items()}
    texts = {"/metrics": {"text/plain": False}, "/": {"text/html": False}}
    assert refers == {path: texts.get(path, {"application/json": True}) for path in gets}
    assert content["/metrics"]["text/plain"]["schema"] == {"type": "string"} == named["schema"]
    errors = lambda item: item["content"]["application/json"]["schema"]
    ref = lambda name: {"$ref": f"#/components/schemas/{name}"}
    assert errors(posts["/v1/messages"]["responses"]["400"]) == ref("AnthropicError")
    assert errors(posts["/v1/completions"]["responses"]["400"]) == ref("OpenAIError")
    both = {"anyOf": [ref("OpenAIError"), ref("AnthropicError")]}
    assert errors(gets["/v1/models"]["responses"]["401"]) == both
    assert found["security"] == ([] if key is None else [{"bearer": []}, {"key": []}])
    assert found["components"]["securitySchemes"]["key"] == {"type": "apiKey", "in": "header", "name": "x-api-key"}


def test_the_objects_of_the_document_have_the_fields_that_are_said_and_no_others():
    def objects(schema):
        if isinstance(schema, dict):
            yield from [schema] if "properties" in schema and "type" in schema else []
            for inner in schema.values():
                yield from objects(inner)
        elif isinstance(schema, list):
            for inner in schema:
                yield from objects(inner)

    found = list(objects(SCHEMAS))
    assert len(found) > 30
    for schema in found:
        assert schema["type"] == "object" and schema["additionalProperties"] is False, schema
        assert set(schema["required"]) <= schema["properties"].keys(), schema
