"""Requests with images and videos through the tiny model and its tower: cut, cached, preempted, drafted, moved = plain.

Blocks of 8 and top 3: of prompts of 40 tokens most tokens drop blocks that they see.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from support.compilations import compilations
from support.drafts import draft
from support.engines import QUICK, finish, params, preemptions, quick, runner_of
from support.seeing import CONFIG, PICTURES, WORK, model, seeing_engine

from m3jax.decoding import Eagle3Drafter, Engine, Generation, Media
from m3jax.decoding.engine import Snapshot
from m3jax.media import PlaceholderIds, batch, feature_places
from m3jax.parallel import parse_mesh

NEW = 24
TOLERANCE = 1e-5  # of a log-probability, between programs that sum in different orders


@pytest.fixture(autouse=True, scope="module")
def quick_programs():
    with quick():
        yield


def add(served: Engine, number: int, new: int = NEW, **knobs) -> int:
    tokens, media = WORK[number]
    return served.add(tokens, params(new, **knobs), media)


@cache
def alone(number: int) -> Generation:
    """A request in an engine of its own."""
    served = seeing_engine(model())
    handle = add(served, number)
    finish(served)
    return served.result(handle)


def assert_plain(served: Engine, handle: int, number: int) -> None:
    found = served.result(handle)
    assert found.tokens == alone(number).tokens
    np.testing.assert_allclose(found.logprobs, alone(number).logprobs, rtol=0, atol=TOLERANCE)


def test_a_request_is_one_call_over_its_tokens():
    """Chunks that end inside pictures, and decode, give what one call gives of all tokens, with all pictures at once.

    A placeholder that was drawn is a token like others: only the prompts' ones have features.
    """
    prompts, rows = np.zeros((2, len(WORK), 72), np.int32)
    for number, (tokens, _) in enumerate(WORK):
        prompts[number, : len(tokens)] = tokens
        rows[number, : len(tokens) + NEW] = (*tokens, *alone(number).tokens)
    media = batch([p for _, m in WORK for p in m.images], [v for _, m in WORK for v in m.videos], model().config)

    @partial(jax.jit, compiler_options=QUICK)
    def run(model, rows, places, media):
        return jax.nn.log_softmax(model(rows, embeddings=model.embed(rows, model.features(media), places)))

    logprobs = np.asarray(run(model(), rows, feature_places(prompts, media, PlaceholderIds.of_config(CONFIG)), media))
    for number, (tokens, _) in enumerate(WORK):
        places = len(tokens) - 1 + np.arange(NEW)
        assert alone(number).tokens == logprobs[number, places].argmax(-1).tolist()
        expected = logprobs[number, places, alone(number).tokens]
        np.testing.assert_allclose(alone(number).logprobs, expected, rtol=0, atol=5 * TOLERANCE)


def test_pictures_matter():
    """Prompts of equal ids and other pictures have other tokens; and the pictures' features reach past three blocks."""
    assert alone(0).tokens != alone(1).tokens


@cache
def warm() -> Engine:
    """One engine for several tests, in which nothing is compiled after warm-up."""
    served = seeing_engine(model())
    served.warmup()
    return served


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.further)])
def test_companions_hits_and_preemptions(share):
    """Too few pages for all: the youngest start again, from known pages or from patches; some pictures twice."""
    served = warm() if share else seeing_engine(model(), prefix_cache=False)
    served.warmup()
    with compilations() as seen:
        handles = [add(served, number) for number in (*range(5), 0, 1)]
        finish(served)
    assert preemptions(served)
    assert seen == []
    for handle, number in zip(handles, (*range(5), 0, 1), strict=True):
        assert_plain(served, handle, number)


def test_copied_and_truncated():
    """While the prompt is read, and after."""
    served = warm()
    for rounds in (1, 4):
        first = add(served, 2)
        for _ in range(rounds):
            served.step()
        copied = served.copy(first)
        served.truncate(first, 0)
        finish(served)
        assert_plain(served, first, 2)
        assert_plain(served, copied, 2)


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_a_moved_request_goes_on(rounds):
    """Its patches travel: the receiver reads what the sender had not, and again what it has to give back."""
    source, target = warm(), seeing_engine(model())
    handle = add(source, 2)
    for _ in range(rounds):
        source.step()
    snapshot = Snapshot.from_bytes(source.export(handle).to_bytes())
    source.abort(handle)
    moved = target.import_request(snapshot)
    finish(target)
    assert_plain(target, moved, 2)
    again = target.import_request(snapshot)
    target.update(target.served_model, "keep")  # which drops all pages
    finish(target)
    assert_plain(target, again, 2)


def test_pages_that_came_from_elsewhere_are_known_by_their_contents():
    source, target = warm(), seeing_engine(model())
    handle = add(source, 0)
    for _ in range(5):
        source.step()
    target.import_request(source.export(handle))
    source.abort(handle)
    finish(target)
    for number, hit in ((1, 8), (0, 40)):
        found = add(target, number)
        finish(target)
        assert_plain(target, found, number)
        assert target.result(found).cached_tokens == hit


HOSTILE = {
    "the snapshot's media is 'x'": "x",
    "image 1 has the grid": Media(((PICTURES[0][0], ("a", "b", "c")),)),
    "image 1 has patches": Media((("x", (1, 4, 8)),)),
    "8 image placeholders .* for 0 features": Media(),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("match", HOSTILE)
def test_an_edited_snapshot_is_refused(match):
    source = warm()
    handle = add(source, 0)
    source.step()
    snapshot = source.export(handle)
    source.abort(handle)
    before = source.pages
    with pytest.raises(ValueError, match=match):
        source.import_request(replace(snapshot, media=HOSTILE[match]))
    assert source.pages == before


@pytest.mark.usefixtures("eight_devices")
def test_features_on_a_mesh_are_those_of_one_device():
    """Every device has all rows, and they stay where they were put."""
    found = []
    for mesh in (None, parse_mesh("data=2,tensor=2")):
        served = seeing_engine(model(mesh))
        place = runner_of(served).features.sharding
        add(served, 0)
        served._scheduler.admit()
        served._scheduler.read_media()
        assert runner_of(served).features.sharding.is_equivalent_to(place, 2)
        found.append(np.asarray(runner_of(served).features))
    assert place.is_fully_replicated and np.abs(found[0]).max() > 1
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.further
def test_drafted_in_the_invariant_mode_is_alone_to_the_bit_and_plain():
    """A picture runs through the tower alone, in a call of the size that its own patches ask for.

    An EAGLE3 draft reads the target's layers at pictures, and placeholders' own embeddings, however it is cut.
    """
    options = dict(draft=Eagle3Drafter(draft(fc_norm=True)), draft_tokens=3, invariant=True)
    served, order = seeing_engine(model(), **options), (3, 2, 0, 1, 4, 0)
    handles = [add(served, number) for number in order]
    finish(served)
    assert served.drafting.forwards
    for handle, number in zip(handles, order, strict=True):
        lonely = seeing_engine(model(), **options)
        only = add(lonely, number, 6)
        finish(lonely)
        found, expected = served.result(handle), lonely.result(only)
        assert (found.tokens[:6], found.logprobs[:6]) == (expected.tokens, expected.logprobs)
        assert_plain(served, handle, number)
