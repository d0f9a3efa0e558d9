"""Index scores of a decode step, split over pages, and their top-k: two Triton kernels.

With 1 to 16 queries a row all time goes to reading index keys once. The keys are the rows of the matrix product and
the queries of all heads its columns. A query has one number a block, so the scores go through memory (4 bytes for the
32 KiB of keys behind each), and one program a query takes the best of them (best_blocks.py).

In M3's sizes::

  index_q  [16 queries and heads, 128] ── stays ───┐
                                                   ├── scores [128, 16] ── column maximum ──┬── a number a block
  table ── page ── index_k  block i, i + 1 ... ────┘                                        └── the best of this program
  then, a program a query:  best of all programs ── J of these ── their blocks ── best J - 1 and the own ── ascending
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.index_topk import Selected
from pallas_kernels.index_topk.ranking import KEY_OF_MINUS_INF, sort_key
from pallas_kernels.index_topk_decode import Call
from pallas_kernels.index_topk_decode.triton.best_blocks import Rules, best_blocks, chosen_keys, last_own_block
from pallas_kernels.numbers import power_of_two
from pallas_kernels.pages import FinderRefs, Pages
from pallas_kernels.triton_common import check_pool, dot, matmul_dtype

_MAX_BLOCKS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of the grid, and of what the second kernel looks through."""

    programs: int = 396  # of the whole grid, at most: what an H200 runs at once, so that no few are left over
    num_warps: int = 4
    num_stages: int = 2
    few_blocks: int = 2048  # up to here the second kernel is no faster for taking groups of blocks first


LIMITS = Limits(check_pages=check_pool, config=Config, stored=(jnp.float8_e4m3fn,), max_blocks=_MAX_BLOCKS)


def run(call: Call, config: Config | None) -> Selected:
    """Run `index_topk_decode` on a checked call."""
    batch, length, heads, width = call.index_q.shape
    config = default_config(call.index_k.pool.dtype) if config is None else config
    tile_rows = max(16, power_of_two(length * heads))
    num_blocks = call.index_k.num_blocks
    splits = max(1, min(num_blocks, config.programs // batch))
    positions, lengths = call.positions.astype(jnp.int32), call.lengths.astype(jnp.int32)
    rules = Rules(heads, call.index_k.block_size, *call.counts, splits, config.few_blocks)
    block_keys, group_keys = pl.pallas_call(
        partial(_score_kernel, index_k=call.index_k, tile_rows=tile_rows, rules=rules),
        grid=(splits, batch),
        out_shape=[jax.ShapeDtypeStruct((batch, length * heads, n), jnp.float32) for n in (num_blocks, splits)],
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=call.interpret,
        name="index_score_decode",
    )(call.index_q.reshape(batch, -1, width), positions, lengths, call.index_k.pool, call.index_k.finder())
    blocks = best_blocks(block_keys, group_keys, positions, lengths, rules, call.interpret)
    return (blocks, chosen_keys(blocks, block_keys, positions, rules)) if call.return_keys else blocks


def default_config(stored: jax.typing.DTypeLike) -> Config:
    """Return the sizes for keys in this dtype: many small programs hide best that one-byte keys are converted."""
    return Config(programs=792, num_warps=2) if stored == jnp.float8_e4m3fn else Config()


def _score_kernel(
    q_ref,
    positions_ref,
    lengths_ref,
    pool_ref,
    finder: FinderRefs,
    block_keys_ref,
    group_keys_ref,
    *,
    index_k: Pages,
    tile_rows: int,
    rules: Rules,
):
    """Sort keys of the blocks of one split, for all queries of a row, and the highest of each query."""
    split, row = pl.program_id(0), pl.program_id(1)
    lane = jnp.arange(tile_rows, dtype=jnp.int32)
    # Lanes that only fill the tile have no place to write to: their few bytes, between reads, took 2% of the time.
    is_query = lane < q_ref.shape[1]
    dtype = matmul_dtype(q_ref.dtype, pool_ref.dtype)
    q = q_ref[row, jnp.minimum(lane, q_ref.shape[1] - 1), :].astype(dtype)  # [R H]
    stop = last_own_block(positions_ref, lengths_ref, row, index_k.block_size)
    per_split = rules.per_split(stop)

    def score_block(block, highest):
        page, is_held = index_k.locate(finder, row, 0, block)
        keys = pool_ref[page, :, :].astype(dtype)  # [P H]
        key = sort_key(jnp.max(dot(keys, q, transpose=True), axis=0))
        key = jnp.where(is_held, key, KEY_OF_MINUS_INF)
        plgpu.store(block_keys_ref.at[row, lane, block], key, mask=is_query, eviction_policy="evict_last")
        return jnp.maximum(highest, key)

    start = split * per_split
    nothing = jnp.full((tile_rows,), -jnp.inf, jnp.float32)
    highest = jax.lax.fori_loop(start, jnp.minimum(start + per_split, stop), score_block, nothing)
    plgpu.store(group_keys_ref.at[row, lane, split], highest, mask=is_query)
