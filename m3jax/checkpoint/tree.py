"""Conversion of a model's parameters to a dictionary by dotted path, and back."""

from collections.abc import Mapping
from typing import Any

import jax

from m3jax.make import dotted_path


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of a module, or of a tree of its structure, by path ("stacks.0.self_attn.q_proj")."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {dotted_path(keys): leaf for keys, leaf in leaves}


def replace(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a tree of the same structure with other leaves, each named by its path."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: leaves[dotted_path(keys)], tree)
