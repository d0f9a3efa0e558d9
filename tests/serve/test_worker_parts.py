"""The calls of a worker beside an engine that is none: what it says of itself, its load, and what it fetches."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from support.embedded import TOKENIZER

from m3jax.assets import embedded_path
from m3jax.decoding.loop import LoopClosed
from m3jax.serve.worker import Worker, worker
from m3jax.serve.worker.tokenizer_files import pieces, tokenizer_archive
from m3jax.version import VERSION

pytestmark = pytest.mark.usefixtures("unchecked")  # the engine and the model here are none

PAGE, MAX_LENGTH = 16, 64


class Engine:
    """Sizes, a load and counts of pages that are written down; no request goes on unless `busy` is set."""

    max_length, config = MAX_LENGTH, SimpleNamespace(eos_token_id=(1, 5), vocab_size=2048, index_block_size=PAGE)
    shapes = SimpleNamespace(media_patches=(), stop_ids=4, batch=8)
    busy = False

    def __init__(self):
        self.config.to_dict = lambda: {"model_type": "a_type", "architectures": ["An", "Other"]}
        self.load = {"running": 2, "waiting": 3}
        self.pages = {"free": 4, "cached": 5, "used": 1, "hit_tokens": 6, "missed_tokens": 18}
        self.warmed, self.updates, self.known = [], [], 0

    def observe_pages(self, note):
        pass

    def step(self):
        time.sleep(0.001)  # other threads have their turn, as beside a device's work
        return []

    def warmup(self, programs):
        self.warmed.append(programs)

    def update(self, model):
        self.updates.append(model)

    def check_request(self, prompt, params):
        pass

    def known_tokens(self, prompt):
        return self.known


MODEL = SimpleNamespace(dtype="float16")


@dataclass(frozen=True)
class SamplingSettings:
    """In place of a request's `Params`."""

    record: tuple[str, ...] = ()


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The clocks that a worker reads: they stand still until a test moves them."""
    clock = SimpleNamespace(unix=1000.0, monotonic=500.0)
    read = SimpleNamespace(time=lambda: clock.unix, monotonic=lambda: clock.monotonic)
    monkeypatch.setattr(worker, "time", read)
    return clock


@pytest.fixture
def own(clock) -> Iterator[Worker]:
    defaults = SimpleNamespace(stop_ids=None, knobs={"top_p": 0.5, "bad_words": ["x"]})
    lm = SimpleNamespace(tokenizer=TOKENIZER, folder=Path("models/folder"), defaults=defaults, model=MODEL)
    made = Worker(Engine(), lm)
    yield made
    made.engine.busy = False
    asyncio.run(made.close())


def test_the_model_and_the_server_are_described(own, clock):
    """Every field that a gateway reads; what was asked of it last and since when it serves are seconds."""

    async def described():
        return await own.GetModelInfo(pb.GetModelInfoRequest()), await own.GetServerInfo(pb.GetServerInfoRequest())

    clock.unix = 1003.0
    with pytest.raises(ValueError, match="the request has no prompt"):
        asyncio.run(anext(own.Generate(pb.GenerateRequest())))
    clock.unix = 1007.0
    own._active["a"] = worker._Active()
    model, server = asyncio.run(described())
    assert model == pb.GetModelInfoResponse(
        model_path="folder", served_model_name="folder", tokenizer_path="folder", is_generation=True,
        max_context_length=MAX_LENGTH, max_req_input_len=MAX_LENGTH - 1, vocab_size=2048, supports_vision=False,
        model_type="a_type", architectures=["An", "Other"], eos_token_ids=[1, 5], bos_token_id=TOKENIZER.bos_id or 0,
        default_sampling_params_json='{"top_p": 0.5}',
    )  # fmt: skip
    assert server == pb.GetServerInfoResponse(
        active_requests=1, last_receive_timestamp=1003.0, uptime_seconds=7.0, server_type="vllm-grpc",
        data_parallel_size=1, block_size=PAGE, model_dtype="float16", max_num_seqs=8,
        multimodal_encoder_dtype="float32", engine_reasoning_parser="minimax_m3",
        constrained_decoding_start="after_reasoning",
    )  # fmt: skip


def test_a_load_is_what_the_engine_counts(own):
    """Tokens are pages times their size; a prompt waits until its request has had news."""

    async def load():
        return await own.GetLoads(pb.GetLoadsRequest())

    own._active = {
        "reads": worker._Active(prompt_tokens=7), "waits": worker._Active(prompt_tokens=30),
        "draws": worker._Active(prompt_tokens=500, has_begun=True), "is not read": worker._Active(),
    }  # fmt: skip
    loads = asyncio.run(load())
    assert (loads.version, loads.dp_rank_count) == (VERSION, 1) and loads.timestamp.endswith("+00:00")
    (found,) = loads.loads
    assert found == pb.SchedulerLoad(
        num_running_reqs=2, num_waiting_reqs=3, num_total_reqs=5, num_used_tokens=PAGE, max_total_num_tokens=10 * PAGE,
        token_usage=0.1, gen_throughput=0.0, cache_hit_rate=0.25, utilization=0.25, max_running_requests=8,
        num_waiting_uncached_tokens=37,
    )  # fmt: skip
    own.engine.pages |= {"hit_tokens": 0, "missed_tokens": 0}
    assert asyncio.run(load()).loads[0].cache_hit_rate == 0.0  # nothing was looked up yet
    with pytest.raises(ValueError, match="dp_rank = 1: this worker has rank 0 alone"):
        asyncio.run(own.GetLoads(pb.GetLoadsRequest(dp_rank=1)))


def test_throughput_is_of_the_last_ten_seconds(own, clock):
    for moment, count in ((500.0, 30), (505.0, 20)):
        clock.monotonic = moment
        own._note_drawn(count)
    for moment, tokens_a_second in ((505.0, 5.0), (510.0, 5.0), (510.1, 2.0), (515.0, 2.0), (515.1, 0.0)):
        clock.monotonic = moment
        assert own._throughput() == tokens_a_second, moment
    clock.monotonic = 515.0
    own._note_drawn(1)
    assert list(own._drawn) == [(505.0, 20), (515.0, 1)]  # what counts no more is not kept


def test_health_while_it_compiles_and_after_its_end(own):
    """It is ready before too: only the caller knows that it will prepare. Nothing is asked of it once it is closed."""

    async def health():
        found = await own.HealthCheck(pb.HealthCheckRequest())
        return found.healthy, found.message

    async def work():
        assert await health() == (True, "ready")
        seen = []
        loop = asyncio.get_running_loop()

        def warmup(programs):
            seen.append(asyncio.run_coroutine_threadsafe(health(), loop).result(10))
            if len(seen) == 2:
                raise RuntimeError("no memory")

        own.engine.warmup = warmup
        await own.prepare()
        assert await health() == (True, "ready")
        with pytest.raises(RuntimeError, match="no memory"):
            await own.prepare()
        assert seen == [(False, "compiling")] * 2 and await health() == (True, "ready")
        await own.close()
        assert await health() == (False, "the engine has ended")
        with pytest.raises(LoopClosed, match="takes no more requests"):
            await own.prepare()

    asyncio.run(work())
    assert own.constraints._llguidance is not None  # grammars are ready before a request asks for one


def test_all_but_the_tower_is_compiled_unless_it_is_said(own):
    asyncio.run(own.prepare())
    asyncio.run(own.prepare(("tower",)))
    assert own.engine.warmed == [("prefill", "decode", "pages"), ("tower",)]


def test_the_cache_is_flushed_once_nothing_goes_on(own, clock, monkeypatch):
    """A caller that does not wait is told how many go on; one that waits looks again every few milliseconds."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)
        clock.monotonic += 1.0
        own.engine.busy = len(waits) < 3

    async def flush(seconds):
        return await own.FlushCache(common_pb2.FlushCacheRequest(timeout_s=seconds))

    monkeypatch.setattr(worker, "asyncio", SimpleNamespace(sleep=sleep, get_running_loop=asyncio.get_running_loop))
    own._active["a"] = worker._Active()
    own.engine.busy = True
    refused = asyncio.run(flush(0))
    assert (refused.success, refused.message) == (False, "1 requests go on: try again") and not waits
    assert not asyncio.run(flush(1.0)).success and len(waits) == 1  # at its end it looks once more
    flushed = asyncio.run(flush(9.0))
    assert (flushed.success, len(waits), own.engine.updates) == (True, 3, [MODEL]) and max(waits) <= 0.1
    monkeypatch.undo()


def test_prompts_of_which_more_than_a_page_is_unknown_are_read_elsewhere(own):
    """Scores are of the whole prompt, whatever is known of it; the other engine draws a token behind it."""
    long = MAX_LENGTH - 2
    cases = [
        # tokens, known, whether they are scored, whether there are pictures, what is known of a prompt that is fetched
        (40, 16, False, False, 16), (33, 16, False, False, 16), (32, 16, False, False, None),
        (40, 32, False, False, None), (17, 0, False, False, 0), (16, 0, False, False, None), (40, 32, True, False, 32),
        (16, 0, True, False, None),
        (long, 0, True, False, 0), (long + 1, 0, True, False, None), (long + 1, 0, False, False, 0),
        (40, 16, False, True, None),
    ]  # fmt: skip
    of = lambda length, known, is_scored, is_seen: (
        setattr(own.engine, "known", known),
        own._known_part(
            SimpleNamespace(
                prompt=range(length), media=is_seen, params=SimpleNamespace(prompt_logprobs=0 if is_scored else None)
            ),
            None,
        ),
    )[1]
    assert of(40, 16, False, False) is None  # all is read here
    own._prefill = SimpleNamespace(close=lambda: None)
    for *case, expected in cases:
        assert of(*case) == expected, case

    def refuse(prompt, params):
        raise ValueError("max_new_tokens = 0: must be at least 1")

    own.engine.check_request = refuse
    with pytest.raises(ValueError, match="max_new_tokens = 0"):  # before a prompt is read for it
        of(40, 16, False, False)


def test_how_much_of_a_prompt_is_read(own):
    """Of the first of its continuations, which share it; nothing before the engine has it and after its end."""
    own.engine.prompt_progress = {7: (16, 32)}.__getitem__

    async def progress(name):
        return await own.prompt_progress(name)

    streams = [SimpleNamespace(handle=7, cancel=lambda: None), SimpleNamespace(handle=8, cancel=lambda: None)]
    own._active = {"a": worker._Active(streams, prompt_tokens=40), "waits": worker._Active(prompt_tokens=9)}
    assert [asyncio.run(progress(name)) for name in ("a", "waits", "unknown")] == [(40, 16, 32), None, None]

    def ended(handle):
        raise ValueError("it has ended")

    own.engine.prompt_progress = ended
    assert asyncio.run(progress("a")) is None


def test_requests_are_ended_by_their_names(own):
    """All their streams, now or once the engine has them; the others go on."""
    ended = []
    streams = {name: [SimpleNamespace(cancel=lambda name=name: ended.append(name))] * 2 for name in "ab"}
    own._active = {name: worker._Active(streams[name]) for name in "ab"} | {"waits": worker._Active()}
    asyncio.run(own.Abort(pb.AbortRequest(request_ids=["a", "unknown", "waits"])))
    assert ended == ["a", "a"]
    assert {name: active.is_aborted for name, active in own._active.items()} == {"a": True, "b": False, "waits": True}


def test_the_tokenizer_comes_in_pieces(own):
    own.folder = embedded_path()

    async def sent():
        return [piece async for piece in own.GetTokenizer(common_pb2.GetTokenizerRequest())]

    assert asyncio.run(sent()) == list(pieces(tokenizer_archive(own.folder)))


def test_events_of_several_streams_have_their_index():
    """Each stream's in its order until it ends; those that come while others wait are not held back."""

    async def stream(letter, count, arrived=None):
        for number in range(count):
            if arrived is not None and number:
                await arrived.wait()
            yield SimpleNamespace(text=f"{letter}{number}", generation="whole" if number == count - 1 else None)

    async def work():
        alone = [(index, event.text) async for index, event in worker._events([stream("a", 3)])]
        assert alone == [(0, "a0"), (0, "a1"), (0, "a2")]
        arrived, found = asyncio.Event(), []
        async for index, event in worker._events([stream("a", 2, arrived), stream("b", 3), stream("c", 1)]):
            found.append((index, event.text))
            if len(found) == 5:
                arrived.set()
        assert found[-1] == (0, "a1")
        assert sorted(found) == [(0, "a0"), (0, "a1"), (1, "b0"), (1, "b1"), (1, "b2"), (2, "c0")]
        assert [text for index, text in found if index == 1] == ["b0", "b1", "b2"]

    asyncio.run(asyncio.wait_for(work(), 10))


def test_a_request_that_was_ended_while_it_was_read_is_ended_when_the_engine_has_it(own):
    """What reads it is not waited for at the worker's end, neither here nor where prompts are fetched."""
    cancelled, order = [], SimpleNamespace(prompt=[1, 2], params=SamplingSettings(), media=None, guide=None, n=2)
    streams = [SimpleNamespace(cancel=lambda number=number: cancelled.append(number)) for number in range(2)]
    active = worker._Active()

    def read(request):
        active.is_aborted = request == "ended"
        return order

    asked = []
    own._reader, own._known_part = SimpleNamespace(read=read), lambda *_: None
    own._loop.submit = lambda *given, **named: asked.append((given, named)) or streams
    for request, expected in (("goes on", []), ("ended", [0, 1])):
        assert asyncio.run(own._submit(request, active, ("blocks",))) is order and cancelled == expected
        assert active.streams == streams and active.prompt_tokens == 2
    params = SamplingSettings(record=("blocks",))
    assert asked == [(([1, 2], params, None, None), dict(n=2, timeout=0))] * 2


def test_a_worker_ends_without_those_who_wait(own):
    """As threads that read requests and fetch prompts do: they find its loop closed."""
    may_go, closed = threading.Event(), []
    waiting = [threads.submit(may_go.wait, 20) for threads in (own._submitters, own._fetchers)]
    own._prefill = SimpleNamespace(close=lambda: closed.append("prefill"))
    asyncio.run(own.close())
    assert not any(thread.done() for thread in waiting) and closed == ["prefill"] and own._loop.is_closed
    may_go.set()
    for threads in (own._submitters, own._fetchers):
        with pytest.raises(RuntimeError, match="after shutdown"):
            threads.submit(int)


@pytest.mark.parametrize(("prompt_logprobs", "expected"), [(None, 8), (0, 3)])
def test_a_fetched_prompt_counts_as_cached_what_was_known_on_either_side(own, monkeypatch, prompt_logprobs, expected):
    """Nothing here where it is scored. Pages that were taken meanwhile are fetched again, all of them."""
    slept, tried = [], []
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(worker, "say", lambda text: None)
    fetched = lambda left_out: SimpleNamespace(snapshot=f"behind {left_out}", cached_tokens=3, left_out=left_out)
    own._prefill = SimpleNamespace(fetch=lambda prompt, params, is_stopped, known=0: fetched(known), close=lambda: None)
    answers = iter([worker.OutOfPages("full"), worker.UnknownPages("taken"), None])

    def submit(snapshot, guide, **named):
        tried.append((snapshot, guide, named))
        if error := next(answers):
            raise error
        return ["stream"]

    own._loop.submit_snapshot, own.engine.busy = submit, True
    own._loop.call = lambda function: function()
    order = SimpleNamespace(prompt=[1] * 9, guide="guide", n=2)
    params, active = SimpleNamespace(prompt_logprobs=prompt_logprobs), worker._Active()
    assert own._fetch(order, params, 8, active) == ["stream"] and slept == [worker._POLL_SECONDS]
    asked = lambda left_out, cached: (
        f"behind {left_out}",
        "guide",
        dict(n=2, timeout=0, cached_tokens=cached, left_out=left_out),
    )
    assert tried == [asked(8, expected), asked(8, expected), asked(0, 3)]
    for is_aborted, is_busy in ((True, True), (False, False)):
        answers, active.is_aborted, own.engine.busy = iter([worker.OutOfPages("full")]), is_aborted, is_busy
        with pytest.raises(worker.OutOfPages):
            own._fetch(order, params, 8, active)
    assert len(slept) == 1
