"""A selection inverted: from the blocks of each query to the queries of each block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Tiles(NamedTuple):
    """A selection inverted: for each block the queries that chose it, in tiles of C (block -> query, as CSR)."""

    row: Int[Array, " X"]
    head: Int[Array, " X"]
    block: Int[Array, " X"]
    query: Int[Array, "X C"]
    valid: Bool[Array, "X C"]
    slot_of: Int[Array, "B K T J"]  # where the partial output of a (query, slot) pair lies in [X * C]


def invert(blocks: Int[Array, "B K T J"], num_blocks: int, tile: int) -> Tiles:
    """Invert query -> blocks into block -> queries, each block's list padded to whole tiles.

    Args:
      blocks: selected ids, -1 for none.
      num_blocks: M.
      tile: C, queries of a tile.

    Returns:
      Tiles in order of (row, head, block); those past the last used one are invalid throughout.
    """
    batch, heads, length, slots = blocks.shape
    pairs, bins = length * slots, batch * heads * num_blocks
    key = jnp.where(blocks >= 0, blocks, num_blocks).reshape(batch * heads, pairs)
    order, key = _stable_sort(key, num_blocks)
    begin = (jnp.arange(batch * heads, dtype=jnp.int32) * pairs)[:, None]
    edges = jax.vmap(lambda k: jnp.searchsorted(k, jnp.arange(num_blocks + 1, dtype=jnp.int32)))(key)
    count = jnp.diff(edges, axis=1).astype(jnp.int32).reshape(-1)
    first = (begin + edges[:, :-1].astype(jnp.int32)).reshape(-1)
    order = (begin + order).reshape(-1)
    last_tile = jnp.cumsum(-(-count // tile), dtype=jnp.int32)
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), last_tile])

    tiles = jnp.arange(_tile_bound(blocks.size, bins, tile), dtype=jnp.int32)
    bin_of = jnp.minimum(jnp.searchsorted(last_tile, tiles, side="right"), bins - 1).astype(jnp.int32)
    lane = (tiles - first_tile[bin_of])[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)
    valid = (lane < count[bin_of][:, None]) & (tiles < last_tile[-1])[:, None]
    pair = order[jnp.where(valid, first[bin_of][:, None] + lane, 0)]

    place = jnp.zeros_like(order).at[order].set(jnp.arange(blocks.size, dtype=jnp.int32), unique_indices=True)
    own = (jnp.arange(batch * heads, dtype=jnp.int32) * num_blocks).reshape(batch, heads, 1, 1)
    of = (own + jnp.maximum(blocks, 0)).reshape(-1)
    rank = place - first[of]
    slot_of = (first_tile[of] + rank // tile) * tile + rank % tile
    slot_of = jnp.where(blocks >= 0, slot_of.reshape(blocks.shape), 0)
    row_head, block = bin_of // num_blocks, bin_of % num_blocks
    return Tiles(row_head // heads, row_head % heads, block, pair // slots % length, valid, slot_of)


def _stable_sort(key: Int[Array, "R X"], largest: int) -> tuple[Int[Array, "R X"], Int[Array, "R X"]]:
    """(order, sorted keys) of each row; equal keys stay in order.

    Key and place are packed into one number where it holds both: on a CPU XLA sorts numbers five times as fast as
    pairs.
    """
    size = key.shape[1]
    if (largest + 1) * size > jnp.iinfo(jnp.int32).max:
        order = jnp.argsort(key, axis=1, stable=True).astype(jnp.int32)
        return order, jnp.take_along_axis(key, order, axis=1)
    packed = jnp.sort(key * size + jnp.arange(size, dtype=jnp.int32), axis=1)
    return packed % size, packed // size


def _tile_bound(pairs: int, bins: int, tile: int) -> int:
    """No inversion needs more tiles: every used bin wastes less than one."""
    return pairs // tile + min(pairs, bins)
