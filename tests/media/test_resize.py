"""The resize on bytes: torch's in every byte, at any size, and fast and plain are one."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.comparisons import assert_equal
from support.media import picture

from m3jax.media import resize_bicubic, resize_definition
from m3jax.media.bicubic import bicubic_taps

AXES = "height width color"
# 1x1 and 13x2600 of the table of sizes, both ways; sides that stay, and that shrink so far that float32 is too narrow.
HARD = [
    ((1, 1), (56, 56)), ((56, 56), (1, 1)), ((13, 2600), (28, 812)), ((28, 812), (13, 2600)), ((13, 2600), (28, 2604)),
    ((40, 40), (40, 80)), ((40, 40), (80, 40)), ((33, 47), (33, 47)), ((1500, 3), (1, 7)), ((2, 3000), (5, 3)),
    ((216, 384), (28, 56)), ((100, 101), (99, 100)), ((24, 25), (25, 24)), ((130, 200), (49, 97)),
]  # fmt: skip

sides = st.one_of(st.integers(1, 12), st.integers(1, 180))
sizes = st.tuples(sides, sides)


def contrasts(height: int, width: int, seed: int) -> np.ndarray:
    """Noise, or black and white pixels alone, whose sums go beyond 0 and 255."""
    noise = picture(height, width, seed)
    return noise if seed % 2 else np.where(noise < 128, np.uint8(0), np.uint8(255))


def examples(test):
    for number, (size, target) in enumerate(HARD):
        test = example(size=size, target=target, seed=number)(test)
    return test


@examples
@given(size=sizes, target=sizes, seed=st.integers(0, 10_000))
@settings(max_examples=200)
def test_every_byte_is_torchs(size, target, seed):
    """Shrunk and enlarged, thin and square: what F.interpolate makes of uint8, which torchvision calls."""
    torch = pytest.importorskip("torch", reason="compares with torch")
    image = contrasts(*size, seed)
    planes = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    # torch 2.13 fails an assertion of its own where three colours become one pixel; a colour at a time it does not.
    planes = planes[:, None] if target == (1, 1) else planes[None]
    theirs = torch.nn.functional.interpolate(planes, target, mode="bicubic", antialias=True)
    theirs = theirs.reshape(3, *target).permute(1, 2, 0).numpy()
    assert_equal(resize_bicubic(image, *target), theirs, f"bytes of {size} to {target}", AXES)


@examples
@given(size=sizes, target=sizes, seed=st.integers(0, 10_000))
def test_the_fast_resize_is_its_definition(size, target, seed):
    image = contrasts(*size, seed)
    ours = resize_bicubic(image, *target)
    assert_equal(ours, resize_definition(image, *target), f"bytes of {size} to {target}", AXES)


def test_weights_have_as_many_bits_as_16_hold():
    """Torch's rule: the largest has 15 bits and a sign, and more than 22 bits of a fraction are none's."""
    for size, target in [(7, 56), (56, 28), (57, 28), (300, 29), (2800, 28), (3500, 28), (5000, 28), (20_000, 28)]:
        taps = bicubic_taps(size, target)
        largest = int(taps.weights.max())
        assert largest < 1 << 15 and (taps.bits == 22 or 2 * largest >= (1 << 15) - 2), (size, target, taps.bits)
        assert not taps.weights.flags.writeable and not taps.starts.flags.writeable  # they are shared
        with pytest.raises(ValueError, match="read-only"):
            taps.weights[0] = 0
    assert [bicubic_taps(size, 28).bits for size in (5000, 20_000)] == [22, 22]


def test_pillow_is_another_resize():
    """Trap: Pillow keeps 22 bits of a weight and is one level off here and there: its pixels are not the model's."""
    image = picture(300, 400)
    pillow = np.asarray(Image.fromarray(image).resize((392, 308), Image.Resampling.BICUBIC)).astype(int)
    off = np.abs(resize_bicubic(image, 308, 392) - pillow)
    assert off.max() == 1 and 0.001 < (off > 0).mean() < 0.01, (off.max(), (off > 0).mean())


@pytest.mark.parametrize(
    ("image", "size", "reason"),
    [
        (np.zeros((4, 4, 3), np.float32), (28, 28), r"float32 \[4, 4, 3\]: must be uint8 \[H W 3\]"),
        (np.zeros((4, 4), np.uint8), (28, 28), r"uint8 \[4, 4\]: must be"),
        ([[1]], (28, 28), "an image of list"),
        (np.zeros((0, 4, 3), np.uint8), (28, 28), r"0 x 4 pixels \(H x W\) has none"),
        (np.zeros((4, 4, 3), np.uint8), (0, 28), r"0 x 28 pixels \(H x W\): both must be at least 1"),
    ],
)
def test_what_is_no_image_is_refused(unchecked, image, size, reason):
    with pytest.raises(ValueError, match=reason):
        resize_bicubic(image, *size)
