"""Images of every kind to pixels, and broken ones to one line; patches stand in the order of merge blocks."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.comparisons import assert_close, assert_equal
from support.media import image_file, picture

from m3jax.media import PRESETS, decode_image, process_image
from m3jax.media.patches import normalized, patch_positions, patch_rows

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's

PIXELS = picture(30, 44, 1)
AXES = "row column color"


def png_of_size(height: int, width: int) -> bytes:
    """A PNG file that says it has so many pixels, and has none of them."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_kinds_of_files(kind, tmp_path):
    options = {"WEBP": dict(lossless=True), "JPEG": dict(quality=100, subsampling=0)}.get(kind, {})
    data = image_file(PIXELS, kind, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) if kind in ("GIF", "JPEG") else PIXELS
    assert_equal(decode_image(data), expected, f"pixels of {kind}", AXES)
    path = tmp_path / "picture"
    path.write_bytes(data)
    assert_equal(decode_image(path), expected, f"pixels of a {kind} file", AXES)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "LAB", "I", "F"])
def test_modes(mode):
    image = Image.fromarray(PIXELS).convert("L" if mode in "IF" else "RGB").convert(mode)
    assert_equal(decode_image(image), np.asarray(image.convert("RGB")), f"pixels of mode {mode}", AXES)


def test_what_is_transparent_lies_over_white():
    """In each of the ways to be it: an alpha channel, a colour of the palette, a colour of its own, an array."""
    rgba = Image.fromarray(np.dstack([PIXELS, picture(30, 44, 2, colors=1)]))
    alpha = np.asarray(rgba)[..., 3:] / 255.0
    expected = PIXELS * alpha + 255.0 * (1.0 - alpha)
    for name, given_image in (("RGBA", rgba), ("PNG", image_file(rgba)), ("array", np.asarray(rgba))):
        assert_close(decode_image(given_image), expected, f"pixels of {name}", AXES, atol=1.0)
    grey = Image.merge("LA", [Image.fromarray(PIXELS[..., 0]), rgba.getchannel("A")])
    assert_close(decode_image(grey)[..., 1], expected[..., 0], "pixels of LA", "row column", atol=1.0)
    hole = Image.fromarray(np.array([[0, 1]], np.uint8), mode="L").convert("P")
    assert_equal(decode_image(image_file(hole, transparency=1)), [[[0, 0, 0], [255, 255, 255]]], "pixels of P", AXES)


def test_sixteen_bits_keep_their_upper_half():
    """Pillow clips 16-bit grey at 255, which turns nearly all of it white."""
    deep = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    for image in (Image.fromarray(deep), image_file(Image.fromarray(deep))):
        assert_equal(decode_image(image)[..., 0], deep >> 8, "pixels of I;16", "row column")


def test_exif_orientation_is_obeyed():
    """A phone writes upright pictures lying on their side, and how to turn them."""
    for orientation, turned in {1: PIXELS, 3: PIXELS[::-1, ::-1], 6: np.rot90(PIXELS, -1), 8: np.rot90(PIXELS)}.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert_equal(decode_image(image_file(PIXELS, exif=exif)), turned, f"pixels at orientation {orientation}", AXES)


def test_arrays_of_each_layout():
    grey = PIXELS[..., 0]
    for image in (grey, grey[..., None]):
        assert_equal(decode_image(image), np.dstack([grey] * 3), "pixels", AXES)
    assert decode_image(PIXELS) is PIXELS


def test_an_image_that_moves_shows_its_first_frame():
    frames = [Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in (10, 200)]
    for kind in ("GIF", "WEBP"):
        data = image_file(frames[0], kind, save_all=True, append_images=frames[1:], **{"lossless": True})
        assert decode_image(data)[0, 0].tolist() == [10, 10, 10], kind


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_patch_is_where_its_position_says(rows, columns, seed):
    """Rows of patches and their positions have one order, that of merge blocks: value by value by the formula."""
    image = picture(28 * rows, 28 * columns, seed)
    made = process_image(np.tile(image, (4, 4, 1)) if rows * columns < 4 else image)  # at least 4 tokens, so no resize
    height, width = 14 * made.grid[1], 14 * made.grid[2]
    image = np.tile(image, (4, 4, 1))[:height, :width]
    _, down, across = patch_positions(made.grid).T
    patches = made.patches.reshape(-1, 3, 2, 14, 14)
    for place in range(len(patches)):
        top, left = 14 * down[place], 14 * across[place]
        pixels = image[top : top + 14, left : left + 14].astype(np.float64) / 255.0
        expected = ((pixels - MEAN) / STD).transpose(2, 0, 1)
        for frame in (0, 1):
            assert_close(patches[place, :, frame], expected, f"patch {place}", "color row column", atol=1e-6)
    # Four rows of patches in a row are one block of 2 x 2.
    blocks = np.stack([down // 2, across // 2]).reshape(2, -1, 4)
    assert (blocks == blocks[..., :1]).all()


def test_each_step_of_the_normalisation_is_rounded_to_float32():
    """255 x mean, 255 x std, the difference and the quotient, as transformers' processors do; here bit for bit."""
    pixels = np.arange(256, dtype=np.float32).reshape(1, 16, 16).repeat(3, axis=0)  # [C H W]
    found = normalized(pixels)
    for colour in range(3):
        mean, std = (np.float32(np.float64(np.float32(of[colour])) * 255) for of in (MEAN, STD))
        difference = (pixels[colour].astype(np.float64) - np.float64(mean)).astype(np.float32)
        expected = (difference.astype(np.float64) / np.float64(std)).astype(np.float32)
        assert_equal(found[colour], expected, f"normalised values of colour {colour}", "row column")


@given(t=st.integers(1, 3), rows=st.integers(1, 3), columns=st.integers(1, 3))
def test_rows_of_patches_stand_in_the_order_of_merge_blocks(t, rows, columns):
    """By the definition: temporal patch, block's row and column, then the row and column within the block."""
    grid = (t, 2 * rows, 2 * columns)
    expected = [
        (time, 2 * row + down, 2 * column + across)
        for time in range(t) for row in range(rows) for column in range(columns)
        for down in range(2) for across in range(2)
    ]  # fmt: skip
    assert_equal(patch_positions(grid), expected, "positions", "patch thw")
    frames = np.zeros((2 * t, 3, 28 * rows, 28 * columns), np.float32)  # a number for each frame, colour and patch
    frames += np.arange(2 * t)[:, None, None, None] * 1000 + np.arange(3)[:, None, None] * 500
    frames += (np.arange(28 * rows) // 14)[:, None] * 20 + np.arange(28 * columns) // 14
    made = patch_rows(frames).reshape(-1, 3, 2, 14, 14)
    for patch, (time, row, column) in zip(made, expected, strict=True):
        numbers = np.array([[1000 * (2 * time + frame) + 500 * color for frame in range(2)] for color in range(3)])
        assert_equal(patch[:, :, 0, 0], numbers + 20 * row + column, "patch", "color frame")


def test_presets_give_the_sizes_of_their_rules():
    made = {name: process_image(picture(40, 400), name) for name in PRESETS}
    assert {name: image.grid for name, image in made.items()} == {
        "hub": (1, 2, 28), "vllm": (1, 2, 28), "sglang": (1, 4, 30), "smg": (1, 8, 80)
    }  # fmt: skip
    assert process_image(PIXELS, max_long_side=504).grid == (1, 8, 12)
    assert process_image(PIXELS, "smg", max_long_side=504).grid == (1, 8, 12)


BOMB = png_of_size(20_000, 20_000)
BROKEN = {
    "empty": (b"", "these 0 bytes are no image"),
    "text": (b"<html>not found</html>", "no image: must be a whole PNG, JPEG, GIF or WEBP"),
    "cut PNG": (image_file(PIXELS)[:-900], "cannot be decoded"),
    "cut JPEG": (image_file(picture(99, 99), "JPEG")[:-900], "cannot be decoded.*truncated"),
    "cut GIF": (image_file(PIXELS, "GIF")[:-900], "cannot be decoded|no image"),
    "cut WEBP": (image_file(PIXELS, "WEBP")[:-900], "cannot be decoded|no image"),
    "flipped bits": (image_file(PIXELS)[:60] + bytes(40) + image_file(PIXELS)[100:], "cannot be decoded"),
    "no pixels": (png_of_size(0, 5), "no image|has none"),
    "a bomb": (BOMB, "more than 89478485 pixels: PIL.Image.MAX_IMAGE_PIXELS"),
    "a bomb of which Pillow only warns": (
        png_of_size(10_000, 9_000),
        r"10000 x 9000 pixels \(H x W\), more than 89478485",
    ),
    "thin": (picture(1, 201), r"1 x 201 pixels \(H x W\): one side is more than 200 times"),
    "floats": (np.zeros((5, 5, 3)), r"float64 \[5, 5, 3\]: must be uint8"),
    "five colors": (np.zeros((5, 5, 5), np.uint8), r"uint8 \[5, 5, 5\]: must be"),
    "an array without pixels": (np.zeros((0, 5, 3), np.uint8), r"0 x 5 pixels \(H x W\) has none"),
    "a Pillow image without pixels": (Image.new("RGB", (0, 5)), r"5 x 0 pixels \(H x W\) has none"),
    "a name": ("picture.png", "an image as str: give bytes, a Path"),
    "another format": (image_file(PIXELS, "BMP"), "no image: must be a whole PNG"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_images_are_one_line(name, unchecked):
    source, reason = BROKEN[name]
    with pytest.raises(ValueError, match=reason) as caught:
        process_image(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_folder_or_a_missing_file_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "no\nsuch.png"):
        with pytest.raises(ValueError, match="cannot be read") as caught:
            process_image(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(preset="tgi"), "no media preset 'tgi': there are hub, vllm, sglang, smg"),
        (dict(max_long_side=1000), "max_long_side = 1000: must be a multiple of 28"),
        (dict(max_long_side=0), "max_long_side = 0: must be"),
        (dict(max_long_side=5600), r"would have 5012 x 5012 pixels \(H x W\): at most 12845056"),
    ],
)
def test_wrong_options(options, reason):
    image = (
        picture(60, 60)
        if "preset" in options or options["max_long_side"] < 2000
        else np.zeros((5000, 5000, 3), np.uint8)
    )
    with pytest.raises(ValueError, match=reason):
        process_image(image, **options)
