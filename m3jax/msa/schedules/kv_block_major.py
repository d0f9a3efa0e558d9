"""The KV-block-major schedule of `sparse_attention`: each block meets all queries that chose it (paper, section 4)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from m3jax.msa.chunks import elements_at_once, map_chunks
from m3jax.msa.inversion import Tiles, invert
from m3jax.msa.views import BlockView
from m3jax.numerics import UNSEEN, accumulator, attend, merge_parts

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

    Each (query, block) pair has a place of its own in the partial outputs, so nothing is accumulated out of order
    and two runs give the same bits. Memory is bounded by chunks of queries.
    """

    def attend_chunk(q, blocks, positions):
        return _attend_chunk(q, view, blocks.swapaxes(1, 2), positions, lengths)

    # [B K T J] -> [B T K J]: the axis of queries is walked, the same one in all arrays.
    return map_chunks(attend_chunk, _QUERY_CHUNK, 1, q, blocks.swapaxes(1, 2), positions)


def _attend_chunk(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attend with one chunk of queries: invert the selection, attend tile by tile, merge each query's parts."""
    batch, heads, num_queries, slots = blocks.shape
    groups, width = q.shape[2] // heads, q.shape[-1]
    # Between a quarter and half of the queries that an average block gets, a power of two in [8, 128].
    num_blocks = view.num_blocks
    queries_per_block = max(16, num_queries * slots // num_blocks)
    tile = min(128, 1 << (queries_per_block.bit_length() - 2))
    tiles = invert(blocks, num_blocks, tile)
    grouped = q.reshape(batch, num_queries, heads, groups, width)  # [B T K G H]
    out, lse = _attend_tiles(grouped, view, tiles, positions, lengths)  # [X*C G H], [X*C G]

    place_of_slot = jnp.moveaxis(tiles.place_of, 3, 0)  # [J B K T]
    is_used = jnp.moveaxis(blocks >= 0, 3, 0)  # [J B K T]
    # An unused slot points at the place of some other pair; with lse UNSEEN its share is 0.
    lses = jnp.where(is_used[..., None], lse[place_of_slot], UNSEEN)  # [J B K T G]
    out, lse = merge_parts(lambda slot: out[place_of_slot[slot]], lses)  # [B K T G H], [B K T G]
    out = out.swapaxes(1, 2).reshape(batch, num_queries, heads * groups, width)  # [B T N H]
    return out.astype(q.dtype), lse.swapaxes(1, 2).reshape(batch, num_queries, heads * groups)


def _attend_tiles(
    q: Float[Array, "B T K G H"],
    view: BlockView,
    tiles: Tiles,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "XC G H"], Float[Array, "XC G"]]:
    """Return outputs and LSE of the queries of every tile over the tile's block, some tiles at a time."""
    num_tiles, tile = tiles.query.shape
    groups, width = q.shape[3:]
    tiles_per_step = elements_at_once(_STEP_SCORES) // (tile * groups * view.block_size)
    tiles_per_step = max(1, min(num_tiles, tiles_per_step))
    steps = -(-num_tiles // tiles_per_step)

    def by_step(x):
        x = jnp.pad(x, ((0, steps * tiles_per_step - num_tiles),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(steps, tiles_per_step, *x.shape[1:])

    def attend_step(row, head, block, query, valid):
        return _attend_blocks(q, view, row, head, block, query, valid, positions, lengths)

    def idle(row, head, block, query, valid):
        # What a query that sees no key has: its part has weight 0 in the merge, whatever block the tile names.
        shape, dtype = (tiles_per_step, tile, groups), accumulator(q.dtype)
        return jnp.zeros((*shape, width), dtype), jnp.full(shape, UNSEEN, dtype)

    def step(tiles_of_step):
        # Tiles that no block filled come last; whole steps of them cost nothing.
        *_, valid = tiles_of_step
        return jax.lax.cond(jnp.any(valid), attend_step, idle, *tiles_of_step)

    by_steps = jax.tree.map(by_step, (tiles.row, tiles.head, tiles.block, tiles.query, tiles.valid))
    out, lse = jax.lax.map(jax.checkpoint(step), by_steps)
    return out.reshape(-1, groups, width), lse.reshape(-1, groups)


def _attend_blocks(
    q: Float[Array, "B T K G H"],
    view: BlockView,
    row: Int[Array, " X"],
    head: Int[Array, " X"],
    block: Int[Array, " X"],
    query: Int[Array, "X C"],
    valid: Bool[Array, "X C"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "X C G H"], Float[Array, "X C G"]]:
    """Return outputs and LSE of X tiles, each of C queries over its own block."""
    num_tiles, tile = query.shape
    groups, width = q.shape[3:]
    keys, values = view.blocks(row, head, block)  # [X P H] each
    key_positions = block[:, None] * view.block_size + jnp.arange(view.block_size, dtype=jnp.int32)  # [X P]
    is_key = key_positions < lengths[row][:, None]  # [X P]
    values = jnp.where(is_key[..., None], values, 0)  # 0 x NaN would be NaN
    query_positions = positions[row[:, None], query]  # [X C]
    is_token = valid & (query_positions < lengths[row][:, None])
    visible = is_token[..., None] & (key_positions[:, None] <= query_positions[..., None])  # [X C P]
    queries = q[row[:, None], query, head[:, None]].reshape(num_tiles, -1, width)  # [X C G H] -> [X C*G H]
    out, lse = attend(queries, keys, values, jnp.repeat(visible, groups, axis=1))
    return out.reshape(num_tiles, tile, groups, -1), lse.reshape(num_tiles, tile, groups)
