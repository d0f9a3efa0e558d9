"""A request that one engine exports and another imports (T16), as prefill/decode disaggregation does."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support import tiny
from support.engines import CONFIG, SIZE, engine, finish, params, poison, prompt, quick, serve

from m3jax.decoding.engine import Snapshot, UnknownPages

WORK = prompt(45), params(20, temperature=0.8, seed=5)


@cache
def model():
    return tiny.model(CONFIG)


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """The programs of test_engine.py, for those are there already."""
    with quick():
        yield


@cache
def alone():
    return serve(engine(model()), WORK)[0]


def half_way(rounds: int):
    """An engine and a request in it after some rounds."""
    source = engine(model())
    handle = source.add(*WORK)
    for _ in range(rounds):
        source.step()
    return source, handle


# Rounds: not begun, in the prompt, at its end, in the continuation.
@pytest.mark.parametrize("rounds", [0, 2, 4, 7])
def test_an_imported_request_goes_on_with_the_same_tokens(rounds):
    source, handle = half_way(rounds)
    snapshot = Snapshot.from_bytes(source.export(handle).to_bytes())
    assert len(snapshot.new) == len(source.result(handle).tokens)
    target = engine(model())
    others = [target.add(prompt(20, seed=3), params(6))]  # its pages are others than in the source
    target.step()
    poison(target)
    moved = target.import_request(snapshot)
    before = target.timings.prompt_tokens
    finish(target)
    assert target.result(moved).tokens == alone().tokens
    np.testing.assert_allclose(target.result(moved).logprobs, alone().logprobs, rtol=0, atol=1e-5)
    # What was in the source's pages is not computed again; the other prompt may have had 8 tokens to go.
    left = len(snapshot.prompt) + len(snapshot.new) - snapshot.cached
    assert target.timings.prompt_tokens - before <= left + 8
    assert len(target.result(others[0]).tokens) == 6
    finish(source)
    assert source.result(handle).tokens == alone().tokens


def test_index_keys_travel_too():
    """T16: without them the import would choose other blocks, and other tokens would come out."""
    source, handle = half_way(7)
    snapshot = source.export(handle)
    assert snapshot.cached > 4 * SIZE  # selection is partial
    pages = [[(k, v, None if i is None else np.zeros_like(i)) for k, v, i in group] for group in snapshot.pages]
    target = engine(model())
    moved = target.import_request(replace(snapshot, pages=pages))
    finish(target)
    wrong = target.result(moved)
    assert not np.allclose(wrong.logprobs, alone().logprobs[: len(wrong.logprobs)], rtol=0, atol=1e-4)


def test_pages_that_the_target_knows_may_be_left_out():
    """What they hold in the snapshot means nothing then; a target that knows fewer refuses it and changes nothing."""
    source, handle = half_way(7)
    target, snapshot = engine(model()), source.export(handle)
    left_out = 4 * SIZE
    nothing = lambda x: None if x is None else np.concatenate([np.full_like(x[:, :4], np.nan), x[:, 4:]], axis=1)
    pages = [[tuple(map(nothing, stack)) for stack in group] for group in snapshot.pages]
    serve(target, ((*WORK[0][: 3 * SIZE], 1), params(2)))  # one page less
    before = target.pages["free"], target.pages["used"]
    with pytest.raises(UnknownPages, match="32 tokens were left out of the snapshot's pages, and 24 are known here"):
        target.import_request(replace(snapshot, pages=pages), left_out=left_out)
    target.check()
    assert (target.pages["free"], target.pages["used"]) == before and not target.busy
    serve(target, ((*WORK[0][: 4 * SIZE], 1), params(2)))
    assert target.known_tokens(WORK[0]) == left_out
    moved = target.import_request(replace(snapshot, pages=pages), left_out=left_out)
    finish(target)
    assert target.result(moved).tokens == alone().tokens


@pytest.mark.parametrize("length", [15, 16, 17, 100])
def test_pages_of_a_prompt_can_be_taken_while_the_rest_is_read(length):
    """Whole pages that were read, the last one in part at the end; at most eight, from whichever is asked for."""
    served, tokens = engine(model()), prompt(length)
    handle, found = served.add(tokens, params(9)), []
    assert served.export_pages(handle) == (0, None)
    is_going_on = True
    while is_going_on:
        is_going_on = served.prefill(decode_follows=False)
        read = served.prompt_progress(handle)[1]
        ready = read // SIZE if is_going_on else -(-length // SIZE)
        while len(found) < ready:
            count, group = served.export_pages(handle, first=len(found))
            assert count == min(8, ready - len(found))
            found += [[x[:, place] for stack in group for x in stack if x is not None] for place in range(count)]
        assert served.export_pages(handle, first=ready) == (0, None)
    whole = [x for group in served.export(handle).pages for x in _by_page(group)]
    for page, (arrays, expected) in enumerate(zip(found, whole, strict=False)):
        filled = min(SIZE, length - page * SIZE)
        for x, y in zip(arrays, expected, strict=True):  # [L K P H] or [L P I]
            np.testing.assert_array_equal(x[..., :filled, :], y[..., :filled, :])
    served.step()
    assert served.export_pages(handle, first=-(-length // SIZE)) == (0, None)  # new tokens' pages are not the prompt's


def _by_page(group):
    """Yield the arrays of each page of a snapshot's entry."""
    arrays = [x for stack in group for x in stack if x is not None]
    yield from ([x[:, place] for x in arrays] for place in range(8))


def test_another_cache_is_refused():
    source, handle = half_way(7)
    snapshot = source.export(handle)
    target = engine(model(), kv_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"its dtype of k in stack 0 is float32, this engine's bfloat16"):
        target.import_request(snapshot)
    other = engine(tiny.model(tiny.config("dM", index_topk_blocks=4)))
    with pytest.raises(ValueError, match=r"of another model or cache: its .*, this engine.s"):
        other.import_request(snapshot)
    assert not target.busy and not other.busy


def test_no_room_changes_nothing():
    source, handle = half_way(7)
    target = engine(model())
    busy, _ = target.add(prompt(100, seed=9), params(8)), target.add(prompt(30, seed=9), params(60))
    for _ in range(9):
        target.step()
    before = target.pages
    with pytest.raises(RuntimeError, match="page"):
        target.import_request(source.export(handle))
    assert {k: target.pages[k] for k in ("free", "used")} == {k: before[k] for k in ("free", "used")}
    finish(target)
    assert len(target.result(busy).tokens) == 8
