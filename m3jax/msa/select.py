"""The index branch: score 128-token blocks, keep the best of them (paper, section 3; docs/msa.md)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.msa.dense import causal
from m3jax.msa.numerics import einsum
from m3jax.msa.views import check_block_size

_SCORE_BUDGET = 1 << 19  # token scores held at once; more would leave the cache of a core
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
    _check_scores(index_q, index_k, block_size, score)
    index_k = _pad_to(index_k, block_size)
    chunk = _query_chunk(index_q, index_k)
    fn = lambda q, p: _chunk_scores(q, index_k, p, lengths, block_size, score)
    out = map_chunks(lambda q, p: fn(q, p).swapaxes(1, 2), chunk, 1, index_q, positions)
    return out.swapaxes(1, 2)


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
    _check_scores(index_q, index_k, block_size, score)
    index_k = _pad_to(index_k, block_size)
    rules = dict(block_size=block_size, top_k=top_k, local_blocks=local_blocks, init_blocks=init_blocks)

    def chunk(q, p):
        scores = _chunk_scores(q, index_k, p, lengths, block_size, score)
        return select_blocks(scores, p, lengths, **rules).swapaxes(1, 2)

    q = jax.lax.stop_gradient(index_q)
    return map_chunks(chunk, _query_chunk(index_q, index_k), 1, q, positions).swapaxes(1, 2)


def _ordered(scores: Float[Array, "*X M"]) -> Float[Array, "*X M"]:
    """Scores as finite sort keys: NaN below -inf, -0 equal to +0, and room at both ends for forced and unseen."""
    lowest = jnp.finfo(scores.dtype).min
    above = jnp.nextafter(lowest, jnp.zeros_like(lowest))
    key = jnp.clip(scores, above, -above)
    return jnp.where(jnp.isnan(scores), lowest, jnp.where(key == 0, 0.0, key))


def _chunk_scores(q, index_k, positions, lengths, block_size, score):
    """[B C K H] queries against all keys, in pieces of whole blocks: [B K C M]."""
    size = index_k.shape[1]
    piece = max(block_size, _KEY_CHUNK // block_size * block_size)
    if size <= piece or q.shape[1] == 1:
        return _piece_scores(q, index_k, jnp.int32(0), positions, lengths, block_size, score)
    index_k = _pad_to(index_k, piece)
    pieces = index_k.reshape(index_k.shape[0], -1, piece, index_k.shape[-1]).swapaxes(0, 1)
    starts = jnp.arange(len(pieces), dtype=jnp.int32) * piece
    last = jnp.max(jnp.where(positions < lengths[:, None], positions, -1))

    def step(_, xs):
        k, start = xs
        seen = lambda: _piece_scores(q, k, start, positions, lengths, block_size, score)
        unseen = lambda: jnp.full_like(jax.eval_shape(seen), -jnp.inf)
        return None, jax.lax.cond(start <= last, seen, unseen)

    _, out = jax.lax.scan(step, None, (pieces, starts))
    out = jnp.moveaxis(out, 0, 3).reshape(*out.shape[1:4], -1)
    return out[..., : size // block_size]


def _piece_scores(q, k, start, positions, lengths, block_size, score):
    """Scores of the blocks of one piece of keys, whose first key has position `start`."""
    scores = einsum("btkh,bsh->bkts", q, k)
    slots = start + jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = causal(positions, lengths, slots)
    if score == "lse":
        scores = scores * k.shape[-1] ** -0.5
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    blocks = scores.reshape(*scores.shape[:-1], -1, block_size)
    return jnp.max(blocks, -1) if score == "max" else _logsumexp(blocks)


def _logsumexp(x: Float[Array, "*X P"]) -> Float[Array, "*X"]:
    """Log-sum-exp whose gradient is 0, not NaN, over a block that nothing sees."""
    empty = jnp.all(jnp.isneginf(x), axis=-1)
    return jnp.where(empty, -jnp.inf, jax.nn.logsumexp(jnp.where(empty[..., None], 0.0, x), axis=-1))


def _query_chunk(index_q, index_k) -> int:
    batch, length, heads, _ = index_q.shape
    width = min(index_k.shape[1], _KEY_CHUNK)
    blocks = batch * heads * max(width, index_k.shape[1] // 8)
    return rows_within(_SCORE_BUDGET, blocks, length)


def _pad_to(x: Float[Array, "B S H"], multiple: int) -> Float[Array, "B S2 H"]:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0)))


def _check_scores(index_q, index_k, block_size: int, score: str) -> None:
    if score not in ("max", "lse"):
        raise ValueError(f"score = {score!r}: allowed are 'max' and 'lse'")
    if index_q.shape[-1] != index_k.shape[-1]:
        raise ValueError(
            f"index_q has width {index_q.shape[-1]} and index_k {index_k.shape[-1]}: they must be the same"
        )
    check_block_size(block_size)
