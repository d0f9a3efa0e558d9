"""Which blocks a tile of neighbouring queries needs: the union of their selections, with a bit for each query."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.common import div, power_of_two
from pallas_kernels.sparse_prefill.csr import seen_blocks
from pallas_kernels.sparse_prefill.operands import Sizes

_LAST = 2**30
_COLUMNS = 16


def union_blocks(
    blocks: Int[Array, "B K T J"], at: Int[Array, "B T2"], sizes: Sizes
) -> tuple[Int[Array, "B K X U"], Int[Array, "B K X U"], Int[Array, "B K X U"], Int[Array, "B K X 2"]]:
    """(pages, ids, bits, counts) of each tile: first the blocks that every query of the tile sees whole, ascending.

    Blocks that a query cannot see, that are not held, and all of padding are left out. Bit i stands for token i of
    the tile. `counts` holds how many blocks are seen whole, and how many there are.

    Two kernels compare all entries of a tile with each other, some columns at a time: the first finds equal ids, the
    second the place of each id among the different ones.
    """
    batch, heads = blocks.shape[:2]
    listed = jax.ShapeDtypeStruct((batch, heads, sizes.tiles, sizes.tokens * power_of_two(sizes.slots)), jnp.int32)
    counts = jax.ShapeDtypeStruct((batch, heads, sizes.tiles, 2), jnp.int32)
    entries = _entries(blocks, at, sizes)

    def call(kernel, out_shape, *operands):
        return pl.pallas_call(
            partial(kernel, sizes=sizes),
            grid=(sizes.tiles, heads, batch),
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(num_warps=max(1, listed.shape[3] // 32), num_stages=1),
            interpret=sizes.interpret,
            name=f"union_blocks{kernel.__name__}",
        )(*operands)

    order, bits = call(_equal, (listed, listed), entries)
    table = () if sizes.k.table is None else (sizes.k.table,)
    return call(_place, (listed, listed, listed, counts), order, bits, at, sizes.k.layer.reshape(1), *table)


def _entries(blocks, at, sizes: Sizes) -> Int[Array, "B K X U"]:
    """The selections of each tile side by side; what does not count has a number of its own behind all ids."""
    seen = seen_blocks(blocks, at[:, : sizes.length], sizes)
    ids = jnp.where(seen, blocks, _LAST)
    pad = ((0, 0), (0, 0), (0, sizes.out_tokens - sizes.length), (0, power_of_two(sizes.slots) - sizes.slots))
    ids = jnp.pad(ids, pad, constant_values=_LAST)
    if sizes.out_tokens % sizes.tokens:
        last = ids[:, :, -sizes.tokens :]
        ids = jnp.concatenate([ids[:, :, : sizes.out_tokens // sizes.tokens * sizes.tokens], last], axis=2)
    ids = ids.reshape(*ids.shape[:2], sizes.tiles, -1)
    return jnp.where(ids == _LAST, _LAST + jnp.arange(ids.shape[3], dtype=jnp.int32), ids)


def _equal(ids_ref, order_ref, bits_ref, *, sizes: Sizes):
    here = (pl.program_id(2), pl.program_id(1), pl.program_id(0))
    size = ids_ref.shape[3]
    lane = jnp.arange(size, dtype=jnp.int32)
    ids = ids_ref[*here, lane]
    columns = min(size, _COLUMNS)

    def step(i, state):
        bits, repeats = state
        column = i * columns + jnp.arange(columns, dtype=jnp.int32)
        same = ids[:, None] == ids_ref[*here, column][None, :]
        bit = 1 << div(column, size // sizes.tokens)
        earlier = same & (column[None, :] < lane[:, None])
        return bits + jnp.where(same, bit[None, :], 0), repeats + earlier.astype(jnp.int32)

    zero = jnp.zeros((size, columns), jnp.int32)
    bits, repeats = jax.lax.fori_loop(0, size // columns, step, (zero, zero))
    first = (jnp.sum(repeats, axis=1) == 0) & (ids < _LAST)
    order_ref[*here, lane] = jnp.where(first, ids, _LAST + lane)
    bits_ref[*here, lane] = jnp.sum(bits, axis=1)


def _place(order_ref, bits_ref, at_ref, layer_ref, *rest, sizes: Sizes):
    *table, pages_ref, ids_ref, out_bits_ref, counts_ref = rest
    tile, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    here = (row, head, tile)
    size = order_ref.shape[3]
    lane = jnp.arange(size, dtype=jnp.int32)
    order = order_ref[*here, lane]
    columns = min(size, _COLUMNS)

    def step(i, before):
        other = order_ref[*here, i * columns + jnp.arange(columns, dtype=jnp.int32)]
        return before + (other[None, :] < order[:, None]).astype(jnp.int32)

    before = jax.lax.fori_loop(0, size // columns, step, jnp.zeros((size, columns), jnp.int32))
    place = jnp.sum(before, axis=1)
    first = order < _LAST
    ids = jnp.where(first, order, 0)
    page, _ = sizes.k.locate(layer_ref, table[0] if table else None, row, head, ids)
    pages_ref[*here, place] = page
    ids_ref[*here, place] = ids
    out_bits_ref[*here, place] = bits_ref[*here, lane]

    member = jnp.arange(sizes.tokens, dtype=jnp.int32)
    at = at_ref[row, sizes.first(tile) + member]
    own = jnp.min(jnp.where(at >= 0, div(jnp.maximum(at, 0), sizes.k.block_size), _LAST))
    counts_ref[*here, 0] = jnp.sum((order < own).astype(jnp.int32))
    counts_ref[*here, 1] = jnp.sum(first.astype(jnp.int32))
