"""Attention over the selected blocks: one definition, three schedules (paper, sections 3 and 4)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.msa.dense import attend_group, causal, check_heads, check_view, finish, hide
from m3jax.msa.kv_block_major import kv_block_major
from m3jax.msa.views import BlockView, check_block_size, contiguous
from m3jax.numerics import attend

SCHEDULES = ("mask", "query_major", "kv_block_major")
_GATHER_BUDGET = 1 << 24  # gathered key elements held at once by query_major


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    schedule: str = "mask",
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Grouped-query causal attention over the tokens of the selected blocks alone.

    Args:
      q: queries; head n reads KV head n // (N // K).
      k: keys; slot s holds position s. Slots >= lengths may hold anything, NaN included; anything finite in a gradient.
      v: values.
      blocks: distinct block ids per KV head and query in any order, -1 for an unused slot (`select_blocks`).
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      block_size: P.
      schedule: "mask" is the definition, dense attention under the expanded mask; "query_major" gathers the
        blocks of each query; "kv_block_major" visits each block once with all queries that chose it.
      return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
      Outputs in q's dtype, and the LSE (-inf where nothing is visible) if asked for.

    Raises:
      ValueError: an unknown schedule, head counts that do not divide, or a selection of another shape.

    Source: paper, equation 8 and section 4.
    """
    check_heads(q, k)
    check_view(q, k.shape[2], blocks)
    check_block_size(block_size)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule = {schedule!r}: allowed are {', '.join(map(repr, SCHEDULES))}")
    if schedule == "mask":
        out, lse = _mask(q, k, v, blocks, positions, lengths, block_size)
        return finish(out, lse, q.dtype, return_lse)
    fn = query_major if schedule == "query_major" else kv_block_major
    out, lse = fn(q, contiguous(k, v, block_size), blocks, positions, lengths)
    return (out, lse) if return_lse else out


def _mask(q, k, v, blocks, positions, lengths, block_size):
    slots = jnp.arange(k.shape[1], dtype=jnp.int32)
    chosen = expand_blocks(blocks, k.shape[1], block_size)
    visible = chosen & causal(positions, lengths, slots)[:, None]
    return attend_group(q, k.swapaxes(1, 2), hide(v.swapaxes(1, 2), slots, lengths), visible)


def expand_blocks(blocks: Int[Array, "B K T J"], size: int, block_size: int) -> Bool[Array, "B K T S"]:
    """The token mask of a selection: True where a token's block is among the chosen ones."""
    count = -(-size // block_size)
    chosen = jnp.any(blocks[..., None] == jnp.arange(count, dtype=blocks.dtype), axis=-2)
    return jnp.repeat(chosen, block_size, axis=-1)[..., :size]


def query_major(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Gather the blocks of each query and attend: right for a few queries, as in a decode step.

    Memory is linear in T: chunks of queries are gathered one after the other.
    """
    _, heads, _, slots = blocks.shape
    per_query = q.shape[0] * heads * slots * view.block_size * q.shape[-1]
    chunk = rows_within(_GATHER_BUDGET, per_query, q.shape[1])
    fn = lambda q, b, p: _gather_chunk(q, view, b.swapaxes(1, 2), p, lengths)
    return map_chunks(fn, chunk, 1, q, blocks.swapaxes(1, 2), positions)


def _gather_chunk(q, view, blocks, positions, lengths):
    batch, heads, length, _ = blocks.shape
    rows = jnp.arange(batch)[:, None, None, None]
    k, v = view.blocks(rows, jnp.arange(heads)[:, None, None], jnp.maximum(blocks, 0))
    slots = blocks[..., None] * view.block_size + jnp.arange(view.block_size, dtype=blocks.dtype)
    at = positions[:, None, :, None, None]
    visible = (blocks >= 0)[..., None] & (slots <= at) & (at < lengths[:, None, None, None, None])
    # What an unused slot or an unseen token reads is arbitrary memory (T9, T10).
    v = jnp.where(visible[..., None], v, 0)
    flat = lambda x: x.reshape(*x.shape[:3], -1, *x.shape[5:])
    rows_q = q.reshape(batch, length, heads, -1, q.shape[-1]).swapaxes(1, 2)
    out, lse = attend(rows_q, flat(k), flat(v), flat(visible)[..., None, :])
    return finish(out, lse, q.dtype, True)
