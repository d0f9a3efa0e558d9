"""What others drive an engine by: events, groups, shared prompts, an order of service, new weights, known pages."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.compilations import compilations
from support.engines import CONFIG, finish, params, prompt, quick, serve
from support.fake_model import FakeConfig, FakeModel
from support.service_definition import MOST_PASSES

from m3jax.cache import PageEvent
from m3jax.decoding import Engine, Generation, Params
from m3jax.decoding.engine import engine as engine_module
from m3jax.model import M3

PAGE = 4
SMALL = FakeConfig(index_block_size=PAGE, max_position_embeddings=256)


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


@cache
def fake(seed: int = 0) -> FakeModel:
    return FakeModel.random(seed, SMALL)


def small(**changes) -> Engine:
    """An engine over a model that runs in no time; every engine here shares its programs."""
    shape = dict(pages=60, max_batch=4, prefill_rows=2, prefill_chunk=8, steps_per_call=3, max_length=200)
    return Engine(fake(), **shape | changes)


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def alone(tokens: tuple[int, ...], asked: Params, seed: int = 0) -> Generation:
    served = Engine(
        fake(seed), pages=60, max_batch=4, prefill_rows=2, prefill_chunk=8, steps_per_call=3, max_length=200
    )
    return serve(served, (tokens, asked))[0]


def assert_same(found: Generation, expected: Generation, cached: int | None = None) -> None:
    """Fail unless tokens, log-probabilities (to rounding) and reasons are the same, and the cached tokens these."""
    assert (found.tokens, found.stop_reason) == (expected.tokens, expected.stop_reason)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert cached is None or found.cached_tokens == cached


# Events


def test_events_are_all_that_a_reader_needs():
    """Put together by their starts, they are the result that comes with the last; the engine keeps nothing of it."""
    served = small()
    asked = {served.add(prompt(n, seed=n), params(9)): n for n in (3, 20, 50)}
    told, ended, starts = {handle: [] for handle in asked}, {}, []
    for round_ in range(100):
        for event in served.step():
            assert event.handle not in ended
            starts += [event.start] if event.handle == min(asked) else []
            del told[event.handle][event.start :]
            told[event.handle] += zip(event.tokens, event.logprobs, event.versions, strict=True)
            if event.generation is not None:
                ended[event.handle] = event.generation
        if round_ == 1:
            served.truncate(min(asked), 1)
        if not served.busy:
            break
    assert ended.keys() == asked.keys()
    assert starts[:3] == [0, 4, 1]  # the third event begins where the request was taken back to
    for handle, n in asked.items():
        assert_same(ended[handle], alone(prompt(n, seed=n), params(9)))
        assert told[handle] == list(zip(ended[handle].tokens, ended[handle].logprobs, [0] * 9, strict=True))
    assert served.step() == []


def test_what_ends_outside_of_a_step_is_told_by_the_next():
    served = small()
    first, second = served.add(prompt(5), params(1)), served.add(prompt(6), params(50))
    served.prefill()
    served.abort(second)
    events = {event.handle: event for event in served.step()}
    assert events[first].generation == alone(prompt(5), params(1))
    assert events[second].stop_reason == events[second].generation.stop_reason == "aborted"
    assert not served.busy


def test_results_of_many_requests_take_no_memory(monkeypatch):
    """Those of the last requests alone, here 40, can still be read by handle."""
    monkeypatch.setattr(engine_module, "RESULTS_KEPT", 40)
    served = small()
    handles = [served.add(prompt(3), params(1)) for _ in range(40 + 5)]
    results = served.run()
    assert len(results) == len(handles)
    assert served.result(handles[-1]) == results[handles[0]] == alone(prompt(3), params(1))
    assert served.take(handles[-1]) == results[handles[-1]].tokens
    assert served.result(handles[5]) == results[handles[5]]
    with pytest.raises(ValueError, match="one of the last 40 that ended"):
        served.result(handles[4])


def test_a_result_says_how_long_it_took():
    served = small(max_batch=1)
    first, second = served.add(prompt(30), params(9)), served.add(prompt(6, seed=1), params(5))
    results = served.run()
    took = [results[handle].timings for handle in (first, second)]
    assert took[0].queue_seconds < took[1].queue_seconds
    assert took[1].queue_seconds >= took[0].prompt_seconds + took[0].decode_seconds > 0


# Groups, and prompts that are being computed


@pytest.mark.parametrize("share", [True, False])
def test_a_group_is_one_prefill_and_n_draws(share):
    """Request i is the one that has the seed plus i; its first token is its own, and one token of it is computed."""
    served, tokens = small(prefix_cache=share), prompt(50)
    asked = [params(9, temperature=1.5, seed=seed) for seed in (2**32 - 2, 2**32 - 1, 0, 1)]
    handles = served.add(tokens, asked[0], n=4)
    results = served.run()
    served.check()
    for handle, each, cached in zip(handles, asked, (0, 49, 49, 49), strict=True):
        assert_same(results[handle], alone(tokens, each), cached)
    assert len({results[handle].tokens[0] for handle in handles}) > 1
    assert served.timings.prompt_tokens == 50 + 3


def test_a_group_may_be_larger_than_the_rows():
    """Who waits for a row finds the prompt in pages that are cached by then, or in those of who still has a row."""
    served = small()
    handles = served.add(prompt(50), params(9, temperature=1.5), n=11)
    results = served.run()
    for seed, handle in enumerate(handles):
        assert_same(results[handle], alone(prompt(50), params(9, temperature=1.5, seed=seed)))
    assert served.timings.prompt_tokens <= 50 + 10 * (50 % PAGE + PAGE)


def test_a_group_has_a_list_of_handles_whatever_its_size():
    served = small()
    assert served.add(prompt(3), params(2), n=1) == [0] and served.add(prompt(3), params(2)) == 1


@pytest.mark.parametrize("beginning", [PAGE, 41, 60])
def test_equal_beginnings_are_computed_once_while_they_are_computed(beginning):
    """Two prompts that begin alike come at once: the second waits for the pages that the first is about to fill."""
    served = small()
    first, second = prompt(60), (*prompt(60)[:beginning], *prompt(60 - beginning, seed=1))
    handles = [served.add(first, params(5)), served.add(second, params(5)), served.add(prompt(9, seed=2), params(5))]
    served.step()
    assert served.prompt_progress(handles[2])[1] > 0  # it waits for nobody
    results = served.run()
    known = 59 if beginning == 60 else beginning // PAGE * PAGE
    for handle, tokens, cached in zip(handles, (first, second, prompt(9, seed=2)), (0, known, 0), strict=True):
        assert_same(results[handle], alone(tokens, params(5)), cached)
    assert served.timings.prompt_tokens == 60 + (60 - known) + 9


def test_who_shares_a_prompt_outlives_whom_it_waited_for():
    """The first of two equal prompts is aborted while the second waits for its pages: the second computes the rest."""
    for rounds in range(5):
        served = small(prefix_cache=rounds % 2 == 0)
        first, second = served.add(prompt(30), params(5), n=2)
        for _ in range(rounds):
            served.step()
        served.abort(first)
        finish(served)
        assert_same(served.result(second), alone(prompt(30), params(5, seed=1)))


@pytest.mark.parametrize("length", range(1, 2 * PAGE + 2))
def test_one_token_behind_a_known_beginning_is_a_decode_step(length):
    """T57: At every residue of a page a prompt that another one has computed gives the same first token."""
    served = small()
    handles = [*served.add(prompt(length), params(6), n=3), served.add(prompt(length), params(6))]
    results = served.run()
    served.check()
    for handle, cached in zip(handles, (0, *(length - 1,) * 3), strict=True):
        assert_same(results[handle], alone(prompt(length), params(6)), cached)


# The order of service


def test_a_higher_priority_is_served_first():
    served = small(max_batch=1)
    order = {served.add(prompt(9, seed=i), params(3), priority=p): (i, p) for i, p in enumerate((0, -1, 2, 0, 2))}
    ended = [event.handle for _ in range(40) for event in served.step() if event.generation]
    assert [order[handle] for handle in ended] == [(2, 2), (4, 2), (0, 0), (3, 0), (1, -1)]


def test_a_deadline_ends_a_request_with_what_it_has(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("m3jax.decoding.engine.engine.perf_counter", lambda: clock[0])
    served = small(max_batch=1)
    late, waiting, other = (served.add(prompt(9, seed=i), params(90), deadline=d) for i, d in enumerate((5, 7, None)))
    for _ in range(3):
        served.step()
    clock[0] = 6.0
    served.step()
    clock[0] = 8.0
    finish(served)
    whole = alone(prompt(9), params(90))
    found = served.result(late)
    assert found.stop_reason == "deadline" and found.tokens == whole.tokens[: len(found.tokens)] != []
    assert served.result(waiting).stop_reason == "deadline" and len(served.result(waiting).tokens) < 10
    assert_same(served.result(other), alone(prompt(9, seed=2), params(90)))


def test_a_short_prompt_is_not_held_back_by_a_long_one():
    """Behind a prompt of 24 chunks one of two chunks has its first token after four calls of prefill."""
    served = small(prefill_rows=1)
    long = served.add(prompt(190), params(1))
    short = served.add(prompt(16, seed=1), params(1))
    calls = 0
    while served.reason(short) == "unfinished":
        served.step()
        calls += 1
    assert calls <= 4 and served.reason(long) == "unfinished"
    assert served.run()[long] == alone(prompt(190), params(1))


def test_a_long_prompt_goes_on_whatever_comes_behind_it():
    """With a new short prompt in every round the long one has its first token after two calls a chunk."""
    served = small(prefill_rows=1, prefix_cache=False)
    long = served.add(prompt(100), params(1))
    for round_ in range(26):
        served.add(prompt(5, seed=round_), params(1))
        served.step()
    assert served.reason(long) == "length"


def test_who_lacks_pages_is_passed_a_bounded_number_of_times():
    """A request of all pages waits for them; MOST_PASSES short ones pass it, and then it is its turn."""
    served = small(pages=16, max_length=64, prefix_cache=False)
    served.add(prompt(8, seed=99), params(20))
    served.step()
    large = served.add(prompt(62), params(1))
    others = []
    for round_ in range(80):
        others.append(served.add(prompt(3, seed=round_), params(9)))
        served.step()
        served.check()
        if served.prompt_progress(large)[1]:
            break
    passed = [handle for handle in others if served.reason(handle) != "unfinished" or served.prompt_progress(handle)[1]]
    assert MOST_PASSES <= len(passed) <= MOST_PASSES + 3  # those in the other rows may be read before it
    assert_same(served.run()[large], alone(prompt(62), params(1)))


# New weights


@pytest.mark.parametrize("live", ["finish", "restart", "keep"])
def test_new_weights_between_rounds(live):
    """Every token carries the version that drew it; pages of the old weights are not found; nothing compiles."""
    served, first, second = small(), prompt(21), prompt(30, seed=1)
    warm = small()
    serve(warm, (prompt(40), params(5)), (prompt(40), params(5)))
    handle = served.add(first, params(12))
    for _ in range(4):
        served.step()
    so_far = served.result(handle).tokens
    assert 0 < len(so_far) < 12
    with compilations() as seen:
        assert served.update(fake(seed=7), live) == 1
        assert served.pages["cached"] == 0
        other = served.add(second, params(6))
        again = served.add(first, params(6))
        results = served.run()
    assert seen == []
    served.check()
    assert_same(results[other], alone(second, params(6), seed=7), 0)
    assert results[other].versions == [1] * 6
    assert_same(results[again], alone(first, params(6), seed=7), 0 if live == "finish" else None)
    found = results[handle]
    if live == "finish":
        assert_same(found, alone(first, params(12)))
        assert found.versions == [0] * 12
    elif live == "restart":
        assert_same(found, alone(first, params(12), seed=7))
        assert found.versions == [1] * 12
    else:
        rest = 12 - len(so_far)
        assert found.tokens == so_far + alone((*first, *so_far), params(rest), seed=7).tokens
        assert found.versions == [0] * len(so_far) + [1] * rest


def test_weights_that_cannot_be_served_are_refused_and_change_nothing(unchecked):
    served = small()
    handle = served.add(prompt(9), params(4))
    with pytest.raises(ValueError, match=r"parameter \.head of the new model is float32"):
        served.update(replace(fake(), head=fake().head[:-1]))
    with pytest.raises(ValueError, match="live = 'later'"):
        served.update(fake(), live="later")
    assert served.run()[handle].versions == [0] * 4


# Known pages


def test_an_observer_knows_what_can_be_found():
    """The events of stored and evicted pages, played again, are the pages that a prompt finds."""
    served, known = small(pages=16, max_length=60), {}

    def observe(event: PageEvent) -> None:
        if event.what == "stored":
            assert event.number not in known and (event.parent is None or event.parent in known)
            known[event.number] = (*(known[event.parent] if event.parent is not None else ()), *event.tokens)
        elif event.what == "evicted":
            del known[event.number]
        else:
            known.clear()

    served.observe_pages(observe)
    for seed in range(5):
        serve(served, (prompt(17, seed=seed % 3), params(6)), (prompt(30, seed=seed), params(6)))
        assert len(known) == served.pages["cached"]
        assert all(served.known_tokens((*tokens, 0)) == len(tokens) for tokens in known.values())
    assert served.pages["evictions"] > 0
    served.update(jax.tree.map(jnp.copy, fake()))
    assert known == {}
