"""Sparse attention of a prefill, schedule kv_block_major: each block meets the queries that chose it.

The selection is inverted (csr.py). A program holds one block of keys and values and walks the queries that chose it,
a few queries x 16 heads at a time. It writes their normalised partial outputs, each (query, slot) pair to a place of
its own, and a second kernel merges them by log-sum-exp (paper, section 4). Nothing is added in an order that could
change.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import LOG2E, Pages, div, dot, exp2, rem, seen_positions
from pallas_kernels.sparse_prefill.csr import Inverted, invert, search, seen_blocks
from pallas_kernels.sparse_prefill.operands import Config, Sizes, check

_WORK_TILES = 32  # tiles of queries that share one load of a block
_CHUNK_PAIRS = 1 << 17  # (query, slot) pairs of a KV head whose partial outputs are held at once


def kv_block_major(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    return_lse: bool = False,
    config: Config | None = None,
    chunk: int | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Attention over the selected blocks, a block at a time. Arguments and results are those of `query_union`.

    `chunk` is how many queries of a row have their partial outputs, J of them each, in memory at once.
    """
    check(q, k, v, blocks)
    length, slots = q.shape[1], blocks.shape[3]
    config = config or _default(q.dtype)
    at = seen_positions(positions, lengths, length)
    chunk = min(length, chunk or max(1, _CHUNK_PAIRS // slots))
    sizes = Sizes(k, config, length, q.shape[2], blocks.shape[1], slots, q.shape[3], interpret, return_lse)
    out = ()
    for start in range(0, length, chunk):
        piece = slice(start, start + chunk)
        out = _chunk(q, v, blocks[:, :, piece], at[:, piece], lengths, start, sizes, out)
    return tuple(_trim(x, sizes) for x in out)


def _chunk(q, v, blocks, at, lengths, start: int, sizes: Sizes, out) -> tuple[Array, ...]:
    """The queries from `start` on, written into the outputs of the chunks before."""
    batch, kv_heads, length, _ = blocks.shape
    config, k = sizes.config, sizes.k
    seen = seen_blocks(blocks, at, sizes)
    per_work = sizes.tokens * _WORK_TILES
    csr = invert(blocks, seen, at, sizes, per_work)
    pairs = blocks.size
    bins = batch * kv_heads * k.num_blocks
    lanes = (pairs + sizes.tokens) * sizes.padded_group  # the last tile's lanes without a pair write behind the end
    parts, lses = pl.pallas_call(
        partial(_block_kernel, sizes=sizes, chunk=(start, length), bins=bins, per_work=per_work, pairs=pairs),
        grid=(pairs // per_work + min(pairs, bins),),
        out_shape=(
            jax.ShapeDtypeStruct((lanes, sizes.width), q.dtype),
            jax.ShapeDtypeStruct((lanes,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=sizes.interpret,
        name="kv_block_major",
    )(q.reshape(-1, sizes.width), at.reshape(-1), lengths, *csr, *k.operands(), v.pool)
    return _merge(parts, lses, seen, start, sizes, q.dtype, out)


def _block_kernel(q_ref, at_ref, lengths_ref, *rest, sizes: Sizes, chunk, bins: int, per_work: int, pairs: int):
    *csr, k_ref, layer_ref = rest[:6]
    csr = Inverted(*csr)
    *table, v_ref, out_ref, lse_ref = rest[6:]
    work = pl.program_id(0)
    place = search(lambda i: csr.works[i] <= work, bins, jnp.int32(0))

    @pl.when(place < bins)
    def _():
        block = rem(place, sizes.k.num_blocks)
        row_head = div(place, sizes.k.num_blocks)
        row, head = div(row_head, sizes.kv_heads), rem(row_head, sizes.kv_heads)
        page, _ = sizes.k.locate(layer_ref, table[0] if table else None, row, head, block)
        # The works before this one in the same bin.
        earlier = work - jnp.where(place > 0, csr.works[jnp.maximum(place - 1, 0)], 0)
        start = csr.first[place] + earlier * per_work
        stop = jnp.minimum(start + per_work, csr.first[place + 1])
        partly = jnp.clip(csr.whole[place] - start, 0, stop - start)
        slots = block * sizes.k.block_size + jnp.arange(sizes.k.block_size, dtype=jnp.int32)
        k = k_ref[page, :, :]
        v = plgpu.load(v_ref.at[page, :, :], mask=(slots < lengths_ref[row])[:, None], other=0.0)
        lane = jnp.arange(sizes.rows, dtype=jnp.int32)
        member, query = div(lane, sizes.padded_group), rem(lane, sizes.padded_group)

        def step(masked):
            def body(i, state):
                at_pair = start + i * sizes.tokens + member
                real = at_pair < stop
                pair = csr.pairs[jnp.where(real, at_pair, start)]
                # Pairs count (row, KV head, query of the chunk, slot); rows of q count (row, query, head).
                first, length = chunk
                token = div(pair, sizes.slots) - row_head * length
                group = head * sizes.group + jnp.minimum(query, sizes.group - 1)
                q = q_ref[(row * sizes.length + first + token) * sizes.heads + group, :]
                scores = dot(q, k, transpose=True)
                if masked:
                    at = at_ref[row * length + token]
                    scores = jnp.where(slots[None, :] <= at[:, None], scores, -jnp.inf)
                top = jnp.max(scores, axis=1) * sizes.scale
                p = exp2(scores * sizes.scale - top[:, None], sizes.interpret)
                total = jnp.sum(p, axis=1)
                out = dot(p.astype(v.dtype), v) / total[:, None]
                target = jnp.where(real, pair, pairs + member) * sizes.padded_group + query
                out_ref[target, :] = out.astype(out_ref.dtype)
                lse_ref[target] = top + jnp.log(total) * LOG2E
                return state

            return body

        tiles = lambda n: div(n + sizes.tokens - 1, sizes.tokens)
        first_whole = tiles(partly)
        state = jax.lax.fori_loop(0, first_whole, step(True), jnp.int32(0))
        jax.lax.fori_loop(first_whole, tiles(stop - start), step(False), state)


def _merge(parts, lses, seen, start: int, sizes: Sizes, dtype, out) -> tuple[Array, ...]:
    """Join the J partial outputs of each query of a chunk."""
    batch, kv_heads, length, _ = seen.shape
    rows = sizes.length * kv_heads * sizes.padded_group
    shape = (jax.ShapeDtypeStruct((batch, rows, sizes.width), dtype),)
    if sizes.return_lse:
        shape = (*shape, jax.ShapeDtypeStruct((batch, rows), jnp.float32))
    return pl.pallas_call(
        partial(_merge_kernel, sizes=sizes, chunk=(start, length)),
        grid=(length, kv_heads, batch),
        out_shape=shape,
        input_output_aliases={3 + i: i for i in range(len(out))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=sizes.interpret,
        name="kv_block_major_merge",
    )(parts, lses, seen.astype(jnp.int32), *out)


def _trim(x, sizes: Sizes):
    """Without the heads that fill a group up to a power of two."""
    x = x.reshape(x.shape[0], sizes.length, sizes.kv_heads, sizes.padded_group, *x.shape[2:])[:, :, :, : sizes.group]
    return x.reshape(*x.shape[:2], sizes.heads, *x.shape[4:])


def _merge_kernel(parts_ref, lses_ref, seen_ref, *refs, sizes: Sizes, chunk):
    out_refs = refs[-2:] if sizes.return_lse else refs[-1:]
    token, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    query = jnp.arange(sizes.padded_group, dtype=jnp.int32)
    start, length = chunk
    pair = ((row * sizes.kv_heads + head) * length + token) * sizes.slots

    def lse(j):
        part = lses_ref[(pair + j) * sizes.padded_group + query]
        return jnp.where(seen_ref[row, head, token, j] != 0, part, -jnp.inf)

    top = jnp.full((sizes.padded_group,), -jnp.inf, jnp.float32)
    top = jax.lax.fori_loop(0, sizes.slots, lambda j, top: jnp.maximum(top, lse(j)), top)
    top = jnp.where(top == -jnp.inf, 0.0, top)

    def add(j, state):
        values, total = state
        weight = exp2(lse(j) - top, sizes.interpret)
        part = parts_ref[(pair + j) * sizes.padded_group + query, :].astype(jnp.float32)
        # A place that nothing wrote holds anything: 0 x NaN would be NaN.
        part = jnp.where(weight[:, None] > 0.0, part * weight[:, None], 0.0)
        return values + part, total + weight

    empty = jnp.zeros((sizes.padded_group, sizes.width), jnp.float32), jnp.zeros((sizes.padded_group,), jnp.float32)
    values, total = jax.lax.fori_loop(0, sizes.slots, add, empty)
    safe = jnp.where(total > 0.0, total, 1.0)
    target = ((start + token) * sizes.kv_heads + head) * sizes.padded_group + query
    out_refs[0][row, target, :] = (values / safe[:, None]).astype(out_refs[0].dtype)
    if sizes.return_lse:
        out_refs[1][row, target] = jnp.where(total > 0.0, top / LOG2E + jnp.log(safe), -jnp.inf)


def _default(dtype) -> Config:
    return (
        Config(tokens=2, num_warps=4, num_stages=1)
        if dtype == jnp.float32
        else Config(tokens=4, num_warps=4, num_stages=3)
    )
