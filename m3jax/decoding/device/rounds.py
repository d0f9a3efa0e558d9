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

from m3jax.decoding.device.state import (
    BAD_LOGITS,
    LENGTH,
    LIVE,
    NOTHING_ALLOWED,
    STOP_ID,
    Continuations,
    Layout,
    Masks,
    NewTokens,
    State,
    on_rows,
    pin,
    readable,
)
from m3jax.decoding.device.step import draw_token, for_steps, no_new_tokens, room_for_choices, run_model
from m3jax.decoding.protocols import HostStacks, TargetModel, is_invariant
from m3jax.decoding.sampling import NO_TOKEN, USED, DrawContext, HostOrDevice, pushed
from m3jax.decoding.speculation.drafter import Drafter
from m3jax.decoding.speculation.verify import DraftCounts, Proposal, Verdict, context_by_column, count_agreeing, verify
from m3jax.decoding.steering import Steering

ROUNDS_ARGUMENTS = dict(
    donate_argnames=("state",), static_argnames=("draft_tokens", "max_rounds", "num_top", "records", "layout", "types")
)


@partial(jax.jit, **ROUNDS_ARGUMENTS)
def decode_in_rounds(
    model: TargetModel,
    drafter: Drafter,
    state: State,
    rounds: Int32[HostOrDevice, "B"],
    draft_tokens: int,
    max_rounds: int,
    host: HostStacks | None = None,
    masks: Masks | None = None,
    edits: dict[str, Steering] | None = None,
    rows: Int32[HostOrDevice, "R"] | None = None,
    num_top: int = 0,
    records: tuple[str, ...] = (),
    layout: Layout | None = None,
    types: tuple[type, ...] = (),
) -> tuple[State, NewTokens]:
    """Append 1 to 1 + K tokens to each live row, up to `rounds` times; one token, once, to a row under a mask.

    Args:
      model: the target.
      drafter: proposes tokens.
      state: of B rows; donated.
      rounds: of each row, at most `max_rounds`; a row that has taken them stays LIVE.
      draft_tokens: K, proposals of a round; a call of the target has X = 1 + K columns.
      max_rounds: rounds that there is room for: W = max_rounds x (1 + K) new tokens of a row.
      host: as in `prefill`.
      masks: what the next token of each row may be; None for anything. They say nothing of the token after it, so a row
        that has one takes no proposals.
      edits: as in `prefill`, of the B rows.
      rows: as in `decode`.
      num_top: as in `prefill`.
      records: as in `prefill`.
      layout: as in `prefill`.
      types: as in `prefill`.

    Returns:
      The state, and the new tokens of the B rows.
    """
    if rows is not None:
        shared = dict(draft_tokens=draft_tokens, max_rounds=max_rounds, host=host)
        shared |= dict(num_top=num_top, records=records, types=types)
        of_few = lambda few, rounds, masks, edits: decode_in_rounds(
            model, drafter, few, rounds, masks=masks, edits=edits, **shared
        )
        return on_rows(of_few, state, rows, rounds, masks, edits)
    batch, max_tokens = len(state.lengths), max_rounds * (1 + draft_tokens)
    model = for_steps(model, batch * (1 + draft_tokens))
    counts_before, is_edited = state.continuations.counts, state.continuations.is_edited(masks)
    if masks is not None:
        rounds = jnp.where(masks.is_masked, jnp.minimum(rounds, 1), rounds)

    def goes_on(carry):
        round_index, state, *_ = carry
        return jnp.any((round_index < rounds) & (state.stop_reasons == LIVE))

    def run_round(carry):
        round_index, state, drafting, choices, *new = carry
        is_live = (round_index < rounds) & (state.stop_reasons == LIVE)
        lengths, sampling = state.lengths, state.continuations.sampling
        context, wants_top = state.continuations.context(is_edited, masks), state.continuations.top_logprobs > 0

        # Propose K tokens for the positions after the newest one.
        proposal, cache = drafter.propose(
            model, state.cache, state.draft_memory, sampling, state.newest_token, lengths, is_live, draft_tokens
        )
        if masks is not None:
            proposal = proposal._replace(tokens=jnp.where(masks.is_masked[:, None], -1, proposal.tokens))

        # Verify them in one call of the target, whose columns are the newest token and the proposals.
        # Where nothing was proposed (-1) token 0 runs in its place; it is never accepted.
        tokens = jnp.concatenate([state.newest_token[:, None], jnp.maximum(proposal.tokens, 0)], axis=1)  # [B X]
        positions = lengths[:, None] + jnp.arange(1 + draft_tokens, dtype=jnp.int32)  # [B X]
        positions = jnp.where(is_live[:, None], positions, -1)
        end = lengths + (1 + draft_tokens) * is_live
        inputs = tokens, cache, host, positions, end
        hidden, taps, made, cache = run_model(model, drafter, *inputs, records=records, edits=edits)
        # The invariant mode draws each token as decoding without a draft does: the text is the same with any draft.
        if not is_invariant(model):
            logits = model.unembed(hidden).astype(jnp.float32)  # [B X V]
            verdict = verify(logits, proposal, sampling, context, lengths + 1, wants_top, num_top, records)
        else:
            verdict = _draw_all(model, hidden, proposal, state.continuations, context, lengths + 1, num_top, records)

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

        made |= verdict.of_draws

        # Write the kept columns behind what each row got in earlier rounds; one past the buffer is dropped.
        column = jnp.arange(1 + draft_tokens, dtype=jnp.int32)
        target_column = jnp.where(column < counts[:, None], earlier_counts[:, None] + column, max_tokens)  # [B X]
        row_index = jnp.arange(batch)[:, None]
        of_columns = verdict.tokens, verdict.logprobs, verdict.top_ids, verdict.top_logprobs
        new = [x.at[row_index, target_column].set(y, mode="drop") for x, y in zip(new, of_columns, strict=True)]
        # Column x of the target draws token x of the round: its choices go with that token.
        choices = {name: x.at[row_index, target_column].set(made[name], mode="drop") for name, x in choices.items()}
        is_accepted = verdict.accepted[:, None] > jnp.arange(draft_tokens)  # [B K]
        is_proposed = (proposal.tokens >= 0) & is_live[:, None]  # [B K]
        drafting = DraftCounts(
            forwards=drafting.forwards + is_live,
            proposed=drafting.proposed + jnp.sum(is_proposed, axis=1, dtype=jnp.int32),
            accepted=drafting.accepted + (is_accepted & is_live[:, None]),
        )
        return round_index + 1, pin(state, layout), drafting, choices, *new

    no_counts = jnp.zeros(batch, jnp.int32)
    no_drafting = DraftCounts(no_counts, no_counts, jnp.zeros((batch, draft_tokens), jnp.int32))
    no_choices = room_for_choices(model, state, host, records, max_tokens)
    start = jnp.int32(0), state, no_drafting, no_choices, *no_new_tokens(batch, max_tokens, num_top)
    _, state, drafting, choices, *new = lax.while_loop(goes_on, run_round, start)
    state = pin(state, layout)
    counts = state.continuations.counts - counts_before
    return state, readable(NewTokens(*new, counts, state.stop_reasons, drafting, choices), layout)


def _draw_all(
    model: TargetModel,
    hidden: Float[Array, "B X D"],
    proposal: Proposal,
    continuations: Continuations,
    context: DrawContext,
    positions: Int32[Array, "B"],
    num_top: int,
    records: tuple[str, ...] = (),
) -> Verdict:
    """Return the tokens that decoding without a draft would draw, and the length of the run of proposals that agree.

    Drawing them this way gives the target's distribution, as `verify` does, and also the same text with any draft or
    none. A proposal that is a point mass is accepted as often as by `verify`; one that was drawn, less often.

    Args:
      model: the target, invariant.
      hidden: after the newest token and after each proposal: X = 1 + K columns.
      proposal: K tokens a row.
      continuations: of B rows.
      context: of B rows, before the proposals.
      positions: that the first proposal of each row would have.
      num_top: as in `prefill`.
      records: as in `draw_token`.
    """
    batch, width = hidden.shape[:2]
    of_column = lambda x: jnp.repeat(x, width, axis=0)
    drawn, of_draws = draw_token(
        model,
        hidden.reshape(batch * width, -1),
        jax.tree.map(of_column, continuations.sampling),
        context_by_column(context, proposal.tokens),
        (positions[:, None] + jnp.arange(width, dtype=jnp.int32)).reshape(-1),
        of_column(continuations.top_logprobs > 0),
        num_top,
        records=records,
    )
    by_row = lambda x: x.reshape(batch, width, *x.shape[1:])
    tokens, logprobs, *top = map(by_row, drawn)  # [B X] and [B X Z], two each
    accepted = count_agreeing(tokens, proposal)
    return Verdict(accepted, tokens, logprobs, *top, {name: by_row(value) for name, value in of_draws.items()})


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
    is_nothing_allowed = jnp.any(is_offered & (verdict.tokens == NO_TOKEN), axis=1)
    is_stop_id = jnp.any(verdict.tokens[..., None] == continuations.stop_ids[:, None], axis=-1)  # [B X I] -> [B X]
    is_stop = is_offered & is_stop_id & (verdict.tokens >= 0)
    until_stop = jnp.where(jnp.any(is_stop, axis=1), 1 + jnp.argmax(is_stop, axis=1), 1 + width).astype(jnp.int32)
    remaining = continuations.limits - continuations.counts
    counts = jnp.minimum(jnp.minimum(verdict.accepted + 1 - is_bad, until_stop), remaining) * is_live

    used_ids = jnp.where(column < counts[:, None], verdict.tokens, continuations.uses.shape[1])  # [B X]
    uses = continuations.uses.at[jnp.arange(len(used_ids))[:, None], used_ids].add(USED, mode="drop")  # [B V]
    recent = pushed(continuations.recent, verdict.tokens, counts)  # [B R]
    reasons = jnp.where(is_bad, jnp.where(is_nothing_allowed, NOTHING_ALLOWED, BAD_LOGITS), LIVE)
    reasons = jnp.where(counts >= remaining, LENGTH, reasons)
    reasons = jnp.where(counts == until_stop, STOP_ID, reasons).astype(jnp.int32)
    counts_after = continuations.counts + counts
    return replace(continuations, counts=counts_after, uses=uses, recent=recent), reasons, counts
