"""Meshes, and the one table that says which axis of which array is divided over which mesh axis."""

from m3jax.parallel.mesh import AXES, make_mesh, parse_mesh
from m3jax.parallel.rules import RULES, sharding, spec

__all__ = ["AXES", "RULES", "make_mesh", "parse_mesh", "sharding", "spec"]
