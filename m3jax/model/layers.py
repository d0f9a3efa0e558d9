"""The norm, the rotary embedding and the SwiGLU-OAI MLP of a layer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.execution import Tap
from m3jax.execution.plain import add, add_norm, apply_rope, gemma_norm, mlp
from m3jax.make import Make
from m3jax.model.context import Context
from m3jax.numerics import accumulator
from m3jax.ops.experts import Activation
from m3jax.weights import Weight

__all__ = ["MLP", "activation", "add", "add_norm", "apply_rope", "gemma_norm", "rope_table", "swiglu_oai"]


def rope_table(
    positions: Int[Array, "B T"], rotary_dim: int, theta: float, dtype: jnp.dtype
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Return cosines and sines of position x theta**(-2i / rotary_dim) for i < R = rotary_dim / 2, float32 at least."""
    # Never in bfloat16: around position 2**20 its numbers lie 8192 apart, and an angle's remainder by 2 pi is noise.
    table_dtype = np.float64 if accumulator(dtype) == np.float64 else np.float32
    # By numpy: frequencies are constants of the program, the same whatever device computes the rest.
    exponent = np.arange(0, rotary_dim, 2, dtype=table_dtype) / table_dtype(rotary_dim)  # [R]
    angles = positions[..., None].astype(table_dtype) * (table_dtype(1.0) / table_dtype(theta) ** exponent)  # [B T R]
    return jnp.cos(angles), jnp.sin(angles)


def swiglu_oai(
    gate: Float[Array, "..."], up: Float[Array, "..."], alpha: float, limit: float, beta: float = 1.0
) -> Float[Array, "..."]:
    """Return (up + beta) * gate * sigmoid(alpha * gate), gate clamped above and up on both sides at `limit`."""
    # By comparisons: XLA's CPU backend may fuse a minimum with the product before it, and then NaN becomes a number.
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return (up + beta) * gate * jax.nn.sigmoid(alpha * gate)


def activation(config: M3Config, dtype: jnp.dtype) -> Activation:
    """Return the model's `swiglu_oai`, a function of gate and up.

    Products are in float32 and meet in float32: its result, rounded to `dtype`, is the only rounding between them.
    """
    alpha, limit, beta = config.swiglu_alpha, config.swiglu_limit, config.swiglu_beta
    return lambda gate, up: swiglu_oai(gate, up, alpha, limit, beta).astype(dtype)


class MLP(nnx.Module):
    """The dense feed-forward part, also the shared expert: gate_proj and up_proj [L D F], down_proj [L F D].

    A call has the parameters of one layer, without L: a stack of layers is scanned.
    """

    def __init__(self, depth: int, width: int, hidden: int, make: Make):
        self.gate_proj = make.linear((depth, width, hidden), ("layers", None, "mlp"))
        self.up_proj = make.linear((depth, width, hidden), ("layers", None, "mlp"))
        self.down_proj = make.linear((depth, hidden, width), ("layers", "mlp", None))

    def matrices(self) -> tuple[Weight, Weight, Weight]:
        """Return gate, up and down."""
        return self.gate_proj[...], self.up_proj[...], self.down_proj[...]

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, layer: Int[Array, ""], tap: Tap
    ) -> Float[Array, "B T D"]:
        """Return one layer's MLP, left in the accumulator's dtype.

        Args:
          x: Output of the layer's second norm.
          context: Values that the layers of the call share.
          layer, tap: Unused, as in a layer with experts.
        """
        return context.how.each_token(partial(self.on_tokens, config=context.config))(x)

    def on_tokens(self, x: Float[Array, "B T D"], config: M3Config) -> Float[Array, "B T D"]:
        """Return the MLP of some tokens."""
        return mlp(x, self.matrices(), activation(config, x.dtype))
