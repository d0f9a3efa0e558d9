"""The blocks that a tile of neighbouring queries needs: the union of their selections, with a bit for each query."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from pallas_kernels.numbers import BEHIND_ALL, power_of_two
from pallas_kernels.pages import FinderRefs
from pallas_kernels.sparse_prefill.triton.csr import seen_blocks
from pallas_kernels.sparse_prefill.triton.sizes import Sizes
from pallas_kernels.triton_common import div

_COLUMNS = 16


class Unions(NamedTuple):
    """The entries of each tile: first the blocks that every query of the tile sees whole, ascending.

    Blocks that a query cannot see, that are not held, and all of padding are left out. Arrays, or inside a kernel
    references to them.
    """

    pages: Any  # [B K X U]
    ids: Any  # [B K X U]
    bits: Any  # [B K X U] bit i is set where token i of the tile chose the block
    counts: Any  # [B K X 2] how many blocks are seen whole, and how many there are


def union_blocks(blocks: Int[Array, "B K T J"], query_positions: Int[Array, "B T2"], sizes: Sizes) -> Unions:
    """The union of the selections of each tile.

    Two kernels compare all entries of a tile with each other, some columns at a time: the first finds equal ids, the
    second the place of each id among the different ones.
    """
    batch, heads = blocks.shape[:2]
    listed = jax.ShapeDtypeStruct((batch, heads, sizes.tiles, sizes.tile_tokens * power_of_two(sizes.slots)), jnp.int32)
    counts = jax.ShapeDtypeStruct((batch, heads, sizes.tiles, 2), jnp.int32)
    call = partial(
        pl.pallas_call,
        grid=(sizes.tiles, heads, batch),
        compiler_params=plgpu.CompilerParams(num_warps=max(1, listed.shape[3] // 32), num_stages=1),
        interpret=sizes.interpret,
    )
    entries = _entries(blocks, query_positions, sizes)
    merge_equal = call(partial(_equal_kernel, sizes=sizes), out_shape=(listed, listed), name="union_blocks_equal")
    order, bits = merge_equal(entries)
    place = call(
        partial(_place_kernel, sizes=sizes), out_shape=Unions(listed, listed, listed, counts), name="union_blocks_place"
    )
    return place(order, bits, query_positions, sizes.k.finder())


def _entries(blocks: Int[Array, "B K T J"], query_positions: Int[Array, "B T2"], sizes: Sizes) -> Int[Array, "B K X U"]:
    """Return the selections of each tile side by side; a slot that does not count has an own number above all ids."""
    is_seen = seen_blocks(blocks, query_positions[:, : sizes.length], sizes)
    ids = jnp.where(is_seen, blocks, BEHIND_ALL)
    padding = ((0, 0), (0, 0), (0, sizes.out_tokens - sizes.length), (0, power_of_two(sizes.slots) - sizes.slots))
    ids = jnp.pad(ids, padding, constant_values=BEHIND_ALL)
    if sizes.out_tokens % sizes.tile_tokens:
        # The last tile ends with the queries, and repeats some of the tile before.
        last_tile = ids[:, :, -sizes.tile_tokens :]
        whole_tiles = ids[:, :, : sizes.out_tokens // sizes.tile_tokens * sizes.tile_tokens]
        ids = jnp.concatenate([whole_tiles, last_tile], axis=2)
    ids = ids.reshape(*ids.shape[:2], sizes.tiles, -1)  # [B K X U]
    return jnp.where(ids == BEHIND_ALL, BEHIND_ALL + jnp.arange(ids.shape[3], dtype=jnp.int32), ids)


def _equal_kernel(ids_ref, order_ref, bits_ref, *, sizes: Sizes):
    """Of entries with equal ids the first keeps its id and gets the bits of all; others go behind all ids."""
    row, head, tile = pl.program_id(2), pl.program_id(1), pl.program_id(0)
    size = ids_ref.shape[3]
    lane = jnp.arange(size, dtype=jnp.int32)
    ids = ids_ref[row, head, tile, lane]
    columns = min(size, _COLUMNS)

    def compare(i, state):
        bits, repeats = state
        column = i * columns + jnp.arange(columns, dtype=jnp.int32)
        is_same = ids[:, None] == ids_ref[row, head, tile, column][None, :]  # [U columns]
        bit = 1 << div(column, size // sizes.tile_tokens)
        is_earlier = is_same & (column[None, :] < lane[:, None])
        return bits + jnp.where(is_same, bit[None, :], 0), repeats + is_earlier.astype(jnp.int32)

    zero = jnp.zeros((size, columns), jnp.int32)
    bits, repeats = jax.lax.fori_loop(0, size // columns, compare, (zero, zero))
    is_first = (jnp.sum(repeats, axis=1) == 0) & (ids < BEHIND_ALL)
    order_ref[row, head, tile, lane] = jnp.where(is_first, ids, BEHIND_ALL + lane)
    bits_ref[row, head, tile, lane] = jnp.sum(bits, axis=1)


def _place_kernel(
    order_ref,
    bits_ref,
    positions_ref,
    finder: FinderRefs,
    pages_ref,
    ids_ref,
    placed_bits_ref,
    counts_ref,
    *,
    sizes: Sizes,
):
    """Each entry at the place that its id has among all, with its page."""
    tile, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = order_ref.shape[3]
    lane = jnp.arange(size, dtype=jnp.int32)
    order = order_ref[row, head, tile, lane]
    columns = min(size, _COLUMNS)

    def count_lower(i, lower):
        other = order_ref[row, head, tile, i * columns + jnp.arange(columns, dtype=jnp.int32)]
        return lower + (other[None, :] < order[:, None]).astype(jnp.int32)

    lower = jax.lax.fori_loop(0, size // columns, count_lower, jnp.zeros((size, columns), jnp.int32))
    place = jnp.sum(lower, axis=1)
    is_first = order < BEHIND_ALL
    ids = jnp.where(is_first, order, 0)
    page, _ = sizes.k.locate(finder, row, head, ids)
    pages_ref[row, head, tile, place] = page
    ids_ref[row, head, tile, place] = ids
    placed_bits_ref[row, head, tile, place] = bits_ref[row, head, tile, lane]

    member = jnp.arange(sizes.tile_tokens, dtype=jnp.int32)
    position = positions_ref[row, sizes.first_token(tile) + member]
    own_block = jnp.where(position >= 0, div(jnp.maximum(position, 0), sizes.k.block_size), BEHIND_ALL)
    first_own = jnp.min(own_block)
    counts_ref[row, head, tile, 0] = jnp.sum((order < first_own).astype(jnp.int32))
    counts_ref[row, head, tile, 1] = jnp.sum(is_first.astype(jnp.int32))
