"""Placeholders in prompts, and the arrays that a call of the model takes: which feature goes where."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.comparisons import assert_equal
from support.media import blank_image, blank_video, clip, picture

from m3jax import M3Config
from m3jax.media import (
    PlaceholderIds,
    batch,
    expand_text,
    expand_tokens,
    feature_places,
    process_image,
    process_video,
)
from m3jax.media.packing import bucket_size, pack, pack_layout, segments
from m3jax.media.placeholders import END, IMAGE, START, VIDEO
from m3jax.media.places import segment_places

IDS = PlaceholderIds()
VISION = M3Config.tiny(vision_config={"patch_size": 14, "vision_segment_max_frames": 4})
encode = lambda text: [ord(letter) for letter in text]


def test_an_image_in_text():
    text = expand_text(f"a {IMAGE} b {IMAGE}", [blank_image(2, 4), blank_image(2, 2)])
    assert text == f"a {START}{IMAGE}{IMAGE}{END} b {START}{IMAGE}{END}"


def test_a_video_in_text():
    """A time and the brackets of an image for each pair of frames, across chunks; without a frame rate no times."""
    grids = ((4, 2, 4), (1, 2, 4))
    pair = f"{START}{VIDEO}{VIDEO}{END}"
    stamped = expand_text(f"{VIDEO}?", videos=[blank_video(grids, (0.0, 1.0, 2.05, 3.0, 61.96))])
    seconds = ["0.0", "1.0", "2.0", "3.0", "62.0"]
    assert stamped == "".join(f"]<]{second} seconds[>[{pair}" for second in seconds) + "?"
    assert expand_text(VIDEO, videos=[blank_video(grids)]) == 5 * pair


def test_images_and_videos_mixed():
    """Each kind is counted by itself: the first image goes to the first image placeholder, wherever videos stand."""
    images, videos = [blank_image(2, 2), blank_image(2, 6)], [blank_video(((2, 2, 4),), (0.0, 0.5))]
    text = f"{IMAGE}x{VIDEO}y{IMAGE}"
    pair = f"{START}{VIDEO}{VIDEO}{END}"
    expected = f"{START}{IMAGE}{END}x]<]0.0 seconds[>[{pair}]<]0.5 seconds[>[{pair}y{START}{IMAGE}{IMAGE}{IMAGE}{END}"
    assert expand_text(text, images, videos) == expected
    tokens = expand_tokens([IDS.image, 120, IDS.video, 121, IDS.image], images, videos, encode=encode)
    names = {START: IDS.start, END: IDS.end, IMAGE: IDS.image, VIDEO: IDS.video}
    for name, token in names.items():
        expected = expected.replace(name, chr(token))
    assert tokens == encode(expected)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_more_placeholders_than_images_or_fewer(count):
    """Also a prompt that was expanded before: its placeholders are not images."""
    images = [blank_image(2, 2)] * count
    with pytest.raises(ValueError, match=f"the prompt has 2 image placeholders for {count} images: write one"):
        expand_text(f"{IMAGE} {IMAGE}", images)
    with pytest.raises(ValueError, match=f"has 2 video placeholders for {count} videos"):
        expand_tokens([IDS.video, IDS.video], [], [blank_video(((1, 2, 2),))] * count)
    with pytest.raises(ValueError, match="has 4 image placeholders for 1 images"):
        expand_text(expand_text(IMAGE, [blank_image(4, 4)]), [blank_image(4, 4)])


def test_time_stamps_need_a_tokenizer():
    with pytest.raises(ValueError, match="time stamps, which are text: give encode"):
        expand_tokens([IDS.video], videos=[blank_video(((1, 2, 2),), (0.0,))])


def test_placeholder_ids_of_a_config():
    assert IDS._asdict() == dict(image=200025, video=200026, start=200029, end=200030)  # of M3's tokenizer
    tiny = lambda **extra: PlaceholderIds.of_config(M3Config.tiny(extra=extra))
    assert tiny() == IDS and tiny(image_token_index=7, video_token_index=9) == IDS._replace(image=7, video=9)
    assert tiny(image_token_index=0, video_token_index=255) == IDS._replace(image=0, video=255)
    for wrong in (256, -1, "7"):
        with pytest.raises(ValueError, match=r"video_token_index = .* outside the vocabulary of 256"):
            tiny(video_token_index=wrong)


def test_placeholder_ids_of_a_tokenizer():
    from m3jax.text import Tokenizer

    class Backend:
        def token_to_id(self, text):
            return {IMAGE: 5, VIDEO: 6, START: 7, END: 8}.get(text)

    class Blind(Backend):
        def token_to_id(self, text):
            return None if text == END else 5

    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer.backend = Backend()
    assert PlaceholderIds.of_tokenizer(tokenizer) == (5, 6, 7, 8)
    tokenizer.backend = Blind()
    with pytest.raises(ValueError, match=r"no token .*end of image.*knows no images and videos"):
        PlaceholderIds.of_tokenizer(tokenizer)


def test_a_batch():
    """Images first, then chunks of videos; positions begin anew in each, in merge-block order; padding is marked."""
    image, video = process_image(picture(28, 112)), process_video(clip(9, 28, 112))
    media = batch([image], [(video.patches, video.grid)], VISION)
    assert_equal(media.patches[:16], image.patches, "patches of the image", "patch value")
    assert_equal(media.patches[16:96], video.patches, "patches of the video", "patch value")
    assert len(media.patches) == 256 and not media.patches[96:].any()
    segments = np.repeat([0, 1, 2, -1], [16, 64, 16, 160])
    assert_equal(media.segments, segments, "segments", "patch")
    block = [(0, 0), (0, 1), (1, 0), (1, 1)]
    rows = [(row, 2 * part + column) for part in range(4) for row, column in block]
    positions = [(t, *place) for chunk in ([0], [0, 1, 2, 3], [0]) for t in chunk for place in rows]
    assert_equal(media.positions[:96], positions, "positions", "patch thw")
    assert (int(media.image_features), int(media.video_features)) == (4, 20)
    assert all(isinstance(leaf, np.ndarray) for leaf in media) and media.patches.dtype == np.float32


def test_a_layout_is_a_batch_without_the_values_of_patches():
    """Also of no segment: then all is padding."""
    parts = segments([process_image(picture(28, 56))], [process_video(clip(3, 28, 28))], VISION)
    for given_parts in (parts, parts[:1], ()):
        size = 8 + sum(len(segment.patches) for segment in given_parts)
        whole, layout = pack(given_parts, size), pack_layout(given_parts, size)
        assert whole.patches.shape == (size, 1176) and layout.patches.shape == (size, 0)
        for name in whole._fields[1:]:
            assert_equal(
                getattr(layout, name), getattr(whole, name), name, " ".join("abc"[: getattr(whole, name).ndim])
            )
    assert (whole.segments == -1).all() and not whole.positions.any() and not whole.patches.any()
    assert int(whole.image_features) == int(whole.video_features) == 0


def test_a_clip_in_one_row_is_cut_into_chunks():
    """Trap: a gateway sends a video's grid as one row, the hub's processor a row a chunk; both give equal segments."""
    video = process_video(clip(19, 28, 112))
    assert video.grid == ((4, 2, 8), (4, 2, 8), (2, 2, 8))
    whole, cut = (batch(videos=[(video.patches, grid)], config=VISION) for grid in ((10, 2, 8), np.array(video.grid)))
    for name, left, right in zip(whole._fields, whole, cut, strict=True):
        assert_equal(left, right, name)
    long = M3Config.tiny(vision_config={"vision_segment_max_frames": 8})
    assert batch(videos=[(video.patches, (10, 2, 8))], config=long).segments.max() == 1


def test_permuted_images_are_permuted_segments():
    images = [process_image(picture(30 + 28 * number, 60, number)) for number in range(3)]
    order = [2, 0, 1]
    there, back = batch(images, config=VISION), batch([images[number] for number in order], config=VISION)
    for place, number in enumerate(order):
        old, new = there.segments == number, back.segments == place
        assert_equal(back.patches[new], there.patches[old], f"patches of image {number}", "patch value")
        assert_equal(back.positions[new], there.positions[old], f"positions of image {number}", "patch thw")


def test_buckets_are_few():
    """Four sizes a doubling, none a quarter above what it holds but for the smallest: the programs to compile."""
    sizes = [bucket_size(count) for count in range(1, 10_001)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 22 and all(size % 4 == 0 for size in sizes)
    assert sorted(set(sizes))[:10] == [256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280]
    assert all(count <= size < max(257, 1.25 * count + 1) for count, size in enumerate(sizes, 1))


@given(
    rows=st.lists(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 5)), max_size=3), min_size=1),
    seed=st.integers(0, 99),
)
def test_features_go_to_their_placeholders(rows, seed):
    """Whatever the rows of tokens hold: the n-th image's features stand between the n-th image's brackets."""
    draw, prompts, images, videos = np.random.default_rng(seed), [], [], []
    for row in rows:
        prompt, row_images, row_videos = [1], [], []
        for is_video, height, width in row:
            prompt += [IDS.video if is_video else IDS.image, *draw.integers(0, 99, draw.integers(0, 3))]
            grids = ((height, 2, 2 * width), (width, 2, 2 * width))
            (row_videos if is_video else row_images).append(
                blank_video(grids, (0.5,) * (height + width)) if is_video else blank_image(2 * height, 2 * width)
            )
        prompts.append(expand_tokens(prompt, row_images, row_videos, encode=encode))
        images, videos = images + row_images, videos + row_videos
    if not images and not videos:
        return
    length = max(map(len, prompts))
    tokens = np.array([prompt + [0] * (length - len(prompt)) for prompt in prompts])
    media = batch(images, videos, VISION)
    places = feature_places(tokens, media)
    flat, count = tokens.reshape(-1), sum(image.tokens for image in images)
    total = count + sum(video.tokens for video in videos)
    assert (flat[places[:count]] == IDS.image).all() and (flat[places[count:total]] == IDS.video).all()
    assert (places[total:] == -1).all() and len(places) == len(media.patches) // 4
    assert (np.diff(places[:count]) > 0).all() and (np.diff(places[count:total]) > 0).all()
    starts = np.flatnonzero(np.diff(media.segments[::4][:total], prepend=-1))
    assert (flat[places[starts] - 1] == IDS.start).all()


def test_features_that_do_not_fit_the_prompt():
    small, large = blank_image(2, 2), blank_image(2, 6)
    tokens = np.array([expand_tokens([9, IDS.image, 9, IDS.image], [small, large])])
    assert feature_places(tokens, batch([small, large])).tolist()[:5] == [2, 6, 7, 8, -1]
    with pytest.raises(ValueError, match=r"segment 0 .* placeholders at 2 and 6 and none between.*another order"):
        feature_places(tokens, batch([large, small]))
    with pytest.raises(ValueError, match=r"have 4 image placeholders \(id 200025\) for 3 features"):
        feature_places(tokens, batch([large]))
    with pytest.raises(ValueError, match="have 0 video placeholders"):
        feature_places(tokens, batch([small, large], [blank_video(((1, 2, 2),))]))
    with pytest.raises(ValueError, match=r"have 4 image placeholders .* for 5 features"):
        feature_places(tokens, batch([small, large, small]))


def test_places_of_segments_that_are_not_packed():
    """An array for each image and each chunk of a video, also for one of them and for none."""
    images, videos = [blank_image(2, 4), blank_image(2, 2)], [blank_video(((2, 2, 4), (1, 2, 4)))]
    tokens = expand_tokens([IDS.image, 5, IDS.video, IDS.image], images, videos)
    found = segments(images, videos)
    assert [(part.grid, part.features, part.is_video) for part in found] == [
        ((1, 2, 4), 2, False), ((1, 2, 2), 1, False), ((2, 2, 4), 4, True), ((1, 2, 4), 2, True)
    ]  # fmt: skip
    places = segment_places(tokens, found)
    assert [part.tolist() for part in places] == [[1, 2], [18], [6, 7, 10, 11], [14, 15]]
    assert all(
        tokens[place] == (IDS.image if number < 2 else IDS.video) for number, at in enumerate(places) for place in at
    )
    assert [part.tolist() for part in segment_places(tokens[:4], found[:1])] == [[1, 2]] and segment_places(
        [9], ()
    ) == []
    with pytest.raises(ValueError, match="for 2 features"):
        segment_places([9], found[:1])


def test_a_chunk_has_four_temporal_patches_where_no_config_says_another_number():
    for config in (None, M3Config.tiny(vision_config={})):
        grids = [part.grid for part in segments((), [blank_video(((9, 2, 2),))], config)]
        assert grids == [(4, 2, 2), (4, 2, 2), (1, 2, 2)]


ROWS = np.zeros((8, 1176), np.float32)


@pytest.mark.parametrize(
    ("given_media", "reason"),
    [
        (dict(), "no image and no video: leave `media` out"),
        (dict(images=[(ROWS, (1, 2, 2))]), "image 1 has 8 patches, and its grid .1, 2, 2. has 4"),
        (
            dict(images=[(ROWS, (1, 1, 8))]),
            "image 1 has the grid .1, 1, 8.: must be .t, h, w. in patches, h and w",
        ),
        (dict(images=[(ROWS, (2, 2, 0))]), "must be .t, h, w."),
        (dict(images=[(ROWS, (2, 2, 2))]), "image 1 has grids .*: an image has one"),
        (dict(images=[(ROWS.astype(np.float64), (1, 2, 4))]), r"patches float64 \[8, 1176\]: must be float32"),
        (dict(videos=[(ROWS[:, :588], (1, 2, 4))]), r"video 1 has patches float32 \[8, 588\]"),
        (dict(images=[blank_image(2, 2)], config=M3Config.tiny()), "no vision_config: it takes text alone"),
        (dict(images=[blank_image(2, 2)], config=M3Config.tiny(vision_config={"patch_size": 16})), "patch_size = 16"),
        (
            dict(
                images=[blank_image(2, 2)],
                config=M3Config.tiny(vision_config={"img_token_compression_config": {"spatial_merge_size": 4}}),
            ),
            "spatial_merge_size = 4 is not supported, only 2",
        ),
        (
            dict(images=[blank_image(2, 2)], config=M3Config.tiny(vision_config={"temporal_patch_size": 1})),
            "temporal_patch_size = 1 is not supported, only 2",
        ),
        (
            dict(images=[blank_image(2, 2)], config=M3Config.tiny(vision_config={"vision_segment_max_frames": 1.5})),
            "vision_segment_max_frames = 1.5: must be a positive integer",
        ),
        (
            dict(images=[blank_image(2, 2)], config=M3Config.tiny(vision_config={"vision_segment_max_frames": 0})),
            "vision_segment_max_frames = 0: must be a positive integer",
        ),
    ],
)
def test_media_that_cannot_be_packed(unchecked, given_media, reason):
    with pytest.raises(ValueError, match=reason):
        batch(**given_media)
