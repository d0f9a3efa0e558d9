"""What every layer of one call shares."""

import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from m3jax.cache import Cache, Places
from m3jax.cache.offload.pool import HostPages
from m3jax.config import M3Config
from m3jax.model.layers import rope_table


@struct.dataclass
class Context:
    """Positions, lengths and rotary tables of one call."""

    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    places: Places | None
    host: HostPages | None
    schedule: str = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False)
    backend: str = struct.field(pytree_node=False)

    @classmethod
    def make(
        cls,
        positions: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        cache: Cache | None,
        config: M3Config,
        dtype: jnp.dtype,
        schedule: str,
        mesh: Mesh | None,
        backend: str = "auto",
    ) -> "Context":
        """Compute the rotary tables, and where tokens go in the cache, once for all layers."""
        cos, sin = rope_table(positions, config.rotary_dim, config.rope_theta, dtype)
        places = None if cache is None else cache.places(positions, lengths)
        return cls(positions, lengths, cos, sin, places, None, schedule, mesh, backend)

    def of_stack(self, i: int, cache: Cache | None) -> "Context":
        """With the host memory of stack i, where its keys and values are offloaded."""
        return self if cache is None or cache.host is None else self.replace(host=cache.host[i])
