"""Inversion of a choice: each block's queries from each query's blocks, or each expert's tokens from each token's."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from m3jax.msa.chunks import elements_at_once
from m3jax.platform import platform

# Up to so many comparisons are cheaper than a sort. On a CPU, whose sort is one loop, 24 queries took 400,000 of them.
_MOST_COMPARED = 1 << 19
_MOST_COMPARED_ON_A_CPU = 1 << 14


class Tiles(NamedTuple):
    """The queries that chose each block, cut into X tiles of C places (compressed rows: block -> queries).

    Attributes:
      row: of the batch, of each tile.
      head: KV head of each tile.
      block: the block that the queries of each tile chose.
      query: the query in each place; any one in an unused place.
      pair: likewise the (query, slot) pair, counted in `[B K T J]`.
      valid: True for places that are used.
      place_of: the place of each (query, slot) pair among the X * C places; 0 for an unused slot.
    """

    row: Int[Array, " X"]
    head: Int[Array, " X"]
    block: Int[Array, " X"]
    query: Int[Array, "X C"]
    pair: Int[Array, "X C"]
    valid: Bool[Array, "X C"]
    place_of: Int[Array, "B K T J"]


def invert(blocks: Int[Array, "B K T J"], num_blocks: int, tile: int) -> Tiles:
    """Invert query -> blocks into block -> queries, each block's list padded to whole tiles.

    A bin is one block of one row and head. Pairs of a query and a slot are sorted by bin, stably, so that a bin's
    queries ascend.

    Args:
      blocks: selected ids, -1 for none.
      num_blocks: M.
      tile: C, queries of a tile.

    Returns:
      Tiles in order of (row, head, block); those past the last used one are invalid throughout.
    """
    num_bins, num_places = math.prod(blocks.shape[:2]) * num_blocks, _most_tiles(blocks, num_blocks, tile) * tile
    limit = _MOST_COMPARED_ON_A_CPU if platform() == "cpu" else _MOST_COMPARED
    is_few = max(num_bins, num_places) * max(num_bins, blocks.size) <= limit
    return (by_comparison if is_few else by_sorting)(blocks, num_blocks, tile)


def by_sorting(blocks: Int[Array, "B K T J"], num_blocks: int, tile: int) -> Tiles:
    """Compute `invert` by sorting, for any number of pairs."""
    batch, heads, num_queries, slots = blocks.shape
    pairs_per_head, num_bins = num_queries * slots, batch * heads * num_blocks
    # Unused slots sort behind all blocks, where no bin begins.
    sort_key = jnp.where(blocks >= 0, blocks, num_blocks).reshape(batch * heads, pairs_per_head)
    order, sorted_key = _stable_sort(sort_key, num_blocks)  # [B*K T*J] each
    first_pair_of_head = (jnp.arange(batch * heads, dtype=jnp.int32) * pairs_per_head)[:, None]
    block_ids = jnp.arange(num_blocks + 1, dtype=jnp.int32)
    edges = jax.vmap(lambda key: _search(key, block_ids, "left"))(sorted_key)
    count = jnp.diff(edges, axis=1).reshape(-1)  # [B*K*M]: pairs of each bin
    first = (first_pair_of_head + edges[:, :-1]).reshape(-1)  # [B*K*M]: where they begin
    order = (first_pair_of_head + order).reshape(-1)  # [B*K*T*J]: pairs by bin
    last_tile = jnp.cumsum(-(-count // tile), dtype=jnp.int32)  # [B*K*M]: tiles up to and with each bin
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), last_tile])

    tiles = jnp.arange(_most_tiles(blocks, num_blocks, tile), dtype=jnp.int32)
    bin_of = jnp.minimum(_search(last_tile, tiles, "right"), num_bins - 1)  # [X]
    rank_in_bin = (tiles - first_tile[bin_of])[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)  # [X C]
    valid = (rank_in_bin < count[bin_of][:, None]) & (tiles < last_tile[-1])[:, None]
    pair = order[jnp.where(valid, first[bin_of][:, None] + rank_in_bin, 0)]  # [X C]

    # And back: the place of each pair, from its rank among the pairs of its bin.
    pair_ids = jnp.arange(blocks.size, dtype=jnp.int32)
    position_in_order = jnp.zeros_like(order).at[order].set(pair_ids, unique_indices=True)
    first_bin_of_head = (jnp.arange(batch * heads, dtype=jnp.int32) * num_blocks).reshape(batch, heads, 1, 1)
    bin_of_pair = (first_bin_of_head + jnp.maximum(blocks, 0)).reshape(-1)  # [B*K*T*J]
    rank = position_in_order - first[bin_of_pair]
    place_of = (first_tile[bin_of_pair] + rank // tile) * tile + rank % tile
    place_of = jnp.where(blocks >= 0, place_of.reshape(blocks.shape), 0)  # [B K T J]
    row_and_head, block = bin_of // num_blocks, bin_of % num_blocks
    query = pair // slots % num_queries
    return Tiles(row_and_head // heads, row_and_head % heads, block, query, pair, valid, place_of)


def by_comparison(blocks: Int[Array, "B K T J"], num_blocks: int, tile: int) -> Tiles:
    """Compute `invert` by comparing each pair with all places, for few pairs.

    A sort, binary searches and a scatter are some sixty programs on a GPU, most of them turns of small loops: in a
    decode step they take longer than these few comparisons.
    """
    batch, heads, num_queries, slots = blocks.shape
    num_bins, num_pairs, most_tiles = batch * heads * num_blocks, blocks.size, _most_tiles(blocks, num_blocks, tile)
    first_bin = (jnp.arange(batch * heads, dtype=jnp.int32) * num_blocks).reshape(batch, heads, 1, 1)
    bin_of_pair = jnp.where(blocks >= 0, first_bin + blocks, num_bins).reshape(-1)  # [p]; num_bins is none
    pairs, bins = jnp.arange(num_pairs, dtype=jnp.int32), jnp.arange(num_bins, dtype=jnp.int32)
    tiles, places = jnp.arange(most_tiles, dtype=jnp.int32), jnp.arange(most_tiles * tile, dtype=jnp.int32)
    count_if = lambda condition: jnp.sum(condition, axis=1, dtype=jnp.int32)

    # Where each bin's tiles begin, and where in them each pair lies: behind the earlier ones of its bin.
    count = count_if(bin_of_pair == bins[:, None])  # [B*K*M]
    tiles_of_bin = -(-count // tile)
    first_tile = jnp.sum(jnp.where(bins < bins[:, None], tiles_of_bin, 0), axis=1, dtype=jnp.int32)  # [B*K*M]
    rank = count_if((bin_of_pair == bin_of_pair[:, None]) & (pairs < pairs[:, None]))  # [p]
    place_of = first_tile[jnp.minimum(bin_of_pair, num_bins - 1)] * tile + rank  # [p]
    place_of = jnp.where(bin_of_pair < num_bins, place_of, -1)

    # And back: the pair in each place, the bin of each tile.
    is_in = place_of == places[:, None]  # [X*C p]
    pair = jnp.sum(jnp.where(is_in, pairs, 0), axis=1, dtype=jnp.int32).reshape(-1, tile)
    valid = jnp.any(is_in, axis=1).reshape(-1, tile)  # [X C]
    bin_of = jnp.minimum(count_if(first_tile + tiles_of_bin <= tiles[:, None]), num_bins - 1)  # [X]
    row_and_head, block = bin_of // num_blocks, bin_of % num_blocks
    place_of = jnp.maximum(place_of, 0).reshape(blocks.shape)
    query = pair // slots % num_queries
    return Tiles(row_and_head // heads, row_and_head % heads, block, query, pair, valid, place_of)


def _most_tiles(blocks: Int[Array, "B K T J"], num_blocks: int, tile: int) -> int:
    """Return the number of tiles that is enough whatever was chosen: each used bin wastes less than one."""
    num_bins = blocks.shape[0] * blocks.shape[1] * num_blocks
    # Full tiles are at most blocks.size // tile, and each used bin has at most one that is not full.
    return blocks.size // tile + min(blocks.size, num_bins)


def _stable_sort(sort_key: Int[Array, "R X"], largest: int) -> tuple[Int[Array, "R X"], Int[Array, "R X"]]:
    """Return (order, sorted keys) of each row; equal keys stay in order.

    Key and place are packed into one number where it holds both: on a CPU XLA sorts numbers five times as fast as
    pairs.
    """
    size = sort_key.shape[1]
    places = jnp.arange(size, dtype=jnp.int32)
    if (largest + 1) * size > jnp.iinfo(jnp.int32).max:
        in_order, order = jax.lax.sort((sort_key, jnp.broadcast_to(places, sort_key.shape)), num_keys=2)
        return order, in_order
    packed = jnp.sort(sort_key * size + places, axis=1)
    return packed % size, packed // size


def _search(ascending: Int[Array, " X"], values: Int[Array, " Y"], side: str) -> Int[Array, " Y"]:
    """Compute `jnp.searchsorted`, by a loop of some ten turns only where comparing all with all takes longer."""
    is_few = ascending.size * values.size <= elements_at_once(_MOST_COMPARED)
    # On a GPU each turn of a loop would be several kernels; unrolled they are one together.
    by_halves = "scan_unrolled" if platform() == "gpu" else "scan"
    method = "compare_all" if is_few else by_halves
    return jnp.searchsorted(ascending, values, side=side, method=method).astype(jnp.int32)
