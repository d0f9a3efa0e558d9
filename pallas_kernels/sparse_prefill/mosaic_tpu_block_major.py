"""Sparse attention of a prefill on a TPU, schedule kv_block_major: each block meets the queries that chose it.

The (query, slot) pairs are sorted by block, and their queries gathered in that order. A step takes the pairs of one
block in one tile of 16 pairs; prefetched lists drive the index maps, so a page is copied once for all steps of its
block, and a tile of outputs is written once all its blocks are done. The normalised partial outputs go back to their
(query, slot) places, where they are merged by log-sum-exp (paper, section 4).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import Pages, seen_positions
from pallas_kernels.mosaic_common import PREFETCHED, Chip, Interpret, dot_nt, dot_tn, locate
from pallas_kernels.sparse_prefill.mosaic_tpu_operands import TpuConfig, TpuSizes, check

_CHUNK_PAIRS = 1 << 17  # whose queries and partial outputs are held at once


def kv_block_major(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    return_lse: bool = False,
    config: TpuConfig | None = None,
    chunk: int | None = None,
    interpret: Interpret = False,
) -> tuple[Array, ...]:
    """Attention over the selected blocks, a block at a time. Arguments and results are those of `query_union`.

    Keys and values are in the queries' dtype or in float8_e4m3fn without a scale. `chunk` is how many queries of a row
    have their partial outputs, J of them each, in memory at once.
    """
    check(q, k, v, blocks, interpret)
    batch, length, heads, width = q.shape
    kv_heads, slots = blocks.shape[1], blocks.shape[3]
    tokens = (config or TpuConfig()).tokens
    chunk = min(length, chunk or max(1, _CHUNK_PAIRS // (kv_heads * slots)))
    pieces = -(-length // chunk)
    fill = pieces * chunk - length
    sizes = TpuSizes(k, tokens, chunk, heads, kv_heads, slots, width)
    _check_lists(sizes)
    at = seen_positions(positions, lengths, length + fill).reshape(batch * pieces, chunk)
    q = jnp.pad(q, ((0, 0), (0, fill), (0, 0), (0, 0))).reshape(batch * pieces, chunk, heads, width)
    blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, fill), (0, 0)), constant_values=-1)
    blocks = blocks.reshape(batch, kv_heads, pieces, chunk, slots).swapaxes(1, 2)
    blocks = blocks.reshape(batch * pieces, kv_heads, chunk, slots)
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), pieces)
    of_piece = lambda x: _piece(*x, v.pool, lengths, sizes, interpret)
    out, lse = jax.lax.map(of_piece, (q, blocks, at, row))
    out = out.reshape(batch, -1, heads, width)[:, :length]
    lse = lse.reshape(batch, -1, heads)[:, :length]
    return (out, lse) if return_lse else (out,)


def _piece(q, blocks, at, row, v, lengths, sizes: TpuSizes, interpret):
    """Some queries of one row of the batch."""
    pairs = blocks.size
    tiles = -(-pairs // sizes.tokens)
    bins = sizes.kv_heads * sizes.k.num_blocks
    own = jnp.where(at >= 0, at // sizes.block_size, -1)[None, :, None]
    seen = (blocks >= 0) & (blocks <= own) & (blocks < sizes.k.num_blocks)
    head = jnp.arange(sizes.kv_heads, dtype=jnp.int32)[:, None, None]
    key = jnp.where(seen, head * sizes.k.num_blocks + blocks, bins).reshape(-1)
    key, order = jax.lax.sort((key, jnp.arange(pairs, dtype=jnp.int32)), num_keys=1)
    fill = tiles * sizes.tokens - pairs
    key = jnp.pad(key, (0, fill), constant_values=bins)
    works = _works(key, bins, sizes)
    source = jnp.pad(order, (0, fill))
    token, head = source // sizes.slots % sizes.length, source // (sizes.slots * sizes.length)
    grouped = q.reshape(sizes.length, sizes.kv_heads, sizes.group, sizes.width)[token, head]
    lanes_at = jnp.repeat(at[token].reshape(tiles, 1, sizes.tokens), sizes.group, axis=2)
    parts, lses = _attend(grouped, lanes_at, works, row, v, lengths, sizes, interpret)
    # Back to the order of (KV head, query, slot).
    place = jnp.zeros_like(order).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    shape = (sizes.kv_heads, sizes.length, sizes.slots, sizes.group)
    lses = jnp.where(seen[..., None], lses.reshape(-1, sizes.group)[place].reshape(shape), -jnp.inf)
    return _merge(parts[place].reshape(*shape, sizes.width), lses, sizes, q.dtype)


def _works(key: Int[Array, " X"], bins: int, sizes: TpuSizes):
    """(count, bins, starts): where another block begins, or another tile of pairs, among those that count."""
    at = jnp.arange(len(key), dtype=jnp.int32)
    other = jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]])
    begins = (other | (at % sizes.tokens == 0)) & (key < bins)
    most = _most_works(sizes)
    starts = jnp.nonzero(begins, size=most, fill_value=0)[0].astype(jnp.int32)
    count = jnp.sum(begins, dtype=jnp.int32)
    end = jnp.sum(key < bins, dtype=jnp.int32)
    starts = jnp.where(jnp.arange(most) < count, starts, end)
    return count, key[jnp.minimum(starts, len(key) - 1)], jnp.append(starts, end)


def _most_works(sizes: TpuSizes) -> int:
    pairs = sizes.kv_heads * sizes.length * sizes.slots
    return -(-pairs // sizes.tokens) + min(pairs, sizes.kv_heads * sizes.k.num_blocks)


def _attend(grouped, lanes_at, works, row, v, lengths, sizes: TpuSizes, interpret):
    count, *lists = works
    k, chip = sizes.k, Chip.here(interpret)
    table = () if k.table is None else (k.table[row],)
    prefetched = (k.layer.reshape(1), row.reshape(1), lengths, *lists, *table)

    def page(i, layer_ref, row_ref, lengths_ref, bins_ref, starts_ref, *table_ref):
        head, block = bins_ref[i] // k.num_blocks, bins_ref[i] % k.num_blocks
        # The table is that of this row alone.
        return locate(k, layer_ref, *(table_ref or (None,)), 0 if table_ref else row_ref[0], head, block)

    at_page = lambda *args: (page(*args)[0], 0, 0)
    at_tile = lambda i, layer, row, lengths, bins, starts, *_: (starts[i] // sizes.tokens, 0, 0)
    queries = pl.BlockSpec((sizes.tokens, sizes.group, sizes.width), at_tile)
    return pl.pallas_call(
        partial(_kernel, sizes=sizes, page=page, prefetched=len(prefetched)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(count,),
            in_specs=[
                queries,
                pl.BlockSpec((1, 1, sizes.rows), at_tile),
                pl.BlockSpec((1, *k.pool.shape[1:]), at_page),
                pl.BlockSpec((1, *k.pool.shape[1:]), at_page),
            ],
            out_specs=[queries, pl.BlockSpec((1, 1, sizes.rows), at_tile)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(grouped.shape, grouped.dtype),
            jax.ShapeDtypeStruct(lanes_at.shape, jnp.float32),
        ],
        compiler_params=chip.params("arbitrary"),
        interpret=interpret,
        name="kv_block_major",
    )(*prefetched, grouped, lanes_at, k.pool, v)


def _kernel(*refs, sizes: TpuSizes, page, prefetched: int):
    lists, (q_ref, at_ref, k_ref, v_ref, out_ref, lse_ref) = refs[:prefetched], refs[prefetched:]
    _, row_ref, lengths_ref, bins_ref, starts_ref, *_ = lists
    i = pl.program_id(0)
    block = bins_ref[i] % sizes.k.num_blocks
    _, held = page(i, *lists)
    q = q_ref[...].reshape(sizes.rows, sizes.width)
    key = jax.lax.broadcasted_iota(jnp.int32, (sizes.block_size, 1), 0)
    limit = jnp.where(held, at_ref[0] - block * sizes.block_size, -1)
    scores = jnp.where(key <= limit, dot_nt(k_ref[0].astype(q.dtype), q) * sizes.width**-0.5, -jnp.inf)
    top = jnp.max(scores, axis=0, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    p = jnp.exp(scores - top)
    total = jnp.sum(p, axis=0, keepdims=True)
    # What lies behind the row's end, or in a page that is not held, may be NaN.
    seen = jnp.where(held, lengths_ref[row_ref[0]] - block * sizes.block_size, 0)
    v = jnp.where(key < seen, v_ref[0].astype(jnp.float32), 0.0).astype(q.dtype)
    values = dot_tn(v, p.astype(q.dtype)) / jnp.where(total > 0.0, total, 1.0)
    # Other rows of this tile belong to other blocks.
    first, stop = starts_ref[i], starts_ref[i + 1]
    at = first // sizes.tokens * sizes.tokens
    mine = lambda axis, shape: (
        (at + jax.lax.broadcasted_iota(jnp.int32, shape, axis) // (sizes.group if axis else 1) >= first)
        & (at + jax.lax.broadcasted_iota(jnp.int32, shape, axis) // (sizes.group if axis else 1) < stop)
    )
    values = values.T.reshape(sizes.tokens, sizes.group, sizes.width)
    out_ref[...] = jnp.where(mine(0, out_ref.shape), values, out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)
    lse = jnp.where(total > 0.0, top + jnp.log(jnp.where(total > 0.0, total, 1.0)), -jnp.inf)
    lse_ref[0] = jnp.where(mine(1, lse.shape), lse, lse_ref[0])


def _merge(parts, lses, sizes: TpuSizes, dtype):
    """Join the J partial outputs of each query."""
    top = jnp.max(lses, axis=2, keepdims=True)
    weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=2)
    safe = jnp.where(total > 0.0, total, 1.0)
    # A place that nothing wrote holds anything: 0 x NaN would be NaN.
    parts = jnp.where(weights[..., None] > 0.0, parts.astype(jnp.float32) * weights[..., None], 0.0)
    out = (jnp.sum(parts, axis=2) / safe[..., None]).astype(dtype)
    lse = jnp.where(total > 0.0, top[:, :, 0] + jnp.log(safe), -jnp.inf)
    by_token = lambda x: jnp.moveaxis(x, 0, 1).reshape(sizes.length, sizes.heads, *x.shape[3:])
    return by_token(out), by_token(lse)


def _check_lists(sizes: TpuSizes) -> None:
    if 2 * _most_works(sizes) + sizes.k.num_blocks > 2 * PREFETCHED - 4096:
        raise ValueError(
            f"{sizes.k.num_blocks} blocks x {sizes.kv_heads} KV heads: too many for kv_block_major's lists; use "
            'schedule="query_union"'
        )
