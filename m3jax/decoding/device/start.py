"""Rows that begin to decode without prefill: all of their tokens but the last are in the cache."""

from functools import partial

import jax
from jaxtyping import Int32

from m3jax.decoding.device.state import LIVE, Continuations, Layout, State, pin
from m3jax.decoding.sampling import HostOrDevice


@partial(jax.jit, donate_argnames=("state",), static_argnames=("layout", "types"))
def start_rows(
    state: State,
    rows: Int32[HostOrDevice, "C"],
    last_token: Int32[HostOrDevice, "C"],
    lengths: Int32[HostOrDevice, "C"],
    continuations: Continuations,
    layout: Layout | None = None,
    types: tuple[type, ...] = (),
) -> State:
    """Make some rows live: their next step writes their last token, and draws the one behind it.

    Args:
      state: of B rows; donated.
      rows: of C requests; B, one past the last, for none.
      last_token: of each, which is not in the cache.
      lengths: tokens of each that are.
      continuations: how these requests go on.
      layout: as in `prefill`.
      types: as in `prefill`.
    """
    update = lambda of_rows, of_requests: of_rows.at[rows].set(of_requests, mode="drop")
    started = State(
        cache=state.cache,
        continuations=jax.tree.map(update, state.continuations, continuations),
        lengths=update(state.lengths, lengths),
        newest_token=update(state.newest_token, last_token),
        stop_reasons=update(state.stop_reasons, LIVE),
        draft_memory=state.draft_memory,
    )
    return pin(started, layout)
