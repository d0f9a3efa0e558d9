"""Where the keys and values of a layer lie: a view knows how to read block b of row r."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@runtime_checkable
class BlockView(Protocol):
    """Keys and values of one layer, as blocks of P tokens per row and KV head."""

    block_size: int
    num_blocks: int
    num_heads: int

    def blocks(self, rows: Int[Array, "..."], heads: Int[Array, "..."], ids: Int[Array, "..."]) -> tuple[Array, Array]:
        """Read whole blocks of `(row, head)`: `(k, v)`, each `[... P H]`. Ids must lie in [0, num_blocks)."""
        ...

    def run(self, first: Int[Array, ""] | int, count: int) -> tuple[Float[Array, "B K C H"], Float[Array, "B K C H"]]:
        """Read `count` consecutive blocks of every row and head, from block `first` on."""
        ...


@struct.dataclass
class Contiguous:
    """Head-major keys and values `[L B K S H]` of a stack of layers, read at one layer.

    S is a multiple of the block size. The layer stays an index, so a decode step reads the blocks that it selected
    and never copies the layer out of the stack.
    """

    k: Float[Array, "L B K S H"]
    v: Float[Array, "L B K S H"]
    layer: Int[Array, ""] | int
    block_size: int = struct.field(pytree_node=False)

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row holds."""
        return self.k.shape[-2] // self.block_size

    @property
    def num_heads(self) -> int:
        """K, the number of KV heads."""
        return self.k.shape[2]

    def blocks(self, rows, heads, ids):
        """Read blocks `ids` of `(rows, heads)` as `[... P H]`."""

        def read(x):
            x = x.reshape(*x.shape[:3], self.num_blocks, self.block_size, x.shape[-1])
            return x[self.layer, rows, heads, ids]

        return read(self.k), read(self.v)

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row and head, as tokens."""
        size = count * self.block_size

        def read(x):
            start = [jnp.asarray(i, jnp.int32) for i in (self.layer, 0, 0, first * self.block_size, 0)]
            return jax.lax.dynamic_slice(x, start, (1, *x.shape[1:3], size, x.shape[-1]))[0]

        return read(self.k), read(self.v)


def contiguous(k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], block_size: int) -> Contiguous:
    """View token-major arrays as blocks; the last block is padded with zeros."""
    check_block_size(block_size)
    pad = ((0, 0), (0, -k.shape[1] % block_size), (0, 0), (0, 0))
    k, v = (jnp.pad(x, pad).swapaxes(1, 2)[None] for x in (k, v))
    return Contiguous(k, v, 0, block_size)


def check_block_size(block_size: int) -> None:
    """Raise ValueError where a block would hold no token."""
    if block_size < 1:
        raise ValueError(f"block_size = {block_size}: must be at least 1")
