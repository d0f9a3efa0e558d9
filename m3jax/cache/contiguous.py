"""A contiguous cache: one run of slots per row, keys, values and index keys together."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.parallel import sharding

_KV_AXES = ("layers", "batch", "kv_heads", None, None)
_INDEX_AXES = ("layers", "batch", None, None)


@struct.dataclass
class StackCache:
    """The cache of one stack of layers; `index_k` is None where attention is dense."""

    k: Float[Array, "L B K S H"]
    v: Float[Array, "L B K S H"]
    index_k: Float[Array, "L B S I"] | None

    def update(
        self,
        layer: Int[Array, ""],
        slots: Int[Array, "B T"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        index_k: Float[Array, "B T I"] | None,
    ) -> "StackCache":
        """Write new tokens at their slots; a slot outside the cache is dropped."""
        rows = jnp.arange(k.shape[0])[:, None]
        put = lambda x, new: x.at[layer, rows, :, slots].set(new.astype(x.dtype), mode="drop")
        out = self.replace(k=put(self.k, k), v=put(self.v, v))
        if index_k is None:
            return out
        new = index_k.astype(self.index_k.dtype)
        return out.replace(index_k=self.index_k.at[layer, rows, slots].set(new, mode="drop"))


@struct.dataclass
class Cache:
    """What a model has seen: an argument and a result of every call, donated between them.

    Slot s of row b holds position s. There are no lengths in it: they are data of the call.
    """

    stacks: tuple[StackCache, ...]

    @classmethod
    def init(
        cls, config: M3Config, batch: int, max_length: int, dtype: str = "bfloat16", mesh: Mesh | None = None
    ) -> "Cache":
        """An empty cache.

        Args:
          config: the model's configuration.
          batch: B, rows.
          max_length: tokens a row can hold; rounded up to whole blocks.
          dtype: of keys, values and index keys.
          mesh: divides rows and KV heads by the rules table.

        Raises:
          ValueError: batch or max_length below 1, or max_length beyond the model's context.
        """
        if batch < 1 or not 1 <= max_length <= config.max_position_embeddings:
            raise ValueError(
                f"batch = {batch}, max_length = {max_length}: need at least 1 row and 1 to "
                f"{config.max_position_embeddings} tokens (the model's context)"
            )
        size = -(-max_length // config.index_block_size) * config.index_block_size
        zeros = lambda shape, axes: jnp.zeros(shape, dtype, device=sharding(shape, axes, mesh))

        def stack(s):
            kv = (s.num_layers, batch, config.num_key_value_heads, size, config.head_dim)
            index = (s.num_layers, batch, size, config.index_head_dim)
            return StackCache(
                zeros(kv, _KV_AXES), zeros(kv, _KV_AXES), zeros(index, _INDEX_AXES) if s.is_sparse else None
            )

        return cls(tuple(stack(s) for s in config.stacks))

    @property
    def max_length(self) -> int:
        """Slots of a row."""
        return self.stacks[0].k.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in jax.tree.leaves(self))
