"""The query-major schedule of `sparse_attention`: gather the blocks of each query and attend (paper, section 4)."""

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.msa.schedules.layout import zero_from
from m3jax.msa.views import BlockView
from m3jax.numerics import attend

_GATHER_BUDGET = 1 << 24  # gathered key elements held at once


def query_major(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Gather the blocks of each query and attend to them; best for a few queries, as in a decode step.

    Memory is linear in T: chunks of queries are gathered one after the other.
    """
    batch, heads, num_queries, slots = blocks.shape
    gathered_per_query = batch * heads * slots * view.block_size * q.shape[-1]
    chunk = rows_within(_GATHER_BUDGET, gathered_per_query, num_queries)

    def attend_chunk(q, blocks, positions):
        blocks = blocks.swapaxes(1, 2)
        keys, values = gather(view, jnp.arange(batch), blocks)
        return attend_to_gathered(q, keys, values, blocks, positions, lengths)

    # [B K T J] -> [B T K J]: the axis of queries is walked, the same one in all arrays.
    return map_chunks(attend_chunk, chunk, 1, q, blocks.swapaxes(1, 2), positions)


def gather(
    view: BlockView, rows: Int[Array, " B"], blocks: Int[Array, "B K T J"]
) -> tuple[Float[Array, "B K T J P H"], Float[Array, "B K T J P H"]]:
    """Return keys and values of the blocks that queries of some rows keep; those of an unused slot mean nothing."""
    head_ids = jnp.arange(blocks.shape[1])[:, None, None]
    return view.blocks(rows[:, None, None, None], head_ids, jnp.maximum(blocks, 0))


def attend_to_gathered(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K T J P H"],
    values: Float[Array, "B K T J P H"],
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute `sparse_attention` from the keys and values that `gather` gave."""
    heads, block_size = blocks.shape[1], keys.shape[-2]
    query_positions = positions[:, None, :, None]  # [B 1 T 1]
    is_read = (blocks >= 0) & (query_positions < lengths[:, None, None, None])
    # Of each block a query sees the tokens up to its own position: none, all, or the first few of its own block.
    num_seen = jnp.where(is_read, jnp.clip(query_positions + 1 - blocks * block_size, 0, block_size), 0)  # [B K T J]
    visible = jnp.arange(block_size, dtype=blocks.dtype) < num_seen[..., None]  # [B K T J P]
    # The values of an unused slot or an unseen token are arbitrary memory, and 0 x NaN would be NaN (T9, T10).
    values = zero_from(values, num_seen)
    keys, values = (rearrange(x, "b k t j p h -> b k t (j p) h") for x in (keys, values))
    visible = rearrange(visible, "b k t j p -> b k t 1 (j p)")
    queries = rearrange(q, "b t (k g) h -> b k t g h", k=heads)
    out, lse = attend(queries, keys, values, visible)  # [B K T G H], [B K T G]
    return rearrange(out, "b k t g h -> b t (k g) h").astype(q.dtype), rearrange(lse, "b k t g -> b t (k g)")
