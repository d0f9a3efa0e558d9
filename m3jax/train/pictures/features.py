"""Pictures inside a step of training: bytes to patches, patches to features, features among the tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt8

from m3jax.media import MediaBatch
from m3jax.media.packing import NO_SEGMENT
from m3jax.media.patches import MEAN, STD
from m3jax.model import M3, init
from m3jax.vision import VisionConfig


class Pictures(NamedTuple):
    """The pictures and clips of a batch, each in as many rows of patches as the largest has: a pytree of arrays.

    Attributes:
      patches: pixels as bytes, in the order of `m3jax.media.patches.patch_rows`; zeros behind a picture's last patch.
      segments: 0 for the patches that there are, -1 behind them.
      positions: of each patch in its picture, (temporal patch, row, column).
      places: where each feature goes in the flattened tokens [B T], -1 for none.
    """

    patches: UInt8[Array | np.ndarray, "S X P"]
    segments: Int32[Array | np.ndarray, "S X"]
    positions: Int32[Array | np.ndarray, "S X 3"]
    places: Int32[Array | np.ndarray, "S R"]


def picture_features(model: M3, pictures: Pictures) -> Float[Array, "S R D"]:
    """What the tower and the projector make of each picture; rows of padding are zero.

    Args:
      model: with a tower.
      pictures: S of them, each by itself.
    """

    def of_one(patches: UInt8[Array, "X P"], segments: Int[Array, " X"], positions: Int[Array, "X 3"]) -> Array:
        no_features = jnp.int32(0)  # which of them are an image's matters where placeholders are looked for, not here
        normal = jnp.where((segments == NO_SEGMENT)[:, None], 0.0, normalized_rows(patches))
        return model.vision(MediaBatch(normal, segments, positions, no_features, no_features), "definition")

    return jax.vmap(of_one)(*pictures[:3])


def normalized_rows(patches: UInt8[Array, "... P"]) -> Float[Array, "... P"]:
    """Patches of bytes as the tower takes them: `m3jax.media.patches.normalized` for rows, colour after colour.

    Args:
      patches: rows of 3 colours, two frames and 14 x 14 pixels each.
    """
    per_colour = patches.shape[-1] // len(MEAN)
    rows = lambda values: jnp.repeat(jnp.asarray(values, jnp.float32) * 255.0, per_colour)
    return (patches.astype(jnp.float32) - rows(MEAN)) / rows(STD)


def with_pictures(model: M3, tokens: Int[Array, "B T"], pictures: Pictures) -> Float[Array, "B T D"]:
    """The embeddings of tokens, with features where they stand for pictures.

    Args:
      model: with a tower.
      tokens: with all placeholders.
      pictures: of these tokens.
    """
    features = picture_features(model, pictures)
    return model.embed(tokens, features.reshape(-1, features.shape[-1]), pictures.places.reshape(-1))


def with_tower(base: M3, vision: VisionConfig, seed: int) -> M3:
    """A model with a random tower, and with the tower that it has where it has one.

    Args:
      base: float32.
      vision: the tower.
      seed: of its weights.
    """
    if base.vision is not None:
        return base
    model = init(vision.add_to(base.config), seed, "float32")
    for name in ("embed_tokens", "stacks", "norm", "lm_head"):
        setattr(model, name, getattr(base, name))
    return model
