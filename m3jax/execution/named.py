"""The named values of a call's layers: changed where they arise, by functions that a caller gives, and kept if asked.

A layer writes each value with a name into a `Values`, and what uses it next reads it from there. That is the one place
where an edit is made. Which layers have edits is known when a program is traced: without any a `Values` is a
dictionary, and the program is the same as if there were no edits in the world.
"""

import gc
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, Shaped

from m3jax.arrays import check_values, is_checking
from m3jax.execution.validity import are_blocks, are_experts, is_token

# Returns what stands in a value's place: of the value alone, or of the value and what was there before it (`Edits`).
Edit = Callable[..., Array]

HEADS = frozenset({"q", "k", "v", "index_q", "index_k"})


class Values(dict[str, Array]):
    """The named values of one layer, in the order in which they arise.

    Args:
      kept: names of those that the caller asked for.
      edited: names of those that an edit changes.

    Attributes:
      kept, edited: as above.
      asked: both, which must come into being even if something faster leaves them out.
    """

    def __init__(self, kept: frozenset[str] = frozenset(), edited: frozenset[str] = frozenset()):
        super().__init__()
        self.kept, self.edited, self.asked = kept, edited, kept | edited


class EditedValues(Values):
    """The named values of a layer that has edits: what is written goes through its edit.

    Args:
      edits: of this layer, by the values' own names.
      kept: names of the values that the caller asked for.
      seen: what edits can read beside the values of the layer, by name.
      prefix: of the layer's names, for messages.
      limits: (tokens of a block, experts), which a changed selection must respect.
    """

    def __init__(
        self,
        edits: Mapping[str, Edit],
        kept: frozenset[str],
        seen: Mapping[str, Array],
        prefix: str,
        limits: tuple[int, int],
    ):
        super().__init__(kept, frozenset(edits))
        self.edits, self.seen, self.prefix, self.limits = edits, seen, prefix, limits

    def __setitem__(self, name: str, value: Array) -> None:
        """Write a value as its edit, if it has one, makes it."""
        if name in self.edits:
            new = apply_edit(f"{self.prefix}{name}", self.edits[name], value, {**self.seen, **self})
            if name in ("blocks", "expert_ids") and new is not value:
                self._check_selection(name, new)
            value = new
        super().__setitem__(name, value)

    def _check_selection(self, name: str, chosen: Int[Array, "B ..."]) -> None:
        """Have what is wrong with a changed selection raised by `m3jax.checks()`, under which models run such edits."""
        if is_checking():
            block_size, num_experts = self.limits
            of_blocks = lambda *arrays: _problem_of_blocks(self.prefix, *arrays, block_size=block_size)
            of_experts = lambda *arrays: _problem_of_experts(self.prefix, *arrays, num_experts=num_experts)
            find_problem = of_blocks if name == "blocks" else of_experts
            check_values(find_problem, chosen, self.seen["positions"], self.seen["lengths"])


@struct.dataclass
class Inside:
    """The values that a call changes, those that it returns, and where it stops.

    Attributes:
      edits: functions by name, such as "layers.7.attention", "layers.*.blocks" or "embedding". A function that is a
        pytree (`jax.tree_util.Partial(f, vector)`) brings arrays along, which may change without a new program.
      names: of the values that are kept; "layers.*." for all layers that have them.
      stop_at: layers that run; None for all.
    """

    edits: dict[str, Edit] = struct.field(default_factory=dict)
    names: tuple[str, ...] = struct.field(pytree_node=False, default=())
    stop_at: int | None = struct.field(pytree_node=False, default=None)

    def changed(self, name: str, value: Array, **seen: Array) -> Array:
        """Return a value that belongs to no layer, as its edit, if it has one, makes it."""
        return apply_edit(name, self.edits[name], value, seen) if name in self.edits else value

    def runs(self, num_before: int, depth: int) -> list[tuple[int, int]]:
        """Return the ranges of layers of a stack that are edited and kept alike, as one scan can run them.

        Args:
          num_before: layers of the model before the stack.
          depth: layers of the stack.
        """
        if not self.edits and not self.names and self.stop_at is None:
            return [(0, depth)]
        if self.stop_at is not None:
            depth = min(depth, max(self.stop_at - num_before, 0))
        asked = [(self._edits_of(num_before + layer), self._kept_of(num_before + layer)) for layer in range(depth)]
        starts = [layer for layer in range(depth) if layer == 0 or asked[layer] != asked[layer - 1]]
        return list(pairwise([*starts, depth]))

    def of_layers(
        self, kept: list[dict[str, Shaped[Array, "L ..."]]], depths: Sequence[int]
    ) -> dict[int, dict[str, Array]]:
        """Return what was kept of each run of layers, by layer of the model and then by name.

        Args:
          kept: as `run_layers` returns it, by `KeepNamed`.
          depths: layers of each stack.
        """
        runs, num_before = [], 0
        for depth in depths:
            runs += [(num_before + first, num_before + end) for first, end in self.runs(num_before, depth)]
            num_before += depth
        return {
            layer: {name: stacked[layer - first] for name, stacked in values.items()}
            for (first, end), values in zip(runs, kept, strict=True)
            for layer in range(first, end)
        }

    def values(self, num_before: int, first: int, layer: Int[Array, ""], context: Any) -> Values:
        """Return an empty `Values` for a layer of a run.

        Args:
          num_before: layers of the model before the layer's stack.
          first: the run's first layer, in the stack.
          layer: this layer, in the stack; it may be traced.
          context: what the layers of the call share (`m3jax.model.context.Context`).
        """
        edits, kept = self._edits_of(num_before + first), self._kept_of(num_before + first)
        if not edits:
            return Values(kept)
        own = {name.rpartition(".")[2]: self.edits[name] for name in edits}
        seen = {"layer": num_before + layer, "positions": context.positions, "lengths": context.lengths}
        prefix = sorted(edits)[0].rpartition(".")[0] + "."
        config = context.config
        return EditedValues(own, kept, seen, prefix, (config.index_block_size, config.num_local_experts))

    def _edits_of(self, layer: int) -> tuple[str, ...]:
        """Return the given names of a layer's edits."""
        return tuple(name for name in self.edits if name.startswith((f"layers.{layer}.", "layers.*.")))

    def _kept_of(self, layer: int) -> frozenset[str]:
        """Return the own names of a layer's values that are kept."""
        prefixes = (f"layers.{layer}.", "layers.*.")
        return frozenset(name.rpartition(".")[2] for name in self.names if name.startswith(prefixes))


NOTHING = Inside()  # of calls that are computed as they are and return what they always do


def apply_edit(name: str, edit: Edit, value: Array, seen: Mapping[str, Array]) -> Array:
    """Return what an edit makes of a value, rounded to the value's dtype.

    Args:
      name: of the value, for messages.
      edit: gets the value, and `seen` if it takes two arguments.
      value: as it arose.
      seen: what the edit can read beside it.

    Raises:
      ValueError: the edit needs numbers where there are none yet, keeps what it got, or returns another shape or kind.
    """
    arguments = (value, dict(seen)) if _takes_two(edit) else (value,)
    given: list[weakref.ref] = []  # what is computed from a traced value holds it, so whoever keeps either is found

    def traced(*arguments):
        given.extend(map(weakref.ref, jax.tree.leaves(arguments)))
        return edit(*arguments)

    try:
        new_type = jax.eval_shape(traced, *arguments)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise ValueError(
            f"edits[{name!r}] asks for numbers while its program is traced ({type(error).__name__}): use jax.numpy, "
            "and jnp.where in place of if"
        ) from error
    if _any_alive(given):
        raise ValueError(
            f"edits[{name!r}] keeps what it was given: an edit must be pure; intermediates(names=[{name!r}]) returns "
            "values"
        )
    shape, dtype = getattr(new_type, "shape", None), getattr(new_type, "dtype", None)
    is_of_kind = dtype is not None and (
        jnp.issubdtype(dtype, jnp.floating) if jnp.issubdtype(value.dtype, jnp.floating) else dtype == value.dtype
    )
    if shape != value.shape or not is_of_kind:
        what = f"{dtype} {list(shape)}" if dtype is not None else f"a {type(new_type).__name__}"
        raise ValueError(f"edits[{name!r}] returns {what}: must be {value.dtype} {list(value.shape)}")
    return jnp.asarray(edit(*arguments)).astype(value.dtype)


def _any_alive(references: Sequence[weakref.ref]) -> bool:
    """Return True if an object is still in use; one that only a cycle holds is collected first.

    `jax.checking_leaks` collects garbage for every edit, which takes a second in a large process.
    """
    if not any(reference() is not None for reference in references):
        return False
    gc.collect()
    return any(reference() is not None for reference in references)


def _takes_two(edit: Edit) -> bool:
    """Return True if a function has two arguments that it must be given."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        parameters = inspect.signature(edit).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return sum(p.kind in kinds and p.default is p.empty for p in parameters) == 2


def _problem_of_blocks(
    prefix: str,
    blocks: Int[np.ndarray, "B K T J"],
    positions: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, " B"],
    block_size: int,
) -> str | None:
    """Return what is wrong with a changed selection of blocks, in one line; None if nothing is."""
    own_block = (positions // block_size)[:, None]  # [B 1 T]
    is_wrong = ~are_blocks(blocks, own_block) & is_token(positions, lengths)[:, None]  # [B K T]
    if not is_wrong.any():
        return None
    row, head, column = (int(i) for i in np.argwhere(is_wrong)[0])
    return (
        f"edits['{prefix}blocks'] gives {blocks[row, head, column].tolist()} for row {row}, KV head {head}, token "
        f"{column}: give distinct ids, ascending, up to the token's own block {own_block[row, 0, column]}, which is "
        "always among them, then -1"
    )


def _problem_of_experts(
    prefix: str,
    expert_ids: Int[np.ndarray, "B T A"],
    positions: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, " B"],
    num_experts: int,
) -> str | None:
    """Return what is wrong with changed experts, in one line; None if nothing is."""
    is_wrong = ~are_experts(expert_ids, num_experts) & is_token(positions, lengths)  # [B T]
    if not is_wrong.any():
        return None
    row, column = (int(i) for i in np.argwhere(is_wrong)[0])
    return (
        f"edits['{prefix}expert_ids'] gives {expert_ids[row, column].tolist()} for row {row}, token {column}: give "
        f"distinct ids from 0 to {num_experts - 1}"
    )
