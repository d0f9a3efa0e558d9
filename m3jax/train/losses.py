"""Losses: next-token prediction, and the alignment of the index branch with attention (docs/msa.md)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.msa.dense import causal
from m3jax.msa.sparse import expand_blocks
from m3jax.numerics import einsum

_SCORE_BUDGET = 1 << 26  # probabilities of one chunk of queries


def next_token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Weighted mean cross-entropy, in nats a token."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


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
    q and k, so none reaches the trunk (T33).

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
    per_query = q.shape[0] * (q.shape[2] + 2 * k.shape[2]) * k.shape[1]
    chunk = rows_within(_SCORE_BUDGET, per_query, q.shape[1])

    def rows(q, index_q, positions, blocks):
        support = causal(positions, lengths, jnp.arange(k.shape[1], dtype=jnp.int32))[:, None]
        if blocks is not None:
            support &= expand_blocks(blocks.swapaxes(1, 2), k.shape[1], block_size)
        teacher = _teacher(q, k, support)
        student = _masked_log_softmax(einsum("btki,bsi->bkts", index_q, index_k) * index_k.shape[-1] ** -0.5, support)
        log_teacher = jnp.log(jnp.where(teacher > 0, teacher, 1.0))
        return jnp.sum(jnp.where(teacher > 0, teacher * (log_teacher - student), 0.0), axis=-1).swapaxes(1, 2)

    if blocks is None:
        out = map_chunks(lambda a, b, c: rows(a, b, c, None), chunk, 1, q, index_q, positions)
    else:
        out = map_chunks(rows, chunk, 1, q, index_q, positions, blocks.swapaxes(1, 2))
    real = (positions >= 0) & (positions < lengths[:, None])
    return jnp.sum(jnp.where(real[..., None], out, 0.0)) / jnp.maximum(jnp.sum(real) * k.shape[2], 1)


def caught_mass(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    config: M3Config,
) -> Float[Array, "B K T"]:
    """Share of dense attention's probability that lies in the selected blocks, mean over a group's heads."""
    per_query = q.shape[0] * 2 * q.shape[2] * k.shape[1]

    def rows(q, positions, blocks):
        visible = causal(positions, lengths, jnp.arange(k.shape[1], dtype=jnp.int32))[:, None]
        chosen = expand_blocks(blocks.swapaxes(1, 2), k.shape[1], config.index_block_size)
        return jnp.sum(_teacher(q, k, visible) * chosen, axis=-1).swapaxes(1, 2)

    chunk = rows_within(_SCORE_BUDGET, per_query, q.shape[1])
    return map_chunks(rows, chunk, 1, q, positions, blocks.swapaxes(1, 2)).swapaxes(1, 2)


def _teacher(q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], support: Array) -> Float[Array, "B K T S"]:
    """Mean over the heads of a group of their attention probabilities on the support."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = einsum("btkgh,bskh->bkgts", grouped, k) * q.shape[-1] ** -0.5
    return jnp.mean(jnp.exp(_masked_log_softmax(scores, support[:, :, None])), axis=2)


def _masked_log_softmax(scores: Float[Array, "*X S"], mask: Array) -> Float[Array, "*X S"]:
    """Log-softmax over the masked-in entries; -inf elsewhere, without NaN in rows that have none."""
    low = jnp.finfo(scores.dtype).min
    out = jax.nn.log_softmax(jnp.where(mask, scores, low), axis=-1)
    return jnp.where(mask, out, low)
