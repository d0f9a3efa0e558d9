"""The vision tower on a GPU: cuDNN's attention, and the bits of an image beside others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.on_gpu import poison

from m3jax import media
from m3jax.model.build import MakeRandom
from m3jax.vision import Vision, VisionConfig, attend_segments, segment_attention

HEADS, HEAD_DIM = 16, 80
ERROR = 0.03  # of an output, in values of about 1
# patches of a call, of the image that is looked at
ATTENTION = [
    pytest.param(2560, 40, marks=pytest.mark.small), (2560, 320), (2560, 576), (2560, 1200), (2560, 2000), (6144, 2304),
]  # fmt: skip
# layers, patches of a call, sides of the image in patches
TOWER = [(3, 2560, 24, 24), (2, 6144, 36, 64)]
TEXT_WIDTH = 6144


def beside(patches: int, own: int) -> list[tuple[list[int], list[int]]]:
    """Lengths of the images before an image and behind it, of several sizes, as far as they fit."""
    every = [
        ([], []), ([60], []), ([], [1100]), ([300, 60, 4], [60]), ([16] * 20, []), ([own], []), ([own], [own]),
        ([4] * 40, [4] * 100), ([1281], []), ([400], [4]),
    ]  # fmt: skip
    return [(before, behind) for before, behind in every if sum(before) + own + sum(behind) <= patches]


@pytest.mark.parametrize(("patches", "own"), ATTENTION)
def test_attention_gives_an_image_the_same_bits_wherever_it_lies(patches, own, seed):
    """Also beside images of NaN; and the values are the definition's."""
    keys = jax.random.split(jax.random.key(seed), 2)
    normal = lambda key, *sizes: jax.random.normal(key, (3, *sizes, HEADS, HEAD_DIM), jnp.float32).astype(jnp.bfloat16)
    image, others = normal(keys[0], own), normal(keys[1], patches)
    right = jax.jit(segment_attention)(*image.astype(jnp.float32), jnp.zeros(own, jnp.int32))
    run, found, error = jax.jit(attend_segments), {}, 0.0
    for before, behind in beside(patches, own):
        start, end = sum(before), sum(before) + own + sum(behind)
        lengths = [*before, own, *behind]
        segments = np.full(patches, -1, np.int32)
        segments[:end] = np.repeat(np.arange(len(lengths)), lengths)
        for factor in (1.0, 1e3, jnp.nan):
            inputs = (others * factor).astype(jnp.bfloat16)
            inputs = inputs.at[:, start : start + own].set(image).at[:, end:].set(jnp.nan)
            poison()
            out = np.asarray(run(*inputs, jnp.asarray(segments)))
            mine = out[start : start + own]
            found.setdefault(mine.tobytes(), f"{before} before and {behind} behind, times {factor}")
            assert not out[end:].any(), f"padding gives something else than 0, with {before} before, {behind} behind"
            error = max(error, float(np.abs(mine.astype(np.float32) - right).max()))
    assert len(found) == 1, "the image has other bits beside images of: " + "; ".join(found.values())
    assert error < ERROR, f"error {error:.1e}"


@pytest.mark.parametrize(("layers", "patches", "height", "width"), TOWER)
def test_the_tower_gives_an_image_the_same_bits_wherever_it_lies(layers, patches, height, width, seed):
    """Padding may be NaN."""
    random = MakeRandom(jax.random.key(seed), "bfloat16", None)
    vision = Vision(VisionConfig(num_hidden_layers=layers), TEXT_WIDTH, random)
    draw = np.random.default_rng(seed)

    def picture(rows: int, columns: int):
        return draw.standard_normal((rows * columns, 1176), np.float32), (1, rows, columns)

    image, run, found = picture(height, width), jax.jit(lambda vision, batch: vision(batch)), {}
    for before, behind in beside(patches, height * width):
        sides = lambda length: (2, length // 4 * 2)
        first = [picture(*sides(length)) for length in before]
        batch = media.pack(media.segments([*first, image, *(picture(*sides(length)) for length in behind)]), patches)
        unused = np.where(batch.segments[:, None] < 0, np.nan, batch.patches).astype(np.float32)
        features = np.asarray(run(vision, batch._replace(patches=unused)))
        assert np.isfinite(features.astype(np.float32)).all(), f"NaN of padding, with {before} before, {behind} behind"
        start = sum(len(x) for x, _ in first) // 4
        mine = features[start : start + height * width // 4]
        found.setdefault(mine.tobytes(), f"{before} before and {behind} behind")
    assert len(found) == 1, "the image has other bits beside images of: " + "; ".join(found.values())
