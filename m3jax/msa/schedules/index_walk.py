"""The walk over index keys: `block_scores` and `select_blocks` of a chunk of queries at a time, over pieces of keys."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Int

from m3jax.msa.candidates import best_of_share, join_over_devices
from m3jax.msa.checks import checked
from m3jax.msa.chunks import elements_at_once, map_chunks, rows_within
from m3jax.msa.views import IndexView, contiguous_index
from m3jax.numerics import UNSEEN, accumulator, dot_scores
from m3jax.spec.msa import SelectionRules, pool, sees, select_blocks

_SCORE_BUDGET = 1 << 19  # token scores held at once; more would leave the cache of a core
_FEW_ROWS = 128  # up to here pieces are longer
_KEY_CHUNK = 1024  # keys scored at once; pieces that no query of the chunk can see are skipped


def index_walk(
    index_q: Float[Array, "B T K I"],
    view: IndexView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps; the scores of all blocks are held for a chunk of queries only.

    Where devices divide the keys, each scores those that it holds and they choose among the candidates of all. No
    gradient goes through it.

    Args:
      index_q: index queries after norm and RoPE, one head for each KV head.
      view: the index keys, as `m3jax.msa.contiguous_index` makes one.
      positions: position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      rules: J, which blocks are forced, and what a block's score is.

    Returns:
      Ascending ids, then -1.
    """

    index_q, view = jax.lax.stop_gradient((index_q, view))
    pooled = _largest if rules.score == "max" else partial(pool, score=rules.score)

    share = view.share
    if share is None:
        seen_positions, seen_lengths = positions, lengths
    else:
        seen_positions, seen_lengths = share.positions(positions, lengths), share.lengths(lengths)

    def select_chunk(index_q, positions, seen_positions):
        scores = _score_chunk(index_q, view, seen_positions, seen_lengths, rules.score, pooled)  # [B K T M]
        if share is None:
            chosen = select_blocks(scores, positions, lengths, rules, block_size=view.block_size)
        else:
            chosen = best_of_share(scores, positions, lengths, rules, share)
        return jax.tree.map(lambda x: x.swapaxes(1, 2), chosen)  # [B T K J]

    chosen = map_chunks(select_chunk, _query_chunk(index_q, view), 1, index_q, positions, seen_positions)
    blocks = chosen if share is None else join_over_devices(chosen, rules.top_k, share.axes)
    return blocks.swapaxes(1, 2)


def walk_scores(
    index_q: Float[Array, "B T K I"],
    view: IndexView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    score: str = "max",
) -> Float[Array, "B K T M"]:
    """Compute `block_scores` over a view; token scores are held for a chunk of queries only.

    Args:
      index_q, view, positions, lengths: as in `index_walk`.
      score: as in `SelectionRules`.

    Returns:
      [B K T M], float32 (float64 for float64 inputs); -inf for a block in which the query sees no token.
    """

    def score_chunk(index_q, positions):
        scores = _score_chunk(index_q, view, positions, lengths, score, partial(pool, score=score))
        return scores.swapaxes(1, 2)  # [B T K M]

    return map_chunks(score_chunk, _query_chunk(index_q, view), 1, index_q, positions).swapaxes(1, 2)


def _query_chunk(index_q: Float[Array, "B T K I"], view: IndexView) -> int:
    """Return the number of queries that are scored at once."""
    batch, num_queries, heads, _ = index_q.shape
    num_keys = view.num_blocks * view.block_size
    scores_per_query = batch * heads * max(min(num_keys, _KEY_CHUNK), num_keys // 8)
    return rows_within(elements_at_once(_SCORE_BUDGET), scores_per_query, num_queries)


def _largest(token_scores: Float[Array, "*X P"]) -> Float[Array, "*X"]:
    """Compute `pool` by the maximum, NaN where one is NaN, in one pass over the scores; it has no gradient."""
    lowest = np.asarray(-np.inf, token_scores.dtype)
    take_in = lambda one, other: (jax.lax.max(one[0], other[0]), one[1] | other[1])
    dimension = (token_scores.ndim - 1,)
    largest, has_nan = jax.lax.reduce((token_scores, jnp.isnan(token_scores)), (lowest, np.False_), take_in, dimension)
    return jnp.where(has_nan, jnp.nan, largest)


def _score_chunk(
    index_q: Float[Array, "B T K I"],
    view: IndexView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    score: str,
    pool_tokens: Callable[[Float[Array, "*X P"]], Float[Array, "*X"]],
) -> Float[Array, "B K T M"]:
    """Return a chunk's scores of all blocks, in pieces of whole blocks; `pool_tokens` makes them of tokens' scores."""
    batch, num_queries, heads, _ = index_q.shape
    num_blocks, block_size = view.num_blocks, view.block_size
    is_few = batch * num_queries * heads <= _FEW_ROWS
    blocks_per_piece = (elements_at_once(4 * _KEY_CHUNK) if is_few else _KEY_CHUNK) // block_size
    blocks_per_piece = max(1, min(blocks_per_piece, num_blocks))
    num_pieces = -(-num_blocks // blocks_per_piece)
    token_positions = jnp.where(positions < lengths[:, None], positions, -1)
    first_position, last_position = jnp.min(token_positions), jnp.max(token_positions)
    queries = rearrange(index_q, "b t k i -> b (k t) i")  # [B K*T I]

    def score_piece(first_block, masked):
        keys = view.run(first_block, blocks_per_piece)  # [B X I]
        token_scores = rearrange(dot_scores(queries, keys), "b (k t) x -> b k t x", k=heads)
        if score == "lse":
            token_scores = token_scores * keys.shape[-1] ** -0.5
        if masked:
            key_positions = first_block * block_size + jnp.arange(keys.shape[1], dtype=jnp.int32)
            token_scores = jnp.where(sees(positions, lengths, key_positions)[:, None], token_scores, UNSEEN)
        by_block = rearrange(token_scores, "b k t (m p) -> b k t m p", p=block_size)
        pooled = pool_tokens(by_block)  # [B K T m]
        return jnp.where(view.present(first_block, blocks_per_piece)[:, None, None], pooled, UNSEEN)

    def step(_, piece):
        # The last piece starts early enough to end at the view's end; what it repeats is cut off below.
        first_block = jnp.minimum(piece * blocks_per_piece, num_blocks - blocks_per_piece)

        def unseen():
            return jnp.full((batch, heads, num_queries, blocks_per_piece), UNSEEN, accumulator(index_q.dtype))

        # Where a mask changes nothing "max" does without. "lse" keeps it, as rounding could differ from a masked one.
        is_all_seen = (first_block + blocks_per_piece) * block_size <= first_position + 1 if score == "max" else False
        # 0: no query sees a key of the piece; 1: some are seen; 2: all queries see all keys.
        branch = (first_block * block_size <= last_position).astype(jnp.int32) + is_all_seen
        branches = (unseen, lambda: score_piece(first_block, True), lambda: score_piece(first_block, False))
        return None, jax.lax.switch(branch, branches)

    _, by_piece = jax.lax.scan(step, None, jnp.arange(num_pieces, dtype=jnp.int32))
    by_piece = jnp.moveaxis(by_piece, 0, 3)  # [B K T pieces m]
    whole_pieces = rearrange(by_piece[..., :-1, :], "b k t x m -> b k t (x m)")
    repeated = num_pieces * blocks_per_piece - num_blocks
    return jnp.concatenate([whole_pieces, by_piece[..., -1, repeated:]], axis=-1)


@checked
def index_topk(
    index_q: Float[Array, "B T K I"],
    index_k: Float[Array, "B S I"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    **rules: int | str,
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps: `select_blocks` of `block_scores`, without ever holding all scores.

    Args:
      index_q: index queries after norm and RoPE, one head for each KV head.
      index_k: index keys, one head that all share.
      positions: position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      block_size: P.
      **rules: those of `SelectionRules`: top_k, and, if they are not M3's, local_blocks, init_blocks and score.

    Returns:
      Ascending ids, then -1.

    Raises:
      ValueError: rules that contradict each other, a block size below 1, or index widths that differ.
    """
    selection_rules = SelectionRules(**rules)
    return index_walk(index_q, contiguous_index(index_k, block_size), positions, lengths, selection_rules)
