"""MiniMax Sparse Attention (MSA), defined: the functions that every faster implementation is tested against.

A query scores blocks of P tokens with a small second attention, the index branch, keeps the J best of them for each KV
head, and attends to the tokens of those blocks alone. The definition holds all scores at once; the schedules in
`m3jax.msa` and the kernels hold less.

Axes: B rows, T queries, S keys (key s of a row has position s), N query heads, K KV heads and as many index heads,
G = N / K, H head dim, I index head dim, M = ceil(S / P) blocks, J slots. Keys at positions >= the row's length may hold
anything, NaN too. `m3jax.msa` has the same functions with checks of their arguments.
"""

from dataclasses import dataclass
from numbers import Integral

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Bool, Float, Int

SCORES = ("max", "lse")


@dataclass(frozen=True)
class SelectionRules:
    """The rules of selection: how many blocks a query keeps, which it keeps in any case, and how a block is scored.

    Attributes:
      top_k: Number of blocks J that a query keeps at most, forced ones included.
      local_blocks: Number of blocks, ending with the query's own, that are always kept; at least 1.
      init_blocks: Number of blocks at the start of the row that are always kept.
      score: Score of a block: "max", the largest score of its visible tokens, or "lse", the log of the sum of
        exponentials of these scores times I**-0.5.

    Raises:
      ValueError: Counts that contradict each other or are no integers, or an unknown score.

    Source: paper section 3 (max, 16 blocks, the own one forced); SGLang for init_blocks, more local_blocks and "lse".
    """

    top_k: int
    local_blocks: int = 1
    init_blocks: int = 0
    score: str = "max"

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"score = {self.score!r}: allowed are {', '.join(map(repr, SCORES))}")
        for name in ("top_k", "local_blocks", "init_blocks"):
            check_integer(name, getattr(self, name))
        if self.local_blocks < 1 or self.init_blocks < 0 or self.local_blocks + self.init_blocks > self.top_k:
            raise ValueError(
                f"local_blocks = {self.local_blocks}, init_blocks = {self.init_blocks}, top_k = {self.top_k}: need "
                "local_blocks >= 1 (a query always keeps its own block), init_blocks >= 0, and both together at most "
                "top_k"
            )


def check_integer(name: str, value: object) -> None:
    """Raise ValueError for a count that is no integer: 8.0 too, which jit would take for the 8 of a later call."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} = {value!r}: must be an integer, without a decimal point or quotation marks")


def is_token(positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Bool[Array, "B T"]:
    """Return True for queries that are tokens, and False for padding.

    Args:
      positions: Position of each query. Negative values, and values >= `lengths`, mark padding.
      lengths: Number of valid keys per row.
    """
    return (positions >= 0) & (positions < lengths[:, None])


def sees(
    positions: Int[Array, "B T"], lengths: Int[Array, " B"], key_positions: Int[Array, " S"]
) -> Bool[Array, "B T S"]:
    """Return True where a query sees a key: up to its own position, and nowhere if the query is padding.

    Args:
      positions: Position of each query, as in `is_token`.
      lengths: Number of valid keys per row.
      key_positions: Position of each key.
    """
    return is_token(positions, lengths)[:, :, None] & (key_positions <= positions[:, :, None])


def block_scores(
    index_q: Float[Array, "B T K I"],
    index_k: Float[Array, "B S I"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    block_size: int,
    score: str = "max",
) -> Float[Array, "B K T M"]:
    """Return each query's score of each block: the largest score of a token in the block that the query sees.

    Args:
      index_q: Queries of the index branch after norm and RoPE, one for each KV head.
      index_k: Keys of the index branch after norm and RoPE; all heads share one.
      positions: Position of each query. Negative values, and values >= `lengths`, mark padding.
      lengths: Number of valid keys per row.
      block_size: Tokens per block, P.
      score: Score of a block, as in `SelectionRules`.

    Returns:
      Scores in float32 (float64 for float64 inputs); -inf for a block in which the query sees no token.

    Source: paper section 3; transformers `MiniMaxM3VLIndexer`; SGLang for "lse".
    """
    num_keys, width = index_k.shape[1:]
    # The mask comes before the pool: otherwise tokens that are not seen would speak for a query's own block (T2).
    token_scores = _product("btki,bsi->bkts", index_q, index_k)  # [B K T S]
    visible = sees(positions, lengths, jnp.arange(num_keys))[:, None]  # [B 1 T S]
    scale = width**-0.5 if score == "lse" else 1  # "max" needs none: it only compares
    token_scores = jnp.where(visible, token_scores * scale, -jnp.inf)
    token_scores = jnp.pad(token_scores, [*[(0, 0)] * 3, (0, -num_keys % block_size)], constant_values=-jnp.inf)
    return pool(rearrange(token_scores, "b k t (m p) -> b k t m p", p=block_size), score)  # [B K T M]


def pool(token_scores: Float[Array, "... P"], score: str) -> Float[Array, "..."]:
    """Return the scores of blocks from those of their tokens; -inf where the query sees none of them."""
    if score == "max":  # the maximum alone leaves NaN out of a large array on a CPU (jaxlib 0.10.2)
        return jnp.where(jnp.any(jnp.isnan(token_scores), axis=-1), jnp.nan, jnp.max(token_scores, axis=-1))
    is_unseen = jnp.all(jnp.isneginf(token_scores), axis=-1)
    finite = jnp.where(is_unseen[..., None], 0.0, token_scores)  # 0 makes the gradient 0, not NaN
    return jnp.where(is_unseen, -jnp.inf, jax.nn.logsumexp(finite, axis=-1))


def select_blocks(
    scores: Float[Array, "B K T M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
    *,
    block_size: int,
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps: ascending ids, then -1.

    A query keeps exactly min(J, own block + 1) of the blocks up to its own one, the first in this order: forced blocks
    (the own one always), then higher scores, NaN after every number, and the lower id among equal scores. -0 equals +0,
    an infinity counts as the largest number of its sign. Forced blocks use slots, they do not add any (T3). Padding
    keeps none.

    Args:
      scores: Block scores; those after a query's own block are ignored.
      positions: Position of each query, as in `block_scores`.
      lengths: Number of valid keys per row.
      rules: Number of blocks to keep, and which are forced.
      block_size: Tokens per block, P.

    Source: paper section 3; MiniMax-AI/MSA reference top-k (score descending, id ascending).
    """
    num_blocks = scores.shape[-1]
    num_slots = min(rules.top_k, num_blocks)
    own_block = jnp.where(is_token(positions, lengths), positions // block_size, -1)[:, None, :, None]  # [B 1 T 1]
    block_ids = jnp.arange(num_blocks, dtype=jnp.int32)  # [M]
    order = selection_keys(scores, block_ids, own_block, rules)  # [B K T M]
    _, chosen = jax.lax.top_k(order, num_slots)  # [B K T J], best first; the lower id among equal keys
    is_used = jnp.arange(num_slots) <= own_block  # [B 1 T J]
    chosen = jnp.sort(jnp.where(is_used, chosen, num_blocks).astype(jnp.int32), axis=-1)
    chosen = jnp.where(chosen < num_blocks, chosen, -1)
    return jnp.pad(chosen, ((0, 0),) * 3 + ((0, rules.top_k - num_slots),), constant_values=-1)  # [B K T J]


def selection_keys(
    scores: Float[Array, "B K T M"],
    block_ids: Int[Array, "..."],
    own_block: Int[Array, "B 1 T 1"],
    rules: SelectionRules,
) -> Float[Array, "B K T M"]:
    """Return the sort keys of `select_blocks`: a query prefers blocks with higher ones.

    Args:
      scores: Scores of some blocks.
      block_ids: Ids of these blocks; broadcasts against `scores`.
      own_block: Block of each query; -1 for padding.
      rules: Rules that say which blocks are forced.
    """
    # One sort key holds the whole order: unseen (-inf) < NaN (lowest) < the finite numbers < forced (inf).
    is_forced = (block_ids > own_block - rules.local_blocks) | (block_ids < rules.init_blocks)  # [B 1 T M]
    lowest = jnp.finfo(scores.dtype).min
    above_nan = jnp.nextafter(lowest, jnp.zeros_like(lowest))
    sort_key = jnp.clip(scores, above_nan, -above_nan)  # [B K T M]
    sort_key = jnp.where(jnp.isnan(scores), lowest, jnp.where(sort_key == 0, 0.0, sort_key))
    sort_key = jnp.where(is_forced, jnp.inf, sort_key)
    return jnp.where(block_ids <= own_block, sort_key, -jnp.inf)


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute grouped-query causal attention: softmax over all keys that a query sees.

    Args:
      q: Queries; head n reads KV head n // G.
      k: Keys. Those at positions >= `lengths` may be NaN, but must be finite where a gradient is taken.
      v: Values, as `k`.
      positions: Position of each query, as in `block_scores`.
      lengths: Number of valid keys per row.
      return_lse: Whether to return the log-sum-exp of the scaled scores too.

    Returns:
      Outputs in q's dtype; if asked for, also the log-sum-exp in float32 (float64 for float64 inputs). Padding has 0
      and -inf.

    Source: paper section 3: scale H**-0.5, no sink, no soft cap.
    """
    visible = sees(positions, lengths, jnp.arange(k.shape[1]))[:, None]  # [B 1 T S]
    out, lse = _attend(q, k, v, visible, lengths)
    return (out, lse) if return_lse else out


def sparse_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute grouped-query causal attention over the tokens of the selected blocks alone (paper, equation 8).

    Args:
      q, k, v, positions, lengths, return_lse: As in `dense_attention`, and so are the results.
      blocks: Distinct block ids for each KV head and query in any order, -1 for an unused slot (`select_blocks`).
      block_size: Tokens per block, P.
    """
    visible = sees(positions, lengths, jnp.arange(k.shape[1]))[:, None]  # [B 1 T S]
    out, lse = _attend(q, k, v, visible & chosen_tokens(blocks, k.shape[1], block_size), lengths)
    return (out, lse) if return_lse else out


def msa(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    index_q: Float[Array, "B T K I"],
    index_k: Float[Array, "B S I"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
    *,
    block_size: int,
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K T J"]]:
    """Compute MiniMax Sparse Attention as a whole: score blocks, keep the best of them, attend to these alone.

    Index queries and keys come from the same normed hidden state as q, k and v, by projections of their own, with a
    norm and RoPE as q and k have them: an index query for each KV head, and one index key that all heads share. In
    training that hidden state is detached for them, and no gradient goes through the selection (`m3jax.spec.model`).

    Args:
      q, k, v: Queries, keys and values after norm and RoPE.
      index_q, index_k: Queries and keys of the index branch after norm and RoPE.
      positions: Position of each query, as in `block_scores`.
      lengths: Number of valid keys per row.
      rules: Number of blocks a query keeps, which in any case, and how a block is scored.
      block_size: Tokens per block, P.

    Returns:
      (outputs in q's dtype, 0 for padding; the blocks that each query keeps, none for padding).

    Source: paper section 3.
    """
    scores = block_scores(index_q, index_k, positions, lengths, block_size, rules.score)  # [B K T M]
    blocks = select_blocks(scores, positions, lengths, rules, block_size=block_size)  # [B K T J]
    return sparse_attention(q, k, v, blocks, positions, lengths, block_size=block_size), blocks


def chosen_tokens(blocks: Int[Array, "B K T J"], num_keys: int, block_size: int) -> Bool[Array, "B K T S"]:
    """Return True for the tokens in the blocks that a query keeps."""
    block_ids = jnp.arange(-(-num_keys // block_size))  # [M]
    is_chosen = jnp.any(blocks[..., None] == block_ids, axis=-2)  # [B K T M]
    return repeat(is_chosen, "b k t m -> b k t (m p)", p=block_size)[..., :num_keys]  # [B K T S]


def _attend(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"],
    visible: Bool[Array, "B #K T S"], lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:  # fmt: skip
    """Return (out in q's dtype, lse) of attention over visible keys; (0, -inf) where there are none."""
    # Softmax weights of unseen keys are 0, but 0 x NaN is NaN, and memory past the end of a row may contain NaN.
    is_key = jnp.arange(k.shape[1]) < lengths[:, None]  # [B S]
    v = jnp.where(is_key[:, :, None, None], v, 0)  # [B S K H]
    by_group = rearrange(q, "b t (k g) h -> b k g t h", k=k.shape[2])  # [B K G T H]
    scores = _product("bkgth,bskh->bkgts", by_group, k) * q.shape[-1] ** -0.5  # [B K G T S]
    scores = jnp.where(visible[:, :, None], scores, -jnp.inf)
    # Softmax does not change when all scores are shifted, so the shift needs no gradient. Where nothing is seen all
    # scores are -inf and the shift is 0: -inf - (-inf) would be NaN.
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))  # [B K G T 1]
    highest = jnp.where(jnp.isneginf(highest), 0.0, highest)
    weights = jnp.exp(scores - highest)  # [B K G T S]
    total = jnp.sum(weights, axis=-1, keepdims=True)  # [B K G T 1]
    sees_any = total != 0.0  # True for NaN too, which must not pass for a query that sees nothing
    total = jnp.where(sees_any, total, 1.0)
    # First rounding: the weights, to the values' dtype, before the product. Their sum is not rounded.
    out = jnp.where(sees_any, _product("bkgts,bskh->bkgth", weights.astype(v.dtype), v) / total, 0.0)
    lse = jnp.where(sees_any, highest + jnp.log(total), -jnp.inf)
    out = rearrange(out, "b k g t h -> b t (k g) h").astype(q.dtype)  # [B T N H]; second rounding: the output
    return out, rearrange(lse, "b k g t 1 -> b t (k g)")  # [B T N]


def _product(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return a product summed and left in float32 (float64 for float64), never rounded to tf32 or bfloat16."""
    dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return jnp.einsum(spec, a, b, precision="highest", preferred_element_type=dtype)
