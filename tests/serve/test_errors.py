"""Errors in the words of each protocol, who of several workers is asked, and the blocks that an answer read."""

import asyncio
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc as services

from m3jax.decoding.loop import LoopClosed, LoopFull
from m3jax.serve.gateway import pixels
from m3jax.serve.gateway import workers as workers_module
from m3jax.serve.gateway.blocks import described_blocks
from m3jax.serve.gateway.errors import ApiError, refused
from m3jax.serve.gateway.workers import LocalWorker, RemoteWorker, Workers

pytestmark = pytest.mark.usefixtures("unchecked")  # workers and tokenizers here are none

# Of each status: its type for OpenAI's clients and for Anthropic's.
TYPES = {
    400: ("invalid_request_error", "invalid_request_error"), 401: ("authentication_error",) * 2,
    403: ("permission_error",) * 2, 404: ("not_found_error",) * 2, 413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error",) * 2, 499: ("invalid_request_error",) * 2, 500: ("server_error", "api_error"),
    503: ("service_unavailable_error", "overloaded_error"), 504: ("timeout_error",) * 2,
}  # fmt: skip


@pytest.mark.parametrize("status", TYPES)
def test_an_error_in_the_words_of_each_protocol(status):
    error = ApiError(status, "it is\nwrong", "tools[0].name", "a_code", 7)
    openai_type, anthropic_type = TYPES[status]
    message = "tools[0].name: it is\\nwrong"
    assert error.as_openai() == {"error": dict(message=message, type=openai_type, param="tools[0].name", code="a_code")}
    assert error.as_anthropic() == {"type": "error", "error": dict(type=anthropic_type, message=message)}
    bearer = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    assert error.headers == {"Retry-After": "7"} | bearer and ApiError(status, "x").headers == bearer
    assert ApiError(status, "tools are wrong", "tools[0]").message == "tools are wrong"
    assert (refused("n", "x").status, refused("n", "x", "c").code, refused(None, "x").message) == (400, "c", "x")


async def status_of(work):
    """The status, code, pause and message of the API's error that a call ends with; else what it raises."""
    with pytest.raises(BaseException) as caught:
        await work
    found = caught.value
    if isinstance(found, ApiError):
        return found.status, found.code, found.retry_after, str(found)
    return type(found)


def raised(error):
    """What `LocalWorker` makes of an error of its worker."""

    async def fail(request):
        raise error

    return asyncio.run(status_of(LocalWorker(Namespace(HealthCheck=fail)).call("HealthCheck", None)))


def raised_apart(monkeypatch, code, details="too much"):
    """What `RemoteWorker` makes of a status of gRPC, in a call and in a stream of answers alike."""
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    class Call:
        async def __aiter__(self):
            raise error
            yield

        def cancel(self):
            pass

    async def fail(request, timeout):
        raise error

    async def run():
        remote = apart(monkeypatch, Namespace(HealthCheck=fail, Generate=lambda request: Call()))
        found = await status_of(remote.call("HealthCheck", None))
        assert await status_of(anext(remote.generate(None, None))) == found
        await remote.close()
        return found

    return asyncio.run(run())


def apart(monkeypatch, stub) -> RemoteWorker:
    """A worker whose calls over gRPC are those of `stub`."""
    monkeypatch.setattr(services, "VllmEngineStub", lambda channel: stub)
    return RemoteWorker("127.0.0.1:9")


def test_what_a_worker_raises_is_told(monkeypatch):
    """In this process and over gRPC; what is neither goes on as it is."""
    assert raised(LoopFull("9 wait")) == (429, "queue_full", 1, "9 wait")
    assert raised(LoopClosed("it stopped")) == (503, "engine_down", 5, "the engine takes no requests: it stopped")
    assert raised(ValueError("max_tokens = 0: no")) == (400, None, None, "max_tokens = 0: no")
    assert raised(KeyError("x")) is KeyError
    codes = grpc.StatusCode
    refused = raised_apart(monkeypatch, codes.INVALID_ARGUMENT, "top_k = -2: no")
    assert refused == (400, None, None, "top_k = -2: no")
    full = raised_apart(monkeypatch, codes.RESOURCE_EXHAUSTED)
    assert full == (429, "queue_full", 1, "the worker is full: too much")
    for code in (codes.UNAVAILABLE, codes.DEADLINE_EXCEEDED):
        assert raised_apart(monkeypatch, code) == (503, "worker_lost", 5, "the worker 127.0.0.1:9 was lost")
    failed = raised_apart(monkeypatch, codes.INTERNAL, "a\nb")
    assert failed == (500, "worker_failed", None, "the worker 127.0.0.1:9 failed: a\\nb")
    assert raised_apart(monkeypatch, codes.INTERNAL, None)[3] == "the worker 127.0.0.1:9 failed: "


def test_the_field_that_a_refusal_begins_with():
    lines = {
        "max_tokens = 0: no": "max_tokens", "min_tokens: too many": "min_tokens", "a_b, c": "a_b",
        "mm_hashes": "mm_hashes", "seed is wrong": None, "The max_tokens": None, "Max_tokens = 1": None, "top-k": None,
    }  # fmt: skip

    async def fail(line):
        raise ValueError(line)

    worker = LocalWorker(Namespace(HealthCheck=fail))
    for line, field in lines.items():
        with pytest.raises(ApiError) as caught:
            asyncio.run(worker.call("HealthCheck", line))
        assert caught.value.field == field, line


class PlainWorker:
    """A worker that answers what it is told to."""

    def __init__(self, name, *, says=None, lost=False):
        self.name, self.says, self.lost, self.healthy, self.asked = name, says, lost, False, []

    async def generate(self, request, notes):
        if self.lost:
            raise ApiError(503, "lost", code="worker_lost")
        for piece in range(2):
            yield self.name, piece, notes

    async def call(self, method, request):
        self.asked.append(method)
        if method == "HealthCheck":
            return Namespace(healthy=self.healthy)
        if self.lost:
            raise ApiError(503, f"{self.name} is lost", code="worker_lost")
        return Namespace(loads=[self.says] if self.says else [])

    async def progress(self, request_id):
        return self.says


def some(*names):
    return Workers([PlainWorker(name) for name in names])


def picked(group, prompt) -> str:
    """The name of the worker that a prompt goes to, which then has its beginning."""

    async def run():
        request = Namespace(tokenized=Namespace(input_ids=list(prompt)))
        names = {name async for name, *_ in group.generate(request)}
        return names.pop()

    return asyncio.run(run())


def test_a_prompt_goes_where_its_beginning_is_and_else_where_least_is_done():
    """In blocks of 64 tokens; a worker may have 8 requests more than the least loaded one, and not 9."""
    group, prompt = some("a", "b", "c"), list(range(200))
    group.running |= {"a": 1, "b": 0, "c": 2}
    assert picked(group, prompt) == "b"
    for load, name in ((0, "b"), (8, "b"), (9, "a")):
        group.running |= {"a": 0, "b": load, "c": 0}
        assert picked(group, [*prompt[:191], 7]) == name, load
    # b had all of it, a has two whole blocks since; of as many blocks who does less is asked.
    group.running |= {"a": 0, "b": 1, "c": 0}
    assert picked(group, prompt) == "b" and picked(group, [*prompt[:128], 5, 6]) == "a"
    assert picked(group, prompt[:63]) in ("a", "c")  # less than a block is nobody's
    group.down.add("a")
    assert picked(group, [*prompt[:128], 5, 6]) == "b" and group.is_up
    group.down |= {"b", "c"}
    assert not group.is_up
    with pytest.raises(ApiError, match="no worker can be reached"):
        picked(group, prompt)
    group = some("a", "b")  # a has all of the prompt, b its first block: more blocks count before fewer requests
    for load, given in ((dict(a=0, b=20), prompt), (dict(a=20, b=0), [*prompt[:64], 7])):
        group.running |= load
        picked(group, given)
    group.running |= {"a": 1, "b": 0}
    assert picked(group, prompt[:130]) == "a" and picked(some("a"), prompt) == "a"


def test_beginnings_are_forgotten_the_oldest_first(monkeypatch):
    monkeypatch.setattr(workers_module, "_MOST_BLOCKS", 2)
    group = some("a", "b")
    first, second = ([start] * 64 for start in (1, 2))
    group.running["b"] = 1
    for prompt in (first, second, first, [3] * 64):
        picked(group, prompt)
    group.running |= {"a": 1, "b": 0}
    assert [picked(group, prompt) for prompt in (first, second)] == ["a", "b"]


def test_requests_that_run_are_counted_and_a_lost_worker_comes_back(monkeypatch, caplog):
    """The log says both, once each: whoever runs the server sees for how long a worker was away."""
    caplog.set_level("WARNING", "m3jax.serve")
    monkeypatch.setattr(workers_module, "_RETRY_SECONDS", 0.01)

    async def work():
        group = some("a", "b")
        request = Namespace(tokenized=Namespace(input_ids=[1] * 64))
        pieces = [piece async for piece in group.generate(request, {})]
        assert pieces == [("a", 0, {}), ("a", 1, {})] and group.running == {"a": 0, "b": 0}
        running = group.generate(request)
        await anext(running)
        assert group.running == {"a": 1, "b": 0}
        await running.aclose()
        assert group.running == {"a": 0, "b": 0}
        first = group.workers[0]
        first.lost = True
        with pytest.raises(ApiError, match="lost"):
            await anext(group.generate(request))
        assert group.down == {"a"} and group.running["a"] == 0
        await asyncio.sleep(0.05)
        assert group.down == {"a"} and first.asked.count("HealthCheck") >= 2
        first.healthy, first.lost = True, False
        for _ in range(200):
            await asyncio.sleep(0.01)
            if not group.down:
                break
        assert not group.down
        group.running["a"] = 1  # it has come back as a new process, which knows nothing
        assert {piece[0] async for piece in group.generate(request)} == {"b"}
        group.running["a"] = 0
        request.tokenized.input_ids = [1]
        assert {piece[0] async for piece in group.generate(request)} == {"a"}
        await group.close()

    asyncio.run(work())
    said = [record.getMessage() for record in caplog.records if record.name == "m3jax.serve"]
    assert said == ["worker a was lost: asked again every 0.01 s", "worker a is back"]


def test_a_stream_over_grpc_that_is_left_is_cancelled(monkeypatch):
    """Also one that came to its end; what a worker apart cannot tell is refused before it is asked."""

    class Call:
        cancelled = 0

        async def __aiter__(self):
            for piece in range(3):
                yield piece

        def cancel(self):
            self.cancelled += 1

    async def work():
        stub = Namespace()
        remote = apart(monkeypatch, stub)
        for leave in (True, False):
            call = Call()
            stub.Generate = lambda request, call=call: call
            pieces = remote.generate(None, None)
            assert await anext(pieces) == 0
            if leave:
                await pieces.aclose()
            else:
                assert [piece async for piece in pieces] == [1, 2]
            assert call.cancelled == 1
        waits = []

        async def answer(request, timeout):
            waits.append(timeout)
            return request

        async def messages(request, timeout):
            waits.append(timeout)
            yield request

        stub.GetLoads, stub.GetTokenizer = answer, messages
        assert await remote.call("GetLoads", 5) == 5
        assert [message async for message in remote.stream("GetTokenizer", 6)] == [6] and waits == [10.0, 60.0]
        with pytest.raises(ApiError, match="return_blocks: the worker runs apart"):
            await anext(remote.generate(None, {}))
        with pytest.raises(ApiError, match="return_progress: the worker runs apart"):
            await remote.progress("x")
        await remote.close()

    asyncio.run(work())


def test_what_workers_say_of_themselves():
    async def work():
        group = Workers([PlainWorker("a", lost=True), PlainWorker("b", says=5), PlainWorker("c")])
        assert await group.loads() == {"b": 5}
        assert [answer.loads for answer in await group.info()] == [[5], [5]]
        assert group.workers[1].asked[-2:] == ["GetModelInfo", "GetServerInfo"]
        assert await group.progress("x") == 5
        assert await some("a", "b").progress("x") is None
        with pytest.raises(ApiError, match="b is lost"):
            await Workers([PlainWorker(name, lost=True) for name in "ab"]).info()

    asyncio.run(work())


def test_blocks_of_an_answer_as_json():
    """For each new token the blocks that were read, ascending, and how many of the 2 x 2 selections had each."""
    record = np.array([[[[2, 0], [0, -1]], [[0, 1], [2, 0]]], [[[-1, -1]] * 2] * 2])  # [X L K J]
    letters = Namespace(
        decode=lambda ids, skip_special_tokens: "".join(chr(97 + i) for i in ids), token_text=None,
        backend=Namespace(id_to_token=lambda i: chr(97 + i)),
    )  # fmt: skip
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("m3jax.serve.gateway.blocks.token_text", lambda tokenizer, token: (chr(97 + token), None))
        found = described_blocks(record, [0, 1, 2, 3, 4], [5, 6], 3, letters)
    assert found == {
        "block_size": 3, "choices": 4, "texts": ["abc", "def", "g"],
        "tokens": [{"text": "f", "blocks": [[0, 4], [1, 1], [2, 2]]}, {"text": "g", "blocks": []}],
    }  # fmt: skip


def test_what_watches_and_what_is_connected_ends_with_the_gateway(monkeypatch):
    closed = []

    async def close(worker):
        closed.append(worker.name)

    async def work():
        group = Workers([PlainWorker("a", lost=True), PlainWorker("b", lost=True), RemoteWorker("127.0.0.1:9")])
        await group.workers[-1].close()
        monkeypatch.setattr(RemoteWorker, "close", close)
        await group.close()  # nothing watches
        assert closed == ["127.0.0.1:9"]
        request = Namespace(tokenized=Namespace(input_ids=[1]))
        for count in (1, 2):
            with pytest.raises(ApiError, match="lost"):
                await anext(group.generate(request))
            assert len(group.down) == count and group.is_up
            assert len(asyncio.all_tasks()) == 2  # one watches all that are down
        await group.close()
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())


def test_media_are_cut_by_processes_that_end_with_the_gateway(monkeypatch):
    """They are started with the first medium, and anew where one died; what waits at the end is not begun."""
    made = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, *given):
            made.append((self, given))
            super().__init__(1)
            self.ended, self.is_broken = [], False

        def submit(self, function, *given):
            if self.is_broken:
                raise BrokenProcessPool("died")
            return super().submit(lambda: (function, given))

        def shutdown(self, **how):
            self.ended.append(how)
            super().shutdown()

    monkeypatch.setattr(pixels, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(pixels, "get_context", lambda name: f"by {name}")
    own = pixels.PixelPool(3)
    own.close()
    process = lambda: asyncio.run(own.process("video", b"x", {"size": 1}))
    assert process() == (pixels.process_medium, ("video", b"x", {"size": 1})) == process()
    assert [given for _, given in made] == [(3, "by spawn")]
    made[0][0].is_broken = True
    with pytest.raises(ValueError, match="the process that decoded this video died: its file cannot be used"):
        process()
    process()
    own.close()
    assert [pool.ended for pool, _ in made] == [[], [dict(wait=False, cancel_futures=True)]]
    made[0][0].shutdown()
