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

from pallas_kernels.common import ABOVE, Pages, check_pages, dot, matmul_dtype, power_of_two
from pallas_kernels.index_topk.ranking import ordered
from pallas_kernels.index_topk_decode.triton_topk import Rules, best_blocks, last_own

MAX_QUERIES = 16
_MAX_BLOCKS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    programs: int = 396  # of the whole grid, at most: what an H200 runs at once, so that no few are left over
    num_warps: int = 4
    num_stages: int = 2
    few_blocks: int = 2048  # up to here the second kernel is no faster for taking groups of blocks first


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
    rules = Rules(heads, index_k.block_size, top_k, local_blocks, init_blocks, splits, config.few_blocks)
    scores, groups = pl.pallas_call(
        partial(_score_kernel, index_k=index_k, rows=rows, rules=rules),
        grid=(splits, batch),
        out_shape=[jax.ShapeDtypeStruct((batch, length * heads, n), jnp.float32) for n in (count, splits)],
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="index_score_decode",
    )(index_q.reshape(batch, -1, width), *at, *index_k.operands())
    return best_blocks(scores, groups, *at, rules, interpret)


def _score_kernel(q_ref, at_ref, lengths_ref, pool_ref, layer_ref, *rest, index_k: Pages, rows: int, rules: Rules):
    *table, out_ref, groups_ref = rest
    split, row = pl.program_id(0), pl.program_id(1)
    lane = jnp.arange(rows, dtype=jnp.int32)
    # Lanes that only fill the tile have no place to write to: their few bytes, between reads, took 2% of the time.
    queries = lane < q_ref.shape[1]
    kind = matmul_dtype(q_ref.dtype, pool_ref.dtype)
    q = q_ref[row, jnp.minimum(lane, q_ref.shape[1] - 1), :].astype(kind)
    stop = last_own(at_ref, lengths_ref, row, index_k.block_size)
    size = rules.per_split(stop)

    def body(block, best):
        page, held = index_k.locate(layer_ref, table[0] if table else None, row, 0, block)
        keys = pool_ref[page, :, :].astype(kind)
        key = ordered(jnp.max(dot(keys, q, transpose=True), axis=0))
        key = jnp.where(held, key, ABOVE)
        plgpu.store(out_ref.at[row, lane, block], key, mask=queries, eviction_policy="evict_last")
        return jnp.maximum(best, key)

    start = split * size
    worst = jnp.full((rows,), -jnp.inf, jnp.float32)
    best = jax.lax.fori_loop(start, jnp.minimum(start + size, stop), body, worst)
    plgpu.store(groups_ref.at[row, lane, split], best, mask=queries)


def _default(stored) -> Config:
    # One-byte keys are converted on their way to the product: many small programs hide that best.
    return Config(programs=792, num_warps=2) if stored == jnp.float8_e4m3fn else Config()


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
