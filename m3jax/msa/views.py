"""Views of the keys and values of a layer, wherever they lie: a view knows how to read block b of row r."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from m3jax.msa.checks import checked
from m3jax.msa.share import Share
from m3jax.platform import platform


@runtime_checkable
class BlockView(Protocol):
    """Keys and values of one layer, as blocks of P tokens per row and KV head.

    What is read of a block that a view does not hold means nothing; `present` says which ones it holds. Where devices
    divide the blocks of rows, a view has those of this device, by its own numbers, and `share` says which ones of a row
    they are; it is None where this device has all.
    """

    block_size: int
    num_blocks: int
    num_heads: int
    width: int
    share: Share | None

    def blocks(self, rows: Int[Array, "..."], heads: Int[Array, "..."], ids: Int[Array, "..."]) -> tuple[Array, Array]:
        """Read whole blocks of `(row, head)`: `(k, v)`, each `[... P H]`. Ids must lie in [0, num_blocks)."""
        ...

    def run(self, first: Int[Array, ""] | int, count: int) -> tuple[Float[Array, "B K CP H"], Float[Array, "B K CP H"]]:
        """Read `count` consecutive blocks of every row and head, as C * P tokens, from block `first` on."""
        ...

    def present(self, first: Int[Array, ""] | int, count: int) -> Bool[Array, "#B C"]:
        """Return True for those of `count` consecutive blocks that the view holds."""
        ...

    def of_row(self, row: Int[Array, ""], multiple: int = 1) -> "BlockView":
        """Return one row as a view of its own, lengthened by meaningless blocks to a multiple of `multiple`."""
        ...


@runtime_checkable
class IndexView(Protocol):
    """Index keys of one layer, as blocks of P tokens per row; `share` as in `BlockView`."""

    block_size: int
    num_blocks: int
    share: Share | None

    def run(self, first: Int[Array, ""] | int, count: int) -> Float[Array, "B CP I"]:
        """Read `count` consecutive blocks of every row, as C * P tokens, from block `first` on."""
        ...

    def present(self, first: Int[Array, ""] | int, count: int) -> Bool[Array, "#B C"]:
        """Return True for those of `count` consecutive blocks that the view holds."""
        ...

    def of_row(self, row: Int[Array, ""], multiple: int = 1) -> "IndexView":
        """Return one row as a view of its own, lengthened as by `BlockView.of_row`."""
        ...


@struct.dataclass
class Contiguous:
    """Head-major keys and values `[B K S H]`; S is a multiple of the block size."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    block_size: int = struct.field(pytree_node=False)

    share = None

    @classmethod
    def of_tokens(cls, k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], block_size: int) -> "Contiguous":
        """Return a view of token-major arrays, without the checks of `contiguous`."""
        padding = ((0, 0), (0, -k.shape[1] % block_size), (0, 0), (0, 0))
        return cls(jnp.pad(k, padding).swapaxes(1, 2), jnp.pad(v, padding).swapaxes(1, 2), block_size)  # [B K S H]

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row holds."""
        return self.k.shape[2] // self.block_size

    @property
    def num_heads(self) -> int:
        """K, the number of KV heads."""
        return self.k.shape[1]

    @property
    def width(self) -> int:
        """H, numbers of a head."""
        return self.k.shape[3]

    def blocks(self, rows, heads, ids):
        """Read blocks `ids` of `(rows, heads)` as `[... P H]`."""

        def read(x):
            by_block = x.reshape(*x.shape[:2], self.num_blocks, self.block_size, -1)  # [B K M P H]
            return _gather(by_block, rows, heads, ids)

        return read(self.k), read(self.v)

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row and head, as tokens."""
        size = count * self.block_size
        k, v = (jax.lax.dynamic_slice_in_dim(x, first * self.block_size, size, axis=2) for x in (self.k, self.v))
        return k, v

    def present(self, first, count):
        """Return True: every block is held."""
        return jnp.ones((1, count), bool)

    def of_row(self, row, multiple=1):
        """Return a view of one row, with zeros behind it."""
        # Pieces of `multiple` blocks then begin at multiples of their length, up to the end.
        padding = ((0, 0), (0, 0), (0, -self.k.shape[2] % (multiple * self.block_size)), (0, 0))
        k, v = (jnp.pad(jax.lax.dynamic_slice_in_dim(x, row, 1), padding) for x in (self.k, self.v))
        return self.replace(k=k, v=v)


@struct.dataclass
class ContiguousIndex:
    """Index keys `[B S I]`; S is a multiple of the block size."""

    k: Float[Array, "B S I"]
    block_size: int = struct.field(pytree_node=False)

    share = None

    @classmethod
    def of_tokens(cls, k: Float[Array, "B S I"], block_size: int) -> "ContiguousIndex":
        """Return a view of index keys, without the checks of `contiguous_index`."""
        return cls(jnp.pad(k, ((0, 0), (0, -k.shape[1] % block_size), (0, 0))), block_size)

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row holds."""
        return self.k.shape[1] // self.block_size

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row, as tokens."""
        return jax.lax.dynamic_slice_in_dim(self.k, first * self.block_size, count * self.block_size, axis=1)

    def present(self, first, count):
        """Return True: every block is held."""
        return jnp.ones((1, count), bool)

    def of_row(self, row, multiple=1):
        """Return a view of one row, with zeros behind it."""
        padding = ((0, 0), (0, -self.k.shape[1] % (multiple * self.block_size)), (0, 0))
        return self.replace(k=jnp.pad(jax.lax.dynamic_slice_in_dim(self.k, row, 1), padding))


@struct.dataclass
class Paged:
    """Pages `[L pages K P H]` of a stack of layers, read at one layer through a table.

    The layer stays an index, so a decode step reads the pages that it selected and never copies the layer out of
    the stack. An entry of the table outside [0, pages) is no page. Of a row that devices divide, the table has the
    blocks of this one.
    """

    k: Num[Array, "L X K P H"]
    v: Num[Array, "L X K P H"]
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None
    layer: Int[Array, ""] | int
    table: Int[Array, "B M"]
    dtype: DTypeLike = struct.field(pytree_node=False)
    share: Share | None = None

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

    @property
    def width(self) -> int:
        """H, numbers of a head."""
        return self.k.shape[4]

    def blocks(self, rows, heads, ids):
        """Read blocks `ids` of `(rows, heads)` as `[... P H]`."""
        return self._read(_gather(self.table, rows, ids), heads)

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row and head, as tokens."""
        page_ids = jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1)  # [B C]
        k, v = self._read(page_ids[:, None], jnp.arange(self.num_heads)[:, None])  # [B K C P H] each
        k, v = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (k, v))  # [B K C*P H]
        return k, v

    def present(self, first, count):
        """Return True for blocks that have a page."""
        return _is_page(jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1), self.k.shape[1])

    def of_row(self, row, multiple=1):
        """Return a view of one row; behind it the table names no page."""
        share = None if self.share is None else self.share.of_row(row)
        return self.replace(table=_row_of_table(self.table, row, multiple), share=share)

    def joined(self):
        """Return a view of the blocks of all devices, whose reads bring blocks together."""
        return Joined(self)

    def _read(self, page_ids, heads):
        """Return the part of pages that some heads have, in the model's dtype."""
        num_pages, kv_heads = self.k.shape[1:3]
        # [L pages K] are virtual pages of single heads; one index to read by is what compiles best.
        virtual_page = (self.layer * num_pages + jnp.clip(page_ids, 0, num_pages - 1)) * kv_heads + heads
        k, v = (_gather_pages(x.reshape(-1, *x.shape[3:]), virtual_page) for x in (self.k, self.v))
        return _scaled_back(k, v, self.scales, heads, self.dtype)


@struct.dataclass
class Pooled:
    """A pool of virtual pages, each of one KV head, that has some of a layer's blocks: `slot_of` says where.

    A block of a head that is not in the pool reads as some other one; the caller selects among those that are in it.
    """

    k: Num[Array, "L D P H"]
    v: Num[Array, "L D P H"]
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None
    layer: Int[Array, ""] | int
    slot_of: Int[Array, " V"]
    table: Int[Array, "B M"]
    num_heads: int = struct.field(pytree_node=False)
    dtype: DTypeLike = struct.field(pytree_node=False)

    share = None

    @property
    def block_size(self) -> int:
        """P, tokens of a page."""
        return self.k.shape[2]

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row can have."""
        return self.table.shape[1]

    @property
    def width(self) -> int:
        """H, numbers of a head."""
        return self.k.shape[3]

    def virtual_page(self, rows, heads, ids):
        """Return the virtual page of each block, and True where there is one; `slot_of` has V of them."""
        page_ids = _gather(self.table, rows, ids)
        is_page = _is_page(page_ids, len(self.slot_of) // self.num_heads)
        return jnp.where(is_page, page_ids, 0) * self.num_heads + heads, is_page

    def blocks(self, rows, heads, ids):
        """Read blocks `ids` of `(rows, heads)` as `[... P H]`."""
        virtual_page, _ = self.virtual_page(rows, heads, ids)
        # A block without a slot reads slot 0, some other block: the caller has not selected it.
        slot = self.layer * self.k.shape[1] + jnp.maximum(_gather(self.slot_of, virtual_page), 0)
        k, v = (_gather_pages(x.reshape(-1, *x.shape[2:]), slot) for x in (self.k, self.v))
        return _scaled_back(k, v, self.scales, heads, self.dtype)

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row and head, as tokens."""
        rows, heads = jnp.arange(len(self.table))[:, None, None], jnp.arange(self.num_heads)[:, None]
        k, v = self.blocks(rows, heads, first + jnp.arange(count))  # [B K C P H] each
        k, v = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (k, v))  # [B K C*P H]
        return k, v

    def present(self, first, count):
        """Return True: every block that a caller may have selected is held."""
        return jnp.ones((1, count), bool)

    def of_row(self, row, multiple=1):
        """Return a view of one row; behind it the table names no page."""
        return self.replace(table=_row_of_table(self.table, row, multiple))


@struct.dataclass
class Joined:
    """A view of all blocks of rows that devices divide, inside `shard_map`: a read brings blocks together.

    A read sums over devices one block and zeros, so every device gets the numbers of the device that holds the block
    (but for the sign of a zero). All devices have to read the same blocks, in the same order.
    """

    part: Paged

    share = None

    @property
    def block_size(self) -> int:
        """P, tokens of a page."""
        return self.part.block_size

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks a row can have, rounded up to what the devices divide."""
        return self.part.num_blocks * self.part.share.num_devices

    @property
    def num_heads(self) -> int:
        """K, the number of KV heads."""
        return self.part.num_heads

    @property
    def width(self) -> int:
        """H, numbers of a head."""
        return self.part.width

    def blocks(self, rows, heads, ids):
        """Read blocks `ids` of `(rows, heads)` as `[... P H]`."""
        held_id, is_held = self._held(rows, ids)
        k, v = self.part.blocks(rows, heads, held_id)
        is_held = jnp.broadcast_to(is_held, k.shape[:-2])[..., None, None]
        # Zeros where a device does not hold the block: its memory may have NaN there, and a sum would spread it.
        return jax.lax.psum((jnp.where(is_held, k, 0), jnp.where(is_held, v, 0)), self.part.share.axes)

    def run(self, first, count):
        """Read blocks `first` to `first + count` of every row and head, as tokens."""
        rows, heads = jnp.arange(len(self.part.table))[:, None, None], jnp.arange(self.num_heads)[:, None]
        k, v = self.blocks(rows, heads, first + jnp.arange(count, dtype=jnp.int32))  # [B K C P H] each
        return tuple(x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (k, v))  # [B K C*P H]

    def present(self, first, count):
        """Return True for blocks that have a page, on any device."""
        rows, ids = jnp.arange(len(self.part.table))[:, None], first + jnp.arange(count, dtype=jnp.int32)
        return jax.lax.pmax(self._held(rows, ids)[1].astype(jnp.int32), self.part.share.axes) > 0  # [B C]

    def of_row(self, row, multiple=1):
        """Return a view of one row; behind it the table names no page."""
        return self.replace(part=self.part.of_row(row, multiple))

    def _held(self, rows, ids):
        """Return this device's numbers of blocks, and True for those that it holds."""
        share = self.part.share
        held_id = ids // share.num_devices
        is_page = _is_page(_gather(self.part.table, rows, held_id), self.part.k.shape[1])
        return held_id, is_page & (ids % share.num_devices == share.first[rows])


@struct.dataclass
class PagedIndex:
    """Index-key pages `[L pages P I]` of a stack of layers, read at one layer through a table."""

    k: Num[Array, "L X P I"]
    scale: Float[Array, ""] | None
    layer: Int[Array, ""] | int
    table: Int[Array, "B M"]
    dtype: DTypeLike = struct.field(pytree_node=False)
    share: Share | None = None

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
        page_ids = jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1)  # [B C]
        layers, num_pages = self.k.shape[:2]
        page_in_stack = self.layer * num_pages + jnp.clip(page_ids, 0, num_pages - 1)
        stored = _gather_pages(self.k.reshape(layers * num_pages, *self.k.shape[2:]), page_in_stack)  # [B C P I]
        keys = _restore(stored, self.scale, self.dtype)
        return keys.reshape(keys.shape[0], -1, keys.shape[-1])  # [B C*P I]

    def present(self, first, count):
        """Return True for blocks that have a page."""
        return _is_page(jax.lax.dynamic_slice_in_dim(self.table, first, count, axis=1), self.k.shape[1])

    def of_row(self, row, multiple=1):
        """Return a view of one row; behind it the table names no page."""
        share = None if self.share is None else self.share.of_row(row)
        return self.replace(table=_row_of_table(self.table, row, multiple), share=share)


@checked
def contiguous(k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], block_size: int) -> Contiguous:
    """View token-major arrays as blocks; the last block is padded with zeros.

    Args:
      k, v: [B S K H] each.
      block_size: P.
    """
    return Contiguous.of_tokens(k, v, block_size)


@checked
def contiguous_index(k: Float[Array, "B S I"], block_size: int) -> ContiguousIndex:
    """View index keys as blocks; the last block is padded with zeros.

    Args:
      k: [B S I].
      block_size: P.
    """
    return ContiguousIndex.of_tokens(k, block_size)


def only_held(blocks: Int[Array, "B K T J"], view: BlockView) -> Int[Array, "B K T J"]:
    """Return a selection with -1 in place of the blocks that the view does not hold."""
    is_held = view.present(0, view.num_blocks)[:, None, None]  # [#B 1 1 M]
    is_held = jnp.broadcast_to(is_held, (*blocks.shape[:3], is_held.shape[-1]))
    return jnp.where(jnp.take_along_axis(is_held, jnp.maximum(blocks, 0), axis=-1), blocks, -1)


def _row_of_table(table: Int[Array, "B M"], row: Int[Array, ""], multiple: int) -> Int[Array, "1 Mp"]:
    """Return one row of a table, lengthened by entries that name no page to a multiple of `multiple`."""
    padding = ((0, 0), (0, -table.shape[1] % multiple))
    return jnp.pad(jax.lax.dynamic_slice_in_dim(table, row, 1), padding, constant_values=-1)


def _gather(x: Shaped[Array, "..."], *indices: Int[Array, "..."]) -> Shaped[Array, "..."]:
    """Return `x[indices]` for indices known to be inside, without the comparison and selection of a checked read."""
    return x.at[indices].get(mode="promise_in_bounds")


def _gather_pages(memory: Num[Array, "V P H"], page_ids: Int[Array, "..."]) -> Num[Array, "... P H"]:
    """Return `memory[page_ids]` for pages known to be inside."""
    if platform() == "cpu":  # a loop over a page's numbers moves eight at a time, one over a head's a single one
        return _gather(memory.reshape(len(memory), -1), page_ids).reshape(*page_ids.shape, *memory.shape[1:])
    return _gather(memory, page_ids)


def _scaled_back(
    k: Num[Array, "*X P H"],
    v: Num[Array, "*X P H"],
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None,
    heads: Int[Array, "..."],
    dtype: DTypeLike,
) -> tuple[Float[Array, "*X P H"], Float[Array, "*X P H"]]:
    """Return stored keys and values of some heads in the model's dtype; only float8 is scaled."""
    if scales is None:  # only float8 has scales
        return _restore(k, None, dtype), _restore(v, None, dtype)
    k_scale, v_scale = (scale[heads][..., None, None] for scale in scales)
    return _restore(k, k_scale, dtype), _restore(v, v_scale, dtype)


def _restore(x: Num[Array, "..."], scale: Float[Array, "..."] | None, dtype: DTypeLike) -> Float[Array, "..."]:
    """Return stored numbers in the dtype of the model: scaled in the scale's dtype, rounded once."""
    return x.astype(dtype) if scale is None else (x.astype(scale.dtype) * scale).astype(dtype)


def _is_page(page_ids: Int[Array, "..."], num_pages: int) -> Bool[Array, "..."]:
    """Return True for the entries of a table that are pages of the pool held here."""
    return (page_ids >= 0) & (page_ids < num_pages)
