"""Decoding in rounds: draft, verify in one call of the target, accept, roll back; one jitted call for many rounds.

Rolling back is nothing but a length: what lies past it in the pages is seen by nobody and is overwritten in the next
round, by the target and by the drafter alike.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from m3jax.decoding.device import (
    BAD_LOGITS,
    LENGTH,
    LIVE,
    STOP_ID,
    Layout,
    New,
    Rounds,
    Rows,
    State,
    pin,
    read,
    unembed,
)
from m3jax.decoding.sampling import HostOrDevice
from m3jax.decoding.verify import Verdict, verify


@partial(jax.jit, donate_argnames=("state",), static_argnames=("count", "room", "layout"))
def decode_in_rounds(
    model: Any,
    drafter: Any,
    state: State,
    rounds: Int32[HostOrDevice, ""],
    count: int,
    room: int,
    host: Any = None,
    layout: Layout | None = None,
) -> tuple[State, New]:
    """Append up to `rounds` times 1 to 1 + K tokens to every live row.

    Args:
      model: as in `device.prefill`.
      drafter: a `Drafter`.
      state: donated.
      rounds: at most `room`; the loop also ends when no row is live.
      count: K, proposals of a round.
      room: rounds that there is room for: W = room x (1 + K) new tokens of a row.
      host: as in `device.prefill`.
      layout: as in `device.prefill`.
    """
    batch = len(state.lengths)
    zeros = lambda kind: jnp.zeros((batch, room * (1 + count)), kind)
    before = state.rows.counts

    def unfinished(carry):
        step, state, _, _ = carry
        return (step < rounds) & jnp.any(state.reasons == LIVE)

    def body(carry):
        step, state, new, done = carry
        had = state.rows.counts
        live = state.reasons == LIVE
        state, verdict = _round(model, drafter, state, count, host)
        new = _append(new, (verdict.tokens, verdict.logprobs), had - before, state.rows.counts - had)
        reached = verdict.accepted[:, None] > jnp.arange(count)
        done = Rounds(
            done.forwards + jnp.sum(live, dtype=jnp.int32),
            done.accepted + jnp.sum(reached & live[:, None], axis=0, dtype=jnp.int32),
        )
        return step + 1, pin(state, layout), new, done

    none = Rounds(jnp.int32(0), jnp.zeros(count, jnp.int32))
    start = jnp.int32(0), state, (zeros(jnp.int32), zeros(jnp.float32)), none
    _, state, (tokens, logprobs), done = lax.while_loop(unfinished, body, start)
    return pin(state, layout), New(tokens, logprobs, state.rows.counts - before, state.reasons, done)


def _round(model: Any, drafter: Any, state: State, count: int, host: Any) -> tuple[State, Verdict]:
    """One round of every live row: 1 to 1 + K tokens each."""
    live, lengths = state.reasons == LIVE, state.lengths
    given = state.rows.sampling, state.newest, lengths, live, count
    proposal, cache = drafter.propose(model, state.cache, state.draft, *given)

    tokens = jnp.concatenate([state.newest[:, None], jnp.maximum(proposal.tokens, 0)], axis=1)
    columns = lengths[:, None] + jnp.arange(1 + count, dtype=jnp.int32)
    end = lengths + (1 + count) * live
    hidden, taps, cache = read(model, drafter, tokens, cache, host, jnp.where(live[:, None], columns, -1), end)
    verdict = verify(unembed(model, hidden), proposal, state.rows.sampling, state.rows.seen, lengths + 1)

    rows, reasons, counts = _keep(state.rows, verdict, live)
    cache, draft = drafter.learn(model, cache, state.draft, taps, verdict.tokens, lengths, counts)
    last = jnp.take_along_axis(verdict.tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    newest = jnp.where(counts > 0, last, state.newest)
    return State(cache, rows, lengths + counts, newest, jnp.where(live, reasons, state.reasons), draft), verdict


def _keep(rows: Rows, verdict: Verdict, live: Bool[Array, "B"]) -> tuple[Rows, Int32[Array, "B"], Int32[Array, "B"]]:
    """(rows, reasons, counts) after each live row took its tokens one after the other, up to what ends it."""
    width = verdict.tokens.shape[1]
    columns = jnp.arange(width, dtype=jnp.int32)
    offered = columns <= verdict.accepted[:, None]
    bad = jnp.any(offered & (verdict.tokens < 0), axis=1)
    stops = offered & jnp.any(verdict.tokens[..., None] == rows.stop_ids[:, None], axis=-1) & (verdict.tokens >= 0)
    until_stop = jnp.where(jnp.any(stops, axis=1), 1 + jnp.argmax(stops, axis=1), 1 + width).astype(jnp.int32)
    left = rows.limits - rows.counts
    counts = jnp.minimum(jnp.minimum(verdict.accepted + 1 - bad, until_stop), left) * live

    ids = jnp.where(columns < counts[:, None], verdict.tokens, rows.seen.shape[1])
    seen = rows.seen.at[jnp.arange(len(ids))[:, None], ids].set(True, mode="drop")
    reasons = jnp.where(bad, BAD_LOGITS, LIVE)
    reasons = jnp.where(counts >= left, LENGTH, reasons)
    reasons = jnp.where(counts == until_stop, STOP_ID, reasons).astype(jnp.int32)
    return replace(rows, counts=rows.counts + counts, seen=seen), reasons, counts


def _append(buffers, new, first: Int32[Array, "B"], counts: Int32[Array, "B"]):
    """Write each row's first `counts` columns behind what it has."""
    columns = jnp.arange(new[0].shape[1], dtype=jnp.int32)
    at = jnp.where(columns < counts[:, None], first[:, None] + columns, buffers[0].shape[1])
    rows = jnp.arange(len(at))[:, None]
    return tuple(old.at[rows, at].set(x, mode="drop") for old, x in zip(buffers, new, strict=True))
