"""A thread that owns an engine: many callers, streams of threads and of coroutines, back-pressure, a clean end."""

import asyncio
import threading
from collections.abc import Iterator
from functools import cache

import pytest
from support.engines import params, prompt, quick, serve
from support.fake_model import FakeConfig, FakeModel

from m3jax.decoding import Engine, EngineLoop, Generation, Params, TokenEvent
from m3jax.decoding.engine.runner import Runner
from m3jax.decoding.loop import LoopClosed, LoopFull, joined


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


@cache
def model() -> FakeModel:
    return FakeModel.random(config=FakeConfig(index_block_size=4))


def engine() -> Engine:
    return Engine(model(), pages=60, max_batch=4, prefill_rows=2, prefill_chunk=8, steps_per_call=3, max_length=200)


@cache
def alone(tokens: tuple[int, ...], asked: Params) -> Generation:
    return serve(engine(), (tokens, asked))[0]


def test_many_threads_get_what_each_gets_alone():
    results: dict[int, Generation] = {}

    def ask(number: int) -> None:
        results[number] = loop.submit(prompt(5 + number), params(3 + number)).result()

    with EngineLoop(engine(), max_requests=5) as loop:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: alone(prompt(5 + number), params(3 + number)) for number in range(12)}


def test_a_stream_gives_tokens_before_the_request_has_ended():
    with EngineLoop(engine()) as loop:
        stream = loop.submit(prompt(9), params(40))
        first = stream.get(timeout=60)
        assert first.stop_reason == "unfinished" and 0 < len(first.tokens) < 40
        rest = [token for event in stream for token in event.tokens]
        assert [*first.tokens, *rest] == alone(prompt(9), params(40)).tokens
        with pytest.raises(ValueError, match="has ended, and its last event was read"):
            stream.get()


def test_coroutines_read_streams_side_by_side():
    async def read(stream) -> list[int]:
        return [token async for event in stream for token in event.tokens]

    async def main() -> list[list[int]]:
        streams = [loop.submit(prompt(n), params(20)) for n in (3, 9, 30)]
        return await asyncio.gather(*map(read, streams))

    with EngineLoop(engine()) as loop:
        assert asyncio.run(main()) == [alone(prompt(n), params(20)).tokens for n in (3, 9, 30)]


def test_a_group_and_new_weights_go_through_the_loop():
    with EngineLoop(engine()) as loop:
        streams = loop.submit(prompt(9), params(6, temperature=1.0, seed=3), n=3)
        found = [stream.result() for stream in streams]
        expected = [alone(prompt(9), params(6, temperature=1.0, seed=3 + i)).tokens for i in range(3)]
        assert [result.tokens for result in found] == expected
        assert loop.update(model()) == 1
        assert loop.submit(prompt(9), params(4)).result().versions == [1] * 4


def test_a_full_loop_has_callers_wait():
    with EngineLoop(engine(), max_requests=2) as loop:
        running = [loop.submit(prompt(9, seed=i), params(150)) for i in range(2)]
        with pytest.raises(LoopFull, match="2 requests go on, and the loop takes 2"):
            loop.submit(prompt(3), params(2), timeout=0)
        with pytest.raises(ValueError, match="n = 3: this loop takes 2 requests at once"):
            loop.submit(prompt(3), params(2), n=3)
        running[0].cancel()
        assert loop.submit(prompt(3), params(2), timeout=60).result() == alone(prompt(3), params(2))
        assert running[0].result().stop_reason == "aborted"
        running[1].cancel()


def test_what_the_engine_refuses_is_refused_where_it_was_asked():
    with EngineLoop(engine(), max_requests=1) as loop:
        for _ in range(3):  # a refused request takes no place
            with pytest.raises(ValueError, match="prompt is empty"):
                loop.submit((), params(2), timeout=5)
        assert loop.submit(prompt(3), params(2), timeout=5).result() == alone(prompt(3), params(2))


@pytest.mark.parametrize("pending", ["finish", "abort"])
def test_a_closed_loop_leaves_no_reader_waiting(pending):
    served = engine()
    loop = EngineLoop(served)
    stream = loop.submit(prompt(9), params(150))
    loop.close(pending)
    found = stream.result()
    whole = alone(prompt(9), params(150))
    assert found == whole if pending == "finish" else found.stop_reason == "aborted"
    with pytest.raises(LoopClosed, match="the loop was closed"):
        loop.submit(prompt(3), params(2))
    assert served.pages["used"] == 0 and serve(served, (prompt(3), params(2))) == [alone(prompt(3), params(2))]


def test_a_failed_engine_is_told_to_every_reader(monkeypatch):
    served = engine()

    def fail(*_):
        raise MemoryError("the device is full")

    loop = EngineLoop(served)
    monkeypatch.setattr(Runner, "launch", fail)
    stream = loop.submit(prompt(9), params(150))
    with pytest.raises(LoopClosed, match="the engine failed") as caught:
        stream.result()
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(LoopClosed, match="the engine failed"):
        loop.submit(prompt(3), params(2))
    loop.close()


def test_events_that_nobody_read_are_one():
    event = lambda start, *tokens: TokenEvent(
        7, start, tokens, tuple(map(float, tokens)), (), (0,) * len(tokens), "length"
    )
    assert joined(event(2, 5, 6), event(4, 8)) == event(2, 5, 6, 8)
    assert joined(event(2, 5, 6), event(3, 8)) == event(2, 5, 8)  # one token was taken back in between
    assert joined(event(2, 5, 6), event(0, 8)) == event(0, 8)
