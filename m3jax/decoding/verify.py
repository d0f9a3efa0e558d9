"""Which drafted tokens a target keeps, so that its own distribution is what comes out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, UInt32

from m3jax.decoding.sampling import SamplingParams, filtered_logits, row_keys

# What a random number at a position is for: each is drawn from a key of its own.
_ACCEPT, _DRAW, DRAFT = range(3)


class Proposal(NamedTuple):
    """What a drafter proposes.

    Attributes:
      tokens: K of each row; -1 for none, which is never accepted.
      log_q: log-probabilities of the distributions that they were drawn from; None where there was no draw, and a
        proposal counts as a point mass.
    """

    tokens: Int32[Array, "B K"]
    log_q: Float32[Array, "B K V"] | None = None


class Verdict(NamedTuple):
    """What is kept.

    Attributes:
      accepted: how many proposals of each row, 0 to K.
      tokens: those, then the target's own next token, -1 where its logits had no distribution. What follows means
        nothing.
      logprobs: of each token under the target's own logits, before any knob.
    """

    accepted: Int32[Array, "B"]
    tokens: Int32[Array, "B X"]
    logprobs: Float32[Array, "B X"]


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
    repeated = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), params)
    flat = filtered_logits(logits.reshape(-1, vocab), repeated, _seen(seen, proposal.tokens).reshape(-1, vocab))
    usable = jnp.isfinite(jnp.max(logits, axis=-1)) & (jnp.max(flat, axis=-1) == 0).reshape(batch, width)
    log_p = jax.nn.log_softmax(flat).reshape(logits.shape)
    accepted = jnp.sum(jnp.cumprod(_accepts(log_p, proposal, params, positions), axis=1), axis=1, dtype=jnp.int32)

    left = _residual(log_p, proposal, accepted)
    greedy = lambda keys, x: jnp.argmax(x, axis=-1).astype(jnp.int32)
    drawn = lambda keys, x: jax.vmap(jax.random.categorical)(keys, x).astype(jnp.int32)
    keys = position_keys(params.seed, positions + accepted, _DRAW)
    token = lax.cond(jnp.all(params.temperature == 0), greedy, drawn, keys, left)
    token = jnp.where(_at(usable, accepted), token, -1)

    padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(width) == accepted[:, None], token[:, None], padded)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return Verdict(accepted, tokens, chosen - jax.nn.logsumexp(logits, axis=-1))


def position_keys(seed: UInt32[Array, "B"], positions: Int32[Array, "B"], purpose: int) -> Key[Array, "B"]:
    """The random key of a purpose at each row's position: a token is decided by its own position's keys alone."""
    return jax.vmap(lambda key: jax.random.fold_in(key, purpose))(row_keys(seed, positions))


def _accepts(log_p, proposal: Proposal, params: SamplingParams, positions) -> Int32[Array, "B K"]:
    """1 where a proposal would be accepted if all before it are."""
    batch, count = proposal.tokens.shape
    pick = lambda x: jnp.take_along_axis(x, jnp.maximum(proposal.tokens, 0)[..., None], axis=-1)[..., 0]
    p = jnp.exp(pick(log_p[:, :count]))
    q = 1.0 if proposal.log_q is None else jnp.exp(pick(proposal.log_q))
    at = (positions[:, None] + jnp.arange(count, dtype=jnp.int32)).reshape(-1)
    keys = position_keys(jnp.repeat(params.seed, count), at, _ACCEPT)
    u = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys).reshape(batch, count)
    return ((u * q < p) & (proposal.tokens >= 0)).astype(jnp.int32)


def _residual(log_p, proposal: Proposal, accepted: Int32[Array, "B"]) -> Float32[Array, "B V"]:
    """Log-weights of the target's own token: p after all proposals, else what of p the refused one did not cover."""
    count = proposal.tokens.shape[1]
    refused, p = jnp.minimum(accepted, count - 1), jnp.exp(_at(log_p, accepted))
    token = jnp.where(accepted < count, _at(proposal.tokens, refused), -1)
    covered = jnp.where(jnp.arange(p.shape[1]) == token[:, None], 1.0, 0.0)
    if proposal.log_q is not None:
        covered = jnp.where(token[:, None] >= 0, jnp.exp(_at(proposal.log_q, refused)), 0.0)
    left = jnp.maximum(p - covered, 0.0)
    # Nothing is left only where rounding made q as large as p everywhere; p is as good a choice then.
    return jnp.log(jnp.where(jnp.any(left > 0, axis=1, keepdims=True), left, p))


def _at(x: Array, index: Int32[Array, "B"]) -> Array:
    """x[b, index[b]]."""
    return jnp.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]


def _seen(seen: Bool[Array, "B V"], tokens: Int32[Array, "B K"]) -> Bool[Array, "B X V"]:
    """What each of the X = 1 + K columns has seen: the row's tokens and the proposals before it."""
    batch, count = tokens.shape
    vocab = seen.shape[1]
    earlier = jnp.arange(count) < jnp.arange(count + 1)[:, None]
    ids = jnp.where(earlier & (tokens >= 0)[:, None], tokens[:, None], vocab)
    rows, columns = jnp.arange(batch)[:, None, None], jnp.arange(count + 1)[:, None]
    return jnp.repeat(seen[:, None], count + 1, axis=1).at[rows, columns, ids].set(True, mode="drop")
