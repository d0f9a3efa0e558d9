"""The specification of what the tower has of its own: rotation by time, row and column, and attention in a segment.

Letters: X patches of a packed batch, N heads, H their width. Axes of a position: 3, time, row, column.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def rotary_angles(
    positions: Int[Array, "X 3"], head_dim: int, theta: float, dtype: DTypeLike = jnp.float32
) -> Float[Array, "X R"]:
    """The angles of each patch: F for its time, F for its row, F for its column; R = 3 F.

    Frequency i of an axis is theta**(-i / F), with F = (head_dim // 3) // 2, the same for the three axes. M3's heads of
    80 have F = 13, so 78 of their dims are turned and the last two are not.

    Args:
      positions: temporal patch, row and column in the segment; the temporal patch counts from 0 in each segment.
      head_dim: H.
      theta: of the lowest frequency.
      dtype: of the angles, float32 at least whatever the model's is.

    Source: transformers 5.23 `MiniMaxM3VLVisionRotaryEmbedding`; 5.17 turned all of a head, by row and column alone.
    """
    number = np.float64 if jnp.dtype(dtype) == np.float64 else np.float32
    axis_dim = 2 * ((head_dim // 3) // 2)
    exponents = np.arange(0, axis_dim, 2, dtype=number) / number(axis_dim)  # [F]
    angles = positions[..., None].astype(number) * (number(1.0) / number(theta) ** exponents)  # [X 3 F]
    return angles.reshape(len(positions), -1)


def rotate(x: Float[Array, "X N H"], cosines: Float[Array, "X R"], sines: Float[Array, "X R"]) -> Float[Array, "X N H"]:
    """Turn dims (i, i + R) of each head by angle i of the patch; dims from 2 R on stay as they are.

    Args:
      x: queries or keys, in the accumulator's dtype.
      cosines, sines: of angles as from `rotary_angles`: the same for all layers.
    """
    half = cosines.shape[-1]
    cos, sin = cosines[:, None], sines[:, None]  # [X 1 R]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def segment_attention(
    q: Float[Array, "X N H"], k: Float[Array, "X N H"], v: Float[Array, "X N H"], segments: Int[Array, " X"]
) -> Float[Array, "X N H"]:
    """Softmax attention in which a patch sees all patches of its own segment and no others.

    A segment is an image or a chunk of a video, whole: all its temporal patches see one another.

    Args:
      q, k: queries and keys after the rotation.
      v: values.
      segments: of each patch; a negative one is padding, which sees nothing and has zeros.

    Returns:
      In q's dtype. Scores and sums have float32 at least; what is multiplied with v is rounded to its dtype.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    precise = dict(precision="highest", preferred_element_type=dtype)
    is_patch = segments >= 0
    sees = (segments[:, None] == segments[None, :]) & is_patch[:, None]  # [X X]
    scores = jnp.einsum("xnh,ynh->nxy", q, k, **precise) * q.shape[-1] ** -0.5  # [N X X]
    scores = jnp.where(sees, scores, -jnp.inf)
    # The result does not depend on `highest`, so no gradient goes through it.
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0.0, highest))
    total = jnp.sum(weights, axis=-1)  # [N X]
    total = jnp.where(is_patch, total, 1)
    values = jnp.where(is_patch[:, None, None], v, 0)
    out = jnp.einsum("nxy,ynh->nxh", weights.astype(v.dtype), values, **precise) / total[..., None]
    return out.swapaxes(0, 1).astype(q.dtype)  # [N X H] -> [X N H]
