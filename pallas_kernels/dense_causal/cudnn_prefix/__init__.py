"""Dense causal attention over pages of chunks that see a long prefix: cuDNN has that, the Triton kernel the rest.

Where devices hold the blocks of rows in turn, the queries of a chunk do not follow one another among the keys of one
device, and a causal mask is no longer a diagonal. But all of them see what stands before the chunk, and of the rest a
kernel that asks each query for its position sees what it should::

    keys of the row    |  blocks that all queries see, in pieces  |  up to as many keys as there are queries  |
                          by cuDNN, without a mask                   by the Triton kernel
                                     └────── joined by log-sum-exp ──────┘

A part's output is rounded to the queries' dtype before the parts are joined in float32.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Limits
from pallas_kernels.dense_causal import Call, triton
from pallas_kernels.dense_causal.cudnn import Config, Part, run_behind_prefix
from pallas_kernels.pages import Pages, seen_positions
from pallas_kernels.triton_common import check_pool

__all__ = ["LIMITS", "Config", "in_order", "run"]

LIMITS = Limits(check_pages=check_pool, config=Config)


def in_order(k: Pages, positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Bool[Array, ""]:
    """Return True if this backend can run the rows: `run` does not look.

    No query sees less than the first one of its row, or more than the others are many; all blocks before are held.
    """
    if k.table is None:
        return jnp.bool_(False)
    seen = seen_positions(positions, lengths, positions.shape[1])
    first_block = _first_block(seen, k.block_size)
    behind = seen - first_block[:, None] * k.block_size
    is_in_rest = (seen < 0) | ((behind >= -1) & (behind < _rest_blocks(k, seen.shape[1]) * k.block_size))
    is_needed = jnp.arange(k.num_blocks, dtype=jnp.int32) < first_block[:, None]  # [B M]
    return jnp.all(is_in_rest) & jnp.all(k.holds(k.table) | ~is_needed)


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `dense_causal` on a checked call of which `in_order` is true; others get any numbers.

    In interpret mode the prefix is computed by XLA, and the rest as on the device.

    Raises:
      ValueError: float32.
    """

    def rest(q: Float[Array, "B T N H"], seen: Int[Array, "B T"]) -> Part:
        first_block = _first_block(seen, call.k.block_size)
        prefix = first_block * call.k.block_size  # [B]
        columns = first_block[:, None] + jnp.arange(_rest_blocks(call.k, q.shape[1]), dtype=jnp.int32)  # [B blocks]
        table = jnp.take_along_axis(call.k.table, columns, axis=1, mode="fill", fill_value=-1)
        k, v = (dataclasses.replace(one, table=table, num_blocks=table.shape[1]) for one in (call.k, call.v))
        behind = jnp.where(seen >= 0, seen - prefix[:, None], -1)  # -1 too for a query that sees the prefix alone
        behind_prefix = dataclasses.replace(call, q=q, k=k, v=v, positions=behind, return_lse=True)
        return *triton.run(behind_prefix, None), prefix

    return run_behind_prefix(rest, call, config)


def _first_block(seen: Int[Array, "B T"], block_size: int) -> Int[Array, " B"]:
    """Return how many whole blocks the first query of a row sees: as many as the others see too."""
    return (seen[:, 0] + 1) // block_size


def _rest_blocks(k: Pages, num_queries: int) -> int:
    """Return the number of blocks behind the prefix that the queries of a row may see, at most."""
    return min(k.num_blocks, -(-num_queries // k.block_size) + 1)
