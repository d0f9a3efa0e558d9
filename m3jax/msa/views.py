"""Where the keys and values of a layer lie: a view knows how to read block b of row r."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num


@runtime_checkable
class BlockView(Protocol):
    """Keys and values of one layer, as blocks of P tokens per row and KV head.

    Blocks that a view does not hold read as anything; `present` says which ones it holds.
    """

    block_size: int
    num_blocks: int
    num_heads: int

    def blocks(self, rows: Int[Array, "..."], heads: Int[Array, "..."], ids: Int[Array, "..."]) -> tuple[Array, Array]:
        """Read whole blocks of `(row, head)`: `(k, v)`, each `[... P H]`. Ids must lie in [0, num_blocks)."""
        ...

    def run(self, first: Int[Array, ""] | int, count: int) -> tuple[Float[Array, "B K C H"], Float[Array, "B K C H"]]:
        """Read `count` consecutive blocks of every row and head, from block `first` on."""
        ...

    def present(self, first: Int[Array, ""] | int, count: int) -> Bool[Array, "#B C"]:
        """Which of these blocks the view holds."""
        ...


@runtime_checkable
class IndexView(Protocol):
    """Index keys of one layer, as blocks of P tokens per row."""

    block_size: int
    num_blocks: int

    def run(self, first: Int[Array, ""] | int, count: int) -> Float[Array, "B C I"]:
        """Read `count` consecutive blocks of every row, from block `first` on."""
        ...

    def present(self, first: Int[Array, ""] | int, count: int) -> Bool[Array, "#B C"]:
        """Which of these blocks the view holds."""
        ...


@struct.dataclass
class Contiguous:
    """Head-major keys and values `[B K S H]`; S is a multiple of the block size."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    block_size: int = struct.field(pytree_node=False)

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row holds."""
        return self.k.shape[2] // self.block_size

    @property
    def num_heads(self) -> int:
        """K, the number of KV heads."""
        return self.k.shape[1]

    def blocks(self, rows, heads, ids):
        """Read blocks `ids` of `(rows, heads)` as `[... P H]`."""
        read = lambda x: _at(x.reshape(*x.shape[:2], self.num_blocks, self.block_size, -1), rows, heads, ids)
        return read(self.k), read(self.v)

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row and head, as tokens."""
        size = count * self.block_size
        read = lambda x: jax.lax.dynamic_slice_in_dim(x, first * self.block_size, size, axis=2)
        return read(self.k), read(self.v)

    def present(self, first, count):
        """All of them."""
        return jnp.ones((1, count), bool)


@struct.dataclass
class ContiguousIndex:
    """Index keys `[B S I]`; S is a multiple of the block size."""

    k: Float[Array, "B S I"]
    block_size: int = struct.field(pytree_node=False)

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row holds."""
        return self.k.shape[1] // self.block_size

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row, as tokens."""
        return jax.lax.dynamic_slice_in_dim(self.k, first * self.block_size, count * self.block_size, axis=1)

    def present(self, first, count):
        """All of them."""
        return jnp.ones((1, count), bool)


@struct.dataclass
class Paged:
    """Pages `[L pages K P H]` of a stack of layers, read at one layer through a table.

    The layer stays an index, so a decode step reads the pages that it selected and never copies the layer out of
    the stack. A page of the table outside [0, pages) is not held: it is no page, or lies on another device.
    """

    k: Num[Array, "L X K P H"]
    v: Num[Array, "L X K P H"]
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None
    layer: Int[Array, ""] | int
    table: Int[Array, "B M"]
    dtype: DTypeLike = struct.field(pytree_node=False)

    @property
    def block_size(self) -> int:
        """P, tokens of a page."""
        return self.k.shape[3]

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row can have."""
        return self.table.shape[1]

    @property
    def num_heads(self) -> int:
        """K, the number of KV heads."""
        return self.k.shape[2]

    def blocks(self, rows, heads, ids):
        """Read blocks `ids` of `(rows, heads)` as `[... P H]`."""
        return self._read(_at(self.table, rows, ids), heads)

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row and head, as tokens."""
        table = jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1)
        k, v = self._read(table[:, None], jnp.arange(self.num_heads)[:, None])
        return tuple(x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (k, v))

    def present(self, first, count):
        """Which of these pages are held here."""
        return _held(jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1), self.k.shape[1])

    def _read(self, pages, heads):
        """Pages `[L pages K]` are virtual pages of single heads; one index to read by is what compiles best."""
        layers, count, kv_heads = self.k.shape[:3]
        at = (self.layer * count + jnp.clip(pages, 0, count - 1)) * kv_heads + heads
        k, v = (_at(x.reshape(layers * count * kv_heads, *x.shape[3:]), at) for x in (self.k, self.v))
        scales = [s[heads][..., None, None] for s in self.scales] if self.scales else (None, None)
        return tuple(_restore(x, s, self.dtype) for x, s in zip((k, v), scales, strict=True))


@struct.dataclass
class Pooled:
    """A pool of virtual pages, those of single KV heads, that has some of a layer's blocks: `slot_of` says where.

    A block of a head that is not in the pool reads as some other one; the caller selects among those that are.
    """

    k: Num[Array, "L D P H"]
    v: Num[Array, "L D P H"]
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None
    layer: Int[Array, ""] | int
    slot_of: Int[Array, " V"]
    table: Int[Array, "B M"]
    num_heads: int = struct.field(pytree_node=False)
    dtype: DTypeLike = struct.field(pytree_node=False)

    @property
    def block_size(self) -> int:
        """P, tokens of a page."""
        return self.k.shape[2]

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row can have."""
        return self.table.shape[1]

    def virtual(self, rows, heads, ids):
        """The virtual page of each block, and whether there is one; `slot_of` has V of them."""
        pages = _at(self.table, rows, ids)
        inside = (pages >= 0) & (pages < len(self.slot_of) // self.num_heads)
        return jnp.where(inside, pages, 0) * self.num_heads + heads, inside

    def blocks(self, rows, heads, ids):
        """Read blocks `ids` of `(rows, heads)` as `[... P H]`."""
        layers, size = self.k.shape[:2]
        slot = _at(self.slot_of, self.virtual(rows, heads, ids)[0])
        at = self.layer * size + jnp.maximum(slot, 0)
        k, v = (_at(x.reshape(layers * size, *x.shape[2:]), at) for x in (self.k, self.v))
        scales = [s[heads][..., None, None] for s in self.scales] if self.scales else (None, None)
        return tuple(_restore(x, s, self.dtype) for x, s in zip((k, v), scales, strict=True))

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row and head, as tokens."""
        rows, heads = jnp.arange(len(self.table))[:, None, None], jnp.arange(self.num_heads)[:, None]
        k, v = self.blocks(rows, heads, first + jnp.arange(count))
        return tuple(x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (k, v))

    def present(self, first, count):
        """All that a caller may have selected."""
        return jnp.ones((1, count), bool)


@struct.dataclass
class PagedIndex:
    """Index-key pages `[L pages P I]` of a stack of layers, read at one layer through a table."""

    k: Num[Array, "L X P I"]
    scale: Float[Array, ""] | None
    layer: Int[Array, ""] | int
    table: Int[Array, "B M"]
    dtype: DTypeLike = struct.field(pytree_node=False)

    @property
    def block_size(self) -> int:
        """P, tokens of a page."""
        return self.k.shape[2]

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row can have."""
        return self.table.shape[1]

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row, as tokens."""
        table = jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1)
        layers, count = self.k.shape[:2]
        pages = self.layer * count + jnp.clip(table, 0, count - 1)
        x = _restore(_at(self.k.reshape(layers * count, *self.k.shape[2:]), pages), self.scale, self.dtype)
        return x.reshape(x.shape[0], -1, x.shape[-1])

    def present(self, first, count):
        """Which of these pages are held here."""
        return _held(jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1), self.k.shape[1])


def contiguous(k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], block_size: int) -> Contiguous:
    """View token-major arrays as blocks; the last block is padded with zeros."""
    check_block_size(block_size)
    pad = ((0, 0), (0, -k.shape[1] % block_size), (0, 0), (0, 0))
    return Contiguous(*(jnp.pad(x, pad).swapaxes(1, 2) for x in (k, v)), block_size)


def contiguous_index(k: Float[Array, "B S I"], block_size: int) -> ContiguousIndex:
    """View index keys as blocks; the last block is padded with zeros."""
    check_block_size(block_size)
    return ContiguousIndex(jnp.pad(k, ((0, 0), (0, -k.shape[1] % block_size), (0, 0))), block_size)


def check_block_size(block_size: int) -> None:
    """Raise ValueError where a block would hold no token."""
    if block_size < 1:
        raise ValueError(f"block_size = {block_size}: must be at least 1")


def _at(x: Array, *index: Array) -> Array:
    """`x[index]` for indices known to be inside: without it every read is compared and selected once more."""
    return x.at[index].get(mode="promise_in_bounds")


def _restore(x: Num[Array, "..."], scale: Float[Array, "..."] | None, dtype: DTypeLike) -> Float[Array, "..."]:
    """Stored numbers back in the dtype of the model: scaled in the scale's dtype, rounded once."""
    return x.astype(dtype) if scale is None else (x.astype(scale.dtype) * scale).astype(dtype)


def _held(table: Int[Array, "B C"], pages: int) -> Bool[Array, "B C"]:
    return (table >= 0) & (table < pages)
