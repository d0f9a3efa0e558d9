"""Patches, grids, chunks, sizes and prompts are those of transformers' processors, run in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.comparisons import assert_equal
from support.media import clip, picture

from m3jax.media import expand_text, process_image, process_video, smart_resize
from m3jax.media.placeholders import VIDEO

pytest.importorskip("transformers", reason="compares with transformers 5.23.0 (pip install 'm3jax[oracle]')")
TESTS = Path(__file__).parents[1]
# Sizes, the order of patches and each byte of a resize have definitions of their own in the files beside this one.
pytestmark = pytest.mark.further

IMAGES = {
    "smaller": picture(40, 61, 1), "larger": picture(700, 1000, 2), "as it is": picture(56, 84, 3),
    "1x1": picture(1, 1, 4), "13x2600": picture(13, 2600, 5), "one row": picture(1, 200, 6),
}  # fmt: skip
# What each video is given to us, and to transformers, whose default leaves frames at their size.
VIDEOS = {
    "two chunks, the last pair odd": (picture(19 * 40, 61, 7).reshape(19, 40, 61, 3), dict(source_fps=10.0), {}),
    "one frame": (picture(70, 70, 8)[None], {}, {}),
    "frames at their size": (picture(3 * 56, 56, 9).reshape(3, 56, 56, 3), {}, dict(do_resize=False)),
    "one segment": (clip(20), dict(segment=100), dict(vision_segment_max_frames=None)),
    "chosen by time": (clip(42), dict(source_fps=8.0, frames="hub"), dict(do_sample_frames=True, fps=1.0)),
    # It takes two of these, [0, 10]: its own bound of at least 4 frames it does not apply.
    "unbounded": (clip(20), dict(source_fps=10.0, frames="hub", min_frames=1), dict(do_sample_frames=True, fps=1.0)),
}
ALPHA = np.dstack([picture(56, 84, 10), picture(56, 84, 11, colors=1)])
SIZES = np.random.default_rng(0).integers(1, 4000, (400, 2))
SIZES = np.concatenate([SIZES[SIZES.max(1) <= 200 * SIZES.min(1)], [[13, 2600], [14, 42], [70, 42], [28, 5600]]])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Run transformers on all images and videos, in a process of its own, and return what it makes of them."""
    source, target = (tmp_path_factory.mktemp("media") / name for name in ("in.npz", "out.npz"))
    pixels = {f"image.{name}": image for name, image in IMAGES.items()}
    pixels |= {f"video.{name}": frames for name, (frames, _, _) in VIDEOS.items()}
    options = {}
    for name, (_, ours, chosen) in VIDEOS.items():
        rate = {"source_fps": ours["source_fps"]} if "source_fps" in ours else {}
        options[f"video.{name}"] = dict(do_resize=True) | rate | chosen
    np.savez(source, options=json.dumps(options), sizes=SIZES, alpha=ALPHA, **pixels)
    command = [sys.executable, "-W", "ignore", "-m", "support.transformers_media", str(source), str(target)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS)
    assert finished.returncode == 0, finished.stderr
    return np.load(target)


@pytest.mark.parametrize("name", IMAGES)
def test_patches_of_an_image(theirs, name):
    """Bit for bit: the resize, normalisation, order of merge blocks, and the frame that is there twice."""
    ours = process_image(IMAGES[name])
    assert_equal(ours.grid, theirs[f"image.{name}.grid"][0], "grid", "thw")
    assert_equal(ours.patches, theirs[f"image.{name}.patches"], "pixel_values", "patch value")
    assert ours.patches.dtype == np.float32 and ours.tokens * 4 == len(ours.patches)


def test_alpha_lies_over_white_where_transformers_is_given_a_pillow_image(theirs):
    """Its `load_image`, which reads paths, addresses and base64, drops alpha before the processor sees any."""
    over_white = process_image(Image.fromarray(ALPHA))
    assert_equal(over_white.patches, theirs["alpha.pillow"], "pixel_values", "patch value")
    assert_equal(process_image(ALPHA[..., :3]).patches, theirs["alpha.loaded"], "pixel_values", "patch value")


@pytest.mark.parametrize("name", VIDEOS)
def test_patches_of_a_video(theirs, name):
    """Bit for bit, with a grid a chunk of four temporal patches, and the same frames, time stamps and placeholders."""
    frames, options, _ = VIDEOS[name]
    ours = process_video(frames, **options)
    assert_equal(ours.frame_indices, theirs[f"video.{name}.indices"], "frame indices", "frame")
    assert_equal(ours.grid, theirs[f"video.{name}.grid"], "grid", "chunk thw")
    assert_equal(ours.patches, theirs[f"video.{name}.patches"], "pixel_values_videos", "patch value")
    assert expand_text(VIDEO, videos=[ours]) == str(theirs[f"video.{name}.text"])


def test_sizes(theirs):
    assert_equal([smart_resize(*size) for size in SIZES.tolist()], theirs["sizes"], "sizes", "image side")
