"""The parts of the vision tower that other towers lack, defined: rotation by time, row and column, and segments.

Axes: T patches of a packed batch, S the same patches as keys, N heads, H head dim, R rotated pairs per head, F
frequencies of each of the 3 axes of a position: time, row and column.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def rotary_angles(
    positions: Int[Array, "T 3"], head_dim: int, theta: float, dtype: DTypeLike = jnp.float32
) -> Float[Array, "T R"]:
    """Return the angles of each patch: F for its time, F for its row, F for its column; R = 3 F.

    Frequency i of an axis is theta**(-i / F), with F = (head_dim // 3) // 2, the same for the three axes. M3's heads of
    80 have F = 13, so 78 of their dims are turned and the last two are not.

    Args:
      positions: Temporal patch, row and column in the segment; each segment counts temporal patches from 0.
      head_dim: Head dim, H.
      theta: Base of the frequencies.
      dtype: Dtype of the activations; angles are in float32 at least.

    Source: transformers 5.23 `MiniMaxM3VLVisionRotaryEmbedding`; 5.17 turned all of a head, by row and column alone.
    """
    number = np.float64 if jnp.dtype(dtype) == np.float64 else np.float32
    axis_dim = 2 * ((head_dim // 3) // 2)
    exponents = np.arange(0, axis_dim, 2, dtype=number) / number(axis_dim)  # [F]
    angles = positions[..., None].astype(number) * (number(1.0) / number(theta) ** exponents)  # [T 3 F]
    return angles.reshape(len(positions), -1)


def rotate(x: Float[Array, "T N H"], cosines: Float[Array, "T R"], sines: Float[Array, "T R"]) -> Float[Array, "T N H"]:
    """Rotate dims (i, i + R) of each head by angle i of the patch; dims from 2 R on stay as they are.

    Args:
      x: Queries or keys, in the accumulator's dtype.
      cosines, sines: Cosines and sines of `rotary_angles`, the same for all layers.
    """
    half = cosines.shape[-1]
    cos, sin = cosines[:, None], sines[:, None]  # [T 1 R]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def segment_attention(
    q: Float[Array, "T N H"], k: Float[Array, "T N H"], v: Float[Array, "T N H"], segments: Int[Array, " T"]
) -> Float[Array, "T N H"]:
    """Compute softmax attention in which a patch sees all patches of its own segment and no others.

    A segment is an image or a chunk of a video, whole: all its temporal patches see one another.

    Args:
      q, k: Queries and keys after the rotation.
      v: Values.
      segments: Segment of each patch; a negative one marks padding, which sees nothing and gets zeros.

    Returns:
      Outputs in q's dtype. Scores and sums are in float32 at least; softmax weights are rounded to v's dtype.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    precise = dict(precision="highest", preferred_element_type=dtype)
    is_patch = segments >= 0
    sees = (segments[:, None] == segments[None, :]) & is_patch[:, None]  # [T S]
    scores = jnp.einsum("tnh,snh->nts", q, k, **precise) * q.shape[-1] ** -0.5  # [N T S]
    scores = jnp.where(sees, scores, -jnp.inf)
    # The result does not depend on `highest`, so it needs no gradient.
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0.0, highest))
    total = jnp.sum(weights, axis=-1)  # [N T]
    total = jnp.where(is_patch, total, 1)
    values = jnp.where(is_patch[:, None, None], v, 0)
    out = jnp.einsum("nts,snh->nth", weights.astype(v.dtype), values, **precise) / total[..., None]
    return out.swapaxes(0, 1).astype(q.dtype)  # [N T H] -> [T N H]
