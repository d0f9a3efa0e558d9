"""The part of `gpu_check.py` about the vision tower: cuDNN's attention, and the bits of an image beside others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks.repeat import poison

from m3jax import media
from m3jax.model.build import MakeRandom
from m3jax.vision import Vision, VisionConfig, attend_segments, segment_attention

HEADS, HEAD_DIM = 16, 80
ERROR = 0.03  # of an output, in values of about 1
# patches of a call, of the image that is looked at
ATTENTION = [(2560, 40), (2560, 320), (2560, 576), (2560, 1200), (2560, 2000), (6144, 2304)]
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


def check_vision_attention(shape, dtype, *, seed: int) -> dict:
    """An image's output has the same bits wherever it lies, also beside images of NaN, and is the definition's."""
    patches, own = shape
    keys = jax.random.split(jax.random.key(seed), 2)
    normal = lambda key, *sizes: jax.random.normal(key, (3, *sizes, HEADS, HEAD_DIM), jnp.float32).astype(dtype)
    image, others = normal(keys[0], own), normal(keys[1], patches)
    right = jax.jit(segment_attention)(*image.astype(jnp.float32), jnp.zeros(own, jnp.int32))
    run, found, ok, error = jax.jit(attend_segments), set(), True, 0.0
    for before, behind in beside(patches, own):
        start, end = sum(before), sum(before) + own + sum(behind)
        lengths = [*before, own, *behind]
        segments = np.full(patches, -1, np.int32)
        segments[:end] = np.repeat(np.arange(len(lengths)), lengths)
        for factor in (1.0, 1e3, jnp.nan):
            inputs = (others * factor).astype(dtype).at[:, start : start + own].set(image).at[:, end:].set(jnp.nan)
            poison()
            out = np.asarray(run(*inputs, jnp.asarray(segments)))
            mine = out[start : start + own]
            found.add(mine.tobytes())
            ok &= not out[end:].any()
            error = max(error, float(np.abs(mine.astype(np.float32) - right).max()))
    return {"error": error, "different bits": len(found) - 1, "ok": ok and len(found) == 1 and error < ERROR}


def check_vision_tower(shape, dtype, *, seed: int) -> dict:
    """An image's features have the same bits wherever it lies; padding may be NaN."""
    layers, patches, height, width = shape
    vision = Vision(VisionConfig(num_hidden_layers=layers), TEXT_WIDTH, MakeRandom(jax.random.key(seed), dtype, None))
    draw = np.random.default_rng(seed)

    def picture(rows: int, columns: int):
        return draw.standard_normal((rows * columns, 1176), np.float32), (1, rows, columns)

    image, run, found, is_finite = picture(height, width), jax.jit(lambda vision, batch: vision(batch)), set(), True
    for before, behind in beside(patches, height * width):
        sides = lambda length: (2, length // 4 * 2)
        first = [picture(*sides(length)) for length in before]
        batch = media.pack(media.segments([*first, image, *(picture(*sides(length)) for length in behind)]), patches)
        unused = np.where(batch.segments[:, None] < 0, np.nan, batch.patches).astype(np.float32)
        features = np.asarray(run(vision, batch._replace(patches=unused)))
        start = sum(len(x) for x, _ in first) // 4
        found.add(features[start : start + height * width // 4].tobytes())
        is_finite &= bool(np.isfinite(features.astype(np.float32)).all())
    return {"different bits": len(found) - 1, "ok": len(found) == 1 and is_finite}


CASES = [
    *[("vision attention", shape, check_vision_attention) for shape in ATTENTION],
    *[("vision tower", shape, check_vision_tower) for shape in TOWER],
]


def cases(small: bool):
    """(name, shape, dtype, check of a seed)."""
    for name, shape, check in CASES[:1] if small else CASES:
        yield name, shape, jnp.bfloat16, partial(check, shape, jnp.bfloat16)
