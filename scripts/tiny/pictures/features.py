"""Pictures inside a step of training: bytes to patches, patches to features, features among the tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8

from m3jax.media import MediaBatch
from m3jax.media.packing import NO_SEGMENT
from m3jax.media.patches import MEAN, STD
from m3jax.model import M3, init
from m3jax.vision import VisionConfig

_SHARPNESS = 16.0  # of the choice between names: the score of a feature as long as an embedding, in a name's direction


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


class Naming(NamedTuple):
    """The names that each token of a batch's pictures shows, and their words: a pytree, a pair of arrays a group.

    Attributes:
      shown: True where a token shows the thing with that name.
      words: token ids of each name, then -1.
    """

    shown: tuple[Bool[Array | np.ndarray, "S R _"], ...]
    words: tuple[Int32[Array | np.ndarray, "_ W"], ...]


def naming_loss(features: Float[Array, "S R D"], embeddings: Float[Array, "V D"], naming: Naming) -> Float[Array, ""]:
    """Return the cross-entropy of features to the names of what they show, in nats for each named token and group.

    Softmax cross-entropy over the names of a group by the product of a feature with the direction of each, the mean of
    its words' embeddings; names that a token shows share its target evenly. It teaches a tower what to tell apart many
    times faster than answers alone, in terms that the text model has already, and keeps features of the size that
    embeddings have: by cosines alone they grow without end, beside what the layers add to them.

    Args:
      features: of each picture.
      embeddings: of the text model's tokens; no gradient reaches them.
      naming: of these pictures.

    Source: contrastive pre-training of image towers (Radford et al., arXiv:2103.00020), for each token by itself.
    """
    embeddings = jax.lax.stop_gradient(embeddings.astype(jnp.float32))
    size = jnp.sqrt(jnp.mean(jnp.sum(jnp.square(embeddings), axis=-1)))
    features, total, count = features.astype(jnp.float32), 0.0, 0
    for shown, words in zip(*naming, strict=True):
        names = jnp.sum(jnp.where((words >= 0)[..., None], embeddings[words], 0.0), axis=1)  # [N D]
        names = _SHARPNESS / size * names / jnp.linalg.norm(names, axis=-1, keepdims=True)
        scores = jax.nn.log_softmax(jnp.einsum("srd,nd->srn", features, names), axis=-1)
        num_shown = jnp.sum(shown, axis=-1)  # [S R]
        total -= jnp.sum(jnp.where(shown, scores, 0.0) / jnp.maximum(num_shown, 1)[..., None])
        count += jnp.sum(num_shown > 0)
    return total / jnp.maximum(count, 1)


def picture_features(model: M3, pictures: Pictures) -> Float[Array, "S R D"]:
    """Return the features that the tower and the projector give each picture; rows of padding are zero.

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
