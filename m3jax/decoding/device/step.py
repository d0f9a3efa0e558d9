"""A chunk of prompts, and decoding one token after the other: what a step does, top to bottom.

Both run the model over the paged cache, draw each row's next token from the logits, and note the rows that end with it.
Decoding with proposals is in `rounds`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree

from m3jax.decoding.device.state import (
    BAD_LOGITS,
    LENGTH,
    LIVE,
    STOP_ID,
    Chunk,
    Continuations,
    Layout,
    NewTokens,
    State,
    pin,
)
from m3jax.decoding.protocols import HostStacks, PagedCache, TappedModel, TargetModel, is_invariant
from m3jax.decoding.sampling import (
    HostOrDevice,
    SamplingParams,
    compute_both,
    log_normaliser,
    logprob_of,
    row_keys,
    sample,
)
from m3jax.decoding.speculation.drafter import Drafter
from m3jax.model import join_features
from m3jax.platform import platform
from m3jax.tiles import LOGITS_TILE, by_tiles

# How jax takes the arguments of each program: `programs` compiles them with other options too.
PREFILL_ARGUMENTS = dict(donate_argnames=("state",), static_argnames=("layout", "types"))
DECODE_ARGUMENTS = dict(donate_argnames=("state",), static_argnames=("max_steps", "layout", "types"))


@partial(jax.jit, **PREFILL_ARGUMENTS)
def prefill(
    model: TargetModel,
    state: State,
    chunk: Chunk,
    continuations: Continuations,
    host: HostStacks | None = None,
    drafter: Drafter | None = None,
    layout: Layout | None = None,
    types: tuple[type, ...] = (),
) -> tuple[State, NewTokens]:
    """Run a piece of some prompts; where a prompt ends in it, its row starts with a first token.

    Only the hidden state of a prompt's last token is unembedded, so nothing of size T x V is made.

    Args:
      model: the target.
      state: of B rows; donated.
      chunk: a piece of C prompts.
      continuations: how these C prompts will go on.
      host: the pages in host memory, if keys and values are there.
      drafter: reads the prompts too, if there is one.
      layout: on a mesh, the shardings that the results keep; without it the compiler may move them, and the next call
        would compile anew.
      types: those of the model, the drafter and the cache, as part of the key by which jax finds the compiled program.
        Its own key forgets them: structures of two registered dataclasses are equal where their fields are.

    Returns:
      The state, and the first token of each of the C prompts that ends here (counts are 0 for the others).
    """
    width = chunk.tokens.shape[1]
    positions = chunk.start[:, None] + jnp.arange(width, dtype=jnp.int32)  # [C T]
    lengths = jnp.minimum(chunk.lengths, chunk.start + width)
    # Where a chunk has no prompt its row is B, one past the last: no page is found for it, so nothing is written.
    prompt_table = state.cache.table.at[chunk.rows].get(mode="fill", fill_value=-1)  # [C M]
    last_column = chunk.lengths - 1 - chunk.start
    ends_here = (last_column >= 0) & (last_column < width)

    cache = state.cache.replace(table=prompt_table)
    embeddings = None
    if chunk.media is not None:
        embeddings = join_features(model.embed(chunk.tokens), chunk.media.features, chunk.media.rows)
    hidden, taps, cache = run_model(model, drafter, chunk.tokens, cache, host, positions, lengths, embeddings)
    # A prompt that does not end here draws from some column too: the shapes are fixed, and its token is dropped below.
    last_index = jnp.clip(last_column, 0, width - 1)[:, None, None]
    last_hidden = jnp.take_along_axis(hidden, last_index, axis=1)[:, 0]  # [C D]
    # Where the host waits for a condition, it could prepare the next chunk only when this one is through. The invariant
    # mode has prompts and steps draw in the same way.
    cond = compute_both if platform() == "gpu" and not is_invariant(model) else lax.cond
    token, logprob = draw_token(model, last_hidden, continuations.sampling, continuations.seen, chunk.lengths, cond)
    memory = None
    if drafter is not None:
        cache, memory = drafter.read_prompt(
            model, cache, chunk.tokens, chunk.start, chunk.lengths, chunk.context, taps, token
        )
    continuations, stop_reasons, is_appended = _append_token(continuations, token, ends_here)

    # One past the last row is dropped: only rows whose prompt ends here change.
    started_rows = jnp.where(ends_here, chunk.rows, len(state.lengths))
    update = lambda of_rows, of_prompts: of_rows.at[started_rows].set(of_prompts, mode="drop")
    state = State(
        cache=cache.replace(table=state.cache.table),
        continuations=jax.tree.map(update, state.continuations, continuations),
        lengths=update(state.lengths, chunk.lengths),
        newest_token=update(state.newest_token, token),
        stop_reasons=update(state.stop_reasons, stop_reasons),
        draft_memory=jax.tree.map(update, state.draft_memory, memory),
    )
    counts = is_appended.astype(jnp.int32)
    return pin(state, layout), NewTokens(token[:, None], logprob[:, None], counts, stop_reasons)


@partial(jax.jit, **DECODE_ARGUMENTS)
def decode(
    model: TargetModel,
    state: State,
    steps: Int32[HostOrDevice, ""],
    max_steps: int,
    host: HostStacks | None = None,
    layout: Layout | None = None,
    types: tuple[type, ...] = (),
) -> tuple[State, NewTokens]:
    """Append up to `steps` tokens to every live row.

    Args:
      model: the target.
      state: of B rows; donated.
      steps: at most `max_steps`; the loop also ends when no row is live.
      max_steps: W, the most new tokens of a row.
      host: as in `prefill`.
      layout: as in `prefill`.
      types: as in `prefill`.

    Returns:
      The state, and the new tokens of the B rows.
    """
    batch = len(state.lengths)
    model = for_steps(model, batch)
    counts_before = state.continuations.counts

    def goes_on(carry):
        step, state, _, _ = carry
        return (step < steps) & jnp.any(state.stop_reasons == LIVE)

    def append_one(carry):
        step, state, tokens, logprobs = carry
        is_live = state.stop_reasons == LIVE
        # Rows that have stopped are padding: nothing is written for them, and what comes out means nothing.
        positions = jnp.where(is_live, state.lengths, -1)[:, None]  # [B 1]
        lengths = state.lengths + is_live  # the newest token joins the cache in this call
        hidden, _, cache = run_model(model, None, state.newest_token[:, None], state.cache, host, positions, lengths)
        sampling, seen = state.continuations.sampling, state.continuations.seen
        # The new token will stand at position `lengths`, which decides its random key.
        token, logprob = draw_token(model, hidden[:, 0], sampling, seen, lengths)
        continuations, stop_reasons, is_appended = _append_token(state.continuations, token, is_live)
        state = State(
            cache=cache,
            continuations=continuations,
            lengths=lengths,
            newest_token=jnp.where(is_appended, token, state.newest_token),
            stop_reasons=jnp.where(is_live, stop_reasons, state.stop_reasons),
        )
        state = pin(state, layout)
        tokens = lax.dynamic_update_slice(tokens, token[:, None], (jnp.int32(0), step))  # [B W]
        logprobs = lax.dynamic_update_slice(logprobs, logprob[:, None], (jnp.int32(0), step))  # [B W]
        return step + 1, state, tokens, logprobs

    no_tokens, no_logprobs = jnp.zeros((batch, max_steps), jnp.int32), jnp.zeros((batch, max_steps), jnp.float32)
    start = jnp.int32(0), state, no_tokens, no_logprobs
    _, state, tokens, logprobs = lax.while_loop(goes_on, append_one, start)
    state = pin(state, layout)
    counts = state.continuations.counts - counts_before
    return state, NewTokens(tokens, logprobs, counts, state.stop_reasons)


def for_steps(model: TargetModel, num_tokens: int) -> TargetModel:
    """Return the model in the form that a loop of steps reads fastest: on a GPU each layer's parameters separately.

    On a GPU XLA copies what it takes out of a stack of layers before each product, and a loop over layers keeps the
    loop over steps out of a CUDA graph. An invariant model made of tiles is left as it is: prompts and steps run the
    same programs.

    Args:
      model: the target.
      num_tokens: of a step, all rows together.
    """
    execution = getattr(model, "execution", None)
    may_be_cut = platform() == "gpu" and execution is not None and execution(has_cache=True).takes_layers_apart
    return model.with_layers_apart(num_tokens) if may_be_cut else model


def run_model(
    model: TargetModel | TappedModel,
    drafter: Drafter | None,
    tokens: Int32[HostOrDevice, "B T"],
    cache: PagedCache,
    host: HostStacks | None,
    positions: Int32[Array, "B T"],
    lengths: Int32[Array, "B"],
    embeddings: Float[Array, "B T D"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T A D"] | None, PagedCache]:
    """Run the target; its cache has the host's pages for this call alone, so that no loop carries what it only reads.

    Args:
      model: the target; a `TappedModel` where the drafter has taps.
      drafter: says which layers' residual stream is tapped, if there is one.
      tokens: of each row.
      cache: the tokens' keys and values are written into it.
      host: as in `prefill`.
      positions: where each token stands; -1 for none.
      lengths: tokens of each row after this call.
      embeddings: what the layers read in place of the tokens' own embeddings.

    Returns:
      (hidden states, what the drafter taps, cache).
    """
    if host is not None:
        cache = cache.replace(host=host)
    call = dict(cache=cache, positions=positions, lengths=lengths)
    if embeddings is not None:
        call["embeddings"] = embeddings
    if drafter is None or not drafter.taps:
        taps = None
        hidden, cache = model.hidden(tokens, **call)
    else:
        hidden, taps, cache = model.tapped(tokens, drafter.taps, **call)
    return hidden, taps, cache if host is None else cache.replace(host=None)


def draw_token(
    model: TargetModel,
    hidden: Float[Array, "B D"],
    sampling: SamplingParams,
    seen: Bool[HostOrDevice, "B V"],
    positions: Int32[HostOrDevice, "B"],
    cond: Callable[..., PyTree[Array]] = lax.cond,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Return each row's next token, and its log-probability under the model's own logits.

    The token is -1 where the logits have no distribution. The draw depends on the row's seed and the position that the
    token will have, and on nothing else; `cond` is as in `sample`.
    """

    def draw(logits, sampling, seen, positions):
        return sample(logits, sampling, row_keys(sampling.seed, positions), seen, cond)

    logits = model.unembed(hidden).astype(jnp.float32)  # [B V]
    tile = LOGITS_TILE if is_invariant(model) else None
    token = by_tiles(draw, tile, logits, sampling, seen, positions)
    return token, logprob_of(token, logits, by_tiles(log_normaliser, tile, logits))


def _append_token(
    continuations: Continuations, token: Int32[Array, "B"], is_active: Bool[Array, "B"]
) -> tuple[Continuations, Int32[Array, "B"], Bool[Array, "B"]]:
    """Give each active row its token; a negative one is none.

    Returns:
      (continuations, stop reasons, flags of the rows that have a token more).
    """
    is_bad = token < 0
    is_appended = is_active & ~is_bad
    counts = continuations.counts + is_appended
    seen_id = jnp.where(is_appended, token, continuations.seen.shape[1])  # one past the vocabulary is dropped
    seen = continuations.seen.at[jnp.arange(len(token)), seen_id].set(True, mode="drop")
    is_stop_id = jnp.any(token[:, None] == continuations.stop_ids, axis=1)
    # Logits without a distribution count before a stop id, and a stop id before the limit.
    reasons = jnp.where(counts >= continuations.limits, LENGTH, LIVE)
    reasons = jnp.where(is_bad, BAD_LOGITS, jnp.where(is_stop_id, STOP_ID, reasons))
    return replace(continuations, counts=counts, seen=seen), reasons.astype(jnp.int32), is_appended
