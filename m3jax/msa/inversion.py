"""A choice inverted: from the blocks of each query to the queries of each block; from a token's experts to an expert's
tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Tiles(NamedTuple):
    """For each block the queries that chose it, cut into X tiles of C places (compressed rows: block -> queries).

    Attributes:
      row: of the batch, of each tile.
      head: KV head of each tile.
      block: which block the queries of a tile chose.
      query: the query in each place; any one in an unused place.
      valid: which places are used.
      place_of: where a (query, slot) pair lies among the X * C places; 0 for an unused slot.
    """

    row: Int[Array, " X"]
    head: Int[Array, " X"]
    block: Int[Array, " X"]
    query: Int[Array, "X C"]
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
    batch, heads, num_queries, slots = blocks.shape
    pairs_per_head, num_bins = num_queries * slots, batch * heads * num_blocks
    sort_key = jnp.where(blocks >= 0, blocks, num_blocks).reshape(batch * heads, pairs_per_head)
    order, sorted_key = _stable_sort(sort_key, num_blocks)  # [B*K T*J] each
    first_pair_of_head = (jnp.arange(batch * heads, dtype=jnp.int32) * pairs_per_head)[:, None]
    edges = jax.vmap(lambda key: jnp.searchsorted(key, jnp.arange(num_blocks + 1, dtype=jnp.int32)))(sorted_key)
    count = jnp.diff(edges, axis=1).astype(jnp.int32).reshape(-1)  # [B*K*M]: pairs of each bin
    first = (first_pair_of_head + edges[:, :-1].astype(jnp.int32)).reshape(-1)  # [B*K*M]: where they begin
    order = (first_pair_of_head + order).reshape(-1)  # [B*K*T*J]: pairs by bin
    last_tile = jnp.cumsum(-(-count // tile), dtype=jnp.int32)  # [B*K*M]: tiles up to and with each bin
    first_tile = jnp.concatenate([jnp.zeros(1, jnp.int32), last_tile])

    # Each used bin wastes less than a tile, so this many are enough whatever was chosen.
    most_tiles = blocks.size // tile + min(blocks.size, num_bins)
    tiles = jnp.arange(most_tiles, dtype=jnp.int32)
    bin_of = jnp.minimum(jnp.searchsorted(last_tile, tiles, side="right"), num_bins - 1).astype(jnp.int32)  # [X]
    rank_in_bin = (tiles - first_tile[bin_of])[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)  # [X C]
    valid = (rank_in_bin < count[bin_of][:, None]) & (tiles < last_tile[-1])[:, None]
    pair = order[jnp.where(valid, first[bin_of][:, None] + rank_in_bin, 0)]  # [X C]

    pair_ids = jnp.arange(blocks.size, dtype=jnp.int32)
    position_in_order = jnp.zeros_like(order).at[order].set(pair_ids, unique_indices=True)
    first_bin_of_head = (jnp.arange(batch * heads, dtype=jnp.int32) * num_blocks).reshape(batch, heads, 1, 1)
    bin_of_pair = (first_bin_of_head + jnp.maximum(blocks, 0)).reshape(-1)  # [B*K*T*J]
    rank = position_in_order - first[bin_of_pair]
    place_of = (first_tile[bin_of_pair] + rank // tile) * tile + rank % tile
    place_of = jnp.where(blocks >= 0, place_of.reshape(blocks.shape), 0)  # [B K T J]
    row_and_head, block = bin_of // num_blocks, bin_of % num_blocks
    query = pair // slots % num_queries
    return Tiles(row_and_head // heads, row_and_head % heads, block, query, valid, place_of)


def _stable_sort(sort_key: Int[Array, "R X"], largest: int) -> tuple[Int[Array, "R X"], Int[Array, "R X"]]:
    """(order, sorted keys) of each row; equal keys stay in order.

    Key and place are packed into one number where it holds both: on a CPU XLA sorts numbers five times as fast as
    pairs.
    """
    size = sort_key.shape[1]
    if (largest + 1) * size > jnp.iinfo(jnp.int32).max:
        order = jnp.argsort(sort_key, axis=1, stable=True).astype(jnp.int32)
        return order, jnp.take_along_axis(sort_key, order, axis=1)
    packed = jnp.sort(sort_key * size + jnp.arange(size, dtype=jnp.int32), axis=1)
    return packed % size, packed // size
