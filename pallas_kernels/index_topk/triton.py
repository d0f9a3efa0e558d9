"""Index scores, causality, block maximum and running top-k of a prefill in one Triton kernel.

A program holds a tile of queries, all heads of a token side by side since they share the index keys, and walks the
blocks before them in ascending order. A query's own block is always selected, and every token of an earlier block is
visible to it. So no token is ever masked, and neither the own block nor what lies after it is read at all.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import ABOVE, Pages, check_pages, div, dot, power_of_two, rem, seen_positions
from pallas_kernels.index_topk.ranking import empty, insert, ordered, selection

_BIG = 2**30
_PROGRAMS = 2 * 132  # fewer than this leave part of a Hopper GPU idle


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    rows: int = 128  # queries x heads of a program
    keys: int = 128  # keys of one matrix product
    num_warps: int = 4
    num_stages: int = 2


def index_topk(
    index_q: Float[Array, "B T K H"],
    index_k: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    top_k: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
    config: Config | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> Int[Array, "B K T J"]:
    """The blocks of each query: no score is ever written.

    Args:
      index_q: index queries after norm and RoPE; bfloat16, float16 or float32.
      index_k: index keys, `contiguous` or `paged`, in the same dtype.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one.
      init_blocks: forced blocks at the start.
      config: tile sizes.
      splits: programs that share the keys of one tile; by default as many as fill the GPU.
      interpret: run on the CPU.

    Returns:
      Ascending ids, then -1: score descending, then id ascending; a block of nothing but NaN ranks last.

    Raises:
      ValueError: counts that contradict each other, or keys of another dtype or width.

    Source: paper section 3; MiniMax-AI/MSA reference top-k.
    """
    _check(index_q, index_k, top_k, local_blocks, init_blocks)
    batch, length, heads, width = index_q.shape
    config = config or _default(index_q.dtype)
    padded_heads = power_of_two(heads)
    tokens = max(1, min(config.rows // padded_heads, power_of_two(length)))
    out_tokens = max(length, tokens)
    tiles = -(-out_tokens // tokens)
    if splits is None:
        splits = max(1, min(_PROGRAMS // (tiles * batch), index_k.num_blocks // 8, 32))
    at = seen_positions(positions, lengths, out_tokens)
    sizes = _Sizes(
        index_k, config, heads, padded_heads, tokens, length, tiles, splits, top_k, local_blocks, init_blocks
    )

    chosen = jax.ShapeDtypeStruct((batch, padded_heads, out_tokens, top_k), jnp.int32)
    listed = (batch, splits, max(1, top_k - 1), tiles * tokens * padded_heads)
    parts = [jax.ShapeDtypeStruct(listed, jnp.float32), jax.ShapeDtypeStruct(listed, jnp.int32)]
    params = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    out = pl.pallas_call(
        partial(_score_kernel, sizes=sizes),
        grid=(tiles, splits, batch),
        out_shape=chosen if splits == 1 else parts,
        compiler_params=params,
        interpret=interpret,
        name="index_topk",
    )(index_q.reshape(batch, -1, width), at, *index_k.operands())
    if splits > 1:
        out = pl.pallas_call(
            partial(_merge_kernel, sizes=sizes),
            grid=(tiles, batch),
            out_shape=chosen,
            compiler_params=plgpu.CompilerParams(num_warps=max(1, sizes.rows // 32), num_stages=2),
            interpret=interpret,
            name="index_topk_merge",
        )(*out, at)
    return out[:, :heads, :length]


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call."""

    index_k: Pages
    config: Config
    heads: int
    padded_heads: int
    tokens: int
    length: int
    tiles: int
    splits: int
    top_k: int
    local_blocks: int
    init_blocks: int

    @property
    def rows(self) -> int:
        return self.tokens * self.padded_heads

    def own_blocks(self, at_ref, row, tile):
        """[1 R]: the own block of each query of a tile, -1 for padding; and its head and its token."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, self.rows), 1)
        token = self.first(tile, at_ref) + div(lane, self.padded_heads)
        at = at_ref[row, token]
        return jnp.where(at >= 0, div(at, self.index_k.block_size), -1), rem(lane, self.padded_heads), token

    def first(self, tile, at_ref):
        """The last tile starts early enough to end with the queries; what it repeats is the same twice."""
        return jnp.minimum(tile * self.tokens, at_ref.shape[1] - self.tokens)


def _score_kernel(q_ref, at_ref, pool_ref, layer_ref, *rest, sizes: _Sizes):
    table_ref = rest[0] if sizes.index_k.table is not None else None
    out_refs = rest[1:] if table_ref is not None else rest
    # Late tiles have the most keys: they come first, and the short ones fill the gaps.
    tile, split, row = sizes.tiles - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    own, head, token = sizes.own_blocks(at_ref, row, tile)
    last = jnp.max(own)
    first = jnp.maximum(jnp.min(jnp.where(own >= 0, own, _BIG)), 0)
    per_split = div(jnp.maximum(last, 0) + sizes.splits - 1, sizes.splits)
    start, stop = split * per_split, jnp.minimum((split + 1) * per_split, last)
    q = q_ref[row, _query_rows(sizes, sizes.first(tile, at_ref)), :]

    def step(masked):
        def body(block, state):
            page, held = sizes.index_k.locate(layer_ref, table_ref, row, 0, block)
            key = ordered(_block_max(q, pool_ref, page, sizes))
            key = jnp.where(held, key, ABOVE) if table_ref is not None else key
            if sizes.local_blocks > 1 or sizes.init_blocks > 0:
                forced = (block > own - sizes.local_blocks) | (block < sizes.init_blocks)
                key = jnp.where(forced, jnp.inf, key)
            if masked:
                key = jnp.where(block < own, key, -jnp.inf)
            return insert(*state, key, jnp.full((1, sizes.rows), block, jnp.int32))

        return body

    state = empty(sizes.top_k - 1, sizes.rows)
    if sizes.top_k > 1:
        whole = jnp.maximum(jnp.minimum(first, stop), start)
        state = jax.lax.fori_loop(start, whole, step(False), state)
        state = jax.lax.fori_loop(whole, stop, step(True), state)
    if sizes.splits == 1:
        _write(out_refs[0], selection(state[1], own), row, head, token)
        return
    lane = tile * sizes.rows + jax.lax.broadcasted_iota(jnp.int32, (1, sizes.rows), 1)
    for j in range(sizes.top_k - 1):
        out_refs[0][row, split, j, lane] = state[0][j]
        out_refs[1][row, split, j, lane] = state[1][j]


def _merge_kernel(keys_ref, ids_ref, at_ref, out_ref, *, sizes: _Sizes):
    tile, row = pl.program_id(0), pl.program_id(1)
    own, head, token = sizes.own_blocks(at_ref, row, tile)
    lane = tile * sizes.rows + jax.lax.broadcasted_iota(jnp.int32, (1, sizes.rows), 1)

    def body(split, state):
        for j in range(sizes.top_k - 1):
            state = insert(*state, keys_ref[row, split, j, lane], ids_ref[row, split, j, lane])
        return state

    state = empty(sizes.top_k - 1, sizes.rows)
    if sizes.top_k > 1:
        state = jax.lax.fori_loop(0, sizes.splits, body, state)
    _write(out_ref, selection(state[1], own), row, head, token)


def _query_rows(sizes: _Sizes, first):
    """[R]: rows of index_q as `[T*K, H]`; those of padding repeat some real one."""
    lane = jnp.arange(sizes.rows, dtype=jnp.int32)
    token = jnp.minimum(first + div(lane, sizes.padded_heads), sizes.length - 1)
    return token * sizes.heads + jnp.minimum(rem(lane, sizes.padded_heads), sizes.heads - 1)


def _block_max(q, pool_ref, page, sizes: _Sizes):
    """[1 R]: the highest score of each query in one block."""
    size = sizes.index_k.block_size
    keys = min(sizes.config.keys, size)
    best = None
    for start in range(0, size, keys):
        scores = dot(q, pool_ref[page, pl.ds(start, keys), :], transpose=True)
        top = jnp.max(scores, axis=1)
        best = top if best is None else jnp.maximum(best, top)
    # As a row of its own shape the maximum leaves the layout of the product: one query a thread, nothing repeated.
    return best[None, :]


def _write(out_ref, slots, row, head, token):
    for j, ids in enumerate(slots):
        out_ref[row, head, token, j] = ids


def _default(dtype) -> Config:
    return Config(rows=64, keys=32, num_warps=4, num_stages=2) if dtype == jnp.float32 else Config()


def _check(index_q, index_k: Pages, top_k: int, local_blocks: int, init_blocks: int) -> None:
    check_pages("index_k", index_k, index_q.shape[0])
    if local_blocks < 1 or init_blocks < 0 or local_blocks + init_blocks > top_k:
        raise ValueError(
            f"local_blocks = {local_blocks}, init_blocks = {init_blocks}, top_k = {top_k}: need local_blocks >= 1, "
            "init_blocks >= 0, and both together at most top_k"
        )
    if index_q.dtype != index_k.pool.dtype or index_q.shape[-1] != index_k.width:
        raise ValueError(
            f"index_q is {index_q.dtype} of width {index_q.shape[-1]} and index_k {index_k.pool.dtype} of "
            f"{index_k.width}: they must be the same"
        )
