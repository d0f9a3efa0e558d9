"""The tiny model with a tiny tower, and prompts with pictures for it."""

from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh
from support import tiny
from support.engines import CONFIG as TEXT
from support.engines import engine, prompt
from support.media import noise_patches

from m3jax import model as m3_model
from m3jax.decoding import Engine, Media
from m3jax.model import M3
from m3jax.vision import VisionConfig

IMAGE, VIDEO = 60, 61
TOWER = VisionConfig.tiny(
    hidden_size=24, num_hidden_layers=2, intermediate_size=40, projector_hidden_size=32, image_token_id=IMAGE,
    video_token_id=VIDEO, vision_segment_max_frames=4,
)  # fmt: skip
CONFIG = TOWER.add_to(TEXT)

# Pictures of 8, 8 and 9 features, and a clip of six pairs of frames: chunks of 8 and 4.
PICTURES = [noise_patches(grid, seed) for seed, grid in enumerate([(1, 4, 8), (1, 4, 8), (1, 6, 6)])]
CLIP = noise_patches((6, 2, 4), seed=7)


@cache
def model(mesh: Mesh | None = None) -> M3:
    """Random weights, biases included; features are a few times as large as the embeddings of tokens."""
    draw = np.random.default_rng(0)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        if "vision" not in name:
            scale = tiny._scale(name, leaf.shape)
        else:
            scale = 0.3 if "bias" in name or "norm" in name else 1.5 * float(np.prod(leaf.shape[:-1])) ** -0.5
        return jax.device_put((draw.normal(size=leaf.shape) * scale).astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(fill, m3_model.abstract(CONFIG, "float32", mesh))


def seeing_engine(model: M3, **changes) -> Engine:
    """One size of call for the tower; a chunk of 12 tokens ends inside pictures."""
    return engine(model, **dict(media_patches=48, media_tokens=60) | changes)


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids without placeholders."""
    return tuple(token % IMAGE for token in prompt(length, seed))


def image(number: int) -> tuple[int, ...]:
    """The placeholders of a picture."""
    return (IMAGE,) * (len(PICTURES[number][0]) // 4)


CLIP_TOKENS = sum(((50 + pair, VIDEO, VIDEO) for pair in range(6)), ())

# Prompts and what they show: two that differ in the picture alone, video and image, text, one picture twice.
WORK = [
    (text(9) + image(0) + text(24, 1), Media([PICTURES[0]])),
    (text(9) + image(1) + text(24, 1), Media([PICTURES[1]])),
    (image(2) + text(6) + CLIP_TOKENS + text(7, 2), Media([PICTURES[2]], [CLIP])),
    (text(30, 3), Media()),
    (image(0) + text(3) + image(0) + text(2), Media([PICTURES[0]] * 2)),
]
