"""The rule by which a target keeps drafted tokens so that its own distribution is what comes out."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, Shaped, UInt32

from m3jax.decoding.sampling import HostOrDevice, SamplingParams, filtered_logits, has_distribution, row_keys

# What a random number at a position is for: each is drawn from a key of its own.
_ACCEPT, _DRAW, DRAFT = range(3)


class Proposal(NamedTuple):
    """The tokens that a drafter proposes.

    Attributes:
      tokens: K of each row; -1 for none, which is never accepted.
      log_q: log-probabilities of the distributions that they were drawn from; None where there was no draw, and a
        proposal counts as a point mass.
    """

    tokens: Int32[Array, "B K"]
    log_q: Float32[Array, "B K V"] | None = None


class Verdict(NamedTuple):
    """The tokens that are kept of one round of proposals.

    Attributes:
      accepted: the number of proposals accepted of each row, 0 to K.
      tokens: those, then the target's own next token, -1 where its logits had no distribution. What follows means
        nothing.
      logprobs: of each token under the target's own logits, before any knob.
    """

    accepted: Int32[Array, "B"]
    tokens: Int32[Array, "B X"]
    logprobs: Float32[Array, "B X"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftCounts:
    """Counts of the proposals of one device call, and of those that were accepted.

    Attributes:
      forwards: how often the target verified proposals of some row: a call for three rows counts as three.
      accepted: in how many of them the first proposal was accepted, the first two, and so on.
    """

    forwards: Int32[HostOrDevice, ""]
    accepted: Int32[HostOrDevice, "K"]


def verify(
    logits: Float[Array, "B X V"],
    proposal: Proposal,
    params: SamplingParams,
    seen: Bool[Array, "B V"],
    positions: Int32[Array, "B"],
) -> Verdict:
    """Accept the longest run of proposals that the rule allows, and draw one token more.

    The target's distribution p is the one after every knob. A proposal x is accepted with probability
    min(1, p(x) / q(x)), where a point mass has q(x) = 1; at the first refusal the next token is drawn from
    max(p - q, 0), normalised, and after K acceptances from p. A greedy row has all of p on one token, so it accepts
    while proposals are the best token, and goes on with the best token.

    Args:
      logits: the target's own, X = 1 + K: after the newest token, then after each proposal.
      proposal: K tokens a row.
      params: B rows.
      seen: tokens of each row so far, for the repetition penalty; accepted proposals join them.
      positions: that the first proposal of each row would have.

    Source: Leviathan et al. 2023, algorithm 1; vLLM's rejection sampler for proposals without a distribution.
    """
    batch, width, vocab = logits.shape
    # The knobs take rows of logits: each of the X columns becomes a row with its own row's parameters.
    column_params = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), params)  # [B*X]
    column_seen = seen_by_column(seen, proposal.tokens).reshape(-1, vocab)  # [B*X V]
    filtered = filtered_logits(logits.reshape(-1, vocab), column_params, column_seen)  # [B*X V]
    is_usable = has_distribution(logits) & (jnp.max(filtered, axis=-1) == 0).reshape(batch, width)  # [B X]
    log_p = jax.nn.log_softmax(filtered).reshape(logits.shape)  # [B X V]
    # A knob may drop the NaN of a column and leave its proposal: such a column accepts nothing.
    would_accept = _would_accept(log_p, proposal, params, positions) * is_usable[:, :-1]  # [B K]
    accepted = jnp.sum(jnp.cumprod(would_accept, axis=1), axis=1, dtype=jnp.int32)

    log_weights = _own_token_weights(log_p, proposal, accepted)  # [B V]
    best = lambda keys, weights: jnp.argmax(weights, axis=-1).astype(jnp.int32)
    draw = lambda keys, weights: jax.vmap(jax.random.categorical)(keys, weights).astype(jnp.int32)
    keys = position_keys(params.seed, positions + accepted, _DRAW)
    own_token = lax.cond(jnp.all(params.temperature == 0), best, draw, keys, log_weights)
    own_token = jnp.where(_column_of_row(is_usable, accepted), own_token, -1)

    proposed = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))  # [B X]
    tokens = jnp.where(jnp.arange(width) == accepted[:, None], own_token[:, None], proposed)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]  # [B X]
    return Verdict(accepted, tokens, chosen - jax.nn.logsumexp(logits, axis=-1))


def position_keys(seed: UInt32[Array, "B"], positions: Int32[Array, "B"], purpose: int) -> Key[Array, "B"]:
    """Return the random key of a purpose at each row's position: only its own position's keys decide a token."""
    return jax.vmap(lambda key: jax.random.fold_in(key, purpose))(row_keys(seed, positions))


def _would_accept(
    log_p: Float32[Array, "B X V"], proposal: Proposal, params: SamplingParams, positions: Int32[Array, "B"]
) -> Int32[Array, "B K"]:
    """Return 1 where a proposal is accepted provided that all before it are, else 0."""
    batch, count = proposal.tokens.shape
    token_index = jnp.maximum(proposal.tokens, 0)[..., None]
    p = jnp.exp(jnp.take_along_axis(log_p[:, :count], token_index, axis=-1)[..., 0])  # [B K]
    q = 1.0
    if proposal.log_q is not None:
        q = jnp.exp(jnp.take_along_axis(proposal.log_q, token_index, axis=-1)[..., 0])  # [B K]
    column_positions = (positions[:, None] + jnp.arange(count, dtype=jnp.int32)).reshape(-1)  # [B*K]
    keys = position_keys(jnp.repeat(params.seed, count), column_positions, _ACCEPT)
    u = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys).reshape(batch, count)  # [B K]
    return ((u * q < p) & (proposal.tokens >= 0)).astype(jnp.int32)


def _own_token_weights(
    log_p: Float32[Array, "B X V"], proposal: Proposal, accepted: Int32[Array, "B"]
) -> Float32[Array, "B V"]:
    """Return log-weights of the target's own token: of p if all are accepted, else of max(p - q, 0)."""
    count = proposal.tokens.shape[1]
    refused, p = jnp.minimum(accepted, count - 1), jnp.exp(_column_of_row(log_p, accepted))
    refused_token = jnp.where(accepted < count, _column_of_row(proposal.tokens, refused), -1)
    covered = jnp.where(jnp.arange(p.shape[1]) == refused_token[:, None], 1.0, 0.0)  # [B V]
    if proposal.log_q is not None:
        covered = jnp.where(refused_token[:, None] >= 0, jnp.exp(_column_of_row(proposal.log_q, refused)), 0.0)
    remaining = jnp.maximum(p - covered, 0.0)
    # Nothing is left only where rounding made q as large as p everywhere; p is as good a choice then.
    return jnp.log(jnp.where(jnp.any(remaining > 0, axis=1, keepdims=True), remaining, p))


def _column_of_row(x: Shaped[Array, "B X ..."], column: Int32[Array, "B"]) -> Shaped[Array, "B ..."]:
    """Return one column of each row: x[b, column[b]]."""
    return jnp.take_along_axis(x, column.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]


def seen_by_column(seen: Bool[Array, "B V"], tokens: Int32[Array, "B K"]) -> Bool[Array, "B X V"]:
    """Return the tokens that each of the X = 1 + K columns has seen: the row's, and the proposals before it."""
    batch, count = tokens.shape
    is_earlier = jnp.arange(count) < jnp.arange(count + 1)[:, None]  # [X K]
    seen_ids = jnp.where(is_earlier & (tokens >= 0)[:, None], tokens[:, None], seen.shape[1])  # [B X K]
    row_index, column_index = jnp.arange(batch)[:, None, None], jnp.arange(count + 1)[:, None]
    seen = jnp.repeat(seen[:, None], count + 1, axis=1)  # [B X V]
    return seen.at[row_index, column_index, seen_ids].set(True, mode="drop")
