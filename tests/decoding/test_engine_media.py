"""Requests with images and videos, over a model that runs in no time; with a real tower in test_engine_vision.py."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
from support import tiny
from support.compilations import compilations
from support.engines import finish, params
from support.fake_model import FakeModel
from support.fake_seer import IMAGE, VIDEO, FakeSeer, seeing_config
from support.media import noise_patches

from m3jax.decoding import Engine, Media, engine_for
from m3jax.decoding.engine.media import FeatureRows, PlacedSegment, Placer, prefix_keys
from m3jax.media import batch, feature_places
from m3jax.media.packing import Segment
from m3jax.media.placeholders import PlaceholderIds

CONFIG = seeing_config(index_block_size=4, max_position_embeddings=128)
IDS = PlaceholderIds(image=IMAGE, video=VIDEO)
SHAPE = dict(pages=40, max_batch=4, prefill_chunk=(3, 8), steps_per_call=2, max_length=64, max_stop_ids=2)
NEW = 12


@cache
def model() -> FakeSeer:
    return FakeSeer.random(CONFIG)


def engine(**changes) -> Engine:
    return Engine(model(), **SHAPE | dict(media_patches=(8, 32), media_tokens=40) | changes)


@cache
def warm() -> Engine:
    """One for tests that look at counters only by their differences."""
    served = engine()
    served.warmup()
    return served


PICTURES = [noise_patches(grid, seed) for seed, grid in enumerate([(1, 4, 4), (1, 4, 4), (1, 2, 4), (1, 2, 2)])]
CLIP = noise_patches((6, 2, 4), seed=7)  # chunks of 8 and 4 features, a pair of frames has 2


def image(number: int) -> tuple[int, ...]:
    """The placeholders of a picture."""
    return (IMAGE,) * (len(PICTURES[number][0]) // 4)


CLIP_TOKENS = sum(((VIDEO, VIDEO, 50 + pair) for pair in range(6)), ())


def of(*numbers: int, clip: bool = False) -> tuple[tuple[int, ...], Media]:
    """A prompt with some pictures, a token between two of them, and perhaps the clip behind the first."""
    pieces = [(*image(number), 10 + place) for place, number in enumerate(numbers)]
    if clip:
        pieces.insert(1, CLIP_TOKENS)
    tokens = sum(pieces, (7, 8, 9))
    return tokens, Media([PICTURES[number] for number in numbers], [CLIP] if clip else [])


def plain(tokens: tuple[int, ...], media: Media, count: int = NEW) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities from the definition: all media in one call, no cache, no engine."""
    packed = batch(media.images, media.videos)
    places = feature_places(np.array([tokens]), packed, IDS)
    table = np.array(model().base.embed, np.float64)
    x = table[np.array(tokens)]
    x[places[places >= 0]] = np.asarray(model().features(packed))[places >= 0]
    new, logprobs = [], []
    for _ in range(count):
        hidden = 0.7 ** np.arange(len(x) - 1, -1, -1) @ x
        logits = np.array(model().base.head, np.float64) @ hidden
        new.append(int(logits.argmax()))
        logprobs.append(logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        x = np.concatenate([x, table[new[-1:]]])
    return new, logprobs


def assert_plain(served: Engine, handle: int, work: tuple[tuple[int, ...], Media]) -> None:
    found, (tokens, logprobs) = served.result(handle), plain(*work)
    assert found.tokens == tokens
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=0, atol=2e-4)


def serve(served: Engine, *works: tuple[tuple[int, ...], Media]) -> list[int]:
    handles = [served.add(tokens, params(NEW), media) for tokens, media in works]
    finish(served)
    return handles


MIX = [of(0), of(1), of(3, 2, 0), of(0, 0), of(2, 1, clip=True), of(clip=True), of(3)]
MIX.append(((1, 2, *of(0)[0]), of(0)[1]))  # a chunk of eight begins with the last feature


def test_every_request_is_the_definition():
    """Whole images, a cut inside each, a video of two chunks, both mixed: tokens and log-probabilities are plain."""
    served = warm()
    for handle, work in zip(serve(served, *MIX), MIX, strict=True):
        assert_plain(served, handle, work)
    assert any(len(tokens) > SHAPE["prefill_chunk"][1] for tokens, _ in MIX)


def test_the_features_of_two_images_differ_enough_to_tell():
    """Two images give different tokens: if they did not, the tests here could not tell them apart."""
    first, second = (plain(*of(number)) for number in (0, 1))
    assert first[0] != second[0]


def test_two_images_behind_the_same_ids_share_no_page():
    """Equal placeholder ids are not equal contents: pages are known by both; what stands before is shared."""
    served = engine()
    prefix = tuple(range(4))  # a page of text
    works = [(prefix + tokens + prefix, media) for tokens, media in (of(0), of(1), of(0))]
    found = []
    for work in works:
        (handle,) = serve(served, work)
        assert_plain(served, handle, work)
        found.append(served.result(handle).cached_tokens)
    whole = (len(works[0][0]) - 1) // 4 * 4
    assert found == [0, 4, whole]
    assert whole > 8  # pages of the image itself are found too


def test_the_grid_is_a_part_of_the_contents():
    """The same patches in another shape are another image."""
    patches, _ = PICTURES[0]
    wide, tall = ((of(0)[0], Media([(patches, grid)])) for grid in ((1, 4, 4), (1, 2, 8)))
    served = engine()
    for work in (wide, tall):
        (handle,) = serve(served, work)
        assert_plain(served, handle, work)
    assert served.media["computed"] == 2
    assert served.result(handle).cached_tokens == 0


def test_an_image_and_a_chunk_of_the_same_patches_share_no_page():
    """Their placeholders differ, which a draft reads."""
    served = engine()
    serve(served, of(0))
    tokens, _ = of(0)
    moving = tuple(VIDEO if token == IMAGE else token for token in tokens)
    (handle,) = serve(served, (moving, Media(videos=[PICTURES[0]])))
    assert served.result(handle).cached_tokens == 0


def test_features_are_computed_once():
    """The same picture twice in a prompt, in two requests that run side by side, and again later."""
    served = engine(prefix_cache=False)
    serve(served, of(0, 0), of(0, 1))
    assert (served.media["computed"], served.media["segments"]) == (2, 2)
    serve(served, of(1, 0))
    assert served.media["computed"] == 2


def test_a_cached_prompt_needs_no_tower():
    """Features whose places are all in known pages are not computed again, even when they were dropped."""
    served = engine()
    work = (of(0)[0] + (1, 2, 3, 4, 5), of(0)[1])
    serve(served, work)
    for seed in range(10, 15):  # fill what the device keeps
        served.add((IMAGE,) * 8 + (seed,), params(1), Media([noise_patches((1, 4, 8), seed)]))
        finish(served)
    before = served.media
    assert before["dropped"] > 0
    (handle,) = serve(served, work)
    assert_plain(served, handle, work)
    assert served.media["computed"] == before["computed"]


def test_features_that_a_prompt_needs_are_not_dropped():
    """More pictures at once than the device keeps: the oldest prompt's stay, and all end as they would alone."""
    served = engine()
    tokens = (7, *(IMAGE,) * 8, 9, *(IMAGE,) * 4, 5)
    works = [(tokens, Media([noise_patches((1, 4, 8), seed), PICTURES[seed % 2]])) for seed in range(20, 26)]
    for handle, work in zip(serve(served, *works), works, strict=True):
        assert_plain(served, handle, work)
    assert served.media["dropped"] > 0


def test_rows_of_features_are_given_to_the_segment_used_last():
    rows = FeatureRows(5)
    first, second = rows.take(1, 2, ()).tolist(), rows.take(2, 3, ()).tolist()
    assert (first, second) == ([0, 1], [2, 3, 4])
    assert rows.take(3, 4, (1, 2)) is None and rows.take(3, 4, (2,)) is None  # two rows are not enough
    assert rows.statistics() == dict(rows=5, used=5, segments=2, computed=2, dropped=0)
    assert rows.rows(1).tolist() == [0, 1]  # a use: now the second is the oldest
    assert set(rows.take(3, 2, ()).tolist()) <= {2, 3, 4}
    assert 1 in rows and 2 not in rows and 3 in rows
    assert rows.statistics() == dict(rows=5, used=4, segments=2, computed=3, dropped=1)
    rows.forget()
    assert rows.statistics() == dict(rows=5, used=0, segments=0, computed=3, dropped=3)
    assert sorted(rows.take(4, 5, ()).tolist()) == [0, 1, 2, 3, 4]


def test_a_segment_is_where_its_features_are():
    patches = np.zeros((12, 3), np.float32)
    placed = PlacedSegment(Segment(patches, (1, 2, 6), False), np.array([4, 5, 7], np.int32), 10)
    assert placed.segment.features == 3 and placed.keys.tolist() == [-12, -13, -14]
    inside = [placed.is_in(*part) for part in ((0, 4), (0, 5), (7, 8), (8, 9), (5, 6), (6, 7))]
    assert inside == [False, True, True, False, True, True]
    assert prefix_keys((1, 2, 3, 4, 9, 9, 5, 9), [placed]) == (1, 2, 3, 4, -12, -13, 5, -14)
    assert prefix_keys((1, 2), ()) == (1, 2)


def test_a_step_waits_for_no_tower_that_others_need():
    """Thirty pictures of one prompt: a round runs one call's worth of patches, and the others go on in each."""
    served = engine(pages=80, max_length=128, prefill_chunk=32, media_tokens=64, media_patches=(16,))
    other = served.add((1, 2, 3), params(60))
    served.step()
    pictures = [noise_patches((1, 2, 4), seed) for seed in range(30)]
    tokens = sum(((IMAGE, IMAGE, number) for number in range(30)), ())
    many = served.add(tokens, params(2), Media(pictures))
    rounds = 0
    while served.media["computed"] < 30:
        before, computed = len(served.result(other).tokens), served.media["computed"]
        served.step()
        rounds += 1
        assert served.media["computed"] - computed <= 1
        assert len(served.result(other).tokens) == min(60, before + 2)
        if rounds == 3:  # a prompt of text overtakes
            text = served.add((5, 6), params(2))
            served.step()
            assert served.result(text).tokens
    assert rounds >= 29
    finish(served)
    assert served.result(many).tokens == plain(tokens, Media(pictures), 2)[0]


def test_small_pictures_share_a_round():
    """As many as one call of the largest size could have taken."""
    served = engine(pages=80, max_length=128, prefill_chunk=32, media_tokens=64, media_patches=(8, 32))
    pictures = [noise_patches((1, 2, 4), seed) for seed in range(6)]
    served.add(sum(((IMAGE, IMAGE) for _ in range(6)), (1,)), params(1), Media(pictures))
    served.step()
    assert served.media["computed"] == 4


def test_nothing_compiles_after_warmup():
    """Any number and size of images, none, a hit, a preemption: the sizes of calls alone are compiled."""
    served = warm()
    sizes = [noise_patches((1, 2, width)) for width in (6, 10, 14)]  # nothing else here has these
    with compilations() as seen:
        for count in range(4):
            tokens = sum(((IMAGE,) * (width // 2) for width in (6, 10, 14)[:count]), (count,))
            first = served.add(tokens, params(NEW), Media(sizes[:count]))
        served.step()
        served.copy(first)
        served.truncate(first, 0)
        served.update(served.served_model, "keep")  # which drops all pages
        finish(served)
    assert seen == []
    assert served.result(first).tokens == plain(tokens, Media(sizes))[0]


def test_the_tower_may_be_compiled_with_the_first_picture_of_a_size():
    """After a warm-up without it text compiles nothing, and of two pictures in one size of call only the first does."""
    served, named = engine(media_patches=(16, 48), media_tokens=77), []  # 77: a program that nobody has compiled before
    watch = lambda name: named.append(name) or nullcontext()
    served.warmup(programs=("prefill", "decode", "pages"))
    with compilations() as seen:
        serve(served, ((1, 2, 3), None))
    assert seen == []
    for patches, names in ((16, ["vision tower for 16 patches"]), (12, []), (20, ["vision tower for 48 patches"])):
        work = (IMAGE,) * (patches // 4), Media([noise_patches((1, 2, patches // 2))])
        named.clear()
        handle = served.add(work[0], params(NEW), work[1])
        with compilations() as seen:
            served.warmup_for(handle, watch)
            served.warmup_for(handle, watch)  # as for another one in the queue: what is compiled stays so
        assert (named, bool(seen)) == (names, bool(names))
        with compilations() as seen:
            finish(served)
        assert seen == []
        assert_plain(served, handle, work)


def test_an_engine_made_to_measure(monkeypatch):
    """One size of call for the tower, the bucket of the largest picture; none where no prompt shows any."""
    monkeypatch.setattr(Engine, "warmup", lambda *_, **__: None)
    (tokens, media), asked = of(0), params(NEW)
    made = engine_for(model(), [tokens, (1, 2)], [asked] * 2, media=[media, None], progress=False)
    assert made.shapes.media_patches == (256,)
    with pytest.raises(ValueError, match="it takes text alone"):
        engine_for(FakeModel.random(config=tiny.config("dM")), [tokens], [asked], media=[media], progress=False)


def test_text_pays_nothing():
    """An engine that serves text alone has no features, and its programs no argument for them."""
    served = engine(media_patches=(), media_tokens=None)
    assert served.media == {}
    handle = served.add((1, 2, 3), params(NEW))
    finish(served)
    assert len(served.result(handle).tokens) == NEW


def test_what_the_caller_does_to_the_patches_later_changes_nothing():
    """Else pages would be known by contents that were never read."""
    patches = PICTURES[0][0].copy()
    work = of(0)[0], Media([(patches, PICTURES[0][1])])
    served = engine()
    handle = served.add(work[0], params(NEW), work[1])
    patches[:] = 0
    finish(served)
    assert_plain(served, handle, of(0))


def test_check_sees_a_feature_in_the_wrong_place(monkeypatch):
    """An engine whose features are off by one is caught by `check`, before anyone compares tokens."""
    rows_of = FeatureRows.rows
    monkeypatch.setattr(FeatureRows, "rows", lambda *given: np.roll(rows_of(*given), 1))
    served = engine()
    served.add(of(0, 1)[0], params(NEW), of(0, 1)[1])
    with pytest.raises(AssertionError, match="is known by the tokens"):
        finish(served)


WRONG = {
    r"the tokens have 4 image placeholders \(id 60\) for 8 features": ((*of(0)[0],), of(0, 1)[1]),
    r"the tokens have 4 image placeholders \(id 60\) for 0 features": (of(0)[0], None),
    r"the tokens have 4 image placeholders \(id 60\) for 2 features": (of(0)[0], of(2)[1]),
    r"the tokens have 0 video placeholders \(id 61\) for 12 features": (of(0)[0], Media([PICTURES[0]], [CLIP])),
    r"segment 0 .* has placeholders at 0 and 3 and none between": ((60, 9, 9, 60, 60, 60), Media([PICTURES[0]])),
    r"an image has 36 patches, grid \(1, 6, 6\), and this engine takes up to 32: make it smaller": (
        (60,) * 9,
        Media([noise_patches((1, 6, 6))]),
    ),
    r"image 1 has 16 patches, and its grid \(1, 2, 4\) has 8": ((60, 60), Media([(PICTURES[0][0], (1, 2, 4))])),
    r"image 1 has patches float64": ((60,) * 4, Media([(PICTURES[0][0].astype(np.float64), (1, 4, 4))])),
    r"media is \[\]: give m3jax.decoding.Media": ((1,), []),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("match", WRONG)
def test_wrong_media_is_one_line_and_disturbs_nobody(match):
    served = warm()
    other = served.add(of(1)[0], params(NEW), of(1)[1])
    served.step()
    pages = served.pages
    with pytest.raises(ValueError, match=match) as caught:
        served.add(WRONG[match][0], params(NEW), WRONG[match][1])
    assert "\n" not in str(caught.value)
    assert served.pages == pages
    finish(served)
    assert_plain(served, other, of(1))


def test_a_model_without_a_tower():
    blind = Engine(model().base, **SHAPE)
    with pytest.raises(ValueError, match="the model has no vision tower and takes text alone"):
        blind.add(of(0)[0], params(NEW), of(0)[1])
    with pytest.raises(ValueError, match="media_patches = 8: the model has no vision tower"):
        Engine(model().base, **SHAPE, media_patches=8)
    blind.add(of(0)[0], params(NEW))  # there the placeholder is a token like others
    text_only = engine(media_patches=())
    with pytest.raises(ValueError, match=r"this engine has media_patches = \(\) and takes text alone"):
        text_only.add(of(0)[0], params(NEW), of(0)[1])


def test_placeholders_outside_the_vocabulary_leave_text_alone():
    """A small random model keeps M3's ids: no prompt can hold them, so its engine serves text and refuses images."""
    config = tiny.config("dM", vision_config={}, extra={"image_token_index": 200025, "video_token_index": 200026})
    placer = Placer(config, can_see=True, sizes=(256,))
    assert placer.place((1, 2, 3), None) == ()
    with pytest.raises(ValueError, match="image_token_index = 200025: outside the vocabulary of 64"):
        placer.place((1, 2, 3), Media([noise_patches((1, 4, 4))]))
