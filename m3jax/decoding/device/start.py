"""Rows that begin to decode without prefill: all of their tokens but the last are in the cache."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from m3jax.decoding.device.state import LIVE, Continuations, Layout, State, pin, set_rows
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
    of_rows = state.continuations, state.lengths, state.newest_token, state.stop_reasons
    live = jnp.full(len(rows), LIVE, jnp.int32)
    started = set_rows(of_rows, rows, (continuations, lengths, last_token, live))
    return pin(State(state.cache, *started, state.draft_memory), layout)
