"""Selection and attention in one order for each query: what is computed beside it changes none of its bits.

A lane is a few consecutive queries of one row. Lanes run one after the other, each over pieces of the row's keys that
begin at multiples of one fixed length, so every product has one shape: whether a query comes in a long prompt, in a
chunk of one, in a decode step or among proposals. A key that a query does not see adds exactly nothing to its sums.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from m3jax.msa.definition import pool, sees, select_blocks
from m3jax.msa.rules import SelectionRules
from m3jax.msa.schedules.layout import group_rows, ungroup_rows, zero_behind_row
from m3jax.msa.schedules.query_major import attend_gathered
from m3jax.msa.views import BlockView, IndexView
from m3jax.numerics import UNSEEN, RunningSoftmax, accumulator, dot_scores
from m3jax.tiles import by_tiles

_LANE = 16  # queries
_PIECE = 512  # keys


def select_invariant(
    index_q: Float[Array, "B T K I"],
    view: IndexView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
) -> Int[Array, "B K T J"]:
    """`select_blocks` of `block_scores`; no gradient goes through it."""
    num_heads, num_blocks, block_size = index_q.shape[2], view.num_blocks, view.block_size
    blocks_per_piece = max(1, _PIECE // block_size)

    def select_lane(row, positions, index_q):
        one_row = view.of_row(row[0], blocks_per_piece)
        length = lengths[row]
        queries = rearrange(index_q, "b t k i -> b (k t) i")  # [1 K*T I]

        def score_piece(piece, scores):
            keys = one_row.run(piece * blocks_per_piece, blocks_per_piece)  # [1 C*P I]
            token_scores = rearrange(dot_scores(queries, keys), "b (k t) x -> b k t x", k=num_heads)
            if rules.score == "lse":
                token_scores = token_scores * keys.shape[-1] ** -0.5
            key_positions = piece * keys.shape[1] + jnp.arange(keys.shape[1], dtype=jnp.int32)
            token_scores = jnp.where(sees(positions, length, key_positions)[:, None], token_scores, UNSEEN)
            of_blocks = pool(rearrange(token_scores, "b k t (m p) -> b k t m p", p=block_size), rules.score)
            is_held = one_row.present(piece * blocks_per_piece, blocks_per_piece)[:, None, None]
            of_blocks = jnp.where(is_held, of_blocks, UNSEEN)
            return jax.lax.dynamic_update_slice_in_dim(scores, of_blocks, piece * blocks_per_piece, axis=3)

        unseen = jnp.full((1, num_heads, _LANE, one_row.num_blocks), UNSEEN, accumulator(index_q.dtype))
        pieces = _pieces_seen(positions, length, blocks_per_piece * block_size)
        scores = jax.lax.fori_loop(0, pieces, score_piece, unseen)[..., :num_blocks]
        scores = one_row.join_scores(scores)  # [1 K T M]
        return select_blocks(scores, positions, length, rules, block_size=block_size).swapaxes(1, 2)

    index_q, view = jax.lax.stop_gradient((index_q, view))
    return _by_lanes(select_lane, positions, index_q).swapaxes(1, 2)  # [B T K J] -> [B K T J]


def invariant(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`sparse_attention`: each query's blocks are gathered, as in `query_major`, for one lane at a time."""

    def attend_lane(row, positions, q, blocks):
        return attend_gathered(q, view.of_row(row[0]), blocks.swapaxes(1, 2), positions, lengths[row])

    return _by_lanes(attend_lane, positions, q, blocks.swapaxes(1, 2))


def invariant_all(
    q: Float[Array, "B T N H"], view: BlockView, positions: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`dense_attention`: a running softmax over the pieces that a lane sees."""
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
        softmax = jax.lax.fori_loop(0, _pieces_seen(positions, length, piece_size), fold_piece, nothing_seen)
        out, lse = softmax.average()
        return ungroup_rows(out, lse, _LANE, q.dtype)

    return _by_lanes(attend_lane, positions, q)


def _pieces_seen(positions: Int[Array, "1 T"], length: Int[Array, " 1"], piece_size: int) -> Int[Array, ""]:
    """How many pieces from the row's beginning on some query of a lane sees."""
    last_position = jnp.max(jnp.where(positions < length[:, None], positions, -1))
    return (last_position + piece_size) // piece_size


def _by_lanes(
    attend_lane: Callable[..., Array | tuple[Array, ...]], positions: Int[Array, "B T"], *arrays: Array
) -> Array | tuple[Array, ...]:
    """A function of lanes over all rows and queries.

    Args:
      attend_lane: of the row [1], positions [1 T], and the other arrays [1 T ...], where T is a lane's queries; gives
        arrays [1 T ...].
      positions: of all queries.
      *arrays: [B T ...].
    """
    batch, num_queries = positions.shape
    lanes_per_row = -(-num_queries // _LANE)

    def cut(x, filling):
        padding = ((0, 0), (0, lanes_per_row * _LANE - num_queries)) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, padding, constant_values=filling).reshape(-1, _LANE, *x.shape[2:])

    def join(x):
        return x.reshape(batch, -1, *x.shape[2:])[:, :num_queries]

    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), lanes_per_row)
    out = by_tiles(attend_lane, 1, row, cut(positions, -1), *(cut(x, 0) for x in arrays))
    return jax.tree.map(join, out)
