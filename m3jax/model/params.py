"""Making the parameter tree: the same constructor gives shapes, logical axes, or random weights."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from m3jax.config import M3Config
from m3jax.parallel import sharding

# (shape, logical axes, dtype or None for the model's, fan-in or None for zeros) -> leaf
Make = Callable[[tuple[int, ...], tuple[str | None, ...], str | None, int | None], object]

DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_dtype(dtype: str) -> None:
    """Raise ValueError for a dtype that a model cannot have."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: allowed are {', '.join(DTYPES)}")
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("dtype = 'float64' needs jax.config.update('jax_enable_x64', True) first")


def leaf_dtype(own: str | None, dtype: str) -> jnp.dtype:
    """A parameter's dtype: the router's is at least float32, whatever the model's is."""
    return jnp.dtype(dtype) if own is None else jnp.promote_types(own, "float64" if dtype == "float64" else own)


def abstract(config: M3Config, dtype: str = "bfloat16", mesh: Mesh | None = None) -> nnx.Module:
    """The model with `jax.ShapeDtypeStruct` leaves: enough to trace, lower and plan."""
    check_dtype(dtype)

    def make(shape, axes, own, fan_in):
        where = None if mesh is None else sharding(shape, axes, mesh)
        return jax.ShapeDtypeStruct(shape, leaf_dtype(own, dtype), sharding=where)

    return _build(config, make, mesh)


def logical_axes(config: M3Config) -> nnx.Module:
    """The model with the tuple of logical axis names in place of each parameter."""
    return _build(config, lambda shape, axes, own, fan_in: Axes(axes), None)


def shardings(config: M3Config, mesh: Mesh | None) -> nnx.Module:
    """The model with the sharding of each parameter in its place."""
    return _build(config, lambda shape, axes, own, fan_in: sharding(shape, axes, mesh), mesh)


def init(config: M3Config, seed: int = 0, dtype: str = "float32", mesh: Mesh | None = None) -> nnx.Module:
    """Random weights: normal with standard deviation fan_in**-0.5; norms and the routing bias are zero.

    The stored norm weight is centred on 0 (the model adds 1).
    """
    check_dtype(dtype)
    count = iter(range(1 << 30))

    def make(shape, axes, own, fan_in):
        kind = leaf_dtype(own, dtype)
        where = sharding(shape, axes, mesh)
        if fan_in is None:
            return jnp.zeros(shape, kind, device=where)
        key = jax.random.fold_in(jax.random.key(seed), next(count))
        draw = jax.jit(_normal, static_argnums=(1, 2, 3), out_shardings=where)
        return draw(key, shape, kind, fan_in)

    return _build(config, make, mesh)


class Axes(tuple):
    """Logical axis names of one parameter; a leaf of the tree, not a container."""


def _normal(key, shape, dtype, fan_in):
    return (jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32)) * fan_in**-0.5).astype(dtype)


def _build(config: M3Config, make: Make, mesh: Mesh | None) -> nnx.Module:
    from m3jax.model.m3 import M3

    return M3(config, make, mesh)


def num_bytes(tree: nnx.Module) -> int:
    """Bytes of all parameters of a real or an abstract model."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
