"""The rule by which a target keeps drafted tokens so that its own distribution is what comes out."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, Shaped, UInt32

from m3jax.decoding.protocols import OF_DRAWS
from m3jax.decoding.sampling import (
    NO_DISTRIBUTION,
    NO_TOKEN,
    DrawContext,
    HostOrDevice,
    SamplingParams,
    best_token,
    filtered_logits,
    has_distribution,
    is_plain,
    log_normaliser,
    logprob_of,
    row_keys,
    top_if_asked,
)
from m3jax.decoding.support import record_draws

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
      tokens: those, then the target's own next token, negative where none could be drawn (`sample`). What follows means
        nothing.
      logprobs: of each token under the target's own logits, before any knob.
      top_ids: the Z most probable tokens in each place under the same logits, best first; 0 where no row asks for them.
      top_logprobs: of these.
      of_draws: what `record_draws` gives in each place, by name.
    """

    accepted: Int32[Array, "B"]
    tokens: Int32[Array, "B X"]
    logprobs: Float32[Array, "B X"]
    top_ids: Int32[Array, "B X Z"]
    top_logprobs: Float32[Array, "B X Z"]
    of_draws: dict[str, Shaped[Array, "B X ..."]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftCounts:
    """Counts of the proposals of one device call, and of those that were accepted, by row.

    Attributes:
      forwards: how often the target verified proposals of the row.
      proposed: tokens that were proposed in these: up to K each.
      accepted: in how many of them the first proposal was accepted, the first two, and so on.
    """

    forwards: Int32[HostOrDevice, "B"]
    proposed: Int32[HostOrDevice, "B"]
    accepted: Int32[HostOrDevice, "B K"]


def verify(
    logits: Float[Array, "B X V"],
    proposal: Proposal,
    params: SamplingParams,
    context: DrawContext,
    positions: Int32[Array, "B"],
    wants_top: Bool[Array, "B"] | None = None,
    num_top: int = 0,
    records: tuple[str, ...] = (),
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
      context: of B rows, before the proposals; accepted ones join it. Under a mask, which says nothing of the tokens
        after the next one, a row must have no proposals.
      positions: that the first proposal of each row would have.
      wants_top: rows that ask for the most probable tokens; None for none.
      num_top: Z, how many.
      records: names of what is recorded; those that are of a draw are made here. Whatever a token's proposal was, it is
        distributed as the target's own draw.

    Source: Leviathan et al. 2023, algorithm 1; vLLM's rejection sampler for proposals without a distribution.
    """
    batch, width, vocab = logits.shape
    rows, inputs = logits.reshape(-1, vocab), (logits, proposal, params, context, positions)

    def choose_plainly(logits, proposal, *_):
        return *_choose_best(logits, proposal), *top_if_asked(rows, None, num_top)

    def choose(*inputs):
        accepted, own_token, filtered = _choose(*inputs)
        return accepted, own_token, *top_if_asked(rows, wants_top, num_top), filtered

    if any(name in OF_DRAWS for name in records):
        accepted, own_token, top_ids, top, filtered = choose(*inputs)
    else:  # rows are greedy most often, and then this is the only condition, as in `sample_with_top`
        all_plain, filtered = jnp.all(is_plain(params, context, wants_top)), None
        accepted, own_token, top_ids, top = lax.cond(all_plain, choose_plainly, lambda *x: choose(*x)[:-1], *inputs)
    top_ids, top = (x.reshape(batch, width, num_top) for x in (top_ids, top))

    proposed = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))  # [B X]
    tokens = jnp.where(jnp.arange(width) == accepted[:, None], own_token[:, None], proposed)
    log_total = log_normaliser(logits)  # [B X]
    logprobs = logprob_of(tokens, logits, log_total)  # [B X]
    top_logprobs = top - log_total[..., None]
    of_draws = {} if filtered is None else record_draws(filtered, tokens.reshape(-1), records)
    of_draws = {name: value.reshape(batch, width, *value.shape[1:]) for name, value in of_draws.items()}
    return Verdict(accepted, tokens, logprobs, top_ids, top_logprobs, of_draws)


def _choose(
    logits: Float[Array, "B X V"],
    proposal: Proposal,
    params: SamplingParams,
    context: DrawContext,
    positions: Int32[Array, "B"],
) -> tuple[Int32[Array, "B"], Int32[Array, "B"], Float32[Array, "Y V"]]:
    """Return how many proposals are accepted, the target's own token, and the B*X rows that `filtered_logits` gives.

    Args:
      logits, proposal, params, context, positions: as of `verify`.
    """
    batch, width, vocab = logits.shape
    # The knobs take rows of logits: each of the X columns becomes a row with its own row's parameters.
    column_params = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), params)  # [B*X]
    column_context = context_by_column(context, proposal.tokens)  # of B*X rows
    filtered = filtered_logits(logits.reshape(-1, vocab), column_params, column_context)  # [B*X V]
    has_token = (jnp.max(filtered, axis=-1) == 0).reshape(batch, width)  # [B X]
    is_usable = has_distribution(logits) & has_token  # [B X]
    log_p = jax.nn.log_softmax(filtered).reshape(logits.shape)  # [B X V]
    # A knob may drop the NaN of a column and leave its proposal: such a column accepts nothing.
    would_accept = _would_accept(log_p, proposal, params, positions) * is_usable[:, :-1]  # [B K]
    accepted = _run_length(would_accept)

    log_weights = _own_token_weights(log_p, proposal, accepted)  # [B V]
    best = lambda keys, weights: jnp.argmax(weights, axis=-1).astype(jnp.int32)
    draw = lambda keys, weights: jax.vmap(jax.random.categorical)(keys, weights).astype(jnp.int32)
    keys = position_keys(params.seed, positions + accepted, _DRAW)
    own_token = lax.cond(jnp.all(params.temperature == 0), best, draw, keys, log_weights)
    no_token = jnp.where(has_distribution(logits), jnp.int32(NO_TOKEN), jnp.int32(NO_DISTRIBUTION))  # [B X]
    own_token = jnp.where(_column_of_row(is_usable, accepted), own_token, _column_of_row(no_token, accepted))
    return accepted, own_token, filtered


def _choose_best(logits: Float[Array, "B X V"], proposal: Proposal) -> tuple[Int32[Array, "B"], Int32[Array, "B"]]:
    """Return the first two of `_choose` where every row takes the best token of the model's own logits."""
    best = jnp.where(has_distribution(logits), best_token(logits), jnp.int32(NO_DISTRIBUTION))  # [B X]
    accepted = count_agreeing(best, proposal)
    return accepted, _column_of_row(best, accepted)


def count_agreeing(tokens: Int32[Array, "B X"], proposal: Proposal) -> Int32[Array, "B"]:
    """Return how many proposals of each row are the tokens in their places, up to the first that is not or is none."""
    return _run_length((tokens[:, :-1] == proposal.tokens) & (tokens[:, :-1] >= 0))


def _run_length(accepts: Shaped[Array, "B K"]) -> Int32[Array, "B"]:
    """Return how many columns of each row are true before the first that is not."""
    return jnp.sum(jnp.cumprod(accepts, axis=1), axis=1, dtype=jnp.int32)


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


def context_by_column(context: DrawContext, tokens: Int32[Array, "B K"]) -> DrawContext:
    """Return the context of each of the X = 1 + K columns: the row's, and the proposals before the column."""
    batch, count = tokens.shape
    is_earlier = jnp.arange(count) < jnp.arange(count + 1)[:, None]  # [X K]
    later = jnp.where(is_earlier, tokens[:, None], -1).reshape(batch * (count + 1), count)  # [B*X K]
    of_column = lambda values: jnp.repeat(values, count + 1, axis=0)
    row = of_column(jnp.arange(batch, dtype=jnp.int32))  # [B*X]
    is_edited = None if context.is_edited is None else of_column(context.is_edited)
    return replace(context, is_edited=is_edited, row=row, later=later)
