"""The sizes that images and frames are resized to: the engines' rules, tiers, and sizes that no rule allows."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3jax.media import LIMITS, LONG_SIDE_TIERS, PRESETS, smart_resize, target_stages
from m3jax.media.sizes import FACTOR, AreaRule, CapRule, Size, TierRule, area_size, cap_size, raised_size

# Height and width of an image, and of what each preset makes of it; tokens are a 784th of its pixels.
TABLE = {
    (672, 672): dict(hub=(672, 672), vllm=(672, 672), sglang=(672, 672), smg=(672, 672)),
    (448, 448): dict(hub=(448, 448), vllm=(448, 448), sglang=(448, 448), smg=(448, 448)),
    (720, 1280): dict(hub=(504, 896), vllm=(504, 896), sglang=(392, 672), smg=(504, 896)),
    (300, 400): dict(hub=(308, 392), vllm=(308, 392), sglang=(308, 420), smg=(308, 392)),
    (1, 1): dict(hub=(56, 56), vllm=(56, 56), sglang=(28, 28), smg=(112, 112)),
    (40, 400): dict(hub=(28, 392), vllm=(28, 392), sglang=(56, 420), smg=(112, 1120)),
    (70, 70): dict(hub=(56, 56), vllm=(56, 56), sglang=(84, 84), smg=(112, 112)),
    (13, 2600): dict(hub=(28, 812), vllm=(28, 2604), sglang=(28, 672), smg=(28, 9408)),
}
TOKENS = {
    (672, 672): (576, 576, 576, 576), (448, 448): (256, 256, 256, 256), (720, 1280): (576, 576, 336, 576),
    (300, 400): (154, 154, 165, 154), (1, 1): (4, 4, 1, 16), (40, 400): (14, 14, 30, 160), (70, 70): (4, 4, 9, 16),
    (13, 2600): (29, 93, 24, 336),
}  # fmt: skip
FRAMES = {(480, 640): (476, 644), (720, 1280): (560, 1008), (2160, 3840): (560, 1008), (300, 400): (308, 392)}
# SGLang shrinks a frame's long side to 672, rounds to pixels and raises to multiples of 28: 378 x 672 is 392 x 672.
CAPPED = {
    (480, 640): (504, 644), (720, 1280): (392, 672), (2160, 3840): (392, 672), (300, 400): (308, 420),
    (672, 672): (672, 672), (1344, 1344): (672, 672), (3, 600): (28, 616), (2, 400): (28, 420), (5, 1000): (28, 672),
    (29, 673): (56, 672), (1000, 5): (672, 28),
}  # fmt: skip

side = st.integers(1, 6000)


@pytest.mark.parametrize("size", TABLE)
def test_sizes_of_the_table(size):
    """Each engine's rule for images; 13 x 2600 differs, and the short side of SMG is raised to 112 first."""
    found = {name: target_stages(*size, preset.image)[-1] for name, preset in PRESETS.items()}
    assert {name: tuple(target) for name, target in found.items()} == TABLE[size]
    assert tuple(target.tokens for target in found.values()) == TOKENS[size]


def test_an_image_on_its_side_has_its_sides_changed():
    for (height, width), row in TABLE.items():
        turned = {name: tuple(target_stages(width, height, PRESETS[name].image)[-1]) for name in row}
        assert turned == {name: target[::-1] for name, target in row.items()}, (width, height)


@pytest.mark.parametrize("size", FRAMES)
def test_frames_have_a_budget_each(size):
    """Trap (smg #2575): the pixels of a video are bounded a frame, 602,112, whatever the number of frames."""
    for name in ("hub", "vllm", "smg"):
        assert tuple(target_stages(*size, PRESETS[name].frame)[-1]) == FRAMES[size], name


def test_sglang_caps_a_frame_before_it_is_raised():
    """A frame below the cap grows by less than a block of 28; above it the long side becomes the cap."""
    assert {size: tuple(target_stages(*size, PRESETS["sglang"].frame)[-1]) for size in CAPPED} == CAPPED
    assert tuple(target_stages(29, 673, PRESETS["sglang"].image)[-1]) == (56, 672)


def test_the_limits_are_the_hosted_api_s():
    """Facts of MiniMax's provider verifier and of its size rule, as they are written there."""
    assert asdict(LIMITS) == dict(
        aspect=200, image_bytes=31_457_280, video_bytes=52_428_800, image_pixels=12_845_056, video_pixels=301_056_000,
        short_side=112, fewest_fps=0.2, most_fps=5.0,
    )  # fmt: skip
    assert LONG_SIDE_TIERS == {"low": 504, "default": 1008, "high": 2016}
    assert {name: (preset.frames, preset.fps) for name, preset in PRESETS.items()} == {
        "hub": ("hub", 1.0), "vllm": ("vllm", 1.0), "sglang": ("sglang", 1.0), "smg": ("smg", 2.0)
    }  # fmt: skip


def test_sizes_of_672_in_a_config_are_no_square():
    """Trap: `"size": [672, 672]` of the hub's preprocessor_config stands for an area, 451,584 pixels, and no tiles."""
    assert smart_resize(720, 1280) == (504, 896) and smart_resize(2000, 500) == (1344, 336)
    assert PRESETS["hub"].image.max_pixels == 672 * 672


@given(height=side, width=side, name=st.sampled_from(list(PRESETS)))
def test_a_size_is_a_multiple_of_28_within_its_bounds(height, width, name):
    rule = PRESETS[name].image
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="more than 200 times"):
            target_stages(height, width, rule)
        return
    found = target_stages(height, width, rule)[-1]
    assert found.height % FACTOR == found.width % FACTOR == 0 and min(found) >= FACTOR, found
    most = getattr(rule, "max_pixels", 672 * 672)
    assert found.area <= most, (found, most)
    assert found.area >= getattr(rule, "min_pixels", FACTOR**2), found


@given(
    size=st.tuples(side, side), least=st.integers(1, 40), spread=st.integers(1, 40), min_side=st.sampled_from([0, 28])
)
def test_any_area_rule_gives_whole_blocks(size, least, spread, min_side):
    """Also where the least area is one block: a side that is rounded to 0 makes too small an area."""
    rule = AreaRule(min_pixels=784 * least, max_pixels=784 * least * spread, min_side=min_side)
    found, rounded = area_size(Size(*size), rule), Size(*(max(min_side, round(x / 28) * 28) for x in size))
    assert all(x % 28 == 0 and x >= 28 for x in found), found
    if rounded.area > rule.max_pixels:
        assert found.area <= rule.max_pixels or min(found) == 28, found
    else:
        assert found == rounded if rounded.area >= rule.min_pixels else found.area >= rule.min_pixels, found


def test_a_raised_image_may_fill_its_area():
    """It stays as it is up to the largest area, though its sides are no multiples of 28; above it, it is shrunk."""
    raised = lambda size, most: tuple(raised_size(Size(*size), AreaRule(short_side=100, max_pixels=most)))
    assert raised((50, 100), 20_000) == (100, 200) and raised((100, 50), 20_000) == (200, 100)
    assert raised((50, 100), 19_999) == (84, 196) and raised((100, 50), 19_999) == (196, 84)
    assert target_stages(112, 4000, PRESETS["smg"].image) == (Size(112, 4004),)  # not below 112: one stage
    assert target_stages(111, 111, PRESETS["smg"].image) == (Size(112, 112), Size(112, 112))


def test_a_cap_is_reached_and_not_exceeded():
    """A side that is the cap stays; one pixel more, raised to a block, is shrunk with the other."""
    for raise_first in (True, False):
        sizes = [cap_size(Size(*x), CapRule(cap=56, raise_first=raise_first)) for x in ((56, 28), (1, 56), (57, 57))]
        assert sizes == [(56, 28), (28, 56), (56, 56)]
    assert cap_size(Size(28, 57), CapRule(cap=56)) == (28, 56) and cap_size(Size(57, 28), CapRule(cap=56)) == (56, 28)
    # SGLang raises an image first, to 364 x 784, and a frame of a video not: 337 * 672 / 777 is 291.5.
    preset = PRESETS["sglang"]
    assert target_stages(337, 777, preset.image) == (Size(336, 672),)
    assert target_stages(337, 777, preset.frame) == (Size(308, 672),)


def test_an_image_is_raised_before_it_is_resized_in_one_preset_alone():
    stages = {name: target_stages(13, 2600, preset.image) for name, preset in PRESETS.items()}
    assert [len(found) for found in stages.values()] == [1, 1, 1, 2]
    assert stages["smg"][0] == (54, 10625)  # 112 x 22400 shrunk to a quarter above the budget
    assert target_stages(40, 400, PRESETS["smg"].image)[0] == (112, 1120)


def test_tiers():
    """A long side above the tier is shrunk to it, else a short side below 112 raised to that; both rounded to 28."""
    size = lambda height, width, tier: tuple(target_stages(height, width, TierRule(long_side=tier))[-1])
    tiers = [size(2160, 3840, tier) for tier in LONG_SIDE_TIERS.values()]
    assert tiers == [(280, 504), (560, 1008), (1120, 2016)]  # 1134 is 40.5 times 28, and half goes to even
    tokens = [size(2160, 3840, tier)[0] * size(2160, 3840, tier)[1] for tier in (252, 504, 1008)]
    assert tokens == sorted(set(tokens))
    assert size(50, 100, 1008) == (112, 224)
    assert size(50, 1008, 1008) == (112, 2268) and size(50, 1009, 1008) == (56, 1008)  # a tier is reached, or exceeded
    assert size(50, 2000, 1008) == (28, 1008)  # the two steps exclude each other
    assert size(300, 400, 1008) == (308, 392)
    assert LIMITS.image_pixels == 3584 * 3584


@pytest.mark.parametrize(
    ("height", "width", "reason"),
    [
        (10, 2001, r"10 x 2001 pixels \(H x W\): one side is more than 200 times the other"),
        (0, 5, r"0 x 5 pixels \(H x W\): both sides must be at least 1"),
    ],
)
def test_shapes_that_no_rule_allows(height, width, reason):
    for preset in PRESETS.values():
        with pytest.raises(ValueError, match=reason):
            target_stages(height, width, preset.image)
    assert smart_resize(10, 2000) == (28, 812)  # 200 times is allowed
