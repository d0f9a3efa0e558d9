"""Sparse attention of a prefill on a TPU, schedule kv_block_major: each block meets the queries that chose it.

The (query, slot) pairs are sorted by block, and their queries gathered in that order. A step takes the pairs of one
block in one tile of 16 pairs; prefetched lists drive the index maps, so a page is copied once for all steps of its
block, and a tile of outputs is written once all its blocks are done. The normalised partial outputs go back to their
(query, slot) places, where they are merged by log-sum-exp (paper, section 4).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.backends import Interpret
from pallas_kernels.mosaic_common import PREFETCHED, Chip, divisor, dot_nt, dot_tn, locate, natural_lse
from pallas_kernels.pages import FinderRefs, Pages, seen_positions
from pallas_kernels.sparse_prefill import Call
from pallas_kernels.sparse_prefill.mosaic_tpu.sizes import Config, Sizes

_CHUNK_PAIRS = 1 << 17  # whose queries and partial outputs are held at once


class Lists(NamedTuple):
    """The arrays that are prefetched into scalar memory; inside the kernel and its index maps, references to them."""

    finder: FinderRefs  # the table is that of this row alone, flat
    row: Any  # [1] which row of the batch this is
    lengths: Any  # [B] valid keys of each row
    bins: Any  # [W] of each work (the pairs of one bin in one tile), its bin: KV head * M + block
    starts: Any  # [W + 1] where the pairs of each work start


def kv_block_major(call: Call, config: Config | None, chunk: int | None = None) -> tuple[Array, ...]:
    """`sparse_prefill` of a checked call by this schedule.

    Keys and values in float8_e4m3fn have no scale here. `chunk` is how many queries of a row have their partial
    outputs, J of them each, in memory at once.

    Raises:
      ValueError: more blocks than its lists have room for.
    """
    batch, length, heads, width = call.q.shape
    kv_heads, slots = call.blocks.shape[1], call.blocks.shape[3]
    chunk = min(length, chunk or max(1, _CHUNK_PAIRS // (kv_heads * slots)))
    pieces = -(-length // chunk)
    padding = pieces * chunk - length
    sizes = Sizes(call.k, (config or Config()).tokens, chunk, heads, kv_heads, slots, width)
    if 2 * _most_works(sizes) + call.k.num_blocks > 2 * PREFETCHED - 4096:
        raise ValueError(
            f"{call.k.num_blocks} blocks x {kv_heads} KV heads: too many for kv_block_major's lists; use "
            'schedule="query_union"'
        )
    query_positions = seen_positions(call.positions, call.lengths, length + padding).reshape(batch * pieces, chunk)
    q = jnp.pad(call.q, ((0, 0), (0, padding), (0, 0), (0, 0))).reshape(batch * pieces, chunk, heads, width)
    blocks = jnp.pad(call.blocks, ((0, 0), (0, 0), (0, padding), (0, 0)), constant_values=-1)
    blocks = blocks.reshape(batch, kv_heads, pieces, chunk, slots).swapaxes(1, 2)  # [B pieces K C J]
    blocks = blocks.reshape(batch * pieces, kv_heads, chunk, slots)
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), pieces)

    def attend_piece(piece: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        q, blocks, query_positions, row = piece
        return _attend_piece(call, q, blocks, query_positions, row, sizes=sizes)

    out, lse = jax.lax.map(attend_piece, (q, blocks, query_positions, row))
    out = out.reshape(batch, -1, heads, width)[:, :length]
    lse = lse.reshape(batch, -1, heads)[:, :length]
    return (out, lse) if call.return_lse else (out,)


def _attend_piece(
    call: Call,
    q: Float[Array, "C N H"],
    blocks: Int[Array, "K C J"],
    query_positions: Int[Array, " C"],
    row: Int[Array, ""],
    *,
    sizes: Sizes,
) -> tuple[Float[Array, "C N H"], Float[Array, "C N"]]:
    """(out, lse) of some queries of one row of the batch."""
    pairs = blocks.size
    tiles = -(-pairs // sizes.tokens)
    num_bins = sizes.kv_heads * sizes.k.num_blocks
    own_block = jnp.where(query_positions >= 0, query_positions // sizes.block_size, -1)[None, :, None]
    is_seen = (blocks >= 0) & (blocks <= own_block) & (blocks < sizes.k.num_blocks)
    head = jnp.arange(sizes.kv_heads, dtype=jnp.int32)[:, None, None]
    key = jnp.where(is_seen, head * sizes.k.num_blocks + blocks, num_bins).reshape(-1)
    key, order = jax.lax.sort((key, jnp.arange(pairs, dtype=jnp.int32)), num_keys=1)
    padding = tiles * sizes.tokens - pairs
    key = jnp.pad(key, (0, padding), constant_values=num_bins)
    count, bins, starts = _works(key, num_bins, sizes)
    pair = jnp.pad(order, (0, padding))  # (KV head, query, slot)
    token, head = pair // sizes.slots % sizes.length, pair // (sizes.slots * sizes.length)
    grouped = q.reshape(sizes.length, sizes.kv_heads, sizes.group, sizes.width)[token, head]  # [X G H]
    lane_positions = query_positions[token].reshape(tiles, 1, sizes.tokens)
    lane_positions = jnp.repeat(lane_positions, sizes.group, axis=2)  # [tiles 1 lanes]
    finder = FinderRefs(sizes.k.layer.reshape(1), None if sizes.k.table is None else sizes.k.table[row])
    lists = Lists(finder, row.reshape(1), call.lengths, bins, starts)
    parts, lses = _attend(grouped, lane_positions, count, lists, call.v, sizes, call.interpret)
    # Back to the order of (KV head, query, slot).
    place = jnp.zeros_like(order).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    shape = (sizes.kv_heads, sizes.length, sizes.slots, sizes.group)
    lses = jnp.where(is_seen[..., None], lses.reshape(-1, sizes.group)[place].reshape(shape), -jnp.inf)  # [K C J G]
    return _merge(parts[place].reshape(*shape, sizes.width), lses, sizes)


def _works(
    key: Int[Array, " X"], num_bins: int, sizes: Sizes
) -> tuple[Int[Array, ""], Int[Array, " W"], Int[Array, " _"]]:
    """(count, bins, starts): where another block begins, or another tile of pairs, among those that count."""
    index = jnp.arange(len(key), dtype=jnp.int32)
    is_other = jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]])
    is_start = (is_other | (index % sizes.tokens == 0)) & (key < num_bins)
    most = _most_works(sizes)
    starts = jnp.nonzero(is_start, size=most, fill_value=0)[0].astype(jnp.int32)
    count = jnp.sum(is_start, dtype=jnp.int32)
    end = jnp.sum(key < num_bins, dtype=jnp.int32)
    starts = jnp.where(jnp.arange(most) < count, starts, end)
    return count, key[jnp.minimum(starts, len(key) - 1)], jnp.append(starts, end)


def _most_works(sizes: Sizes) -> int:
    """Return W, the most works that there can be."""
    pairs = sizes.kv_heads * sizes.length * sizes.slots
    return -(-pairs // sizes.tokens) + min(pairs, sizes.kv_heads * sizes.k.num_blocks)


def _attend(
    grouped: Float[Array, "X G H"],
    lane_positions: Int[Array, "tiles 1 lanes"],
    count: Int[Array, ""],
    lists: Lists,
    v: Pages,
    sizes: Sizes,
    interpret: Interpret,
) -> tuple[Float[Array, "X G H"], Float[Array, "tiles 1 lanes"]]:
    """Normalised partial outputs and their log-sum-exps, in the order of the sorted pairs."""
    k, chip = sizes.k, Chip.current(interpret)
    at_page = lambda i, lists: (_locate_work(i, lists, k)[0], 0, 0)
    at_tile = lambda i, lists: (lists.starts[i] // sizes.tokens, 0, 0)
    queries = pl.BlockSpec((sizes.tokens, sizes.group, sizes.width), at_tile)
    return tuple(pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[
                queries,
                pl.BlockSpec((1, 1, sizes.lanes), at_tile),
                pl.BlockSpec((1, *k.pool.shape[1:]), at_page),
                pl.BlockSpec((1, *k.pool.shape[1:]), at_page),
            ],
            out_specs=[queries, pl.BlockSpec((1, 1, sizes.lanes), at_tile)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(grouped.shape, grouped.dtype),
            jax.ShapeDtypeStruct(lane_positions.shape, jnp.float32),
        ],
        compiler_params=chip.compiler_params("arbitrary"),
        interpret=interpret,
        name="kv_block_major",
    )(lists, grouped, lane_positions, k.pool, v.pool))  # fmt: skip


def _locate_work(i: Int[Array, ""], lists: Lists, k: Pages) -> tuple[Int[Array, ""], Array]:
    """(page, is_held) of the block of a work."""
    head, block = lists.bins[i] // k.num_blocks, lists.bins[i] % k.num_blocks
    row = lists.row[0] if lists.finder.table is None else 0
    return locate(k, lists.finder, row, head, block)


def _kernel(lists: Lists, q_ref, positions_ref, k_ref, v_ref, out_ref, lse_ref, *, sizes: Sizes):
    i = pl.program_id(0)
    block = lists.bins[i] % sizes.k.num_blocks
    _, is_held = _locate_work(i, lists, sizes.k)
    q = q_ref[...].reshape(sizes.lanes, sizes.width)
    key = jax.lax.broadcasted_iota(jnp.int32, (sizes.block_size, 1), 0)
    last_key = jnp.where(is_held, positions_ref[0] - block * sizes.block_size, -1)  # [1 lanes]
    scores = dot_nt(k_ref[0].astype(q.dtype), q) * sizes.width**-0.5  # [P lanes]
    scores = jnp.where(key <= last_key, scores, -jnp.inf)
    top = jnp.max(scores, axis=0, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=0, keepdims=True)
    # What lies behind the row's end, or in a page that is not held, may be NaN.
    seen = jnp.where(is_held, lists.lengths[lists.row[0]] - block * sizes.block_size, 0)
    v = jnp.where(key < seen, v_ref[0].astype(jnp.float32), 0.0).astype(q.dtype)
    is_seen, safe_total = divisor(total)
    values = dot_tn(v, weights.astype(q.dtype)) / safe_total  # [H lanes]
    # Other pairs of this tile belong to other blocks: what they have written stays.
    first, stop = lists.starts[i], lists.starts[i + 1]
    tile_start = first // sizes.tokens * sizes.tokens

    def is_own(pair: Int[Array, "..."]) -> Array:
        return (tile_start + pair >= first) & (tile_start + pair < stop)

    values = values.T.reshape(sizes.tokens, sizes.group, sizes.width)
    out_pair = jax.lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
    out_ref[...] = jnp.where(is_own(out_pair), values, out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)
    lse = natural_lse(top, is_seen, safe_total)
    lse_pair = jax.lax.broadcasted_iota(jnp.int32, lse.shape, 1) // sizes.group
    lse_ref[0] = jnp.where(is_own(lse_pair), lse, lse_ref[0])


def _merge(
    parts: Float[Array, "K C J G H"], lses: Float[Array, "K C J G"], sizes: Sizes
) -> tuple[Float[Array, "C N H"], Float[Array, "C N"]]:
    """Join the J partial outputs of each query."""
    top = jnp.max(lses, axis=2, keepdims=True)  # [K C 1 G]
    weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=2)  # [K C G]
    is_seen, safe_total = divisor(total)
    # A place that nothing wrote holds anything: 0 x NaN would be NaN.
    weighted = jnp.where(weights[..., None] != 0.0, parts.astype(jnp.float32) * weights[..., None], 0.0)
    out = (jnp.sum(weighted, axis=2) / safe_total[..., None]).astype(parts.dtype)  # [K C G H]
    lse = natural_lse(top[:, :, 0], is_seen, safe_total)

    def by_token(x: Shaped[Array, "K C G ..."]) -> Shaped[Array, "C N ..."]:
        return jnp.moveaxis(x, 0, 1).reshape(sizes.length, sizes.heads, *x.shape[3:])

    return by_token(out), by_token(lse)
