"""Norm, rotary embedding and the SwiGLU-OAI MLP."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax.model.params import Make
from m3jax.numerics import accumulator, einsum


def gemma_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """Root-mean-square norm times (1 + weight), in the accumulator's dtype; the caller rounds.

    Source: transformers `MiniMaxM3VLRMSNorm`.
    """
    dtype = accumulator(x.dtype)
    x = x.astype(dtype)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * (1.0 + weight.astype(dtype))


def rope_table(
    positions: Int[Array, "B T"], rotary_dim: int, theta: float, dtype: jnp.dtype
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Cosines and sines of position x theta**(-2i / rotary_dim), R = rotary_dim / 2, in at least float32."""
    kind = np.float64 if accumulator(dtype) == np.float64 else np.float32
    exponent = np.arange(0, rotary_dim, 2, dtype=kind) / kind(rotary_dim)
    angles = positions[..., None].astype(kind) * (kind(1.0) / kind(theta) ** exponent)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "B T X H"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"]
) -> Float[Array, "B T X H"]:
    """Rotate dims (i, i + R) of each head by the position's angle; dims from 2R on pass through (half-split)."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def swiglu_oai(gate: Float[Array, "..."], up: Float[Array, "..."], alpha: float, limit: float) -> Float[Array, "..."]:
    """(up + 1) * gate * sigmoid(alpha * gate), gate clamped above and up on both sides at `limit`."""
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + 1.0) * gate * jax.nn.sigmoid(alpha * gate)


class MLP(nnx.Module):
    """The dense feed-forward part, also the shared expert."""

    def __init__(self, depth: int, width: int, hidden: int, make: Make):
        self.gate_proj = nnx.Param(make((depth, width, hidden), ("layers", None, "mlp"), None, width))
        self.up_proj = nnx.Param(make((depth, width, hidden), ("layers", None, "mlp"), None, width))
        self.down_proj = nnx.Param(make((depth, hidden, width), ("layers", "mlp", None), None, hidden))

    def __call__(self, x: Float[Array, "... D"], alpha: float, limit: float) -> Float[Array, "... D"]:
        """One layer's MLP, left in the accumulator's dtype."""
        gate = einsum("...d,df->...f", x, self.gate_proj[...])
        up = einsum("...d,df->...f", x, self.up_proj[...])
        hidden = swiglu_oai(gate, up, alpha, limit).astype(x.dtype)
        return einsum("...f,fd->...d", hidden, self.down_proj[...])
