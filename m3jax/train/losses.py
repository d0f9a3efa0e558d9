"""Losses: next-token prediction, and the alignment of the index branch with attention (docs/msa.md)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from m3jax.decoding.sampling import log_normaliser, logprob_of
from m3jax.model import M3
from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.msa.definition import chosen_tokens, sees
from m3jax.numerics import einsum
from m3jax.tiles import LOGITS_TILE, by_tiles

_SCORE_BUDGET = 1 << 26  # probabilities of one chunk of queries


def next_token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Weighted mean cross-entropy of the next token, in nats; 0 where all weights are."""
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]  # [B T]
    losses = jax.nn.logsumexp(logits, axis=-1) - target_logit
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def kept_loss(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    expected: Float[Array, "B T V"],
    kept: Bool[Array, "B T"],
) -> Float[Array, ""]:
    """`next_token_loss`, but where `kept` the target is the whole distribution of a model that is not to be forgotten.

    Cross-entropy against softmax(expected) is lowest where the predictions are that model's, however often the text was
    seen: training goes on for a new task and neither forgets the old text nor learns it by heart.

    Args:
      logits: of the model in training.
      targets: the tokens that followed.
      weights: of the targets, of either kind.
      expected: logits of the model that is kept.
      kept: where its distribution is the target.

    Source: learning without forgetting (Li and Hoiem, arXiv:1606.09282), with temperature 1.
    """
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B T]
    of_token = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    of_distribution = jnp.sum(jax.nn.softmax(expected, axis=-1) * logits, axis=-1)
    losses = log_normaliser - jnp.where(kept, of_distribution, of_token)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def token_logprobs(model: M3, tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """The log-probability of each token but the first, after those before it; it has gradients.

    Of a model in its invariant mode (`M3.with_invariance`) these are to the bit those that an invariant engine reports
    for the tokens that it drew, on the same backend and with the same weights and dtype: training is on-policy then.

    Args:
      model: the target.
      tokens: prompts and what followed.
    """
    hidden, _ = model.hidden(tokens)
    tile = None if model.token_tile is None else LOGITS_TILE

    def of_tokens(hidden, tokens):
        logits = model.unembed(hidden).astype(jnp.float32)
        return logprob_of(tokens, logits, by_tiles(log_normaliser, tile, logits))

    batch, length, width = hidden[:, :-1].shape
    rows = hidden[:, :-1].reshape(-1, width), tokens[:, 1:].reshape(-1)
    return by_tiles(of_tokens, model.token_tile, *rows).reshape(batch, length)


def index_kl(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    index_q: Float[Array, "B T K I"],
    index_k: Float[Array, "B S I"],
    blocks: Int[Array, "B K T J"] | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    block_size: int,
) -> Float[Array, ""]:
    """KL divergence from the attention that heads pay to what the index branch expects, in nats.

    Teacher: per KV group the mean over its heads of their probabilities on the support. Student: softmax of the
    token-level index scores times I**-0.5 on the same support. Mean over queries and groups. No gradient reaches
    q and k: the index branch learns from the trunk and never moves it (T33).

    Args:
      q, k: queries and keys of the main branch, after norm and RoPE.
      index_q, index_k: those of the index branch; the only arguments with a gradient.
      blocks: the support is their visible tokens; None is the whole causal row (the dense warm-up).
      positions: absolute position of each query; < 0 or >= lengths marks padding, which does not count.
      lengths: valid keys of each row.
      block_size: P.

    Source: paper, the training objective of the index branch.
    """
    q, k = jax.lax.stop_gradient((q, k))
    num_keys, kv_heads = k.shape[1:3]
    key_positions = jnp.arange(num_keys, dtype=jnp.int32)

    def divergence(q, index_q, support):
        teacher = mean_attention(q, k, support)  # [B K T S]
        scores = einsum("btki,bsi->bkts", index_q, index_k) * index_k.shape[-1] ** -0.5
        student = _masked_log_softmax(scores, support)
        log_teacher = jnp.log(jnp.where(teacher > 0, teacher, 1.0))
        kl = jnp.sum(jnp.where(teacher > 0, teacher * (log_teacher - student), 0.0), axis=-1)  # [B K T]
        return kl.swapaxes(1, 2)

    def whole_row(q, index_q, positions):
        return divergence(q, index_q, sees(positions, lengths, key_positions)[:, None])

    def selected(q, index_q, positions, blocks):
        visible = sees(positions, lengths, key_positions)[:, None]  # [B 1 T S]
        in_selection = chosen_tokens(blocks.swapaxes(1, 2), num_keys, block_size)  # [B K T S]
        return divergence(q, index_q, visible & in_selection)

    per_query = q.shape[0] * (q.shape[2] + 2 * kv_heads) * num_keys
    chunk = rows_within(_SCORE_BUDGET, per_query, q.shape[1])
    if blocks is None:
        kl = map_chunks(whole_row, chunk, 1, q, index_q, positions)  # [B T K]
    else:
        kl = map_chunks(selected, chunk, 1, q, index_q, positions, blocks.swapaxes(1, 2))  # [B T K]
    is_real = (positions >= 0) & (positions < lengths[:, None])
    return jnp.sum(jnp.where(is_real[..., None], kl, 0.0)) / jnp.maximum(jnp.sum(is_real) * kv_heads, 1)


def mean_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], support: Bool[Array, "B #K T S"]
) -> Float[Array, "B K T S"]:
    """Mean over the heads of a group of their attention probabilities on the support.

    Args:
      q: queries of the main branch, after norm and RoPE.
      k: its keys.
      support: the keys that each query attends to; a query with none has probability 0 everywhere.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])  # [B T K G H]
    scores = einsum("btkgh,bskh->bkgts", grouped, k) * q.shape[-1] ** -0.5
    return jnp.mean(jnp.exp(_masked_log_softmax(scores, support[:, :, None])), axis=2)


def _masked_log_softmax(scores: Float[Array, "*X S"], mask: Bool[Array, "*#X S"]) -> Float[Array, "*X S"]:
    """Log-softmax over the masked-in entries; the lowest number elsewhere, so that a row without any has no NaN."""
    lowest = jnp.finfo(scores.dtype).min
    log_probability = jax.nn.log_softmax(jnp.where(mask, scores, lowest), axis=-1)
    return jnp.where(mask, log_probability, lowest)
