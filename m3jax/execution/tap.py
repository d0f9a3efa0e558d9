"""The named values of a call: each passes through one visible line, `x = tap("name", x)`, that may change and keep it.

Which values are edited or kept is known when a program is traced. For all others `tap` returns its argument, and the
program is the same as if no value had a name.
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
from jaxtyping import Array, Float, Int, PyTree, Shaped

from m3jax.arrays import check_values, is_checking
from m3jax.execution.validity import are_blocks, are_experts, is_token

# Maps a value to its replacement. A function of two arguments also gets a dictionary of what was computed before it.
Edit = Callable[..., Array]
# Maps a layer's named values, and what the layers of the call share (`m3jax.model.context.Context`), to what is kept.
Probe = Callable[[dict[str, Array], Any], PyTree[Array]]

HEADS = ("q", "k", "v", "index_q", "index_k")
_PER_LAYER = "layers."


class Tap:
    """The named values of one layer, or of no layer, in the order in which they arise.

    Args:
      kept: Names of the values that the caller wants.
      edits: Functions by the values' own names.
      seen: Arrays that edits of two arguments can read besides the earlier values, by name.
      prefix: Text before the values' own names, for error messages.
      limits: Tokens per block and number of experts, which an edited selection must respect.

    Attributes:
      values: The values so far, by name.
    """

    def __init__(
        self,
        kept: frozenset[str] = frozenset(),
        edits: Mapping[str, Edit] | None = None,
        seen: Mapping[str, Array] | None = None,
        prefix: str = "",
        limits: tuple[int, int] = (1, 1),
    ):
        self.values: dict[str, Array] = {}
        self._kept, self._edits, self._seen, self._prefix, self._limits = kept, edits or {}, seen or {}, prefix, limits

    def __call__(self, name: str, value: Array) -> Array:
        """Return the value, or its replacement if the caller edits it.

        Args:
          name: The value's own name, such as "attention_out".
          value: The value as computed.
        """
        if name in self._edits:
            new = apply_edit(f"{self._prefix}{name}", self._edits[name], value, {**self._seen, **self.values})
            if name in ("blocks", "expert_ids") and new is not value:
                self._check_selection(name, new)
            value = new
        self.values[name] = value
        return value

    def edits(self, *names: str) -> bool:
        """Return True if the caller edits one of these values."""
        return any(name in self._edits for name in names)

    def wants(self, *names: str) -> bool:
        """Return True if the caller edits or keeps one of these values, so that a faster way must not skip it."""
        return any(name in self._edits or name in self._kept for name in names)

    @property
    def kept(self) -> dict[str, Array]:
        """The values that the caller wants."""
        return {name: value for name, value in self.values.items() if name in self._kept}

    def _check_selection(self, name: str, chosen: Int[Array, "B ..."]) -> None:
        """Have `m3jax.checks()`, under which models run such edits, raise an error for an impossible selection."""
        if is_checking():
            block_size, num_experts = self._limits
            of_blocks = lambda *arrays: _problem_of_blocks(self._prefix, *arrays, block_size=block_size)
            of_experts = lambda *arrays: _problem_of_experts(self._prefix, *arrays, num_experts=num_experts)
            find_problem = of_blocks if name == "blocks" else of_experts
            check_values(find_problem, chosen, self._seen["positions"], self._seen["lengths"])


@struct.dataclass
class Taps:
    """The values that a call edits and keeps, over all layers.

    Attributes:
      edits: Functions by full name, such as "layers.7.attention", "layers.*.blocks" or "embedding". A function that is
        a pytree (`jax.tree_util.Partial(f, vector)`) brings arrays, which may change without a new program.
      names: Values to keep, by full name.
      choices: Values to keep of every layer that has them, by own name ("expert_ids", "blocks").
      residual_layers: Layers after which the residual stream is kept: 0 is the embedding, n the output of the n-th.
      probe: Function of each layer's values whose results are kept.
      stop_at: Number of layers that run; None for all.
    """

    edits: dict[str, Edit] = struct.field(default_factory=dict)
    names: tuple[str, ...] = struct.field(pytree_node=False, default=())
    choices: tuple[str, ...] = struct.field(pytree_node=False, default=())
    residual_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())
    probe: Probe | None = struct.field(pytree_node=False, default=None)
    stop_at: int | None = struct.field(pytree_node=False, default=None)

    def outside(self, positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Tap:
        """Return the tap of the values that belong to no layer."""
        is_outside = lambda name: not name.startswith(_PER_LAYER)
        edits = {name: edit for name, edit in self.edits.items() if is_outside(name)}
        return Tap(frozenset(filter(is_outside, self.names)), edits, {"positions": positions, "lengths": lengths})

    def of_layer(self, num_before: int, first: int, layer: Int[Array, ""], context: Any) -> Tap:
        """Return the tap of one layer of a run.

        Args:
          num_before: Layers of the model before the layer's stack.
          first: First layer of the run, in the stack.
          layer: This layer, in the stack; may be traced.
          context: Values that the layers of the call share (`m3jax.model.context.Context`).
        """
        names, kept = self._edits_of(num_before + first), self._kept_of(num_before + first)
        if not names:
            return Tap(kept.union(self.choices))
        edits = {name.rpartition(".")[2]: self.edits[name] for name in names}
        seen = {"layer": num_before + layer, "positions": context.positions, "lengths": context.lengths}
        prefix = sorted(names)[0].rpartition(".")[0] + "."
        limits = context.config.index_block_size, context.config.num_local_experts
        return Tap(kept.union(self.choices), edits, seen, prefix, limits)

    def runs(self, num_before: int, depth: int) -> list[tuple[int, int]]:
        """Return the ranges of layers of a stack that are edited and kept alike, each of which one scan can run.

        Args:
          num_before: Layers of the model before the stack.
          depth: Layers of the stack.
        """
        if not self.edits and not self.names and self.stop_at is None:
            return [(0, depth)]
        if self.stop_at is not None:
            depth = min(depth, max(self.stop_at - num_before, 0))
        asked = [(self._edits_of(num_before + layer), self._kept_of(num_before + layer)) for layer in range(depth)]
        starts = [layer for layer in range(depth) if layer == 0 or asked[layer] != asked[layer - 1]]
        return list(pairwise([*starts, depth]))

    def by_layer(
        self, kept: list[dict[str, Shaped[Array, "L ..."]]], depths: Sequence[int]
    ) -> dict[int, dict[str, Array]]:
        """Return the kept values of each layer of the model, by layer and name.

        Args:
          kept: Values of each run of layers, stacked, as `run_layers` returns them.
          depths: Number of layers of each stack.
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

    def no_residuals(self, embedding: Float[Array, "B T D"]) -> Float[Array, "_ B T D"] | None:
        """Return the memory of the residual stream before the first layer; None if none is kept.

        The memory has a place for each kept layer and a last one that all other layers write to and nothing reads, so
        that every layer writes once, without a condition.
        """
        if not self.residual_layers:
            return None
        kept = [embedding if n == 0 else jnp.zeros_like(embedding) for n in self.residual_layers]
        return jnp.stack([*kept, jnp.zeros_like(embedding)])

    def keep_residual(
        self, residuals: Float[Array, "_ B T D"] | None, number: Int[Array, ""], output: Float[Array, "B T D"]
    ) -> Float[Array, "_ B T D"] | None:
        """Return the memory with a layer's output, if it is one of `residual_layers`.

        Args:
          residuals: The memory.
          number: The layer's number, counted from 1. It is traced: a scan has one program for all layers of a stack.
          output: The layer's output.
        """
        if residuals is None:
            return None
        is_wanted = jnp.asarray(self.residual_layers, jnp.int32) == number  # [A]
        index = jnp.where(jnp.any(is_wanted), jnp.argmax(is_wanted), len(self.residual_layers))
        return jax.lax.dynamic_update_index_in_dim(residuals, output, index, 0)

    def _edits_of(self, layer: int) -> tuple[str, ...]:
        """Return the full names of a layer's edits."""
        return tuple(name for name in self.edits if name.startswith((f"layers.{layer}.", "layers.*.")))

    def _kept_of(self, layer: int) -> frozenset[str]:
        """Return the own names of a layer's kept values."""
        prefixes = (f"layers.{layer}.", "layers.*.")
        return frozenset(name.rpartition(".")[2] for name in self.names if name.startswith(prefixes))


NO_TAPS = Taps()  # nothing is edited or kept


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
