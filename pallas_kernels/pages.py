"""Keys and values as blocks of memory, with or without a table: what the kernels of every backend read."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num


class FinderRefs(NamedTuple):
    """The operands by which a kernel finds a page; inside the kernel, references to them."""

    layer: Any  # [1]
    table: Any | None  # None where blocks lie in order


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("pool", "table", "layer"),
    meta_fields=(
        "layer_stride",
        "page_count",
        "page_stride",
        "row_stride",
        "head_stride",
        "num_blocks",
        "num_devices",
    ),
)
@dataclasses.dataclass(frozen=True)
class Pages:
    """The blocks of keys, values or index keys of all rows and heads, in one pool.

    Block m of row b and head k is `pool[layer * layer_stride + k * head_stride + offset]`, where `offset` is
    `table[b, m] * page_stride` with a table, else `b * row_stride + m`. Made by `contiguous` and `paged`.

    Devices may divide the blocks of rows in turn: `num_devices` then says how many do. Kernels compute the same
    whatever it says; estimates of their cost ask.
    """

    pool: Num[Array, "X P H"]
    table: Int[Array, "B M"] | None
    layer: Int[Array, ""]
    layer_stride: int
    page_count: int
    page_stride: int
    row_stride: int
    head_stride: int
    num_blocks: int
    num_devices: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one head's page."""
        return self.block_size * self.width * self.pool.dtype.itemsize

    @property
    def block_size(self) -> int:
        """P, tokens of a block."""
        return self.pool.shape[1]

    @property
    def width(self) -> int:
        """H, numbers of a token."""
        return self.pool.shape[2]

    def finder(self) -> FinderRefs:
        """Return the operands by which a kernel finds pages in the pool, with `locate`."""
        return FinderRefs(self.layer.reshape(1), self.table)

    def locate(self, finder: FinderRefs, row, head, block) -> tuple[Array, Array]:
        """Return (page, is_held) of a block, inside a kernel; an entry of the table that is no page reads as page 0."""
        base = finder.layer[0] * self.layer_stride + head * self.head_stride
        if finder.table is None:
            return base + row * self.row_stride + block, block >= 0
        page = finder.table[row, block]
        is_held = self.holds(page)
        return base + jnp.where(is_held, page, 0) * self.page_stride, is_held

    def holds(self, page: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Return True for each entry of the table that is a page."""
        return (page >= 0) & (page < self.page_count)


def contiguous(x: Num[Array, "..."], block_size: int, layer: Int[Array, ""] | int | None = None) -> Pages:
    """Keys, values or index keys without a table.

    Args:
      x: `[B K S H]` head-major, or `[B S H]` index keys; with `layer`, a stack of these. S is padded to whole blocks.
      block_size: P.
      layer: which one of a stack to read; the stack is not copied.

    Raises:
      ValueError: another rank.
    """
    rank = x.ndim - (layer is not None)
    if rank not in (3, 4):
        raise ValueError(f"x has shape {x.shape}: need [B K S H] or [B S H], or a stack of these with layer=")
    if padding := -x.shape[-2] % block_size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)])
    num_blocks = x.shape[-2] // block_size
    num_heads = x.shape[-3] if rank == 4 else 1
    num_rows = x.shape[-rank]
    pool = x.reshape(-1, block_size, x.shape[-1])  # [X P H]
    return Pages(
        pool=pool,
        table=None,
        layer=jnp.asarray(0 if layer is None else layer, jnp.int32),
        layer_stride=num_rows * num_heads * num_blocks,
        page_count=len(pool),
        page_stride=1,
        row_stride=num_heads * num_blocks,
        head_stride=num_blocks,
        num_blocks=num_blocks,
    )


def paged(
    x: Num[Array, "..."], table: Int[Array, "B M"], layer: Int[Array, ""] | int | None = None, num_devices: int = 1
) -> Pages:
    """Keys, values or index keys in pages.

    Args:
      x: `[pages K P H]`, or `[pages P H]` index keys; with `layer`, a stack of these.
      table: page of each block of each row; one outside [0, pages) is not held: nothing sees its tokens.
      layer: which one of a stack to read; the stack is not copied.
      num_devices: that divide the blocks of rows, of which these are one device's.

    Raises:
      ValueError: another rank.
    """
    rank = x.ndim - (layer is not None)
    if rank not in (3, 4):
        raise ValueError(f"x has shape {x.shape}: need [pages K P H] or [pages P H], or a stack of these with layer=")
    num_heads = x.shape[-3] if rank == 4 else 1
    page_count = x.shape[-rank]
    return Pages(
        pool=x.reshape(-1, *x.shape[-2:]),  # [X P H]
        table=table.astype(jnp.int32),
        layer=jnp.asarray(0 if layer is None else layer, jnp.int32),
        layer_stride=page_count * num_heads,
        page_count=page_count,
        page_stride=num_heads,
        row_stride=0,
        head_stride=1,
        num_blocks=table.shape[1],
        num_devices=num_devices,
    )


def seen_positions(positions: Int[Array, "B T"], lengths: Int[Array, " B"], padded: int) -> Int[Array, "B T2"]:
    """Positions with -1 for every padding token, and up to `padded` tokens."""
    is_token = (positions >= 0) & (positions < lengths[:, None])
    seen = jnp.where(is_token, positions, -1).astype(jnp.int32)
    return jnp.pad(seen, ((0, 0), (0, padded - seen.shape[1])), constant_values=-1)
