"""A chunk of prompts, and decoding one token after the other: what a step does, top to bottom.

Both run the model over the paged cache, draw each row's next token from the logits, and note the rows that end with it.
Decoding with proposals is in `rounds`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, Shaped

from m3jax.decoding.device.parcel import Parcel, opened
from m3jax.decoding.device.scores import score_tokens
from m3jax.decoding.device.state import (
    BAD_LOGITS,
    LENGTH,
    LIVE,
    NOTHING_ALLOWED,
    STOP_ID,
    Chunk,
    Continuations,
    Layout,
    Masks,
    NewTokens,
    State,
    on_rows,
    pin,
    readable,
    set_rows,
)
from m3jax.decoding.protocols import (
    CHOICES,
    OF_DRAWS,
    HostStacks,
    NamedModel,
    PagedCache,
    TargetModel,
    is_invariant,
)
from m3jax.decoding.sampling import (
    NO_TOKEN,
    USED,
    DrawContext,
    HostOrDevice,
    SamplingParams,
    compute_both,
    log_normaliser,
    logprob_of,
    pushed,
    row_keys,
    sample_and_keep,
    sample_with_top,
)
from m3jax.decoding.speculation.drafter import Drafter
from m3jax.decoding.steering import Steering
from m3jax.decoding.support import record_draws
from m3jax.model import join_features
from m3jax.parallel import exchanged_by_xla
from m3jax.platform import platform
from m3jax.tiles import LOGITS_TILE, by_tiles

# How jax takes the arguments of each program: `programs` compiles them with other options too.
PREFILL_ARGUMENTS = dict(donate_argnames=("state",), static_argnames=("num_top", "records", "layout", "types"))
DECODE_ARGUMENTS = dict(
    donate_argnames=("state",), static_argnames=("max_steps", "num_top", "records", "layout", "types")
)


class Drawn(NamedTuple):
    """The next token of each row.

    Attributes:
      tokens: negative where none could be drawn (`sample`).
      logprobs: under the model's own logits, before any knob.
      top_ids: the Z most probable tokens under the same logits, best first; 0 where no row asks for them.
      top_logprobs: of these.
    """

    tokens: Int32[Array, "B"]
    logprobs: Float32[Array, "B"]
    top_ids: Int32[Array, "B Z"]
    top_logprobs: Float32[Array, "B Z"]


@partial(jax.jit, **PREFILL_ARGUMENTS)
def prefill(
    model: TargetModel,
    state: State,
    chunk: Chunk | Parcel[Chunk],
    host: HostStacks | None = None,
    drafter: Drafter | None = None,
    masks: Masks | None = None,
    edits: dict[str, Steering] | None = None,
    num_top: int = 0,
    records: tuple[str, ...] = (),
    layout: Layout | None = None,
    types: tuple[type, ...] = (),
) -> tuple[State, NewTokens]:
    """Run a piece of some prompts; where a prompt ends in it, its row starts with a first token.

    Only the hidden state of a prompt's last token is unembedded, and where scores are asked for the others, some at a
    time: nothing of size T x V is made.

    Args:
      model: the target.
      state: of B rows; donated.
      chunk: a piece of C prompts, or its parcel.
      host: the pages in host memory, if keys and values are there.
      drafter: reads the prompts too, if there is one.
      masks: what the first token of each of the C prompts may be; None for anything.
      edits: by the names of values, how they are changed in each of the C prompts; None for not at all.
      num_top: Z, the most probable tokens that a row can ask for.
      records: names of choices and of other values that come back with the tokens, as the position made them that each
        was drawn at.
      layout: on a mesh, the shardings that the results keep; without it the compiler may move them, and the next call
        would compile anew.
      types: those of the model, the drafter and the cache, as part of the key by which jax finds the compiled program.
        Its own key forgets them: structures of two registered dataclasses are equal where their fields are.

    Returns:
      The state, and the first token of each of the C prompts that ends here (counts are 0 for the others).
    """
    chunk = opened(chunk)
    continuations, width = chunk.continuations, chunk.tokens.shape[1]
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
    hidden, taps, choices, cache = run_model(
        model, drafter, chunk.tokens, cache, host, positions, lengths, embeddings, records, edits
    )
    # A prompt that does not end here draws from some column too: the shapes are fixed, and its token is dropped below.
    last_index = jnp.clip(last_column, 0, width - 1)
    # A sum over zeros and one token: to take it by its index, a mesh that divides tokens would gather all of them.
    is_last = jnp.arange(width, dtype=jnp.int32) == last_index[:, None]  # [C T]
    last_hidden = jnp.sum(jnp.where(is_last[..., None], hidden, 0), axis=1)  # [C D]
    choices = {name: of_all[jnp.arange(len(last_index)), last_index] for name, of_all in choices.items()}  # [C ...]
    # Where the host waits for a condition, it could prepare the next chunk only when this one is through. The invariant
    # mode has prompts and steps draw in the same way.
    cond = compute_both if platform() == "gpu" and not is_invariant(model) else lax.cond
    with exchanged_by_xla():  # of the prompts' other tokens something may be under way
        drawn, of_draws = draw_token(
            model,
            last_hidden,
            continuations.sampling,
            continuations.context(continuations.is_edited(masks), masks),
            chunk.lengths,
            continuations.top_logprobs > 0,
            num_top,
            cond,
            records,
        )
        scores = None if chunk.targets is None else score_tokens(model, hidden, chunk.targets, num_top)
    choices |= of_draws
    token, memory = drawn.tokens, None
    if drafter is not None:
        cache, memory = drafter.read_prompt(
            model, cache, chunk.tokens, chunk.start, chunk.lengths, chunk.context, taps, token
        )
    continuations, stop_reasons, is_appended = _append_token(continuations, token, ends_here)

    # One past the last row is none: only rows whose prompt ends here change.
    started_rows = jnp.where(ends_here, chunk.rows, len(state.lengths))
    of_rows = state.continuations, state.lengths, state.newest_token, state.stop_reasons, state.draft_memory
    of_prompts = continuations, chunk.lengths, token, stop_reasons, memory
    state = State(cache.replace(table=state.cache.table), *set_rows(of_rows, started_rows, of_prompts))
    new, choices = jax.tree.map(lambda x: x[:, None], (drawn, choices))  # one column
    new = NewTokens(*new, is_appended.astype(jnp.int32), stop_reasons, records=choices, scores=scores)
    return pin(state, layout), readable(new, layout)


@partial(jax.jit, **DECODE_ARGUMENTS)
def decode(
    model: TargetModel,
    state: State,
    steps: Int32[HostOrDevice, "B"],
    max_steps: int,
    host: HostStacks | None = None,
    masks: Masks | None = None,
    edits: dict[str, Steering] | None = None,
    rows: Int32[HostOrDevice, "R"] | None = None,
    num_top: int = 0,
    records: tuple[str, ...] = (),
    layout: Layout | None = None,
    types: tuple[type, ...] = (),
) -> tuple[State, NewTokens]:
    """Append up to `steps` tokens to each live row, and at most one to a row under a mask.

    Args:
      model: the target.
      state: of B rows; donated.
      steps: of each row, at most `max_steps`; a row that has taken them stays LIVE. The loop ends when no row goes on.
      max_steps: W, the most new tokens of a row.
      host: as in `prefill`.
      masks: what the next token of each row may be; None for anything.
      edits: as in `prefill`, of the B rows.
      rows: those that are computed, in ascending order, every live one among them; B, one past the last, for none. None
        is all. On a mesh all are.
      num_top: as in `prefill`.
      records: as in `prefill`.
      layout: as in `prefill`.
      types: as in `prefill`.

    Returns:
      The state, and the new tokens of the B rows.
    """
    if rows is not None:
        shared = dict(max_steps=max_steps, host=host, num_top=num_top, records=records, types=types)
        of_few = lambda few, steps, masks, edits: decode(model, few, steps, masks=masks, edits=edits, **shared)
        return on_rows(of_few, state, rows, steps, masks, edits)
    batch = len(state.lengths)
    model = for_steps(model, batch)
    counts_before, is_edited = state.continuations.counts, state.continuations.is_edited(masks)
    if masks is not None:
        steps = jnp.where(masks.is_masked, jnp.minimum(steps, 1), steps)

    def goes_on(carry):
        step, state, *_ = carry
        return jnp.any((step < steps) & (state.stop_reasons == LIVE))

    def append_one(carry):
        step, state, choices, *new = carry
        continuations = state.continuations
        is_active = (step < steps) & (state.stop_reasons == LIVE)
        # Rows that do not go on are padding: nothing is written for them, and what comes out means nothing.
        positions = jnp.where(is_active, state.lengths, -1)[:, None]  # [B 1]
        lengths = state.lengths + is_active  # the newest token joins the cache in this call
        tokens = state.newest_token[:, None]  # [B 1]
        inputs = tokens, state.cache, host, positions, lengths
        hidden, _, made, cache = run_model(model, None, *inputs, records=records, edits=edits)
        # The new token will stand at position `lengths`, which decides its random key.
        context, wants_top = continuations.context(is_edited, masks), continuations.top_logprobs > 0
        drawn, of_draws = draw_token(
            model, hidden[:, 0], continuations.sampling, context, lengths, wants_top, num_top, records=records
        )
        made |= {name: value[:, None] for name, value in of_draws.items()}
        continuations, stop_reasons, is_appended = _append_token(continuations, drawn.tokens, is_active)
        state = State(
            cache=cache,
            continuations=continuations,
            lengths=lengths,
            newest_token=jnp.where(is_appended, drawn.tokens, state.newest_token),
            stop_reasons=jnp.where(is_active, stop_reasons, state.stop_reasons),
        )
        state = pin(state, layout)
        new = [lax.dynamic_update_slice_in_dim(x, y[:, None], step, 1) for x, y in zip(new, drawn, strict=True)]
        choices = {
            name: lax.dynamic_update_slice_in_dim(of_steps, made[name], step, 1) for name, of_steps in choices.items()
        }
        return step + 1, state, choices, *new

    no_choices = room_for_choices(model, state, host, records, max_steps)
    start = jnp.int32(0), state, no_choices, *no_new_tokens(batch, max_steps, num_top)
    _, state, choices, *new = lax.while_loop(goes_on, append_one, start)
    state = pin(state, layout)
    counts = state.continuations.counts - counts_before
    return state, readable(NewTokens(*new, counts, state.stop_reasons, records=choices), layout)


def room_for_choices(
    model: TargetModel, state: State, host: HostStacks | None, records: tuple[str, ...], width: int
) -> dict[str, Shaped[Array, "B W ..."]]:
    """Return room for the choices that W new tokens of each row were drawn at, by name."""
    if not records:
        return {}

    def one_step(model, state, host):
        tokens, zeros = state.newest_token[:, None], jnp.zeros((len(state.lengths), 1), jnp.int32)
        hidden, _, made, _ = run_model(model, None, tokens, state.cache, host, zeros, state.lengths, records=records)
        logits = model.unembed(hidden).astype(jnp.float32)
        of_draws = record_draws(logits[:, 0], state.newest_token, records)
        return made | {name: value[:, None] for name, value in of_draws.items()}

    shapes = jax.eval_shape(one_step, model, state, host)  # [B 1 ...] each
    return {name: jnp.zeros((x.shape[0], width, *x.shape[2:]), x.dtype) for name, x in shapes.items()}


def no_new_tokens(
    batch: int, width: int, num_top: int
) -> tuple[Int32[Array, "B W"], Float32[Array, "B W"], Int32[Array, "B W Z"], Float32[Array, "B W Z"]]:
    """Return room for W new tokens of B rows: tokens, log-probabilities, and the Z most probable ones with theirs."""
    shape, top_shape = (batch, width), (batch, width, num_top)
    return (
        *(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)),
        *(jnp.zeros(top_shape, jnp.int32), jnp.zeros(top_shape, jnp.float32)),
    )


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
    model: TargetModel | NamedModel,
    drafter: Drafter | None,
    tokens: Int32[HostOrDevice, "B T"],
    cache: PagedCache,
    host: HostStacks | None,
    positions: Int32[Array, "B T"],
    lengths: Int32[Array, "B"],
    embeddings: Float[Array, "B T D"] | None = None,
    records: tuple[str, ...] = (),
    edits: dict[str, Steering] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T A D"] | None, dict[str, Shaped[Array, "B T ..."]], PagedCache]:
    """Run the target; its cache has the host's pages for this call alone, so that no loop carries what it only reads.

    Args:
      model: The target; a `NamedModel` if the drafter has taps or values are recorded.
      drafter: says which layers' residual stream is tapped, if there is one.
      tokens: of each row.
      cache: the tokens' keys and values are written into it.
      host: as in `prefill`.
      positions: where each token stands; -1 for none.
      lengths: tokens of each row after this call.
      embeddings: what the layers read in place of the tokens' own embeddings.
      records: Names of choices and of other values to return. Those of a draw are ignored.
      edits: as in `prefill`.

    Returns:
      (hidden states, what the drafter taps, values by name, choices as int16, or int32 where a row has more blocks,
      cache).
    """
    if host is not None:
        cache = cache.replace(host=host)
    call = dict(cache=cache, positions=positions, lengths=lengths)
    if embeddings is not None:
        call["embeddings"] = embeddings
    if edits is not None:
        call["edits"] = edits
    tapped_layers = () if drafter is None else drafter.taps
    of_layers = tuple(name for name in records if name not in OF_DRAWS)
    taps, values = None, {}
    if of_layers or tapped_layers:
        out = model.run(tokens, names=of_layers, residual_layers=tapped_layers, logits=False, **call)
        hidden, cache, taps, values = out.hidden, out.cache, out.residuals, out.values
    else:
        hidden, cache = model.hidden(tokens, **call)
    # Ids of experts and of blocks are small: half the bytes to carry to the host.
    dtype = jnp.int16 if cache.table.shape[1] <= jnp.iinfo(jnp.int16).max else jnp.int32
    for name, value in values.items():
        if name in CHOICES:
            values[name] = value.astype(dtype)
        elif name.endswith((".blocks", ".block_scores")):  # a request's rows of values have tokens first
            values[name] = value.swapaxes(1, 2)  # [B K T ...] -> [B T K ...]
    return hidden, taps, values, cache if host is None else cache.replace(host=None)


def draw_token(
    model: TargetModel,
    hidden: Float[Array, "B D"],
    sampling: SamplingParams,
    context: DrawContext,
    positions: Int32[HostOrDevice, "B"],
    wants_top: Bool[Array, "B"],
    num_top: int,
    cond: Callable[..., PyTree[Array]] = lax.cond,
    records: tuple[str, ...] = (),
) -> tuple[Drawn, dict[str, Shaped[Array, "B ..."]]]:
    """Return each row's next token with its log-probability, and the most probable tokens where some row asks for them.

    The draw depends on the row's seed and the position that the token will have, and on nothing else.

    Args:
      model: unembeds the hidden states.
      hidden: of B rows.
      sampling: of these rows.
      context: likewise.
      positions: that the tokens will have.
      wants_top: rows that ask for the most probable tokens.
      num_top: Z, how many.
      cond: as in `sample`.
      records: names of what is recorded; those that are of a draw are made here.

    Returns:
      (tokens, what `record_draws` gives).
    """
    logits = model.unembed(hidden).astype(jnp.float32)  # [B V]
    tile = LOGITS_TILE if is_invariant(model) else None
    keeps_filtered = any(name in OF_DRAWS for name in records)
    if tile is not None and context.row is None:
        context = replace(context, row=jnp.arange(len(logits), dtype=jnp.int32))  # a tile finds its own rows' texts

    def draw(logits, sampling, positions, wants_top, is_edited, row, later):
        keys, of_rows = row_keys(sampling.seed, positions), dict(is_edited=is_edited, row=row, later=later)
        draw_rows = sample_and_keep if keeps_filtered else sample_with_top
        return draw_rows(logits, sampling, keys, replace(context, **of_rows), wants_top, num_top, cond)

    of_rows = context.is_edited, context.row, context.later
    tokens, top_ids, top_logits, *kept = by_tiles(draw, tile, logits, sampling, positions, wants_top, *of_rows)
    log_total = by_tiles(log_normaliser, tile, logits)
    drawn = Drawn(tokens, logprob_of(tokens, logits, log_total), top_ids, top_logits - log_total[:, None])
    return drawn, record_draws(kept[0], tokens, records, tile) if kept else {}


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
    used_id = jnp.where(is_appended, token, continuations.uses.shape[1])  # one past the vocabulary is dropped
    uses = continuations.uses.at[jnp.arange(len(token)), used_id].add(USED, mode="drop")
    recent = pushed(continuations.recent, token[:, None], is_appended.astype(jnp.int32))
    is_stop_id = jnp.any(token[:, None] == continuations.stop_ids, axis=1)
    # Logits without a distribution count before a stop id, and a stop id before the limit.
    reasons = jnp.where(counts >= continuations.limits, LENGTH, LIVE)
    reasons = jnp.where(is_stop_id, STOP_ID, reasons)
    reasons = jnp.where(is_bad, jnp.where(token == NO_TOKEN, NOTHING_ALLOWED, BAD_LOGITS), reasons)
    continuations = replace(continuations, counts=counts, uses=uses, recent=recent)
    return continuations, reasons.astype(jnp.int32), is_appended
