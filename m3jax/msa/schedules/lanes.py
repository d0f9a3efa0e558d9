"""Selection and attention in one order for each query, so that what is computed beside it changes none of its bits.

A lane is a few consecutive queries of one row. Lanes run one after the other, each over pieces of the row's keys that
begin at multiples of one fixed length, so every product has one shape: whether a query comes in a long prompt, in a
chunk of one, in a decode step or among proposals. A key that a query does not see adds exactly nothing to its sums.
Where each query reads blocks of its own, a lane may hold queries of several rows.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from m3jax.msa.candidates import best_of_share, join_over_devices
from m3jax.msa.schedules.layout import group_rows, ungroup_rows, zero_behind_row
from m3jax.msa.schedules.query_major import attend_to_gathered, gather
from m3jax.msa.views import BlockView, IndexView
from m3jax.numerics import UNSEEN, RunningSoftmax, accumulator, dot_scores
from m3jax.spec.msa import SelectionRules, pool, sees, select_blocks
from m3jax.tiles import by_tiles, unknown_length

_LANE = 16  # queries of a row, in selection
_DENSE_LANE = 4  # queries of a row, in dense attention, where a decode step has a lane for each row
_SPARSE_LANE = 16  # queries of any rows, in sparse attention
_PIECE = 512  # keys

State = TypeVar("State")


def select_invariant(
    index_q: Float[Array, "B T K I"],
    view: IndexView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
) -> Int[Array, "B K T J"]:
    """Compute `select_blocks` of `block_scores`, lane by lane; no gradient goes through it."""
    num_heads, num_blocks, block_size = index_q.shape[2], view.num_blocks, view.block_size
    blocks_per_piece = max(1, _PIECE // block_size)

    share = view.share

    def select_lane(row, positions, index_q):
        one_row = view.of_row(row[0], blocks_per_piece)
        length = lengths[row]
        seen_positions, seen_length = positions, length
        if share is not None:
            seen_positions, seen_length = one_row.share.positions(positions, length), one_row.share.lengths(length)
        queries = rearrange(index_q, "b t k i -> b (k t) i")  # [1 K*T I]

        def score_piece(piece, scores):
            keys = one_row.run(piece * blocks_per_piece, blocks_per_piece)  # [1 C*P I]
            token_scores = rearrange(dot_scores(queries, keys), "b (k t) x -> b k t x", k=num_heads)
            if rules.score == "lse":
                token_scores = token_scores * keys.shape[-1] ** -0.5
            key_positions = piece * keys.shape[1] + jnp.arange(keys.shape[1], dtype=jnp.int32)
            token_scores = jnp.where(sees(seen_positions, seen_length, key_positions)[:, None], token_scores, UNSEEN)
            of_blocks = pool(rearrange(token_scores, "b k t (m p) -> b k t m p", p=block_size), rules.score)
            is_held = one_row.present(piece * blocks_per_piece, blocks_per_piece)[:, None, None]
            of_blocks = jnp.where(is_held, of_blocks, UNSEEN)
            return jax.lax.dynamic_update_slice_in_dim(scores, of_blocks, piece * blocks_per_piece, axis=3)

        unseen = jnp.full((1, num_heads, _LANE, one_row.num_blocks), UNSEEN, accumulator(index_q.dtype))
        pieces = _pieces_seen(seen_positions, seen_length, one_row, blocks_per_piece)
        scores = jax.lax.fori_loop(0, pieces, score_piece, unseen)[..., :num_blocks]  # [1 K T M]
        if share is None:
            chosen = select_blocks(scores, positions, length, rules, block_size=block_size)
        else:
            chosen = best_of_share(scores, positions, length, rules, one_row.share)
        return jax.tree.map(lambda x: x.swapaxes(1, 2), chosen)  # [1 T K J]

    index_q, view = jax.lax.stop_gradient((index_q, view))
    chosen = _by_lanes(select_lane, _LANE, positions, index_q)
    blocks = chosen if share is None else join_over_devices(chosen, rules.top_k, share.axes)
    return blocks.swapaxes(1, 2)  # [B T K J] -> [B K T J]


def invariant(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute `sparse_attention`, gathering each query's blocks, as in `query_major`, for some queries of any rows."""
    read = lambda state, rows, blocks: (state, *gather(view, rows, blocks))
    _, out, lse = invariant_reading(read, (), q, blocks, positions, lengths)
    return out, lse


def invariant_reading(
    read: Callable[..., tuple[State, Array, Array]],
    state: State,
    q: Float[Array, "B T N H"],
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[State, Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute `invariant` with a function that reads keys and values and changes a state.

    Args:
      read: of the state, rows [C] and the blocks [C K 1 J] of a query of each: (state, keys, values), as `gather` gives
        them; those of slots of -1 mean nothing.
      state: before the first read.
      q, blocks, positions, lengths: as in `sparse_attention`.

    Returns:
      (state, outputs, LSE).
    """
    batch, num_queries, num_heads = q.shape[:3]
    num_tiles = -(-batch * num_queries // _SPARSE_LANE)

    def cut(x, filling):
        x = x.reshape(batch * num_queries, *x.shape[2:])
        padding = ((0, num_tiles * _SPARSE_LANE - len(x)),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding, constant_values=filling).reshape(num_tiles, _SPARSE_LANE, *x.shape[1:])

    row_ids = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], positions.shape)
    rows, positions = cut(row_ids, 0), cut(positions, -1)  # [tiles C]
    queries, blocks = cut(q, 0), cut(blocks.swapaxes(1, 2), -1)  # [tiles C N H], [tiles C K J]

    def attend_tile(tile, carry):
        state, out, lse = carry
        one_tile = [jax.lax.dynamic_index_in_dim(x, tile, keepdims=False) for x in (rows, positions, queries, blocks)]
        tile_rows, tile_positions, tile_queries, tile_blocks = one_tile
        tile_blocks = tile_blocks[:, :, None]  # [C K 1 J]
        state, keys, values = read(state, tile_rows, tile_blocks)
        tile_out, tile_lse = attend_to_gathered(
            tile_queries[:, None], keys, values, tile_blocks, tile_positions[:, None], lengths[tile_rows]
        )
        out = jax.lax.dynamic_update_index_in_dim(out, tile_out[:, 0], tile, 0)
        return state, out, jax.lax.dynamic_update_index_in_dim(lse, tile_lse[:, 0], tile, 0)

    empty = jnp.zeros_like(queries), jnp.zeros(queries.shape[:-1], accumulator(q.dtype))
    state, out, lse = jax.lax.fori_loop(0, unknown_length(num_tiles), attend_tile, (state, *empty))
    out = out.reshape(-1, *q.shape[2:])[: batch * num_queries].reshape(q.shape)
    return state, out, lse.reshape(-1, num_heads)[: batch * num_queries].reshape(q.shape[:-1])


def invariant_all(
    q: Float[Array, "B T N H"], view: BlockView, positions: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute `dense_attention` by a running softmax over the pieces that a lane sees."""
    blocks_per_piece = max(1, _PIECE // view.block_size)
    piece_size = blocks_per_piece * view.block_size
    groups = q.shape[2] // view.num_heads

    def attend_lane(row, positions, q):
        one_row = view.of_row(row[0], blocks_per_piece)
        length = lengths[row]
        queries = group_rows(q, view.num_heads)  # [1 K T*G H]

        def fold_piece(piece, softmax):
            keys, values = one_row.run(piece * blocks_per_piece, blocks_per_piece)  # [1 K C H] each
            key_positions = piece * piece_size + jnp.arange(piece_size, dtype=jnp.int32)  # [C]
            is_held = one_row.present(piece * blocks_per_piece, blocks_per_piece)
            is_held = jnp.repeat(is_held, view.block_size, axis=1)  # [1 C]
            visible = sees(positions, length, key_positions) & is_held[:, None]  # [1 T C]
            visible = jnp.repeat(visible, groups, axis=1)[:, None]  # [1 1 T*G C]
            values = jnp.where(is_held[:, None, :, None], zero_behind_row(values, key_positions, length), 0)
            return softmax.fold(queries, keys, values, visible)

        nothing_seen = RunningSoftmax.empty(queries.shape[:-1], q.shape[-1], accumulator(q.dtype))
        pieces = _pieces_seen(positions, length, one_row, blocks_per_piece)
        softmax = jax.lax.fori_loop(0, pieces, fold_piece, nothing_seen)
        out, lse = softmax.average()
        return ungroup_rows(out, lse, _DENSE_LANE, q.dtype)

    return _by_lanes(attend_lane, _DENSE_LANE, positions, q)


def _pieces_seen(
    positions: Int[Array, "1 T"], length: Int[Array, " 1"], one_row: BlockView | IndexView, blocks_per_piece: int
) -> Int[Array, ""]:
    """Return the number of pieces, from the row's beginning, that hold a key which some query of a lane sees."""
    last_position = jnp.max(jnp.where(positions < length[:, None], positions, -1))
    piece_size = blocks_per_piece * one_row.block_size
    # A proposal may lie behind a full row. A piece that there is not would be read and written as the last one.
    return jnp.minimum(last_position // piece_size + 1, one_row.num_blocks // blocks_per_piece)


def _by_lanes(
    attend_lane: Callable[..., Array | tuple[Array, ...]], size: int, positions: Int[Array, "B T"], *arrays: Array
) -> Array | tuple[Array, ...]:
    """Apply a function of one lane to all lanes of all rows, one after the other.

    Args:
      attend_lane: of the row [1], positions [1 T], and the other arrays [1 T ...], where T is a lane's queries; gives
        arrays [1 T ...].
      size: T, queries of a lane.
      positions: of all queries.
      *arrays: [B T ...].
    """
    batch, num_queries = positions.shape
    lanes_per_row = -(-num_queries // size)

    def cut(x, filling):
        padding = ((0, 0), (0, lanes_per_row * size - num_queries)) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, padding, constant_values=filling).reshape(-1, size, *x.shape[2:])

    def join(x):
        return x.reshape(batch, -1, *x.shape[2:])[:, :num_queries]

    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), lanes_per_row)
    out = by_tiles(attend_lane, 1, row, cut(positions, -1), *(cut(x, 0) for x in arrays))
    return jax.tree.map(join, out)
