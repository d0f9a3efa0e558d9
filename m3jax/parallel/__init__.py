"""Meshes, and the one table that says which axis of which array is divided over which mesh axis; arrays put there."""

from m3jax.parallel.mesh import AXES, as_mesh, make_mesh, parse_mesh
from m3jax.parallel.place import put, read, whole
from m3jax.parallel.rules import PAGE_AXES, RULES, sharding, spec

__all__ = [
    "AXES",
    "PAGE_AXES",
    "RULES",
    "as_mesh",
    "make_mesh",
    "parse_mesh",
    "put",
    "read",
    "sharding",
    "spec",
    "whole",
]
