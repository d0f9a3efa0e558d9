"""Limits used up exactly, and sizes that line up: every slot of stop ids, biases and words, whole groups of pages."""

from collections.abc import Iterator
from functools import cache
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drafts import Knowing
from support.engines import finish, params, prompt, quick, serve
from support.fake_model import FakeConfig, FakeModel
from support.media import noise_patches

from m3jax.decoding import Engine
from m3jax.decoding.engine import media
from m3jax.decoding.engine.exchange import PAGES_A_CALL
from m3jax.decoding.sampling import WORD_TOKENS
from m3jax.media.packing import Segment

PAGE = 4
SLOTS = dict(max_stop_ids=4, max_biases=3, max_bad_words=3)
TOKENS = prompt(9)
# Without repetitions, so that each place of the continuation has a token of its own.
KNOBS = dict(repetition_penalty=8.0)


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


@cache
def fake() -> FakeModel:
    return FakeModel.random(0, FakeConfig(index_block_size=PAGE, max_position_embeddings=256))


def small(**changes) -> Engine:
    shape = dict(pages=40, max_batch=4, prefill_rows=2, prefill_chunk=48, steps_per_call=3, max_length=60)
    return Engine(fake(), **shape | SLOTS | changes)


@cache
def continuation(length: int = 9, new: int = 12) -> tuple[list[int], list[int]]:
    """The new tokens of a request alone, and as many that are none of them."""
    (whole,) = serve(small(), (prompt(length), params(new, **KNOBS)))
    return whole.tokens, [token for token in range(64) if token not in whole.tokens][:new]


@pytest.mark.parametrize("draft", [None, Knowing.of(3, 0, 1, 2, 0, 3, 1)], ids=["steps", "rounds"])
def test_a_request_ends_at_each_of_its_stop_ids(draft):
    """In prefill (the first token), in steps and in rounds, in each slot of all that there are."""
    tokens, others = continuation()
    assert len(set(tokens)) == len(tokens)
    cases = [(place, slot) for place in range(9) for slot in range(SLOTS["max_stop_ids"])]
    work = []
    for place, slot in cases:
        stop_ids = others[: SLOTS["max_stop_ids"] - 1]
        stop_ids.insert(slot, tokens[place])
        work.append((TOKENS, params(12, stop_ids, **KNOBS)))
    served = small() if draft is None else small(draft=draft, draft_tokens=3)
    results = serve(served, *work)
    for (place, slot), found in zip(cases, results, strict=True):
        expected = tokens[: place + 1], "stop_id"
        assert (found.tokens, found.stop_reason) == expected, f"stop id {slot} of {SLOTS['max_stop_ids']}"
    # As the last token that is allowed it ends the request, not the limit; with a limit below it the limit does.
    limits = [(place, limit) for place in range(1, 9) for limit in (place, place + 1)]
    results = serve(served, *((TOKENS, params(limit, [tokens[place]], **KNOBS)) for place, limit in limits))
    for (place, limit), found in zip(limits, results, strict=True):
        expected = tokens[:limit], "length" if limit == place else "stop_id"
        assert (found.tokens, found.stop_reason) == expected, f"limit {limit}, stop at token {place + 1}"


def test_each_slot_of_biases_and_bad_words_counts():
    """A bias that decides, and a word that would come, as the first to the last of as many as there are."""
    tokens, others = continuation()
    wanted = others[-1]
    for slot in range(SLOTS["max_biases"]):
        biases = [(token, -1.0) for token in others[: SLOTS["max_biases"] - 1]]
        biases.insert(slot, (wanted, 100.0))
        (found,) = serve(small(), (TOKENS, params(1, logit_bias=dict(biases))))
        assert found.tokens == [wanted], f"bias {slot} of {SLOTS['max_biases']}"
    for slot in range(SLOTS["max_bad_words"]):
        words = [tuple(others[:WORD_TOKENS]), (others[0],)]
        words.insert(slot, tuple(tokens[2 : 2 + WORD_TOKENS]))
        (found,) = serve(small(), (TOKENS, params(12, bad_words=words, **KNOBS)))
        last = 1 + WORD_TOKENS  # the word's last token
        assert found.tokens[:last] == tokens[:last] and found.tokens[last] != tokens[last], f"word {slot}"


def test_a_request_travels_with_any_number_of_cached_tokens(unchecked):
    """Pages go in groups of eight: whole groups, one page more and one less, pages filled to the last token or not.

    The target has other requests' pages; it knows nothing of the request, then all of its full pages.
    """
    source, target = small(prefix_cache=False), small()
    serve(target, (prompt(23, seed=1), params(5)))
    for cached in range(1, PAGES_A_CALL * PAGE + PAGE + 2):
        asked = prompt(cached, seed=2), params(6)
        handle = source.add(*asked)
        source.prefill()
        snapshot = source.export(handle)
        assert snapshot.cached == cached
        finish(source)
        for known in (0, cached // PAGE):
            used, free = target.pages["used"], target.pages["free"] + target.pages["cached"]
            moved = target.import_request(snapshot)
            target.check()
            assert target.pages["used"] - used == -(-cached // PAGE), f"{cached} tokens, {known} pages known"
            assert free - target.pages["free"] - target.pages["cached"] == -(-cached // PAGE)
            again = target.import_request(snapshot)
            target.check()
            assert target.pages["used"] - used == -(-cached // PAGE) + (cached % PAGE > 0), "shared, but the last"
            finish(target)
            for found in (target.result(moved), target.result(again)):
                assert found.tokens == source.result(handle).tokens, f"{cached} tokens, {known} pages known"


@given(st.lists(st.integers(0, 5), min_size=25, max_size=40))
def test_numbers_of_contents_forget_the_least_recently_used(contents):
    """Against a list of the last three contents: what is in it keeps its number, and no number is given twice."""
    images = [Segment(*noise_patches((1, 2, 2 + 2 * (i % 2)), seed=i), is_video=False) for i in range(6)]
    remembered, given_out = [], 0  # (content, number), the least recently used first
    with mock.patch.object(media, "_MOST_NUMBERS", 3):
        numbers = media.Numbers()
        for content in contents:
            known = [entry for entry in remembered if entry[0] == content]
            expected = known[0][1] if known else given_out
            assert numbers.of(images[content]) == expected, f"{content} after {remembered}"
            given_out += 0 if known else images[content].features
            remembered = [*(entry for entry in remembered if entry[0] != content), (content, expected)][-3:]
