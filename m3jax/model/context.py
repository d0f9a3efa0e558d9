"""What every layer of one call shares."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.model.layers import rope_table


@struct.dataclass
class Context:
    """Positions, lengths and rotary tables of one call."""

    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    schedule: str = struct.field(pytree_node=False)

    @classmethod
    def make(
        cls, positions: Int[Array, "B T"], lengths: Int[Array, " B"], config: M3Config, dtype, schedule: str
    ) -> "Context":
        """Compute the rotary tables once for all layers."""
        cos, sin = rope_table(positions, config.rotary_dim, config.rope_theta, dtype)
        return cls(positions, lengths, cos, sin, schedule)

    def slots(self, size: int) -> Int[Array, "B T"]:
        """The cache slot of each token; padding gets one past the end, where writes are dropped."""
        real = (self.positions >= 0) & (self.positions < self.lengths[:, None])
        return jnp.where(real, self.positions, size)
