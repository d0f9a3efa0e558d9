"""Meshes, and the one table that says which axis of which array is divided over which mesh axis; arrays put there."""

from m3jax.parallel.exchanges import exchanged_by_xla, is_exchanged_by_xla
from m3jax.parallel.mesh import AXES, as_mesh, make_mesh, parse_axes, parse_mesh
from m3jax.parallel.place import put, read, whole
from m3jax.parallel.rules import PAGE_AXES, RULES, sharding, spec
from m3jax.parallel.tokens import TENSOR, TokenAxes, token_axes

__all__ = [
    "AXES",
    "PAGE_AXES",
    "RULES",
    "TENSOR",
    "TokenAxes",
    "as_mesh",
    "exchanged_by_xla",
    "is_exchanged_by_xla",
    "make_mesh",
    "parse_axes",
    "parse_mesh",
    "put",
    "read",
    "sharding",
    "spec",
    "token_axes",
    "whole",
]
