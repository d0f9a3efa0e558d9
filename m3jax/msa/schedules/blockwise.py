"""The blockwise schedule of `dense_attention`: a running softmax over pieces of the keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa.chunks import elements_at_once, map_chunks, rows_within
from m3jax.msa.schedules.layout import group_rows, ungroup_rows, zero_behind_row
from m3jax.msa.views import BlockView
from m3jax.numerics import RunningSoftmax, accumulator
from m3jax.spec.msa import sees

_SCORE_BUDGET = 1 << 20  # scores of one step
_FEW_ROWS = 32  # up to here pieces are longer where that pays
_KEY_CHUNK = 1024


def blockwise(
    q: Float[Array, "B T N H"], view: BlockView, positions: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute `dense_attention`, and its LSE, in chunks of queries and pieces of keys: memory linear in T and in S.

    Pieces that lie after every query of a chunk are skipped, so is what the view holds beyond the longest row.
    """
    batch, num_queries, num_heads, _ = q.shape
    is_few = batch * num_queries <= _FEW_ROWS
    blocks_per_piece = (elements_at_once(_KEY_CHUNK) if is_few else _KEY_CHUNK) // view.block_size
    blocks_per_piece = max(1, min(blocks_per_piece, view.num_blocks))
    scores_per_query = batch * num_heads * blocks_per_piece * view.block_size
    chunk = rows_within(elements_at_once(_SCORE_BUDGET), scores_per_query, num_queries)

    def attend_chunk(q, positions):
        return _attend_chunk(q, view, positions, lengths, blocks_per_piece)

    return map_chunks(attend_chunk, chunk, 1, q, positions)


def _attend_chunk(
    q: Float[Array, "B T N H"],
    view: BlockView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    blocks_per_piece: int,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attend with one chunk of queries over all pieces of keys."""
    last_position = jnp.max(jnp.where(positions < lengths[:, None], positions, -1))
    shortest_row = jnp.min(lengths)
    piece_size = blocks_per_piece * view.block_size
    groups = q.shape[2] // view.num_heads
    queries = group_rows(q, view.num_heads)  # [B K T*G H]

    def step(softmax, piece):
        # The last piece starts early enough to end at the view's end; what it repeats is masked.
        first_block = jnp.minimum(piece * blocks_per_piece, view.num_blocks - blocks_per_piece)

        def fold_piece(values_need_cleaning):
            keys, values = view.run(first_block, blocks_per_piece)  # [B K C H] each
            key_positions = first_block * view.block_size + jnp.arange(piece_size, dtype=jnp.int32)  # [C]
            is_held = jnp.repeat(view.present(first_block, blocks_per_piece), view.block_size, axis=1)  # [B C]
            is_new = key_positions >= piece * piece_size
            visible = sees(positions, lengths, key_positions) & (is_held & is_new)[:, None]  # [B T C]
            visible = jnp.repeat(visible, groups, axis=1)[:, None]  # [B 1 T*G C]
            if values_need_cleaning:
                values = jnp.where(is_held[:, None, :, None], zero_behind_row(values, key_positions, lengths), 0)
            return softmax.fold(queries, keys, values, visible)

        # Values need cleaning only where a row ends, or where a block is another device's.
        is_seen = (piece * piece_size <= last_position).astype(jnp.int32)
        is_clean = ((piece + 1) * piece_size <= shortest_row) & jnp.all(view.present(first_block, blocks_per_piece))
        branches = (lambda: softmax, lambda: fold_piece(True), lambda: fold_piece(False))
        return jax.lax.switch(is_seen * (1 + is_clean), branches), None

    nothing_seen = RunningSoftmax.empty(queries.shape[:-1], q.shape[-1], accumulator(q.dtype))
    pieces = jnp.arange(-(-view.num_blocks // blocks_per_piece), dtype=jnp.int32)
    softmax, _ = jax.lax.scan(jax.checkpoint(step), nothing_seen, pieces)
    out, lse = softmax.average()
    return ungroup_rows(out, lse, q.shape[1], q.dtype)
