"""Losses: next-token prediction, and the alignment of the index branch with attention (docs/msa.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from m3jax.decoding.sampling import log_normaliser, logprob_of
from m3jax.decoding.support import logits_within
from m3jax.execution import Remat
from m3jax.model import M3, Choices
from m3jax.model.context import Context
from m3jax.msa.chunks import map_chunks, rows_within
from m3jax.numerics import einsum
from m3jax.spec.msa import chosen_tokens, sees
from m3jax.tiles import LOGITS_TILE, by_tiles
from m3jax.train.fused import fuse
from m3jax.train.packing import with_fast_gradients
from m3jax.train.step import cast_weights, check_trainable

_SCORE_BUDGET = 1 << 26  # probabilities of one chunk of queries


@dataclass(frozen=True)
class MSALoss:
    """The loss of a language model with sparse attention: the next token, and the alignment of the index branch.

    Two of the same settings are equal, so that `train_step` is compiled once for them.

    Attributes:
      kl_weight: weight of the index loss; 0 leaves it out.
      kl_stride: every how many queries the index loss looks at, from an offset that is drawn for each step.
      compute_dtype: activations and weights of the forward pass; the master weights stay float32.
      remat: what the backward pass recomputes (`m3jax.execution.Compute`).
      fused: attention by `m3jax.train.fused`, for rows without padding; otherwise by the model's schedule.
    """

    kl_weight: float = 1.0
    kl_stride: int = 8
    compute_dtype: str = "bfloat16"
    remat: Remat = True
    fused: bool = False

    def __call__(self, model: M3, batch: Mapping[str, Any]) -> tuple[Float[Array, ""], dict[str, Any]]:
        """Return the loss of a batch and its parts.

        Args:
          model: float32 master weights; its schedule says whether attention is dense or sparse.
          batch: tokens int [B T+1], weights [B T] of the targets `tokens[:, 1:]`, and step, as `train_step` adds it.

        Returns:
          (loss, {"lm", "kl", "loads"}), losses in nats: lm with the batch's weights, kl the mean over sparse layers.
          loads is a list over stacks of [L E], the share of routed pairs that each expert got; None where the MLP is
          dense.

        Raises:
          ValueError: weights in MXFP8, which no step could move.
        """
        offset = self.offset(batch)
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits, measures = self.read(self.prepare(model), tokens, offset)
        lm = next_token_loss(logits, targets, batch["weights"])
        parts = {"lm": lm, **layer_parts(measures)}
        return lm + self.kl_weight * parts["kl"], parts

    def offset(self, batch: Mapping[str, Any]) -> Int[Array, ""]:
        """Return the first query of the index loss, drawn anew for each step; 0 is the step of a batch without one."""
        return drawn_offset(batch.get("step", 0), self.kl_stride)

    def prepare(self, model: M3) -> M3:
        """Return the model as it computes: in `compute_dtype`, and fused where that is asked for.

        Args:
          model: master weights.

        Raises:
          ValueError: weights in MXFP8.
        """
        check_trainable(model)
        model = cast_weights(model, self.compute_dtype)
        return fuse(model) if self.fused else model

    def read(
        self,
        model: M3,
        tokens: Int[Array, "B T"],
        offset: Int[Array, ""],
        embeddings: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T V"], list[dict[str, Array]]]:
        """Return the logits of some rows, and what was measured in the layers of each stack (`layer_parts`).

        Args:
          model: from `prepare`.
          tokens: rows without padding.
          offset: first query of the index loss.
          embeddings: in place of the tokens' own.
        """
        probe = partial(_layer_measures, block_size=model.config.index_block_size,
                        num_experts=model.config.num_local_experts, offset=offset, loss=self)  # fmt: skip
        out = model.run(tokens, embeddings=embeddings, probe=probe, remat=self.remat)
        return out.logits, out.probed


def layer_parts(stacks: list[dict[str, Array]]) -> dict[str, Any]:
    """Return the parts of a loss that layers measured: "kl", mean of the index loss, and "loads" as `MSALoss` has them.

    Args:
      stacks: from `MSALoss.read`.
    """
    layer_kls = [measures["kl"] for measures in stacks if "kl" in measures]  # [L] of each sparse stack
    kl = sum(jnp.sum(kls) for kls in layer_kls) / max(1, sum(kls.shape[0] for kls in layer_kls))
    return {"kl": jnp.asarray(kl, jnp.float32), "loads": [measures.get("load") for measures in stacks]}


def _layer_measures(
    values: dict[str, Array],
    context: Context,
    block_size: int,
    num_experts: int,
    offset: Int[Array, ""],
    loss: MSALoss,
) -> dict[str, Array]:
    """Return what a loss needs of one layer: "kl", its index loss, and "load" [E], each expert's share of the pairs."""
    measures = {}
    if "index_q" in values and loss.kl_weight:
        measures["kl"] = strided_index_kl(values, context, context.positions, offset, loss.kl_stride, block_size)
    if "expert_ids" in values:
        counts = jnp.bincount(values["expert_ids"].reshape(-1), length=num_experts)
        measures["load"] = counts / values["expert_ids"].size
    return measures


def drawn_offset(step: Int[Array, ""] | int, stride: int) -> Int[Array, ""]:
    """Return the first token of a row that the index loss looks at, drawn anew for each step.

    Args:
      step: of the run.
      stride: from one token that it looks at to the next.
    """
    return jax.random.randint(jax.random.fold_in(jax.random.key(0), step), (), 0, stride)


def strided_index_kl(
    values: Mapping[str, Array],
    context: Context,
    slots: Int[Array, "B T"],
    offset: Int[Array, ""],
    stride: int,
    block_size: int,
    first_keys: Int[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Return `index_kl` of every so many queries of a layer: on its selected blocks, or, without a selection, on all.

    Args:
      values: Values of a layer with an index branch, by name.
      context: Context of the call.
      slots: Place of each query in its row.
      offset: First query that counts.
      stride: Distance from one query that counts to the next.
      block_size: P.
      first_keys: First key that each query sees; the row's first by default.
    """
    queries = offset + jnp.arange(slots.shape[1] // stride, dtype=jnp.int32) * stride
    pick = lambda x, axis=1: jnp.take(x, queries, axis=axis)
    return index_kl(
        pick(values["q"]), values["k"], pick(values["index_q"]), values["index_k"],
        blocks=pick(values["blocks"], 2) if "blocks" in values else None, positions=pick(slots),
        lengths=context.lengths, block_size=block_size, first_keys=None if first_keys is None else pick(first_keys),
    )  # fmt: skip


def next_token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Return the weighted mean cross-entropy of the next token, in nats; 0 if all weights are 0."""
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]  # [B T]
    losses = jax.nn.logsumexp(logits, axis=-1) - target_logit
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def token_logprobs(
    model: M3,
    tokens: Int[Array, "B T"],
    choices: Choices | None = None,
    remat: Remat = False,
    support: Int[Array, "B T-1 W"] | None = None,
    temperature: float | None = None,
) -> Float[Array, "B T-1"]:
    """Return the log-probability of each token but the first, given those before it; it has gradients.

    Of a model in its invariant mode (`M3.with_invariance`) these are to the bit those that an invariant engine reports
    for the tokens that it drew, on the same backend and with the same weights and dtype: training is on-policy then.

    Args:
      model: the target.
      tokens: prompts and what followed, right-padded; what the padding gets means nothing.
      choices: experts and blocks that tokens take in place of the model's own choice, as a request's record has them.
      remat: what the backward pass recomputes (`m3jax.execution.Compute`).
      support: the tokens that could have been drawn in the place of each, as a request's record "support" has them; -1
        for all. The log-probabilities are then those among these, and other tokens have a gradient of exactly 0.
      temperature: by which logits are divided. None, without a support, reads the model's own logits, as the engine's
        `logprobs` do; a number, as "drawn_logprobs" do.
    """
    if not model.compute.invariant:
        model = with_fast_gradients(model)
    hidden = model.run(tokens, choices=choices, remat=remat, logits=False).hidden
    return logprobs_of_hidden(model, hidden, tokens, support, temperature)


def logprobs_of_hidden(
    model: M3,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    support: Int[Array, "B T-1 W"] | None,
    temperature: float | None,
) -> Float[Array, "B T-1"]:
    """Return what `token_logprobs` returns, of what the model's final norm gives for each token.

    Args:
      model, tokens, support, temperature: as in `token_logprobs`.
      hidden: of the tokens.
    """
    tile = LOGITS_TILE if model.compute.invariant else None

    def of_tokens(hidden, tokens, support):
        logits = model.unembed(hidden).astype(jnp.float32)
        if support is not None or temperature is not None:
            logits = logits_within(logits, support, 1.0 if temperature is None else temperature)
        return logprob_of(tokens, logits, by_tiles(log_normaliser, tile, logits))

    batch, length, width = hidden[:, :-1].shape
    of_rows = hidden[:, :-1].reshape(-1, width), tokens[:, 1:].reshape(-1)
    support = None if support is None else support.reshape(batch * length, -1)
    return by_tiles(of_tokens, model.compute.token_tile, *of_rows, support).reshape(batch, length)


def index_kl(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    index_q: Float[Array, "B T K I"],
    index_k: Float[Array, "B S I"],
    blocks: Int[Array, "B K T J"] | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    block_size: int,
    first_keys: Int[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Return the KL divergence from the heads' attention to the index branch's distribution, in nats.

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
      first_keys: the first key that each query sees, where a row holds several documents (T29); 0 by default.

    Source: paper, the training objective of the index branch.
    """
    q, k = jax.lax.stop_gradient((q, k))
    num_keys, kv_heads = k.shape[1:3]
    key_positions = jnp.arange(num_keys, dtype=jnp.int32)

    def divergence(q, index_q, support):
        teacher = mean_attention(q, k, support)  # [B K T S]
        scores = einsum("btki,bsi->bkts", index_q, index_k) * index_k.shape[-1] ** -0.5
        student = _masked_log_softmax(scores, support)
        # A key of teacher 0 adds 0, the limit of p log p; log 0 is never taken.
        log_teacher = jnp.log(jnp.where(teacher > 0, teacher, 1.0))
        kl = jnp.sum(jnp.where(teacher > 0, teacher * (log_teacher - student), 0.0), axis=-1)  # [B K T]
        return kl.swapaxes(1, 2)

    def whole_row(q, index_q, positions, first_keys):
        visible = sees(positions, lengths, key_positions) & (key_positions >= first_keys[..., None])  # [B T S]
        return divergence(q, index_q, visible[:, None])

    def selected(q, index_q, positions, blocks):
        visible = sees(positions, lengths, key_positions)[:, None]  # [B 1 T S]
        in_selection = chosen_tokens(blocks.swapaxes(1, 2), num_keys, block_size)  # [B K T S]
        return divergence(q, index_q, visible & in_selection)

    per_query = q.shape[0] * (q.shape[2] + 2 * kv_heads) * num_keys
    chunk = rows_within(_SCORE_BUDGET, per_query, q.shape[1])
    if blocks is None:
        first_keys = jnp.zeros_like(positions) if first_keys is None else first_keys
        kl = map_chunks(whole_row, chunk, 1, q, index_q, positions, first_keys)  # [B T K]
    else:
        kl = map_chunks(selected, chunk, 1, q, index_q, positions, blocks.swapaxes(1, 2))  # [B T K]
    is_real = (positions >= 0) & (positions < lengths[:, None])
    return jnp.sum(jnp.where(is_real[..., None], kl, 0.0)) / jnp.maximum(jnp.sum(is_real) * kv_heads, 1)


def mean_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], support: Bool[Array, "B #K T S"]
) -> Float[Array, "B K T S"]:
    """Return the mean, over the query heads of a group, of their attention probabilities on the support.

    Args:
      q: queries of the main branch, after norm and RoPE.
      k: its keys.
      support: the keys that each query attends to; a query with none has probability 0 everywhere.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])  # [B T K G H]
    scores = einsum("btkgh,bskh->bkgts", grouped, k) * q.shape[-1] ** -0.5
    return jnp.mean(jnp.exp(_masked_log_softmax(scores, support[:, :, None])), axis=2)


def _masked_log_softmax(scores: Float[Array, "*X S"], mask: Bool[Array, "*#X S"]) -> Float[Array, "*X S"]:
    """Return log-softmax over the entries that the mask has, and the dtype's lowest number elsewhere.

    The lowest number, not -inf: a row whose mask is empty would get NaN.
    """
    lowest = jnp.finfo(scores.dtype).min
    log_probability = jax.nn.log_softmax(jnp.where(mask, scores, lowest), axis=-1)
    return jnp.where(mask, log_probability, lowest)
