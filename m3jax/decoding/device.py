"""The device side of the engine: a chunk of prompts, and a run of decode steps, each one jitted call.

Nothing here reads a value on the host. Which rows, how long, where their pages lie, how they are sampled and when they
stop is data, so the shapes (rows, chunk, pages, buffer) alone decide what is compiled.
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

# Why a row stopped; a row that nobody uses is IDLE.
LIVE, LENGTH, STOP_ID, STOP_STRING, BAD_LOGITS, IDLE = range(6)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What each row is and how it goes on.

    Attributes:
      sampling: how tokens are drawn.
      stop_ids: padded with -1.
      limits: new tokens at most.
      counts: new tokens so far.
      seen: tokens of the prompt and the continuation.
    """

    sampling: SamplingParams
    stop_ids: Int32[HostOrDevice, "B I"]
    limits: Int32[HostOrDevice, "B"]
    counts: Int32[HostOrDevice, "B"]
    seen: Bool[HostOrDevice, "B V"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that lives on the device, donated from call to call.

    Attributes:
      cache: the model's cache, with its page table.
      rows: B rows.
      lengths: tokens of each row in the cache; the newest token is not in it yet.
      newest: the last token of each row.
      reasons: LIVE, or why the row does not go on.
    """

    cache: Any
    rows: Rows
    lengths: Int32[Array, "B"]
    newest: Int32[Array, "B"]
    reasons: Int32[Array, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """A piece of one or more prompts.

    Attributes:
      slots: the row of the state that each prompt is; one past the last for none.
      tokens: columns `start` to `start + T` of each prompt.
      start: tokens of it that are in the cache already.
      length: tokens of the whole prompt; 0 for none.
    """

    slots: Int32[HostOrDevice, "C"]
    tokens: Int32[HostOrDevice, "C T"]
    start: Int32[HostOrDevice, "C"]
    length: Int32[HostOrDevice, "C"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class New:
    """Tokens of one call.

    Attributes:
      tokens: what lies at or past `counts` means nothing.
      logprobs: of each token under the model's own logits, before any knob.
      counts: new tokens of each row.
      reasons: LIVE, or why the row does not go on.
    """

    tokens: Int32[HostOrDevice, "B W"]
    logprobs: Float32[HostOrDevice, "B W"]
    counts: Int32[HostOrDevice, "B"]
    reasons: Int32[HostOrDevice, "B"]


Layout = tuple[Sharding, ...]  # on a mesh, where each array of the state stays


@partial(jax.jit, donate_argnames=("state",), static_argnames=("layout",))
def prefill(model: Any, state: State, chunk: Chunk, rows: Rows, layout: Layout | None = None) -> tuple[State, New]:
    """Run a piece of some prompts; where a prompt ends in it, its row starts with a first token.

    Only the hidden state of a prompt's last token is unembedded, so nothing of size T x V is made.

    Args:
      model: has `hidden(tokens, cache=, positions=, lengths=)` and `unembed(hidden)`.
      state: donated.
      chunk: C prompts.
      rows: what the rows of these prompts will be.
      layout: where the results stay; left to itself the compiler may move them, and the next call compile anew.
    """
    width = chunk.tokens.shape[1]
    positions = chunk.start[:, None] + jnp.arange(width, dtype=jnp.int32)
    written = jnp.minimum(chunk.length, chunk.start + width)
    table = state.cache.table.at[chunk.slots].get(mode="fill", fill_value=-1)
    own = state.cache.replace(table=table)
    last = chunk.length - 1 - chunk.start
    ends = (last >= 0) & (last < width)

    def run(own):
        hidden, own = model.hidden(chunk.tokens, cache=own, positions=positions, lengths=written)
        final = jnp.take_along_axis(hidden, jnp.clip(last, 0, width - 1)[:, None, None], axis=1)[:, 0]
        return _logits(model, final), own

    def idle(own):
        return jnp.zeros(rows.seen.shape, jnp.float32), own

    # Where there is no prompt nothing runs, so that a caller can compile without computing.
    logits, own = lax.cond(jnp.any(chunk.length > chunk.start), run, idle, own)
    token, logprob = _draw(logits, rows, chunk.length)
    rows, reasons, grows = _count(rows, token, ends)

    slots = jnp.where(ends, chunk.slots, len(state.lengths))
    put = lambda old, new: old.at[slots].set(new, mode="drop")
    state = State(
        cache=own.replace(table=state.cache.table),
        rows=jax.tree.map(put, state.rows, rows),
        lengths=put(state.lengths, chunk.length),
        newest=put(state.newest, token),
        reasons=put(state.reasons, reasons),
    )
    return _pin(state, layout), New(token[:, None], logprob[:, None], grows.astype(jnp.int32), reasons)


# XLA's CPU backend leaves single matrix products to YNNPACK, which takes a quarter longer than XLA's own kernels at
# the sizes of a prefill (docs/performance.md); for those of a decode step it is the faster one.
prefill_on_cpu = jax.jit(
    prefill.__wrapped__,
    donate_argnames=("state",),
    static_argnames=("layout",),
    compiler_options={"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"},
)


@partial(jax.jit, donate_argnames=("state",), static_argnames=("room", "layout"))
def decode(
    model: Any, state: State, steps: Int32[HostOrDevice, ""], room: int, layout: Layout | None = None
) -> tuple[State, New]:
    """Append up to `steps` tokens to every live row.

    Args:
      model: as in `prefill`.
      state: donated.
      steps: at most `room`; the loop also ends when no row is live.
      room: W, the most new tokens of a row.
      layout: as in `prefill`.
    """
    batch = len(state.lengths)
    zeros = lambda kind: jnp.zeros((batch, room), kind)
    before = state.rows.counts

    def unfinished(carry):
        step, state, _ = carry
        return (step < steps) & jnp.any(state.reasons == LIVE)

    def body(carry):
        step, state, (tokens, logprobs) = carry
        state, token, logprob = _step(model, state)
        put = lambda x, new: lax.dynamic_update_slice(x, new[:, None], (jnp.int32(0), step))
        return step + 1, _pin(state, layout), (put(tokens, token), put(logprobs, logprob))

    buffers = zeros(jnp.int32), zeros(jnp.float32)
    _, state, (tokens, logprobs) = lax.while_loop(unfinished, body, (jnp.int32(0), state, buffers))
    return _pin(state, layout), New(tokens, logprobs, state.rows.counts - before, state.reasons)


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("layout",))
def copy_pages(cache: Any, source: Array, target: Array, layout: Layout | None = None) -> Any:
    """Copy pages of a donated cache; a target of -1 is dropped."""
    return _pin(cache.copy_pages(source, target), layout)


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("layout",))
def write_pages(cache: Any, pages: Array, contents: Any, layout: Layout | None = None) -> Any:
    """Overwrite pages of a donated cache; a page of -1 is dropped."""
    return _pin(cache.write_pages(pages, contents), layout)


read_pages = jax.jit(lambda cache, pages: cache.read_pages(pages))


def _step(model: Any, state: State) -> tuple[State, Array, Array]:
    live = state.reasons == LIVE
    positions = jnp.where(live, state.lengths, -1)[:, None]
    lengths = state.lengths + live
    hidden, cache = model.hidden(state.newest[:, None], cache=state.cache, positions=positions, lengths=lengths)
    token, logprob = _draw(_logits(model, hidden[:, 0]), state.rows, lengths)
    rows, reasons, grows = _count(state.rows, token, live)
    newest = jnp.where(grows, token, state.newest)
    return State(cache, rows, lengths, newest, jnp.where(live, reasons, state.reasons)), token, logprob


def _draw(logits: Float32[Array, "B V"], rows: Rows, lengths: Int32[Array, "B"]):
    """(token, log-probability) of each row; the draw depends on the row's seed and position alone."""
    token = sample(logits, rows.sampling, row_keys(rows.sampling.seed, lengths), rows.seen)
    chosen = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)


def _count(rows: Rows, token: Int32[Array, "B"], active: Bool[Array, "B"]):
    """(rows, reasons, which rows grew) after each active row got `token`; a negative one is no token."""
    bad = token < 0
    grows = active & ~bad
    counts = rows.counts + grows
    outside = jnp.where(grows, token, rows.seen.shape[1])
    seen = rows.seen.at[jnp.arange(len(token)), outside].set(True, mode="drop")
    stops = jnp.any(token[:, None] == rows.stop_ids, axis=1)
    reason = jnp.where(counts >= rows.limits, LENGTH, LIVE)
    reason = jnp.where(bad, BAD_LOGITS, jnp.where(stops, STOP_ID, reason))
    return replace(rows, counts=counts, seen=seen), reason.astype(jnp.int32), grows


def _logits(model: Any, hidden: Float[Array, "B D"]) -> Float32[Array, "B V"]:
    return model.unembed(hidden).astype(jnp.float32)


def _pin(tree: Any, layout: Layout | None) -> Any:
    if layout is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    held = [lax.with_sharding_constraint(x, s) for x, s in zip(leaves, layout, strict=True)]
    return jax.tree.unflatten(structure, held)
