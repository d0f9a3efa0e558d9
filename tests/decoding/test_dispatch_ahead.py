"""Decode calls that are launched before the last one is read: nothing changes but when the tokens come (T54)."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.engines import CONFIG, SHAPE, finish, params, prompt, quick, runner_of
from support.fake_model import FakeModel

from m3jax.decoding import Engine, Generation, Params

ROOM = 48
FAKE = tiny.config("dM", index_block_size=4, max_position_embeddings=64)
# Lengths that end at and beside a page's end; knobs with a state on the device, and draws.
LIVES = [
    (prompt(5, 1), {}),
    (prompt(8, 2), dict(temperature=1.5, seed=1)),
    (prompt(13, 3), dict(repetition_penalty=2.0)),
    (prompt(3, 4), dict(frequency_penalty=1.0, temperature=1.0, seed=2)),
    (prompt(16, 5), {}),
    (prompt(1, 6), dict(temperature=2.0, seed=3)),
]


@cache
def fake() -> FakeModel:
    return FakeModel.random(0, FAKE)


def engine(ahead: bool | None = True, **changes) -> Engine:
    shape = dict(pages=36, max_batch=3, prefill_rows=2, prefill_chunk=(2, 5), steps_per_call=3, max_length=ROOM)
    return Engine(fake(), **shape | changes, max_stop_ids=2, dispatch_ahead=ahead)


@cache
def alone(number: int) -> Generation:
    served = engine(ahead=False)
    tokens, knobs = LIVES[number]
    handle = served.add(tokens, params(ROOM - len(tokens), **knobs))
    return served.run()[handle]


def asked(number: int, new: int, stops: int = 0) -> tuple[tuple[int, ...], Params]:
    """Return request `number`: at most `new` tokens; with stops, it ends at a token that it draws before that."""
    tokens, knobs = LIVES[number]
    stop_ids = alone(number).tokens[new // 2 : new // 2 + 1] if stops else ()
    return tokens, params(min(new, ROOM - len(tokens)), stop_ids, **knobs)


def assert_own(found: Generation, number: int) -> None:
    """Fail unless a request's tokens are the beginning of what it gets alone."""
    whole = alone(number)
    assert found.tokens == whole.tokens[: len(found.tokens)]
    assert found.logprobs == pytest.approx(whole.logprobs[: len(found.tokens)], abs=1e-5)


def noted(served: Engine) -> list[str]:
    """Return a list that will say in which order calls are launched and read."""
    order, runner = [], runner_of(served)
    for name in ("launch", "read"):
        call = getattr(runner, name)
        setattr(runner, name, lambda *args, name=name, call=call: (order.append(name), call(*args))[1])
    return order


def test_the_next_call_is_launched_before_the_last_one_is_read():
    served = engine()
    order = noted(served)
    served.add(*asked(0, 13))
    events = [served.step() for _ in range(2)]
    # The first round launches one call; the second launches the next, and gives out the tokens of the first.
    assert order == ["launch", "launch", "read"]
    assert [sum(len(event.tokens) for event in of_round) for of_round in events] == [1, 3]
    result = next(iter(served.run().values()))
    assert len(result.tokens) == 13
    assert_own(result, 0)
    # 12 tokens by steps are four calls: none is launched for a request that the call in flight ends by its length.
    assert order.count("launch") == order.count("read") == 4


@pytest.mark.parametrize("repeated", [False, True])
def test_rounds_are_launched_ahead_while_a_round_of_one_token_would_not_end_the_request(repeated):
    """However many tokens they may have: a call that finds the request ended by right proposals does nothing."""
    answer = alone(0).tokens[:13]
    tokens = [*LIVES[0][0], *answer] if repeated else LIVES[0][0]  # what comes is looked up in the prompt, or not there
    served = engine(draft="ngram", draft_tokens=2)
    order = noted(served)
    handle = served.add(tokens, params(13))
    result = served.run()[handle]
    in_flight = np.cumsum([1 if name == "launch" else -1 for name in order])
    assert order[0] == "launch" and in_flight[-1] == 0
    assert all(count == 2 for name, count in zip(order[1:], in_flight[1:], strict=True) if name == "launch"), order
    assert result.accepted > 0
    plain = engine(ahead=False)
    handle = plain.add(tokens, params(13))
    assert result.tokens == plain.run()[handle].tokens
    served.check()


def test_a_check_reads_the_call_that_is_in_flight():
    """What that call has written counts too, and its tokens are given out by the next round."""
    served = engine()
    order = noted(served)
    handle = served.add(*asked(0, 13))
    served.step()
    assert order == ["launch"]
    served.check()
    assert order == ["launch", "read"] and len(served.result(handle).tokens) == 4
    served.abort(handle)


def test_nothing_is_launched_ahead_where_that_is_not_asked_for():
    served = engine(ahead=False)
    order = noted(served)
    served.add(*asked(0, 13))
    served.run()
    assert order == ["launch", "read"] * 4


def test_a_row_that_ends_in_a_call_in_flight_does_nothing_in_the_next_one():
    """The host launches the next call before it knows of the end, and sends no state that would revive the row."""
    served = engine()
    handles = {served.add(*asked(number, 20, stops=number == 1)): number for number in (0, 1, 4)}
    results = served.run()
    for handle, number in handles.items():
        assert_own(results[handle], number)
        assert results[handle].stop_reason == ("stop_id" if number == 1 else "length")
    served.check()
    assert served.pages["used"] == 0


@pytest.mark.parametrize("count", [7, 12])
def test_bursts_of_prompts_larger_than_the_rows(count):
    """T54: a request's first token is its own, however many begin while calls are in flight."""
    served, handles = engine(), {}
    for start in range(0, count, 3):
        for i in range(start, min(start + 3, count)):
            number = i % len(LIVES)
            handles[served.add(*asked(number, 4 + i, stops=i % 2))] = number
        served.step()
        served.step()
    results = served.run()
    for handle, number in handles.items():
        assert_own(results[handle], number)
        assert results[handle].stop_reason in ("length", "stop_id")
    served.check()


def test_the_row_of_a_request_that_ends_in_a_call_in_flight_is_free_in_the_next_round():
    served = engine()
    ended, *_ = (served.add(*asked(number, new, stops)) for number, new, stops in ((0, 4, 1), (1, 30, 0), (4, 30, 0)))
    while served.prefill():
        pass
    served.step()
    assert served.reason(ended) == "unfinished"  # as far as is known: its end is in the call in flight
    younger = served.add(*asked(5, 8))
    events = served.step()
    assert younger in {event.handle for event in events if event.tokens}
    served.run()
    assert_own(served.result(younger), 5)


class Ascending:
    """A guide under which each token is greater than the one before it: it has to see all of them."""

    def bits(self, new):
        bits = np.zeros(FAKE.vocab_size, bool)
        bits[(new[-1] + 1 if new else 0) :] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)


def test_a_guide_sees_every_token_before_it_is_asked():
    served = engine()
    handle = served.add(*asked(0, 12), guide=Ascending())
    tokens = served.run()[handle].tokens
    assert tokens == sorted(set(tokens))


KINDS = ("abort", "truncate", "copy", "move", "stop", "update", "late")
ADD = st.tuples(st.just("add"), st.integers(0, len(LIVES) - 1), st.integers(3, 30))
STEP = st.tuples(st.just("step"), st.just(0), st.integers(1, 4))
OTHERS = st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, ROOM))


@settings(max_examples=15)
@given(st.lists(ADD, min_size=1, max_size=3), st.lists(st.one_of(ADD, STEP, STEP, OTHERS), min_size=6), st.booleans())
def test_random_lives_with_a_call_in_flight(first, then, is_tight):
    """T54: whatever is done to requests between two rounds, also to those that a call in flight has just ended."""
    served = engine(pages=14) if is_tight else engine()
    numbers: dict[int, int] = {}
    for what, which, size in (*first, *then):
        live = [handle for handle in numbers if served.reason(handle) == "unfinished"]
        if what == "add":
            numbers[served.add(*asked(which, size, stops=size % 2))] = which
        elif what == "step":
            for _ in range(size):
                served.step()
        elif live:
            act(served, what, live[which % len(live)], size, numbers)
    finish(served)
    for handle, number in numbers.items():
        assert_own(served.result(handle), number)


def act(served: Engine, what: str, handle: int, size: int, numbers: dict[int, int]) -> None:
    """Do something to a request; that it has ended in the call in flight is a reason to refuse, and to do nothing."""
    number, had = numbers[handle], len(served.result(handle).tokens)
    try:
        if what == "abort":
            served.abort(handle)
            assert served.reason(handle) != "unfinished"
        elif what == "truncate":
            served.truncate(handle, size % (had + 1))
        elif what == "copy":
            numbers[served.copy(handle)] = number
        elif what == "move":
            moved = served.export(handle)  # it has what was in flight
            served.abort(handle)
            numbers[served.import_request(moved)] = number
        elif what == "stop":
            served.stop(handle, size % (had + 1))
            assert len(served.result(handle).tokens) == size % (had + 1)
        elif what == "update":
            served.update(fake(), live="keep")
        else:
            served._requests[handle].deadline = 0.0
            served.step()
            assert served.reason(handle) != "unfinished"
    except ValueError as error:
        assert "has ended already" in str(error)


@pytest.mark.further
def test_with_a_draft_and_with_records():
    """Rounds of verification that record are launched ahead too, of a real model, with the same results."""
    model = tiny.model(CONFIG)
    results = []
    for ahead in (False, True):
        with quick():
            served = Engine(model, **SHAPE, draft="ngram", draft_tokens=2, dispatch_ahead=ahead)
        order = noted(served)
        asks = Params(max_new_tokens=20, sampling=params().sampling, record=("blocks",), top_logprobs=2)
        handles = [served.add(prompt(30, seed) * 2, asks) for seed in (1, 2)]
        for _ in range(3):
            served.step()
        moved = served.export(handles[1])  # it has what was in flight
        served.abort(handles[1])
        handles[1] = served.import_request(moved)
        found = [served.run()[handle] for handle in handles]
        results.append([(one.tokens, one.top_logprobs, one.records["blocks"].tolist()) for one in found])
        assert ("launch launch" in " ".join(order)) == ahead
        served.check()
    assert results[0] == results[1]


def test_refused_beside_host_memory():
    with pytest.raises(ValueError, match="dispatch_ahead with device_pages"):
        Engine(tiny.model(CONFIG), **SHAPE, device_pages=16, dispatch_ahead=True)
