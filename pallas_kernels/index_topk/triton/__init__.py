"""Index scores, causality, block maximum and running top-k of a prefill in one Triton kernel.

A program holds a tile of queries, all heads of a token side by side since they share the index keys, and walks the
blocks before them in ascending order. A query's own block is always selected, and every token of an earlier block is
visible to it. So no token is ever masked, and neither the own block nor what lies after it is read at all.

Where there are few tiles, several programs (splits) share the blocks of one. Each writes its list, and a second kernel
merges the lists in order.

In M3's sizes::

  index_q  [32 tokens x 4 heads, 128] ── stays ──┐
                                                 ├── scores [128, 128] ── row maximum ── insert into 15 + 15 registers
  index_k  block 0, 1, 2, ... own - 1 ── walks ──┘                                       of the thread that has the row
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.index_topk import Call, Selected
from pallas_kernels.index_topk.ranking import KEY_OF_MINUS_INF, BestBlocks, empty_list, insert, selection, sort_key
from pallas_kernels.numbers import BEHIND_ALL, power_of_two
from pallas_kernels.pages import FinderRefs, Pages, seen_positions
from pallas_kernels.triton_common import check_pool, div, dot, late_first, rem

_PROGRAMS = 2 * 132  # fewer than this leave part of a Hopper GPU idle


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a tile."""

    rows: int = 128  # queries x heads of a program
    keys: int = 128  # keys of one matrix product
    num_warps: int = 4
    num_stages: int = 2
    splits: int | None = None  # programs that share the keys of one tile; None: as many as fill the GPU


LIMITS = Limits(check_pages=check_pool, config=Config)


def run(call: Call, config: Config | None) -> Selected:
    """Run `index_topk` on a checked call."""
    batch, length, heads, width = call.index_q.shape
    config = default_config(call.index_q.dtype) if config is None else config
    padded_heads = power_of_two(heads)
    tile_tokens = max(1, min(config.rows // padded_heads, power_of_two(length)))
    out_tokens = max(length, tile_tokens)
    tiles = -(-out_tokens // tile_tokens)
    splits = config.splits
    if splits is None:
        splits = max(1, min(_PROGRAMS // (tiles * batch), call.index_k.num_blocks // 8, 32))
    query_positions = seen_positions(call.positions, call.lengths, out_tokens)
    sizes = Sizes(call.index_k, config, heads, padded_heads, tile_tokens, length, tiles, splits, *call.counts)
    slots = (batch, padded_heads, out_tokens, call.top_k)
    chosen_shape = [jax.ShapeDtypeStruct(slots, dtype) for dtype in (jnp.int32, jnp.float32)[: 1 + call.return_keys]]
    listed = (batch, splits, max(1, call.top_k - 1), tiles * sizes.tile_rows)
    lists_shape = [jax.ShapeDtypeStruct(listed, jnp.float32), jax.ShapeDtypeStruct(listed, jnp.int32)]
    walked = pl.pallas_call(
        partial(_select_kernel if splits == 1 else _list_kernel, sizes=sizes),
        grid=(tiles, splits, batch),
        out_shape=chosen_shape if splits == 1 else lists_shape,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=call.interpret,
        name="index_topk",
    )(call.index_q.reshape(batch, -1, width), query_positions, call.index_k.pool, call.index_k.finder())

    def cut(chosen: Sequence[Array]) -> Selected:
        """Drop the heads and tokens that fill up a tile."""
        kept = tuple(x[:, :heads, :length] for x in chosen)
        return kept if call.return_keys else kept[0]

    if splits == 1:
        return cut(walked)
    keys, ids = walked
    chosen = pl.pallas_call(
        partial(_merge_kernel, sizes=sizes),
        grid=(tiles, batch),
        out_shape=chosen_shape,
        compiler_params=plgpu.CompilerParams(num_warps=max(1, sizes.tile_rows // 32), num_stages=2),
        interpret=call.interpret,
        name="index_topk_merge",
    )(keys, ids, query_positions)
    return cut(chosen)


def default_config(dtype: jax.typing.DTypeLike) -> Config:
    """Return the sizes for queries in this dtype; products in float32 are slow and need small tiles."""
    return Config(rows=64, keys=32, num_warps=4, num_stages=2) if dtype == jnp.float32 else Config()


class TileQueries(NamedTuple):
    """The query in each row of a tile, a row being one head of one token: vectors `[1 R]`."""

    own_block: Int[Array, "1 R"]  # -1 for padding
    head: Int[Array, "1 R"]
    token: Int[Array, "1 R"]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    index_k: Pages
    config: Config
    heads: int
    padded_heads: int  # Triton has powers of two alone
    tile_tokens: int
    length: int
    tiles: int
    splits: int
    top_k: int
    local_blocks: int
    init_blocks: int

    @property
    def tile_rows(self) -> int:
        """R, queries x heads of a tile."""
        return self.tile_tokens * self.padded_heads

    def first_token(self, tile: Int[Array, ""], positions_ref) -> Int[Array, ""]:
        """Return the first token of a tile; the last tile ends with the queries, and may repeat tokens of another."""
        return jnp.minimum(tile * self.tile_tokens, positions_ref.shape[1] - self.tile_tokens)

    def queries(self, positions_ref, row: Int[Array, ""], tile: Int[Array, ""]) -> TileQueries:
        """The queries of a tile."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, self.tile_rows), 1)
        token = self.first_token(tile, positions_ref) + div(lane, self.padded_heads)
        position = positions_ref[row, token]
        own_block = jnp.where(position >= 0, div(position, self.index_k.block_size), -1)
        return TileQueries(own_block, rem(lane, self.padded_heads), token)

    def list_lane(self, tile: Int[Array, ""]) -> Int[Array, "1 R"]:
        """Return the columns of a tile's lists among the lists of all tiles."""
        return tile * self.tile_rows + jax.lax.broadcasted_iota(jnp.int32, (1, self.tile_rows), 1)


def _select_kernel(q_ref, positions_ref, pool_ref, finder: FinderRefs, *chosen_refs, sizes: Sizes):
    """Select the blocks of one tile's queries; the program's list is the selection."""
    tile, split, row = late_first(sizes.tiles), pl.program_id(1), pl.program_id(2)
    queries = sizes.queries(positions_ref, row, tile)
    best = _walk(q_ref, positions_ref, pool_ref, finder, queries, tile=tile, split=split, row=row, sizes=sizes)
    _write(chosen_refs, best, queries, row)


def _list_kernel(q_ref, positions_ref, pool_ref, finder: FinderRefs, keys_ref, ids_ref, *, sizes: Sizes):
    """Write the list of one split of a tile's blocks; `_merge_kernel` merges the lists of all splits."""
    tile, split, row = late_first(sizes.tiles), pl.program_id(1), pl.program_id(2)
    queries = sizes.queries(positions_ref, row, tile)
    best = _walk(q_ref, positions_ref, pool_ref, finder, queries, tile=tile, split=split, row=row, sizes=sizes)
    lane = sizes.list_lane(tile)
    for j in range(sizes.top_k - 1):
        keys_ref[row, split, j, lane] = best.keys[j]
        ids_ref[row, split, j, lane] = best.ids[j]


def _merge_kernel(keys_ref, ids_ref, positions_ref, *chosen_refs, sizes: Sizes):
    """Merge the lists of all splits of a tile that have blocks, one after the other.

    Split by split, so that of blocks with equal keys the one with the lower id comes first: a tie goes to it.
    """
    tile, row = pl.program_id(0), pl.program_id(1)
    queries = sizes.queries(positions_ref, row, tile)
    lane = sizes.list_lane(tile)
    last_own, per_split = _blocks_of_splits(queries.own_block, sizes)
    # At a prompt's start there are fewer blocks than splits.
    used_splits = jax.lax.div(last_own + per_split - 1, jnp.maximum(per_split, 1))

    def take_list(split, best):
        for j in range(sizes.top_k - 1):
            best = insert(best, keys_ref[row, split, j, lane], ids_ref[row, split, j, lane])
        return best

    best = empty_list(sizes.top_k - 1, sizes.tile_rows)
    if sizes.top_k > 1:
        best = jax.lax.fori_loop(0, used_splits, take_list, best)
    _write(chosen_refs, best, queries, row)


def _blocks_of_splits(own_block: Int[Array, "1 R"], sizes: Sizes) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return (blocks before the own one of a tile's last query, how many of them a split has; the last have fewer)."""
    last_own = jnp.maximum(jnp.max(own_block), 0)
    return last_own, div(last_own + sizes.splits - 1, sizes.splits)


def _walk(
    q_ref,
    positions_ref,
    pool_ref,
    finder: FinderRefs,
    queries: TileQueries,
    *,
    tile: Int[Array, ""],
    split: Int[Array, ""],
    row: Int[Array, ""],
    sizes: Sizes,
) -> BestBlocks:
    """The best blocks of a tile's queries, of the part of the blocks that this split has."""
    own_block = queries.own_block
    last_own, per_split = _blocks_of_splits(own_block, sizes)
    first_own = jnp.maximum(jnp.min(jnp.where(own_block >= 0, own_block, BEHIND_ALL)), 0)
    start, stop = split * per_split, jnp.minimum((split + 1) * per_split, last_own)
    first_token = sizes.first_token(tile, positions_ref)
    lane = jnp.arange(sizes.tile_rows, dtype=jnp.int32)
    # Rows of padding repeat some real query.
    token = jnp.minimum(first_token + div(lane, sizes.padded_heads), sizes.length - 1)
    q = q_ref[row, token * sizes.heads + jnp.minimum(rem(lane, sizes.padded_heads), sizes.heads - 1), :]  # [R H]

    def take_block(block, best, *, is_masked: bool):
        page, is_held = sizes.index_k.locate(finder, row, 0, block)
        key = sort_key(_block_max(q, pool_ref, page, sizes))
        key = key if finder.table is None else jnp.where(is_held, key, KEY_OF_MINUS_INF)
        if sizes.local_blocks > 1 or sizes.init_blocks > 0:
            is_forced = (block > own_block - sizes.local_blocks) | (block < sizes.init_blocks)
            key = jnp.where(is_forced, jnp.inf, key)
        if is_masked:
            key = jnp.where(block < own_block, key, -jnp.inf)
        return insert(best, key, jnp.full((1, sizes.tile_rows), block, jnp.int32))

    best = empty_list(sizes.top_k - 1, sizes.tile_rows)
    if sizes.top_k > 1:
        # Blocks before every query's own one need no mask; those between the first own block and the last do.
        unmasked_stop = jnp.maximum(jnp.minimum(first_own, stop), start)
        best = jax.lax.fori_loop(start, unmasked_stop, partial(take_block, is_masked=False), best)
        best = jax.lax.fori_loop(unmasked_stop, stop, partial(take_block, is_masked=True), best)
    return best


def _block_max(q: Float[Array, "R H"], pool_ref, page: Int[Array, ""], sizes: Sizes) -> Float[Array, "1 R"]:
    """The highest score of each query in one block."""
    block_size = sizes.index_k.block_size
    keys = min(sizes.config.keys, block_size)
    highest = None
    for start in range(0, block_size, keys):
        scores = dot(q, pool_ref[page, pl.ds(start, keys), :], transpose=True)  # [R S]
        piece = jnp.max(scores, axis=1)
        highest = piece if highest is None else jnp.maximum(highest, piece)
    # As a row of its own shape the maximum leaves the layout of the product: one query a thread, nothing repeated.
    return highest[None, :]


def _write(chosen_refs: tuple, best: BestBlocks, queries: TileQueries, row: Int[Array, ""]) -> None:
    """Write the blocks of a tile's queries; with their keys, if there is a place for these, in the list's order."""
    own_block, chosen_ref = queries.own_block, chosen_refs[0]
    if len(chosen_refs) == 1:
        for j, ids in enumerate(selection(best.ids, own_block)):
            chosen_ref[row, queries.head, queries.token, j] = ids
        return
    keys_ref, own = chosen_refs[1], len(best.ids)
    is_query = own_block >= 0
    for j, (ids, keys) in enumerate(zip(best.ids, best.keys, strict=True)):
        is_listed = is_query & (keys > -jnp.inf)
        chosen_ref[row, queries.head, queries.token, j] = jnp.where(is_listed, ids, -1)
        keys_ref[row, queries.head, queries.token, j] = jnp.where(is_listed, keys, -jnp.inf)
    chosen_ref[row, queries.head, queries.token, own] = own_block
    keys_ref[row, queries.head, queries.token, own] = jnp.where(is_query, jnp.inf, -jnp.inf)
