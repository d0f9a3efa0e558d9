"""Sparse attention of a prefill in Triton kernels, by whichever schedule suits the selection at hand.

`query_union` walks the union of the blocks of 8 neighbouring tokens, for 16 heads of each::

    selections of 8 tokens ── compare all 128 entries ── union, ascending, a bit per token ── pages, bits
    q [128, 128] stays;  per block:  K, V ── q K^T ── 2^(s - top + (0 or -inf)) ── P V ── running out [128, 128]

`kv_block_major` sorts queries by block; a program holds one block::

    selections ── sort by block ── queries of block 0 | queries of block 1 | ...
    K, V of a block stay;  per 4 of its queries x 16 heads:  q [64, 128] ── q K^T ── P V ── out [64, 128], LSE ── memory
    a place for each (query, slot) ── merge of a query's slots by LSE ── out
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.backends import Limits
from pallas_kernels.pages import seen_positions
from pallas_kernels.sparse_prefill import Call, check_config
from pallas_kernels.sparse_prefill.triton.kv_block_major import kv_block_major
from pallas_kernels.sparse_prefill.triton.query_union import default_config, query_union, walk_unions
from pallas_kernels.sparse_prefill.triton.sizes import Config, Sizes
from pallas_kernels.sparse_prefill.triton.union import union_blocks
from pallas_kernels.triton_common import check_pool

__all__ = ["LIMITS", "Config", "kv_block_major", "query_union", "run"]

LIMITS = Limits(check_pages=check_pool, config=Config, schedules=("auto", "query_union", "kv_block_major"))
# How many times more blocks than one query chose may a tile's union hold before inverting the selection is faster?
# Measured on an H200 at 32,768 tokens: the walk takes 4.3 ms for each multiple, the other schedule 9.3 ms in all.
_BREAK_EVEN = 2.1


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `sparse_prefill` on a checked call; "auto" measures how much selections of neighbouring queries overlap."""
    check_config(call, config)
    q, k, blocks = call.q, call.k, call.blocks
    if call.schedule == "kv_block_major":
        return kv_block_major(call, config)
    # Where all blocks of a row are fewer than two selections, unions cannot hold many more than one selection.
    if call.schedule == "query_union" or k.num_blocks <= 2 * blocks.shape[3]:
        return query_union(call, config)
    length = q.shape[1]
    sizes = Sizes.of(call, blocks.shape[1], blocks.shape[3], default_config(q.dtype))
    query_positions = seen_positions(call.positions, call.lengths, sizes.out_tokens)
    unions = union_blocks(blocks, query_positions, sizes)
    is_chosen = (blocks >= 0) & (query_positions[:, None, :length, None] >= 0)  # [B K T J]
    chosen = jnp.sum(is_chosen, dtype=jnp.float32)
    in_unions = jnp.sum(unions.counts[..., 1], dtype=jnp.float32)
    is_spread = in_unions * sizes.tile_tokens > _BREAK_EVEN * chosen
    return jax.lax.cond(
        is_spread,
        lambda: kv_block_major(call, config),
        lambda: walk_unions(q, call.v, query_positions, unions, sizes),
    )
