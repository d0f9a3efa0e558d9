"""The index branch: score 128-token blocks, keep the best of them (paper, section 3; docs/msa.md)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa.chunks import budget, map_chunks, rows_within
from m3jax.msa.dense import causal
from m3jax.msa.views import IndexView, check_block_size, contiguous_index
from m3jax.numerics import accumulator, dot_scores

_SCORE_BUDGET = 1 << 19  # token scores held at once; more would leave the cache of a core
_FEW_ROWS = 128  # up to here pieces are longer
_KEY_CHUNK = 1024  # keys scored at once; pieces that no query of the chunk can see are skipped


def block_scores(
    index_q: Float[Array, "B T K H"],
    index_k: Float[Array, "B S H"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    block_size: int,
    score: str = "max",
) -> Float[Array, "B K T M"]:
    """Score every key block for every query: pool the token scores that the query may see.

    A token score is the plain inner product of index query and index key: a positive scale does not change an
    order. Causality and length are applied per token, before pooling; `"lse"` is the log of the sum of
    exponentials of the scores times H**-0.5, where the scale matters.

    Args:
      index_q: index queries after norm and RoPE, one head per KV head; any float dtype.
      index_k: index keys, one head shared by all; slot s holds position s, slots >= lengths may hold anything.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      block_size: P, tokens of a block.
      score: "max" or "lse".

    Returns:
      Scores in float32 (float64 for float64 inputs); -inf for a block with no visible token, so all through padding.

    Raises:
      ValueError: an unknown score type, or index widths that differ.

    Source: paper section 3 (max-pool after masking); transformers `MiniMaxM3VLIndexer`; SGLang for "lse".
    """
    view = _view(index_q, index_k, block_size, score)
    fn = lambda q, p: _chunk_scores(q, view, p, lengths, score).swapaxes(1, 2)
    return map_chunks(fn, _query_chunk(index_q, view), 1, index_q, positions).swapaxes(1, 2)


def select_blocks(
    scores: Float[Array, "B K T M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    top_k: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
) -> Int[Array, "B K T J"]:
    """Keep the `top_k` best blocks of each query: ascending ids, then -1.

    The query's own block is always kept; so are the `local_blocks - 1` blocks before it and the `init_blocks` first
    ones. Forced blocks use slots, they do not add any: exactly min(top_k, own block + 1) ids are valid. The rest
    is by score descending, then id ascending; NaN ranks last.

    Args:
      scores: block scores; whatever stands beyond a query's own block is ignored.
      positions: absolute position of each query; padding gets no block at all.
      lengths: valid keys of each row.
      block_size: P.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one, at least 1.
      init_blocks: forced blocks at the start.

    Raises:
      ValueError: counts that contradict each other, or a block size below 1.

    Source: paper section 3; MiniMax-AI/MSA reference top-k (score descending, id ascending).
    """
    if local_blocks < 1 or init_blocks < 0 or local_blocks + init_blocks > top_k:
        raise ValueError(
            f"local_blocks = {local_blocks}, init_blocks = {init_blocks}, top_k = {top_k}: need local_blocks >= 1 (a "
            "query always keeps its own block), init_blocks >= 0, and both together at most top_k"
        )
    check_block_size(block_size)
    num_blocks = scores.shape[-1]
    valid = (positions >= 0) & (positions < lengths[:, None])
    own = jnp.where(valid, positions // block_size, -1)[:, None, :, None]
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    forced = (ids > own - local_blocks) | (ids < init_blocks)
    key = jnp.where(forced, jnp.inf, _ordered(scores))
    key = jnp.where(ids <= own, key, -jnp.inf)
    slots = min(top_k, num_blocks)
    _, chosen = jax.lax.top_k(key, slots)  # equal keys come lower id first
    count = jnp.minimum(slots, own + 1)
    chosen = jnp.where(jnp.arange(slots) < count, chosen, num_blocks)
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=-1)
    chosen = jnp.where(chosen < num_blocks, chosen, -1)
    return jnp.pad(chosen, ((0, 0),) * 3 + ((0, top_k - slots),), constant_values=-1)


def index_topk(
    index_q: Float[Array, "B T K H"],
    index_k: Float[Array, "B S H"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    top_k: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
    score: str = "max",
) -> Int[Array, "B K T J"]:
    """`select_blocks` of `block_scores`, a chunk of queries at a time: the scores of all blocks are never held."""
    rules = dict(top_k=top_k, local_blocks=local_blocks, init_blocks=init_blocks, score=score)
    return view_topk(index_q, _view(index_q, index_k, block_size, score), positions, lengths, **rules)


def view_topk(
    index_q: Float[Array, "B T K H"],
    view: IndexView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    top_k: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
    score: str = "max",
    gather: Callable[[Float[Array, "B K T M"]], Float[Array, "B K T M"]] = lambda scores: scores,
) -> Int[Array, "B K T J"]:
    """`index_topk` over a view.

    Args:
      index_q: index queries.
      view: index keys, in pages or not.
      positions: absolute position of each query.
      lengths: valid keys of each row.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one.
      init_blocks: forced blocks at the start.
      score: "max" or "lse".
      gather: where several devices hold the blocks, joins their scores; a block that is not held has -inf.
    """
    rules = dict(block_size=view.block_size, top_k=top_k, local_blocks=local_blocks, init_blocks=init_blocks)

    def chunk(q, p):
        scores = gather(_chunk_scores(q, view, p, lengths, score))
        return select_blocks(scores, p, lengths, **rules).swapaxes(1, 2)

    q = jax.lax.stop_gradient(index_q)
    return map_chunks(chunk, _query_chunk(index_q, view), 1, q, positions).swapaxes(1, 2)


def _ordered(scores: Float[Array, "*X M"]) -> Float[Array, "*X M"]:
    """Scores as finite sort keys: NaN below -inf, -0 equal to +0, and room at both ends for forced and unseen."""
    lowest = jnp.finfo(scores.dtype).min
    above = jnp.nextafter(lowest, jnp.zeros_like(lowest))
    key = jnp.clip(scores, above, -above)
    return jnp.where(jnp.isnan(scores), lowest, jnp.where(key == 0, 0.0, key))


def _chunk_scores(q, view, positions, lengths, score):
    """[B C K H] queries against all keys, in pieces of whole blocks: [B K C M]."""
    count, size = view.num_blocks, view.block_size
    few = q.shape[0] * q.shape[1] * q.shape[2] <= _FEW_ROWS
    piece = max(1, min((budget(4 * _KEY_CHUNK) if few else _KEY_CHUNK) // size, count))
    steps = -(-count // piece)
    at = jnp.where(positions < lengths[:, None], positions, -1)
    first, last = jnp.min(at), jnp.max(at)

    def step(_, i):
        # The last piece starts early enough to end at the view's end; what it repeats is cut off below.
        start = jnp.minimum(i * piece, count - piece)
        hidden = lambda: jnp.full((q.shape[0], q.shape[2], q.shape[1], piece), -jnp.inf, accumulator(q.dtype))
        scores = lambda masked: lambda: _piece_scores(q, view, start, piece, masked, positions, lengths, score)
        # Where a mask changes nothing "max" does without. "lse" keeps it, as rounding could differ from a masked one.
        bare = (start + piece) * size <= first + 1 if score == "max" else False
        kind = (start * size <= last).astype(jnp.int32) + bare
        return None, jax.lax.switch(kind, (hidden, scores(True), scores(False)))

    _, out = jax.lax.scan(step, None, jnp.arange(steps, dtype=jnp.int32))
    out = jnp.moveaxis(out, 0, 3)
    head = out[..., :-1, :].reshape(*out.shape[:3], -1)
    return jnp.concatenate([head, out[..., -1, steps * piece - count :]], axis=-1)


def _piece_scores(q, view, start, piece, masked, positions, lengths, score):
    """Scores of the blocks of one piece of keys; unmasked where every query sees all of it."""
    k = view.run(start, piece)
    rows = q.swapaxes(1, 2).reshape(q.shape[0], -1, q.shape[-1])
    scores = dot_scores(rows, k).reshape(q.shape[0], q.shape[2], q.shape[1], -1)
    if score == "lse":
        scores = scores * k.shape[-1] ** -0.5
    if masked:
        slots = start * view.block_size + jnp.arange(k.shape[1], dtype=jnp.int32)
        scores = jnp.where(causal(positions, lengths, slots)[:, None], scores, -jnp.inf)
    blocks = scores.reshape(*scores.shape[:-1], -1, view.block_size)
    pooled = jnp.max(blocks, -1) if score == "max" else _logsumexp(blocks)
    return jnp.where(view.present(start, piece)[:, None, None], pooled, -jnp.inf)


def _logsumexp(x: Float[Array, "*X P"]) -> Float[Array, "*X"]:
    """Log-sum-exp whose gradient is 0, not NaN, over a block that nothing sees."""
    empty = jnp.all(jnp.isneginf(x), axis=-1)
    return jnp.where(empty, -jnp.inf, jax.nn.logsumexp(jnp.where(empty[..., None], 0.0, x), axis=-1))


def _query_chunk(index_q, view) -> int:
    batch, length, heads, _ = index_q.shape
    keys = view.num_blocks * view.block_size
    return rows_within(budget(_SCORE_BUDGET), batch * heads * max(min(keys, _KEY_CHUNK), keys // 8), length)


def _view(index_q, index_k, block_size: int, score: str) -> IndexView:
    if score not in ("max", "lse"):
        raise ValueError(f"score = {score!r}: allowed are 'max' and 'lse'")
    if index_q.shape[-1] != index_k.shape[-1]:
        raise ValueError(
            f"index_q has width {index_q.shape[-1]} and index_k {index_k.shape[-1]}: they must be the same"
        )
    return contiguous_index(index_k, block_size)
