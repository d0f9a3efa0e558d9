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
      draft: what a drafter remembers of each row.
    """

    cache: Any
    rows: Rows
    lengths: Int32[Array, "B"]
    newest: Int32[Array, "B"]
    reasons: Int32[Array, "B"]
    draft: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """A piece of one or more prompts.

    Attributes:
      slots: the row of the state that each prompt is; one past the last for none.
      tokens: columns `start` to `start + T` of each prompt.
      start: tokens of it that are in the cache already.
      length: tokens of the whole prompt; 0 for none.
      following: the token after these, where the prompt goes on; for a drafter only.
      everything: all tokens of each prompt, for a drafter that reads them.
    """

    slots: Int32[HostOrDevice, "C"]
    tokens: Int32[HostOrDevice, "C T"]
    start: Int32[HostOrDevice, "C"]
    length: Int32[HostOrDevice, "C"]
    following: Int32[HostOrDevice, "C"] | None = None
    everything: Int32[HostOrDevice, "C S"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounds:
    """What drafting did in one call.

    Attributes:
      forwards: how often the target verified proposals of some row: a call for three rows counts as three.
      accepted: in how many of them the first proposal was accepted, the first two, and so on.
    """

    forwards: Int32[HostOrDevice, ""]
    accepted: Int32[HostOrDevice, "K"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class New:
    """Tokens of one call.

    Attributes:
      tokens: what lies at or past `counts` means nothing.
      logprobs: of each token under the model's own logits, before any knob.
      counts: new tokens of each row.
      reasons: LIVE, or why the row does not go on.
      rounds: where there is a drafter, what it did.
    """

    tokens: Int32[HostOrDevice, "B W"]
    logprobs: Float32[HostOrDevice, "B W"]
    counts: Int32[HostOrDevice, "B"]
    reasons: Int32[HostOrDevice, "B"]
    rounds: Rounds | None = None


Layout = tuple[Sharding, ...]  # on a mesh, where each array of the state stays


@partial(jax.jit, donate_argnames=("state",), static_argnames=("layout",))
def prefill(
    model: Any,
    state: State,
    chunk: Chunk,
    rows: Rows,
    host: Any = None,
    drafter: Any = None,
    layout: Layout | None = None,
) -> tuple[State, New]:
    """Run a piece of some prompts; where a prompt ends in it, its row starts with a first token.

    Only the hidden state of a prompt's last token is unembedded, so nothing of size T x V is made.

    Args:
      model: has `hidden(tokens, cache=, positions=, lengths=)` and `unembed(hidden)`.
      state: donated.
      chunk: C prompts.
      rows: what the rows of these prompts will be.
      host: where keys and values are in host memory, its pages (`Cache.host`).
      drafter: reads the prompts too, if there is one.
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
        hidden, taps, own = read(model, drafter, chunk.tokens, own, host, positions, written)
        final = jnp.take_along_axis(hidden, jnp.clip(last, 0, width - 1)[:, None, None], axis=1)[:, 0]
        token, logprob = _draw(unembed(model, final), rows, chunk.length)
        own, draft = (own, None) if drafter is None else drafter.read_prompt(model, own, chunk, taps, token)
        return token, logprob, draft, own

    def idle(own):
        none = jnp.zeros(last.shape, jnp.int32), jnp.zeros(last.shape, jnp.float32)
        return *none, jax.tree.map(lambda x: jnp.zeros((len(last), *x.shape[1:]), x.dtype), state.draft), own

    # Where there is no prompt nothing runs, so that a caller can compile without computing.
    token, logprob, draft, own = lax.cond(jnp.any(chunk.length > chunk.start), run, idle, own)
    rows, reasons, grows = _count(rows, token, ends)

    slots = jnp.where(ends, chunk.slots, len(state.lengths))
    put = lambda old, new: old.at[slots].set(new, mode="drop")
    state = State(
        cache=own.replace(table=state.cache.table),
        rows=jax.tree.map(put, state.rows, rows),
        lengths=put(state.lengths, chunk.length),
        newest=put(state.newest, token),
        reasons=put(state.reasons, reasons),
        draft=jax.tree.map(put, state.draft, draft),
    )
    return pin(state, layout), New(token[:, None], logprob[:, None], grows.astype(jnp.int32), reasons)


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
    model: Any,
    state: State,
    steps: Int32[HostOrDevice, ""],
    room: int,
    host: Any = None,
    layout: Layout | None = None,
) -> tuple[State, New]:
    """Append up to `steps` tokens to every live row.

    Args:
      model: as in `prefill`.
      state: donated.
      steps: at most `room`; the loop also ends when no row is live.
      room: W, the most new tokens of a row.
      host: as in `prefill`.
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
        state, token, logprob = _step(model, state, host)
        put = lambda x, new: lax.dynamic_update_slice(x, new[:, None], (jnp.int32(0), step))
        return step + 1, pin(state, layout), (put(tokens, token), put(logprobs, logprob))

    buffers = zeros(jnp.int32), zeros(jnp.float32)
    _, state, (tokens, logprobs) = lax.while_loop(unfinished, body, (jnp.int32(0), state, buffers))
    return pin(state, layout), New(tokens, logprobs, state.rows.counts - before, state.reasons)


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("layout",))
def copy_pages(cache: Any, source: Array, target: Array, layout: Layout | None = None) -> Any:
    """Copy pages of a donated cache; a target of -1 is dropped."""
    return pin(cache.copy_pages(source, target), layout)


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("layout",))
def write_pages(cache: Any, pages: Array, contents: Any, layout: Layout | None = None) -> Any:
    """Overwrite pages of a donated cache; a page of -1 is dropped."""
    return pin(cache.write_pages(pages, contents), layout)


read_pages = jax.jit(lambda cache, pages: cache.read_pages(pages))


def _step(model: Any, state: State, host: Any) -> tuple[State, Array, Array]:
    live = state.reasons == LIVE
    positions = jnp.where(live, state.lengths, -1)[:, None]
    lengths = state.lengths + live
    hidden, _, cache = read(model, None, state.newest[:, None], state.cache, host, positions, lengths)
    token, logprob = _draw(unembed(model, hidden[:, 0]), state.rows, lengths)
    rows, reasons, grows = _count(state.rows, token, live)
    newest = jnp.where(grows, token, state.newest)
    return State(cache, rows, lengths, newest, jnp.where(live, reasons, state.reasons)), token, logprob


def read(model: Any, drafter: Any, tokens: Array, cache: Any, host: Any, positions: Array, lengths: Array):
    """(hidden states, what the drafter taps, cache): the model over a cache that has host memory for this call alone.

    No loop carries what it only reads.
    """
    given = cache if host is None else cache.replace(host=host)
    rows = dict(cache=given, positions=positions, lengths=lengths)
    if drafter is None or not drafter.taps:
        hidden, new = model.hidden(tokens, **rows)
        taps = None
    else:
        hidden, taps, new = model.tapped(tokens, drafter.taps, **rows)
    return hidden, taps, new if host is None else new.replace(host=None)


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


def unembed(model: Any, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
    """The model's logits of hidden states."""
    return model.unembed(hidden).astype(jnp.float32)


def pin(tree: Any, layout: Layout | None) -> Any:
    """Keep every array of a state where the layout says."""
    if layout is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    held = [lax.with_sharding_constraint(x, s) for x, s in zip(leaves, layout, strict=True)]
    return jax.tree.unflatten(structure, held)
