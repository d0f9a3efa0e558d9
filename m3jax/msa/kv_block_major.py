"""The KV-block-major schedule: each block meets all queries that chose it (paper, section 4)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa.chunks import budget, map_chunks
from m3jax.msa.csr import invert
from m3jax.msa.dense import finish
from m3jax.msa.views import BlockView
from m3jax.numerics import accumulator, attend, merge

_QUERY_CHUNK = 2048  # bounds the partial outputs: J of them a query and head
_STEP_SCORES = 1 << 19  # scores of one step, small enough for a core's cache


def kv_block_major(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attend per KV block over the queries that chose it, then merge the partial outputs by log-sum-exp.

    Each (query, block) pair has a slot of its own in the partial outputs, so nothing is accumulated out of order
    and two runs give the same bits. Memory is bounded by chunks of queries.
    """
    fn = lambda q, b, p: _chunk(q, view, b.swapaxes(1, 2), p, lengths)
    return map_chunks(fn, _QUERY_CHUNK, 1, q, blocks.swapaxes(1, 2), positions)


def _chunk(q, view, blocks, positions, lengths):
    batch, heads, length, slots = blocks.shape
    groups = q.shape[2] // heads
    tile = _tile_size(length * slots, view.num_blocks)
    tiles = invert(blocks, view.num_blocks, tile)
    rows_q = q.reshape(batch, length, heads, groups, q.shape[-1])
    out, lse = _partials(rows_q, view, tiles, positions, lengths)
    # An unused slot points at slot 0 of some other pair; its weight is 0.
    slots, used = (jnp.moveaxis(x, 3, 0) for x in (tiles.slot_of, blocks >= 0))
    merged = merge(lambda j: out[slots[j]], jnp.where(used[..., None], lse[slots], -jnp.inf))
    return finish(*merged, q.dtype, True)


def _tile_size(pairs: int, num_blocks: int) -> int:
    """About half the queries that an average block gets, as a power of two in [8, 128]."""
    mean = max(16, pairs // num_blocks)
    return min(128, 1 << (mean.bit_length() - 2))


def _partials(q, view, tiles, positions, lengths):
    """Attention of every tile: normalised outputs [X*C G H] and their LSE [X*C G]."""
    count, tile = tiles.query.shape
    groups, width = q.shape[3:]
    per_step = max(1, min(count, budget(_STEP_SCORES) // (tile * groups * view.block_size)))
    steps = -(-count // per_step)
    shape = lambda x: jnp.pad(x, ((0, steps * per_step - count),) + ((0, 0),) * (x.ndim - 1)).reshape(
        steps, per_step, *x.shape[1:]
    )
    xs = tuple(shape(x) for x in tiles[:5])

    attention = lambda xs: _tile_attention(q, view, xs, positions, lengths)

    def idle(xs):
        shape = (per_step, tile, groups)
        return jnp.zeros((*shape, width), accumulator(q.dtype)), jnp.full(shape, -jnp.inf, accumulator(q.dtype))

    # Tiles that no block filled come last; whole steps of them cost nothing.
    step = jax.checkpoint(lambda xs: jax.lax.cond(jnp.any(xs[4]), attention, idle, xs))
    out, lse = jax.lax.map(step, xs)
    return out.reshape(-1, groups, width), lse.reshape(-1, groups)


def _tile_attention(q, view, xs, positions, lengths):
    row, head, block, query, valid = xs
    k, v = view.blocks(row, head, block)
    slots = block[:, None] * view.block_size + jnp.arange(view.block_size, dtype=jnp.int32)
    v = jnp.where((slots < lengths[row][:, None])[..., None], v, 0)
    at = positions[row[:, None], query]
    real = valid & (at < lengths[row][:, None])
    visible = real[..., None] & (slots[:, None] <= at[..., None])
    groups = q.shape[3]
    rows = q[row[:, None], query, head[:, None]]
    rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    out, lse = attend(rows, k, v, jnp.repeat(visible, groups, axis=1))
    return out.reshape(*query.shape, groups, -1), lse.reshape(*query.shape, groups)
