"""Making the parameter tree: the same constructors give shapes, logical axes, shardings, or random weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from m3jax.config import M3Config
from m3jax.model.m3 import M3
from m3jax.parallel import as_mesh, sharding

DTYPES = ("bfloat16", "float16", "float32", "float64")
Shape = tuple[int, ...]
Axes = tuple[str | None, ...]


def dtype_name(dtype: DTypeLike) -> str:
    """The name of a model's dtype, given as a name ("bfloat16") or as `jnp.bfloat16` and the like.

    Raises:
      ValueError: a dtype that a model cannot have.
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype = {name!r}: allowed are {', '.join(DTYPES)}")
    if name == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("dtype = 'float64' needs jax.config.update('jax_enable_x64', True) first")
    return name


def parameter_dtype(least: str | None, model_dtype: str) -> jnp.dtype:
    """A parameter's dtype: the model's, or what it needs at least; the router needs float32, float64 in float64."""
    if least is None:
        return jnp.dtype(model_dtype)
    if jnp.issubdtype(least, jnp.integer):
        return jnp.dtype(least)
    return jnp.promote_types(least, model_dtype)


@dataclass(frozen=True)
class MakeEach:
    """Makes every parameter by one function of its shape, axes and dtype, as shapes and shardings need no more."""

    make: Callable[[Shape, Axes, str | None], Any]

    def weight(self, shape: Shape, axes: Axes, *, fan_in: int, dtype: str | None = None) -> nnx.Param:
        """A matrix, or a stack of them."""
        return nnx.Param(self.make(shape, axes, dtype))

    def norm(self, shape: Shape, *, dtype: str | None = None) -> nnx.Param:
        """The weights of a norm, or a bias."""
        return nnx.Param(self.make(shape, (None,) * len(shape), dtype))


@dataclass
class MakeRandom:
    """Draws weights from a normal distribution with standard deviation fan_in**-0.5; norms and biases are zero.

    The stored norm weight is centred on 0 (the model adds 1). Each weight has a key of its own, by its place in the
    order of construction.
    """

    key: Key[Array, ""]
    dtype: str
    mesh: Mesh | None
    num_drawn: int = field(default=0)

    def weight(self, shape: Shape, axes: Axes, *, fan_in: int, dtype: str | None = None) -> nnx.Param:
        """A matrix, or a stack of them, drawn where it lies."""
        key = jax.random.fold_in(self.key, self.num_drawn)
        self.num_drawn += 1
        place = sharding(shape, axes, self.mesh)
        draw = jax.jit(_normal, static_argnames=("shape", "dtype", "fan_in"), out_shardings=place)
        return nnx.Param(draw(key, shape=shape, dtype=parameter_dtype(dtype, self.dtype), fan_in=fan_in))

    def norm(self, shape: Shape, *, dtype: str | None = None) -> nnx.Param:
        """The weights of a norm, or a bias: zero."""
        place = sharding(shape, (None,) * len(shape), self.mesh)
        return nnx.Param(jnp.zeros(shape, parameter_dtype(dtype, self.dtype), device=place))


def _normal(key: Key[Array, ""], shape: Shape, dtype: jnp.dtype, fan_in: int) -> Float[Array, "..."]:
    return (jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32)) * fan_in**-0.5).astype(dtype)


def init(
    config: M3Config,
    seed: int = 0,
    dtype: DTypeLike = "float32",
    mesh: Mesh | str | None = None,
    *,
    rngs: nnx.Rngs | None = None,
) -> M3:
    """A model with random weights (`MakeRandom`).

    Args:
      config: the model's configuration; `M3Config.tiny()` for experiments.
      seed: of the draw.
      dtype: of weights and activations; the router's is at least float32.
      mesh: where the weights lie: from `m3jax.make_mesh`, or text such as "expert=2,tensor=4"; None for the default
        device.
      rngs: its "params" stream draws the weights, in place of a seed.

    Raises:
      ValueError: a dtype that a model cannot have, or a mesh with other axes.
    """
    key = jax.random.key(seed) if rngs is None else rngs.params()
    mesh = as_mesh(mesh)
    return M3(config, MakeRandom(key, dtype_name(dtype), mesh), mesh)


def abstract(config: M3Config, dtype: DTypeLike = "bfloat16", mesh: Mesh | str | None = None) -> M3:
    """The model with `jax.ShapeDtypeStruct` leaves: enough to trace, lower and plan.

    Args:
      config, dtype, mesh: as in `init`.
    """
    name, mesh = dtype_name(dtype), as_mesh(mesh)

    def describe(shape, axes, least_dtype):
        place = None if mesh is None else sharding(shape, axes, mesh)
        return jax.ShapeDtypeStruct(shape, parameter_dtype(least_dtype, name), sharding=place)

    return M3(config, MakeEach(describe), mesh)


class LogicalAxes(tuple):
    """Logical axis names of one parameter; a leaf of the tree, not a container."""


def logical_axes(config: M3Config) -> M3:
    """The model with the tuple of logical axis names in place of each parameter.

    Args:
      config: the model's.
    """
    return M3(config, MakeEach(lambda shape, axes, least_dtype: LogicalAxes(axes)), None)


def shardings(config: M3Config, mesh: Mesh | None) -> M3:
    """The model with the sharding of each parameter in its place.

    Args:
      config: the model's.
      mesh: as in `m3jax.parallel.sharding`.
    """
    return M3(config, MakeEach(lambda shape, axes, least_dtype: sharding(shape, axes, mesh)), mesh)


def num_bytes(tree: nnx.Module) -> int:
    """Bytes of all parameters of a real or an abstract model."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
