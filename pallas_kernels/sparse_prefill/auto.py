"""Sparse attention of a prefill by whichever schedule suits the selection at hand."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import Pages, seen_positions
from pallas_kernels.sparse_prefill.operands import Sizes, check
from pallas_kernels.sparse_prefill.triton import default_config, query_union, walk_union
from pallas_kernels.sparse_prefill.triton_block_major import kv_block_major
from pallas_kernels.sparse_prefill.union import union_blocks

SCHEDULES = ("auto", "query_union", "kv_block_major")
# How many times more blocks than one query chose may a tile's union hold before inverting the selection is faster?
# Measured on an H200 at 32,768 tokens: the walk takes 4.3 ms for each multiple, the other schedule 9.3 ms in all.
_BREAK_EVEN = 2.1


def sparse_prefill(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    schedule: str = "auto",
    return_lse: bool = False,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Attention over the selected blocks. Arguments and results are those of `query_union`.

    Args:
      q: queries after norm and RoPE.
      k: keys.
      v: values.
      blocks: distinct ids in any order, -1 for none.
      positions: absolute position of each query.
      lengths: valid keys of each row.
      schedule: "query_union", "kv_block_major", or "auto", which measures on the device how much the selections of
        neighbouring queries overlap; where all blocks of a row are fewer than two selections it need not look.
      return_lse: also return the LSE.
      interpret: run on the CPU.

    Raises:
      ValueError: an unknown schedule, or operands that do not fit together.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule = {schedule!r}: allowed are {', '.join(map(repr, SCHEDULES))}")
    options = dict(return_lse=return_lse, interpret=interpret)
    args = (q, k, v, blocks, positions, lengths)
    if schedule == "kv_block_major":
        return kv_block_major(*args, **options)
    if schedule == "query_union" or k.num_blocks <= 2 * blocks.shape[3]:
        return query_union(*args, **options)
    check(q, k, v, blocks)
    length, heads, width = q.shape[1:]
    config = default_config(q.dtype)
    sizes = Sizes(k, config, length, heads, blocks.shape[1], blocks.shape[3], width, interpret, return_lse)
    at = seen_positions(positions, lengths, sizes.out_tokens)
    plan = union_blocks(blocks, at, sizes)
    chosen = jnp.sum((blocks >= 0) & (at[:, None, :length, None] >= 0), dtype=jnp.float32)
    spread = jnp.sum(plan[3][..., 1], dtype=jnp.float32) * sizes.tokens > _BREAK_EVEN * chosen
    return jax.lax.cond(spread, lambda: kv_block_major(*args, **options), lambda: walk_union(q, v, at, plan, sizes))
