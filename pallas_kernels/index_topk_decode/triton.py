"""Index scores of a decode step, split over pages, and their top-k: two Triton kernels.

With 1 to 16 queries a row all time goes to reading index keys once. The keys are the rows of the matrix product and
the queries of all heads its columns. A query has one number a block, so the scores go through memory (4 bytes for the
32 KiB of keys behind each), and one program a query takes the best of them.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import ABOVE, Pages, check_pages, div, dot, matmul_dtype, power_of_two, seen_position
from pallas_kernels.index_topk.ranking import ordered

MAX_QUERIES = 16
_MAX_BLOCKS = 1 << 16
_LAST = 2**30


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    programs: int = 396  # of the whole grid, at most: what an H200 runs at once, so that no few are left over
    num_warps: int = 4
    num_stages: int = 2
    topk_warps: int = 0  # of the second kernel; 0 takes what measured best


def index_topk_decode(
    index_q: Float[Array, "B T K H"],
    index_k: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    top_k: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
    config: Config | None = None,
    interpret: bool = False,
) -> Int[Array, "B K T J"]:
    """`index_topk` for at most 16 queries a row.

    Args:
      index_q: index queries after norm and RoPE.
      index_k: index keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn. A scale of the latter
        would change no order, so none is taken; bfloat16 queries are then multiplied as float16.
      positions: absolute position of each query; < 0 or >= lengths marks padding. Each query has its own.
      lengths: valid keys of each row.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one.
      init_blocks: forced blocks at the start.
      config: tile sizes.
      interpret: run on the CPU.

    Returns:
      Ascending ids, then -1: score descending, then id ascending; a block of nothing but NaN ranks last.

    Raises:
      ValueError: too many queries or blocks, counts that contradict each other, or keys of another dtype or width.
    """
    _check(index_q, index_k, top_k, local_blocks, init_blocks)
    batch, length, heads, width = index_q.shape
    config = config or _default(index_k.pool.dtype)
    rows = max(16, power_of_two(length * heads))
    count = index_k.num_blocks
    splits = max(1, min(count, config.programs // batch))
    at = positions.astype(jnp.int32), lengths.astype(jnp.int32)
    scores = pl.pallas_call(
        partial(_score_kernel, index_k=index_k, rows=rows, queries=length * heads, splits=splits),
        grid=(splits, batch),
        out_shape=jax.ShapeDtypeStruct((batch, rows, count), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="index_score_decode",
    )(index_q.reshape(batch, -1, width), *at, *index_k.operands())
    slots = power_of_two(top_k)
    chosen = pl.pallas_call(
        partial(_topk_kernel, top_k=top_k, block_size=index_k.block_size, local=local_blocks, init=init_blocks),
        grid=(length, heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, heads, length, slots), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=_topk_warps(count, config), num_stages=1),
        interpret=interpret,
        name="index_topk_decode",
    )(scores, *at)
    return chosen[..., :top_k]


def _score_kernel(
    q_ref, at_ref, lengths_ref, pool_ref, layer_ref, *rest, index_k: Pages, rows: int, queries: int, splits: int
):
    *table, out_ref = rest
    split, row = pl.program_id(0), pl.program_id(1)
    lane = jnp.arange(rows, dtype=jnp.int32)
    kind = matmul_dtype(q_ref.dtype, pool_ref.dtype)
    q = q_ref[row, jnp.minimum(lane, queries - 1), :].astype(kind)
    token = jnp.arange(power_of_two(at_ref.shape[1]), dtype=jnp.int32)
    last = jnp.max(seen_position(at_ref, lengths_ref, row, jnp.minimum(token, at_ref.shape[1] - 1)))
    stop = jnp.where(last >= 0, div(jnp.maximum(last, 0), index_k.block_size), 0)
    per_split = div(stop + splits - 1, splits)

    def body(block, state):
        page, held = index_k.locate(layer_ref, table[0] if table else None, row, 0, block)
        keys = pool_ref[page, :, :].astype(kind)
        best = jnp.max(dot(keys, q, transpose=True), axis=0)
        out_ref[row, lane, block] = jnp.where(held, ordered(best), ABOVE)
        return state

    start = split * per_split
    jax.lax.fori_loop(start, jnp.minimum(start + per_split, stop), body, jnp.int32(0))


def _topk_kernel(scores_ref, at_ref, lengths_ref, out_ref, *, top_k: int, block_size: int, local: int, init: int):
    token, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, count = pl.num_programs(1), scores_ref.shape[2]
    at = seen_position(at_ref, lengths_ref, row, token)
    own = jnp.where(at >= 0, div(jnp.maximum(at, 0), block_size), -1)
    ids = jnp.arange(power_of_two(count), dtype=jnp.int32)
    key = scores_ref[row, token * heads + head, jnp.minimum(ids, count - 1)]
    key = jnp.where((ids > own - local) | (ids < init), jnp.inf, key)
    # What lies from the own block on was never written.
    key = jnp.where(ids < own, key, -jnp.inf)
    slot = jnp.arange(power_of_two(top_k), dtype=jnp.int32)

    def body(j, state):
        key, chosen = state
        best = jnp.argmax(key, axis=0).astype(jnp.int32)
        return jnp.where(ids == best, -jnp.inf, key), jnp.where(slot == j, best, chosen)

    free = jnp.minimum(own, top_k - 1)
    chosen = jax.lax.fori_loop(0, jnp.maximum(free, 0), body, (key, jnp.zeros_like(slot)))[1]
    chosen = jnp.where(slot < free, chosen, jnp.where((slot == free) & (own >= 0), own, _LAST + slot))
    place = jnp.sum((chosen[None, :] < chosen[:, None]).astype(jnp.int32), axis=1)
    out_ref[row, head, token, place] = jnp.where(chosen < _LAST, chosen, -1)


def _default(stored) -> Config:
    # One-byte keys take half the room, so more programs run at once.
    return Config(programs=528, num_stages=3) if stored == jnp.float8_e4m3fn else Config()


def _topk_warps(count: int, config: Config) -> int:
    return config.topk_warps or (4 if count <= 2048 else 8)


def _check(index_q, index_k: Pages, top_k: int, local_blocks: int, init_blocks: int) -> None:
    check_pages("index_k", index_k, index_q.shape[0])
    if not 1 <= index_q.shape[1] <= MAX_QUERIES or index_k.num_blocks > _MAX_BLOCKS:
        raise ValueError(
            f"{index_q.shape[1]} queries a row and {index_k.num_blocks} blocks: need 1 to {MAX_QUERIES} queries "
            f"(index_topk takes more) and at most {_MAX_BLOCKS} blocks"
        )
    if local_blocks < 1 or init_blocks < 0 or local_blocks + init_blocks > top_k:
        raise ValueError(
            f"local_blocks = {local_blocks}, init_blocks = {init_blocks}, top_k = {top_k}: need local_blocks >= 1, "
            "init_blocks >= 0, and both together at most top_k"
        )
    if index_k.pool.dtype not in (index_q.dtype, jnp.float8_e4m3fn) or index_q.shape[-1] != index_k.width:
        raise ValueError(
            f"index_q is {index_q.dtype} of width {index_q.shape[-1]} and index_k {index_k.pool.dtype} of "
            f"{index_k.width}: need the same width, and keys in the queries' dtype or float8_e4m3fn"
        )
