"""The device's state between calls, and the arguments and results of a call.

A *row* always means a place in the decode batch: B rows decode together, and a request has one of them while it runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, Shaped, UInt32

from m3jax.decoding.device.scores import Scores
from m3jax.decoding.protocols import PagedCache
from m3jax.decoding.sampling import DrawContext, HostOrDevice, SamplingParams, edits_logits
from m3jax.decoding.speculation.drafter import DraftMemory, PromptContext
from m3jax.decoding.speculation.verify import DraftCounts
from m3jax.parallel import whole

# The reasons for which a row stopped; a row without a request is IDLE.
LIVE, LENGTH, STOP_ID, STOP_STRING, BAD_LOGITS, IDLE, NOTHING_ALLOWED = range(7)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Masks:
    """The tokens that the next token of each row may be, as a guide says on the host (`Guide`).

    A row under a mask takes one token in a call: only the host knows what the mask after it is. It stays LIVE.

    Attributes:
      is_masked: rows that have a mask.
      bits: as in `DrawContext.mask`; all ones where a row has no mask.
    """

    is_masked: Bool[HostOrDevice, "B"]
    bits: UInt32[HostOrDevice, "B W"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Continuations:
    """The settings and the progress of each row's continuation: `Params` of the requests as arrays of B rows.

    Attributes:
      sampling: how tokens are drawn.
      stop_ids: a row ends with the first of these; padded with -1.
      limits: new tokens at most.
      min_tokens: new tokens before which no stop id is drawn.
      top_logprobs: most probable tokens to return with each new one; 0 for none.
      counts: new tokens so far.
      uses: how often the prompt and the continuation have each token, as in `DrawContext.uses`.
      recent: the last R tokens of the prompt and the continuation, as in `DrawContext.recent`.
    """

    sampling: SamplingParams
    stop_ids: Int32[HostOrDevice, "B I"]
    limits: Int32[HostOrDevice, "B"]
    min_tokens: Int32[HostOrDevice, "B"]
    top_logprobs: Int32[HostOrDevice, "B"]
    counts: Int32[HostOrDevice, "B"]
    uses: Int32[HostOrDevice, "B V"]
    recent: Int32[HostOrDevice, "B R"]

    def is_edited(self, masks: Masks | None) -> Bool[Array, "B"]:
        """Return True for rows with a knob that acts before the temperature; it is the same for a whole call."""
        is_edited = edits_logits(self.sampling) | (self.min_tokens > 0)
        return is_edited if masks is None else is_edited | masks.is_masked

    def context(self, is_edited: Bool[Array, "B"], masks: Masks | None) -> DrawContext:
        """Return what the knobs before the temperature read of these rows."""
        return DrawContext(
            is_edited=is_edited,
            uses=self.uses,
            recent=self.recent,
            counts=self.counts,
            min_tokens=self.min_tokens,
            stop_ids=self.stop_ids,
            mask=None if masks is None else masks.bits,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that lives on the device, donated from call to call.

    Attributes:
      cache: the model's cache, with its page table.
      continuations: of B rows.
      lengths: tokens of each row in the cache; the newest token is not in it yet.
      newest_token: the last token of each row.
      stop_reasons: LIVE, or why the row does not go on.
      draft_memory: with a drafter, what it remembers of each row.
    """

    cache: PagedCache
    continuations: Continuations
    lengths: Int32[Array, "B"]
    newest_token: Int32[Array, "B"]
    stop_reasons: Int32[Array, "B"]
    draft_memory: DraftMemory | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedFeatures:
    """Features of images and videos, and the tokens of a chunk that stand for them.

    Attributes:
      features: all that the device keeps, of whatever requests.
      rows: the row of the feature that stands in place of each token's embedding; -1 for none.
    """

    features: Float[Array, "F D"]
    rows: Int32[HostOrDevice, "C T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """A piece of C prompts: columns `start` to `start + T` of each.

    Attributes:
      rows: the row that each prompt has; B, one past the last, for none.
      tokens: the piece; what lies past the prompt's end means nothing.
      start: tokens of the prompt that are in the cache already.
      lengths: tokens of the whole prompt; 0 for none.
      continuations: how these prompts will go on.
      context: with a drafter, what it reads of the prompts beyond the piece.
      media: where images and videos are served, their features; None where only text is.
      targets: the token of the prompt that follows each one, -1 for none; None where nobody asks for their scores.
    """

    rows: Int32[HostOrDevice, "C"]
    tokens: Int32[HostOrDevice, "C T"]
    start: Int32[HostOrDevice, "C"]
    lengths: Int32[HostOrDevice, "C"]
    continuations: Continuations
    context: PromptContext | None = None
    media: PlacedFeatures | None = None
    targets: Int32[HostOrDevice, "C T"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewTokens:
    """The tokens that one call appended to each row.

    Attributes:
      tokens: W of them at most; what lies at or past `counts` means nothing.
      logprobs: of each token under the model's own logits, before any knob.
      top_ids: the Z most probable tokens in the place of each new one, best first, under the same logits; of rows that
        ask for none they mean nothing.
      top_logprobs: of these.
      counts: new tokens of each row.
      stop_reasons: LIVE, or why the row does not go on.
      drafting: with a drafter, the counts of its proposals.
      records: choices of experts and blocks, and other named values, of the positions that drew the tokens; none where
        none are asked for.
      scores: of the prompts' tokens that follow those of a chunk (`Chunk.targets`).
    """

    tokens: Int32[HostOrDevice, "B W"]
    logprobs: Float32[HostOrDevice, "B W"]
    top_ids: Int32[HostOrDevice, "B W Z"]
    top_logprobs: Float32[HostOrDevice, "B W Z"]
    counts: Int32[HostOrDevice, "B"]
    stop_reasons: Int32[HostOrDevice, "B"]
    drafting: DraftCounts | None = None
    records: dict[str, Shaped[HostOrDevice, "B W ..."]] = field(default_factory=dict)
    scores: Scores | None = None


_FEW_ELEMENTS = 1 << 16  # of an array that a program rewrites whole rather than scatter into

Layout = tuple[Sharding, ...]  # on a mesh, where each array of the state stays
_Tree = TypeVar("_Tree")


def pin(tree: _Tree, layout: Layout | None) -> _Tree:
    """Keep every array of a state, or of its cache, where the layout says; left alone, the compiler may move them."""
    if layout is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    pinned = [lax.with_sharding_constraint(leaf, place) for leaf, place in zip(leaves, layout, strict=True)]
    return jax.tree.unflatten(structure, pinned)


def readable(tree: _Tree, layout: Layout | None) -> _Tree:
    """Return a call's results so that the host of each process can read them, where the layout has several processes.

    Args:
      tree: what the call returns beside the state.
      layout: of the state; None on one device.
    """
    return whole(tree, None if layout is None else layout[0])


def set_rows(of_rows: _Tree, rows: Int32[HostOrDevice, "C"], of_requests: _Tree) -> _Tree:
    """Return arrays of B rows in which some rows are those of requests.

    Args:
      of_rows: arrays [B ...].
      rows: of C requests, all different; B, one past the last, for a request that has none.
      of_requests: arrays [C ...] of the same structure.
    """
    num_rows = len(jax.tree.leaves(of_rows)[0])
    is_its_row = jnp.arange(num_rows, dtype=jnp.int32)[:, None] == rows  # [B C]
    request, is_set = jnp.argmax(is_its_row, axis=1), jnp.any(is_its_row, axis=1)  # [B]

    def update(old, new):
        # Each scatter is a kernel of its own, and there are some thirty small arrays: on a GPU what is computed element
        # by element becomes one. A large array is written where it lies.
        if old.size > _FEW_ELEMENTS:
            return old.at[rows].set(new, mode="drop")
        return jnp.where(is_set.reshape(-1, *[1] * (old.ndim - 1)), jnp.asarray(new)[request].astype(old.dtype), old)

    return jax.tree.map(update, of_rows, of_requests)


def on_rows(
    decode: Callable[..., tuple[State, NewTokens]],
    state: State,
    rows: Int32[HostOrDevice, "R"],
    *of_rows: PyTree[HostOrDevice | None],
) -> tuple[State, NewTokens]:
    """Decode some rows as if there were no others, which costs what so many rows cost.

    Args:
      decode: maps the state of R rows, and what is handed on of them, to their state and their new tokens.
      state: of B rows; all that are LIVE are among those that decode.
      rows: all different; B, one past the last, for none.
      *of_rows: of B rows each, such as masks; None is handed on.

    Returns:
      The state and the new tokens of B rows; those that are left out have none.
    """
    num_rows = len(state.lengths)
    take = lambda tree: jax.tree.map(lambda x: jnp.asarray(x).at[rows].get(mode="clip"), tree)  # [B ...] -> [R ...]
    before = state.continuations, state.lengths, state.newest_token, state.stop_reasons, state.draft_memory
    continuations, lengths, newest_token, stop_reasons, draft_memory = take(before)
    few = State(
        cache=state.cache.replace(table=take(state.cache.table)),
        continuations=continuations,
        lengths=lengths,
        newest_token=newest_token,
        stop_reasons=jnp.where(rows < num_rows, stop_reasons, IDLE),  # what stands for no row does nothing
        draft_memory=draft_memory,
    )
    few, new = decode(few, *map(take, of_rows))
    after = few.continuations, few.lengths, few.newest_token, few.stop_reasons, few.draft_memory
    state = State(few.cache.replace(table=state.cache.table), *set_rows(before, rows, after))
    put_back = lambda x: jnp.zeros((num_rows, *x.shape[1:]), x.dtype).at[rows].set(x, mode="drop")  # [R ...] -> [B ...]
    return state, replace(jax.tree.map(put_back, new), stop_reasons=state.stop_reasons)
