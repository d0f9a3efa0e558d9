"""The device side of generation: a chunk of prefill, the first token, and the decode loop, each one jitted call.

Nothing here reads a value on the host. Lengths, positions, stop ids, limits and sampling knobs are data, so that
only the shapes (rows, chunk, cache length, buffer length) decide what is compiled.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Float32, Int32

from m3jax.decoding.sampling import HostOrDevice, SamplingParams, row_keys, sample

# Why a row stopped. A row of padding is born stopped.
LIVE, LENGTH, STOP_ID, STOP_STRING, BAD_LOGITS = range(5)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """What the caller asked of each row; read by every step and changed by none.

    Attributes:
      sampling: B rows.
      stop_ids: int32, padded with -1.
      limits: int32, new tokens at most.
    """

    sampling: SamplingParams
    stop_ids: Int32[HostOrDevice, "B I"]
    limits: Int32[HostOrDevice, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefill:
    """Prompts on their way into the cache.

    Attributes:
      cache: the model's cache.
      seen: tokens of each prompt so far.
      logits: after each row's last prompt token, once its chunk has been through.
    """

    cache: Any
    seen: Bool[Array, "B V"]
    logits: Float32[Array, "B V"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that a decode step reads and writes.

    Attributes:
      cache: the model's cache.
      seen: tokens of each prompt and continuation.
      lengths: int32, tokens of each row in the cache; the newest token is not in it yet.
      tokens: int32, new tokens; what lies at or past `counts` means nothing.
      logprobs: float32, log-probability of each new token under the model's own logits, before any knob.
      counts: int32, new tokens of each row.
      reasons: int32, LIVE or why the row stopped.
    """

    cache: Any
    seen: Bool[Array, "B V"]
    lengths: Int32[Array, "B"]
    tokens: Int32[Array, "B R"]
    logprobs: Float32[Array, "B R"]
    counts: Int32[Array, "B"]
    reasons: Int32[Array, "B"]


@dataclass(frozen=True)
class Layout:
    """Where a mesh keeps the arrays of `Prefill` and `State`.

    Every call returns them where it took them from; left to itself, the compiler may choose another place, and
    the next call would be compiled anew.

    Attributes:
      cache: of each array of the cache.
      rows: of all other arrays, whose first axis is the batch.
    """

    cache: tuple[Sharding, ...]
    rows: Sharding

    def pin(self, tree: Prefill | State) -> Any:
        """The same values, held to their places."""
        leaves, structure = jax.tree.flatten(tree)
        places = self.cache + (self.rows,) * (len(leaves) - len(self.cache))
        held = [lax.with_sharding_constraint(x, s) for x, s in zip(leaves, places, strict=True)]
        return jax.tree.unflatten(structure, held)


@partial(jax.jit, donate_argnames=("prefill",), static_argnames=("layout",))
def prefill_chunk(
    model: Any,
    prefill: Prefill,
    tokens: Int32[Array, "B T"],
    start: Int32[Array, ""],
    lengths: Int32[Array, "B"],
    layout: Layout | None = None,
) -> Prefill:
    """Run one chunk of every prompt through the model.

    Only the hidden state of a row's last prompt token is unembedded, so nothing of size T x V is made.

    Args:
      model: has `hidden(tokens, cache=, positions=, lengths=)` and `unembed(hidden)`.
      prefill: donated.
      tokens: int32, columns `start` to `start + T` of the right-padded prompts.
      start: int32.
      lengths: int32, tokens of each whole prompt; 0 for a row of padding.
    """

    def run(prefill):
        return _chunk(model, prefill, tokens, start, lengths)

    # Where no prompt reaches this far nothing runs, so that a caller can compile without computing.
    return _pin(lax.cond(jnp.any(lengths > start), run, lambda prefill: prefill, prefill), layout)


@partial(jax.jit, donate_argnames=("cache", "seen"), static_argnames=("room", "layout"))
def first_token(
    cache: Any,
    seen: Bool[Array, "B V"],
    logits: Float32[Array, "B V"],
    lengths: Int32[Array, "B"],
    plan: Plan,
    room: int,
    layout: Layout | None = None,
) -> State:
    """Choose each row's first new token from the logits of its prompt.

    Args:
      cache: donated.
      seen: donated.
      logits: of `Prefill`.
      lengths: int32, as in `prefill_chunk`.
      plan: B rows.
      room: R, the most new tokens that the state can hold.
      layout: on a mesh, where the results stay; so in every function here.
    """
    rows = lengths.shape[0]
    state = State(
        cache=cache,
        seen=seen,
        lengths=lengths,
        tokens=jnp.zeros((rows, room), jnp.int32),
        logprobs=jnp.zeros((rows, room), jnp.float32),
        counts=jnp.zeros(rows, jnp.int32),
        reasons=jnp.where(lengths > 0, jnp.int32(LIVE), jnp.int32(LENGTH)),
    )
    return _pin(_append(state, logits, plan), layout)


@partial(jax.jit, donate_argnames=("state",), static_argnames=("layout",))
def decode(model: Any, state: State, plan: Plan, steps: Int32[Array, ""], layout: Layout | None = None) -> State:
    """Append up to `steps` tokens to every live row, in one device call.

    Args:
      model: as in `prefill_chunk`.
      state: donated.
      plan: B rows.
      steps: int32; the loop also ends when no row is live.
    """

    def unfinished(carry):
        step, state = carry
        return (step < steps) & jnp.any(state.reasons == LIVE)

    def body(carry):
        step, state = carry
        return step + 1, _pin(_step(model, state, plan), layout)

    return _pin(lax.while_loop(unfinished, body, (jnp.int32(0), state))[1], layout)


@partial(jax.jit, donate_argnames=("state",), static_argnames=("layout",))
def stop_rows(
    state: State, counts: Int32[Array, "B"], stopped: Bool[Array, "B"], layout: Layout | None = None
) -> State:
    """End rows for a reason that only the host can see: a stop string.

    Args:
      state: donated.
      counts: int32, new tokens to keep in the rows that stop.
      stopped: the rows that stop now.
    """
    stopped_state = replace(
        state,
        counts=jnp.where(stopped, counts, state.counts),
        reasons=jnp.where(stopped, jnp.int32(STOP_STRING), state.reasons),
    )
    return _pin(stopped_state, layout)


def _pin(tree: Any, layout: Layout | None) -> Any:
    return tree if layout is None else layout.pin(tree)


def _chunk(
    model: Any,
    prefill: Prefill,
    tokens: Int32[Array, "B T"],
    start: Int32[Array, ""],
    lengths: Int32[Array, "B"],
) -> Prefill:
    rows, chunk = tokens.shape
    positions = jnp.broadcast_to(start + jnp.arange(chunk, dtype=jnp.int32), (rows, chunk))
    written = jnp.minimum(lengths, start + chunk)
    hidden, cache = model.hidden(tokens, cache=prefill.cache, positions=positions, lengths=written)
    last = lengths - 1 - start
    ends_here = (last >= 0) & (last < chunk)
    final = jnp.take_along_axis(hidden, jnp.clip(last, 0, chunk - 1)[:, None, None], axis=1)[:, 0]
    logits = jnp.where(ends_here[:, None], _logits(model, final), prefill.logits)
    seen = _mark(prefill.seen, tokens, positions < lengths[:, None])
    return Prefill(cache=cache, seen=seen, logits=logits)


def _step(model: Any, state: State, plan: Plan) -> State:
    live = state.reasons == LIVE
    newest = jnp.take_along_axis(state.tokens, jnp.maximum(state.counts - 1, 0)[:, None], axis=1)
    positions = jnp.where(live, state.lengths, -1)[:, None]
    lengths = state.lengths + live
    hidden, cache = model.hidden(newest, cache=state.cache, positions=positions, lengths=lengths)
    return _append(replace(state, cache=cache, lengths=lengths), _logits(model, hidden[:, 0]), plan)


def _append(state: State, logits: Float32[Array, "B V"], plan: Plan) -> State:
    live = state.reasons == LIVE
    token = sample(logits, plan.sampling, row_keys(plan.sampling.seed, state.lengths), state.seen)
    bad = token < 0
    grows = live & ~bad
    counts = state.counts + grows
    stops = jnp.any(token[:, None] == plan.stop_ids, axis=1)
    reason = jnp.where(counts >= plan.limits, LENGTH, LIVE)
    reason = jnp.where(bad, BAD_LOGITS, jnp.where(stops, STOP_ID, reason))
    return replace(
        state,
        seen=_mark(state.seen, token[:, None], grows[:, None]),
        tokens=_put(state.tokens, state.counts, token, grows),
        logprobs=_put(state.logprobs, state.counts, _logprob(logits, token), grows),
        counts=counts,
        reasons=jnp.where(live, reason, state.reasons).astype(jnp.int32),
    )


def _logits(model: Any, hidden: Float[Array, "B D"]) -> Float32[Array, "B V"]:
    return model.unembed(hidden).astype(jnp.float32)


def _logprob(logits: Float32[Array, "B V"], token: Int32[Array, "B"]) -> Float32[Array, "B"]:
    chosen = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _mark(seen: Bool[Array, "B V"], tokens: Int32[Array, "B T"], valid: Bool[Array, "B T"]) -> Bool[Array, "B V"]:
    rows, vocab = seen.shape
    outside = jnp.where(valid, tokens, vocab)
    return seen.at[jnp.arange(rows)[:, None], outside].set(True, mode="drop")


def _put(buffer: Array, at: Int32[Array, "B"], value: Array, valid: Bool[Array, "B"]) -> Array:
    rows, room = buffer.shape
    return buffer.at[jnp.arange(rows), jnp.where(valid, at, room)].set(value, mode="drop")
