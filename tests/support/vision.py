"""Tiny towers, and packed batches of random patches."""

from typing import Any

import numpy as np
from jaxtyping import Float32, Int32
from support import tiny

from m3jax import media
from m3jax.config import M3Config
from m3jax.media import MediaBatch
from m3jax.vision import VisionConfig

Item = tuple[Float32[np.ndarray, "X P"], Any]
IMAGE, VIDEO = 60, 61


def vision_config(**changes: Any) -> VisionConfig:
    """A tower no two of whose widths are equal; heads of 20 turn 18 of their dims by three axes of 3 frequencies."""
    values = dict(
        hidden_size=60, num_hidden_layers=2, num_attention_heads=3, intermediate_size=88, projector_hidden_size=72,
        layer_norm_eps=0.01, rope_theta=50.0, image_token_id=IMAGE, video_token_id=VIDEO,
    )  # fmt: skip
    return VisionConfig(**(values | changes))


def config(layers: str = "d", **changes: Any) -> M3Config:
    """A text model's configuration with that tower."""
    return vision_config(**changes).add_to(tiny.config(layers))


def item(seed: int, *grids: tuple[int, int, int]) -> Item:
    """An image of one grid, or a video of a grid a chunk."""
    count = sum(t * h * w for t, h, w in grids)
    patches = np.random.default_rng(seed).standard_normal((count, 1176)).astype(np.float32)
    return patches, (grids[0] if len(grids) == 1 else list(grids))


def batch(images: list[Item], videos: list[Item] = ()) -> MediaBatch:
    """Images and videos, packed."""
    return media.batch(images, videos)


def segments(*lengths: int, size: int) -> Int32[np.ndarray, " X"]:
    """Segments of those lengths one behind the other, and padding up to a size."""
    out = np.full(size, -1, np.int32)
    out[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return out
