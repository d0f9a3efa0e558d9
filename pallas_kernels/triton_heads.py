"""A head of a query or key in a Triton kernel: norm and rotation, in parts that are powers of two wide."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float


def head_parts(width: int, half: int) -> list[pl.Slice]:
    """The dims of a head: two halves that rotate into each other, and the rest. Triton cannot cut a tensor.

    Args:
      width: of the head.
      half: angles of a head.
    """
    halves = [pl.ds(0, half), pl.ds(half, half)]
    return halves if width == 2 * half else [*halves, pl.ds(2 * half, width - 2 * half)]


def norm_rope(
    parts: Sequence[Float[Array, "..."]], weight_ref, cos: Float[Array, " R"], sin: Float[Array, " R"], eps: float
) -> list[Float[Array, "..."]]:
    """A head, or several, through Gemma's norm and the rotation, in float32.

    Args:
      parts: of `head_parts`.
      weight_ref: of the norm.
      cos: cosines of the token's angles.
      sin: sines.
      eps: of the norm.
    """
    parts = [x.astype(jnp.float32) for x in parts]
    width = sum(x.shape[-1] for x in parts)
    square = sum(jnp.sum(x * x, axis=-1) for x in parts) / width
    factor = jax.lax.rsqrt(square + eps)
    factor = factor[:, None] if parts[0].ndim == 2 else factor
    weights = [1.0 + weight_ref[dims].astype(jnp.float32) for dims in head_parts(width, len(cos))]
    first, second, *rest = [x * factor * weight for x, weight in zip(parts, weights, strict=True)]
    return [first * cos - second * sin, second * cos + first * sin, *rest]
