"""The names of a model's values, as edits and captures give them."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import jax
from jaxtyping import Array

from m3jax.config import M3Config
from m3jax.execution import Edit
from m3jax.messages import shown

OUTSIDE = ("embedding", "final_norm", "logits")  # values of no layer
OF_LAYERS = (
    "input", "attention_norm", "q", "k", "v", "index_q", "index_k", "block_scores", "blocks", "attention",
    "attention_out", "ffn_norm", "expert_ids", "expert_weights", "ffn_out", "output",
)  # fmt: skip


def names_of(config: M3Config, dense: bool = False) -> list[tuple[str, ...]]:
    """Return the names of each layer's values, in the order in which they arise (`m3jax.spec.model.layer`).

    Args:
      config: the model's.
      dense: whether it attends to every block (`M3.with_dense`), and selects none.
    """
    of_layers = []
    for stack in config.stacks:
        missing = set() if stack.is_moe else {"expert_ids", "expert_weights"}
        if not stack.is_sparse:
            missing |= {"index_q", "index_k"}
        if not stack.is_sparse or dense:
            missing |= {"block_scores", "blocks"}
        of_layers += [tuple(name for name in OF_LAYERS if name not in missing)] * stack.num_layers
    return of_layers


def all_names(config: M3Config, dense: bool, stop_at: int | None = None) -> tuple[str, ...]:
    """Return the names of all values of a call, with "layers.*." for every layer.

    Args:
      config, dense: As in `names_of`.
      stop_at: Number of layers that run; None for all, the final norm and the head.
    """
    outside, of_layers = OUTSIDE if stop_at is None else OUTSIDE[:1], names_of(config, dense)[:stop_at]
    return *outside, *(f"layers.*.{name}" for name in OF_LAYERS if any(name in names for names in of_layers))


def by_layer(values: Mapping[str, Array]) -> dict[str, Any]:
    """Return values with the layers' in a list, "layers", of one dictionary per layer.

    Args:
      values: Values by full name.
    """
    found: dict[str, Any] = {name: value for name, value in values.items() if name in OUTSIDE}
    layers: dict[int, dict[str, Array]] = {}
    for name, value in values.items():
        if name not in OUTSIDE:
            _, layer, own = name.split(".")
            layers.setdefault(int(layer), {})[own] = value
    return found | {"layers": [layers[layer] for layer in sorted(layers)]}


def check_reach(config: M3Config, has_cache: bool, residual_layers: Sequence[int], stop_at: int | None) -> None:
    """Raise ValueError for layers that a call cannot return or stop at.

    Args:
      config: The model's configuration.
      has_cache: Whether the call has a cache.
      residual_layers, stop_at: As in `M3.run`.
    """
    if has_cache and stop_at is not None:
        raise ValueError("stop_at with a cache: the layers behind it would lack these tokens; leave one of them out")
    depth = config.num_hidden_layers
    is_known = all(0 <= n <= depth for n in residual_layers)
    if len(set(residual_layers)) < len(residual_layers) or not is_known:
        raise ValueError(
            f"residual_layers = {residual_layers}: the model has 0 (the embedding) to {depth}; give each once"
        )


def check_names(
    names: Sequence[str],
    argument: str,
    config: M3Config,
    dense: bool,
    stop_at: int | None = None,
    also: Sequence[str] = (),
) -> None:
    """Raise ValueError for a name that no value of the call has, with the nearest ones.

    Args:
      names: such as "layers.7.attention", "layers.*.blocks" or "embedding".
      argument: what they were given as, for the message.
      config, dense: as of `names_of`.
      stop_at: layers that run; None for all.
      also: further names that are known.
    """
    depth = config.num_hidden_layers
    if stop_at is not None and (isinstance(stop_at, bool) or not isinstance(stop_at, int) or not 0 <= stop_at <= depth):
        raise ValueError(f"stop_at = {stop_at!r}: layers that run, 0 to {depth}")
    of_layers = names_of(config, dense)[:stop_at]
    known = [f"layers.{layer}.{name}" for layer, names in enumerate(of_layers) for name in names]
    known += [f"layers.*.{name}" for name in OF_LAYERS if any(name in names for names in of_layers)]
    known += [*(OUTSIDE if stop_at is None else OUTSIDE[:1]), *also]
    for name in names:
        if name not in known:
            nearest = get_close_matches(str(name), known, n=3, cutoff=0.5) or ["layers.0.output", *OUTSIDE[:1]]
            where = "the model" if stop_at is None else f"a call with stop_at = {stop_at}"
            raise ValueError(f"{argument} has {name!r}, which {where} has not: nearest are {', '.join(nearest)}")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ValueError(f"{argument} has {twice[0]!r} twice: give it once")


def expand(names: Sequence[str], config: M3Config, dense: bool) -> tuple[str, ...]:
    """Return names with each "layers.*." written out for the layers that have the value.

    Args:
      names: of values.
      config, dense: as of `names_of`.
    """
    expanded: dict[str, None] = {}
    for name in names:
        own = name.rpartition(".")[2]
        layers = [layer for layer, of_layer in enumerate(names_of(config, dense)) if own in of_layer]
        expanded |= dict.fromkeys([f"layers.{n}.{own}" for n in layers] if name.startswith("layers.*.") else [name])
    return tuple(expanded)


def check_edits(edits: Mapping[str, Edit], config: M3Config, dense: bool, stop_at: int | None = None) -> None:
    """Raise ValueError for edits of values that the call does not have, or that are no functions.

    Args:
      edits: functions by name.
      config, dense, stop_at: as of `check_names`.
    """
    if not isinstance(edits, Mapping):
        raise ValueError(f"edits is a {type(edits).__name__}: give functions by name, as {{'layers.3.output': f}}")
    check_names(tuple(edits), "edits", config, dense, stop_at)
    for name, edit in edits.items():
        if not callable(edit):
            raise ValueError(f"edits[{name!r}] = {shown(edit)}: give a function of the value")
        if name.startswith("layers.*.") and (both := [other for other in edits if _is_one_of(other, name)]):
            raise ValueError(f"edits has {both[0]!r} and {name!r}: give one function for a value")


def _is_one_of(name: str, pattern: str) -> bool:
    """Return True if a pattern stands for the value of this name of one layer."""
    return name != pattern and name.startswith("layers.") and name.rpartition(".")[2] == pattern.rpartition(".")[2]


def as_pytrees(edits: Mapping[str, Edit]) -> dict[str, Callable[..., Any]]:
    """Return edits as a compiled program takes them: a function that is no pytree is part of what is compiled for."""
    as_tree = lambda edit: edit if jax.tree.structure(edit) != jax.tree.structure(0) else jax.tree_util.Partial(edit)
    return {name: as_tree(edit) for name, edit in edits.items()}
