"""A model's parameters as a dictionary of dotted paths."""

from collections.abc import Mapping
from typing import Any

import jax


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of a module, or of a tree of its structure, by path ("stacks.0.self_attn.q_proj")."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_dotted(path): leaf for path, leaf in leaves}


def replace(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The same tree with other leaves."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_dotted(path)], tree)


def _dotted(path: tuple) -> str:
    # An nnx.Param is a node of its own, with its array under "value".
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
