"""Decoding in rounds: draft, verify in one call of the target, accept, roll back; one jitted call for many rounds.

Rolling back only shortens a row's length: what lies past it in the pages is seen by no query and is overwritten in the
next round, by the target and by the drafter alike.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from m3jax.decoding.device.state import BAD_LOGITS, LENGTH, LIVE, STOP_ID, Continuations, Layout, NewTokens, State, pin
from m3jax.decoding.device.step import draw_token, for_steps, run_model
from m3jax.decoding.protocols import HostStacks, TargetModel, is_invariant
from m3jax.decoding.sampling import HostOrDevice
from m3jax.decoding.speculation.drafter import Drafter
from m3jax.decoding.speculation.verify import DraftCounts, Proposal, Verdict, seen_by_column, verify

ROUNDS_ARGUMENTS = dict(donate_argnames=("state",), static_argnames=("draft_tokens", "max_rounds", "layout", "types"))


@partial(jax.jit, **ROUNDS_ARGUMENTS)
def decode_in_rounds(
    model: TargetModel,
    drafter: Drafter,
    state: State,
    rounds: Int32[HostOrDevice, ""],
    draft_tokens: int,
    max_rounds: int,
    host: HostStacks | None = None,
    layout: Layout | None = None,
    types: tuple[type, ...] = (),
) -> tuple[State, NewTokens]:
    """Append 1 to 1 + K tokens to every live row, up to `rounds` times.

    Args:
      model: the target.
      drafter: proposes tokens.
      state: of B rows; donated.
      rounds: at most `max_rounds`; the loop also ends when no row is live.
      draft_tokens: K, proposals of a round; a call of the target has X = 1 + K columns.
      max_rounds: rounds that there is room for: W = max_rounds x (1 + K) new tokens of a row.
      host: as in `prefill`.
      layout: as in `prefill`.
      types: as in `prefill`.

    Returns:
      The state, and the new tokens of the B rows.
    """
    batch, max_tokens = len(state.lengths), max_rounds * (1 + draft_tokens)
    model = for_steps(model, batch * (1 + draft_tokens))
    counts_before = state.continuations.counts

    def goes_on(carry):
        round_index, state, *_ = carry
        return (round_index < rounds) & jnp.any(state.stop_reasons == LIVE)

    def run_round(carry):
        round_index, state, all_tokens, all_logprobs, drafting = carry
        is_live, lengths, sampling = state.stop_reasons == LIVE, state.lengths, state.continuations.sampling

        # Propose K tokens for the positions after the newest one.
        proposal, cache = drafter.propose(
            model, state.cache, state.draft_memory, sampling, state.newest_token, lengths, is_live, draft_tokens
        )

        # Verify them in one call of the target, whose columns are the newest token and the proposals.
        # Where nothing was proposed (-1) token 0 runs in its place; it is never accepted.
        tokens = jnp.concatenate([state.newest_token[:, None], jnp.maximum(proposal.tokens, 0)], axis=1)  # [B X]
        positions = lengths[:, None] + jnp.arange(1 + draft_tokens, dtype=jnp.int32)  # [B X]
        positions = jnp.where(is_live[:, None], positions, -1)
        end = lengths + (1 + draft_tokens) * is_live
        hidden, taps, cache = run_model(model, drafter, tokens, cache, host, positions, end)
        # The invariant mode draws each token as decoding without a draft does: the text is the same with any draft.
        if not is_invariant(model):
            logits = model.unembed(hidden).astype(jnp.float32)  # [B X V]
            verdict = verify(logits, proposal, sampling, state.continuations.seen, lengths + 1)
        else:
            verdict = _draw_all(model, hidden, proposal, state.continuations, lengths + 1)

        # Keep what a row may have of the accepted ones and the target's own; its length says what is in the cache.
        continuations, stop_reasons, counts = _append_tokens(state.continuations, verdict, is_live)
        cache, memory = drafter.learn(model, cache, state.draft_memory, taps, verdict.tokens, lengths, counts)
        last_token = jnp.take_along_axis(verdict.tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]  # [B]
        earlier_counts = state.continuations.counts - counts_before
        state = State(
            cache=cache,
            continuations=continuations,
            lengths=lengths + counts,
            newest_token=jnp.where(counts > 0, last_token, state.newest_token),
            stop_reasons=jnp.where(is_live, stop_reasons, state.stop_reasons),
            draft_memory=memory,
        )

        # Write the kept columns behind what each row got in earlier rounds; one past the buffer is dropped.
        column = jnp.arange(1 + draft_tokens, dtype=jnp.int32)
        target_column = jnp.where(column < counts[:, None], earlier_counts[:, None] + column, max_tokens)  # [B X]
        row_index = jnp.arange(batch)[:, None]
        all_tokens = all_tokens.at[row_index, target_column].set(verdict.tokens, mode="drop")  # [B W]
        all_logprobs = all_logprobs.at[row_index, target_column].set(verdict.logprobs, mode="drop")  # [B W]
        is_accepted = verdict.accepted[:, None] > jnp.arange(draft_tokens)  # [B K]
        drafting = DraftCounts(
            forwards=drafting.forwards + jnp.sum(is_live, dtype=jnp.int32),
            accepted=drafting.accepted + jnp.sum(is_accepted & is_live[:, None], axis=0, dtype=jnp.int32),
        )
        return round_index + 1, pin(state, layout), all_tokens, all_logprobs, drafting

    no_tokens, no_logprobs = jnp.zeros((batch, max_tokens), jnp.int32), jnp.zeros((batch, max_tokens), jnp.float32)
    no_drafting = DraftCounts(jnp.int32(0), jnp.zeros(draft_tokens, jnp.int32))
    start = jnp.int32(0), state, no_tokens, no_logprobs, no_drafting
    _, state, tokens, logprobs, drafting = lax.while_loop(goes_on, run_round, start)
    state = pin(state, layout)
    counts = state.continuations.counts - counts_before
    return state, NewTokens(tokens, logprobs, counts, state.stop_reasons, drafting)


def _draw_all(
    model: TargetModel,
    hidden: Float[Array, "B X D"],
    proposal: Proposal,
    continuations: Continuations,
    positions: Int32[Array, "B"],
) -> Verdict:
    """Return the tokens that decoding without a draft would draw, and the length of the run of proposals that agree.

    Drawing them this way gives the target's distribution, as `verify` does, and also the same text with any draft or
    none. A proposal that is a point mass is accepted as often as by `verify`; one that was drawn, less often.

    Args:
      model: the target, invariant.
      hidden: after the newest token and after each proposal: X = 1 + K columns.
      proposal: K tokens a row.
      continuations: of B rows.
      positions: that the first proposal of each row would have.
    """
    batch, width = hidden.shape[:2]
    seen = seen_by_column(continuations.seen, proposal.tokens).reshape(batch * width, -1)  # [B*X V]
    sampling = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), continuations.sampling)  # [B*X]
    positions = (positions[:, None] + jnp.arange(width, dtype=jnp.int32)).reshape(-1)  # [B*X]
    drawn = draw_token(model, hidden.reshape(batch * width, -1), sampling, seen, positions)
    tokens, logprobs = (x.reshape(batch, width) for x in drawn)  # [B X] each
    is_agreed = (tokens[:, :-1] == proposal.tokens) & (tokens[:, :-1] >= 0)
    accepted = jnp.sum(jnp.cumprod(is_agreed, axis=1), axis=1, dtype=jnp.int32)
    return Verdict(accepted, tokens, logprobs)


def _append_tokens(
    continuations: Continuations, verdict: Verdict, is_live: Bool[Array, "B"]
) -> tuple[Continuations, Int32[Array, "B"], Int32[Array, "B"]]:
    """Give each live row its tokens, as if one after the other, up to the one that ends it.

    Returns:
      (continuations, stop reasons, how many tokens each row took).
    """
    width = verdict.tokens.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)
    is_offered = column <= verdict.accepted[:, None]  # [B X]
    is_bad = jnp.any(is_offered & (verdict.tokens < 0), axis=1)
    is_stop_id = jnp.any(verdict.tokens[..., None] == continuations.stop_ids[:, None], axis=-1)  # [B X I] -> [B X]
    is_stop = is_offered & is_stop_id & (verdict.tokens >= 0)
    until_stop = jnp.where(jnp.any(is_stop, axis=1), 1 + jnp.argmax(is_stop, axis=1), 1 + width).astype(jnp.int32)
    remaining = continuations.limits - continuations.counts
    counts = jnp.minimum(jnp.minimum(verdict.accepted + 1 - is_bad, until_stop), remaining) * is_live

    seen_ids = jnp.where(column < counts[:, None], verdict.tokens, continuations.seen.shape[1])  # [B X]
    seen = continuations.seen.at[jnp.arange(len(seen_ids))[:, None], seen_ids].set(True, mode="drop")  # [B V]
    reasons = jnp.where(is_bad, BAD_LOGITS, LIVE)
    reasons = jnp.where(counts >= remaining, LENGTH, reasons)
    reasons = jnp.where(counts == until_stop, STOP_ID, reasons).astype(jnp.int32)
    return replace(continuations, counts=continuations.counts + counts, seen=seen), reasons, counts
