"""Construction of the parameter tree: the same constructors give shapes, logical axes, shardings, or weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from m3jax.config import M3Config
from m3jax.make import Frozen
from m3jax.model.m3 import M3
from m3jax.mxfp8 import BLOCK, MXFP8Array, scales_shape
from m3jax.parallel import as_mesh, sharding, spec

DTYPES = ("bfloat16", "float16", "float32", "float64")
# What becomes of MXFP8 weights: they are dequantised into the model's dtype, or stay codes and scales.
WEIGHTS = ("dequantize", "mxfp8")
Shape = tuple[int, ...]
Axes = tuple[str | None, ...]


def dtype_name(dtype: DTypeLike) -> str:
    """Return the name of a model's dtype, given as a name ("bfloat16") or as `jnp.bfloat16` and the like.

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
    """Return a parameter's dtype: the model's, or the least that it needs (the router: float32; float64 in float64)."""
    if least is None:
        return jnp.dtype(model_dtype)
    if jnp.issubdtype(least, jnp.integer):
        return jnp.dtype(least)
    return jnp.promote_types(least, model_dtype)


def check_weights(weights: str) -> None:
    """Raise ValueError for a name that is not in `WEIGHTS`.

    Args:
      weights: the name.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights = {weights!r}: allowed are {', '.join(map(repr, WEIGHTS))}")


@dataclass(frozen=True)
class MakeEach:
    """A maker of parameters by one function of shape, axes and dtype, which is all that shapes and shardings need.

    Attributes:
      make: the function.
      weights: one of `WEIGHTS`: whether the matrices of linear layers are in MXFP8.
      mesh: what they are divided over; it must leave blocks of 32 channels whole.
    """

    make: Callable[[Shape, Axes, str | None], Any]
    weights: str = "dequantize"
    mesh: Mesh | None = None

    def weight(self, shape: Shape, axes: Axes, *, fan_in: int, dtype: str | None = None) -> nnx.Param:
        """Return a matrix, or a stack of them."""
        return nnx.Param(self.make(shape, axes, dtype))

    def linear(self, shape: Shape, axes: Axes, *, inputs: int = 1, outputs: int = 1) -> nnx.Param | Frozen:
        """Return a matrix of a linear layer, or a stack of them; in MXFP8 its codes and scales."""
        if self.weights == "dequantize":
            return nnx.Param(self.make(shape, axes, None))
        _check_blocks(shape, axes, inputs, outputs, self.mesh)
        first_input = len(shape) - outputs - inputs
        block_axes = (*axes[: first_input + 1], *axes[first_input + inputs :])  # the inputs are one axis
        codes = self.make(shape, axes, "uint8")
        scales = self.make(scales_shape(shape, inputs, outputs), block_axes, "uint8")
        return Frozen(MXFP8Array(codes, scales, inputs, outputs))

    def norm(self, shape: Shape, *, dtype: str | None = None, start: float = 0.0) -> nnx.Param:
        """Return the weights of a norm, or a bias."""
        return nnx.Param(self.make(shape, (None,) * len(shape), dtype))


def _check_blocks(shape: Shape, axes: Axes, inputs: int, outputs: int, mesh: Mesh | None) -> None:
    """Raise ValueError if a mesh cuts through a block of 32 input channels, which has one scale."""
    first_input, first_output = len(shape) - outputs - inputs, len(shape) - outputs
    if mesh is None:
        return
    num_channels = math.prod(shape[first_input:first_output])
    mesh_axis = spec(shape, axes, mesh)[first_input]
    parts = 1 if mesh_axis is None else mesh.shape[mesh_axis]
    if parts > 1 and num_channels % (parts * BLOCK):
        raise ValueError(
            f"mesh axis {mesh_axis!r} of size {parts} cuts {num_channels} input channels of an MXFP8 weight into parts "
            f"that are not whole blocks of {BLOCK}: choose a smaller one, or weights = 'dequantize'"
        )


@dataclass
class MakeRandom:
    """A maker of random weights: normal with standard deviation fan_in**-0.5; norms do nothing, biases are 0.

    The text model's norms store weights centred on 0 (the model adds 1), the tower's store weights centred on 1. Each
    matrix has a key of its own, by its place in the order of construction.
    """

    key: Key[Array, ""]
    dtype: str
    mesh: Mesh | None
    num_drawn: int = field(default=0)

    def weight(self, shape: Shape, axes: Axes, *, fan_in: int, dtype: str | None = None) -> nnx.Param:
        """Return a matrix, or a stack of them: a large one is drawn where it lies, a small one put there."""
        key = jax.random.fold_in(self.key, self.num_drawn)
        self.num_drawn += 1
        dtype = parameter_dtype(dtype, self.dtype)
        made_there = partial(
            jax.jit, static_argnames=("shape", "dtype"), out_shardings=sharding(shape, axes, self.mesh)
        )
        size = next((size for size in _SMALL_SIZES if size >= math.prod(shape)), None)
        if size is None:
            return nnx.Param(made_there(_drawn)(key, fan_in**-0.5, shape=shape, dtype=dtype))
        numbers = jax.random.normal(key, (size,), jnp.promote_types(dtype, jnp.float32))
        return nnx.Param(made_there(_cut)(numbers, fan_in**-0.5, shape=shape, dtype=dtype))

    def linear(self, shape: Shape, axes: Axes, *, inputs: int = 1, outputs: int = 1) -> nnx.Param:
        """Return a matrix of a linear layer, or a stack of them."""
        first_output = len(shape) - outputs
        return self.weight(shape, axes, fan_in=math.prod(shape[first_output - inputs : first_output]))

    def norm(self, shape: Shape, *, dtype: str | None = None, start: float = 0.0) -> nnx.Param:
        """Return the weights of a norm, or a bias: all of one value."""
        on_every_device = sharding(shape, (None,) * len(shape), self.mesh)
        return nnx.Param(jnp.full(shape, start, parameter_dtype(dtype, self.dtype), device=on_every_device))


# Sizes in which numbers for small matrices are drawn. On a CPU compiling the draw takes a third of a second for each
# size, and compiling the cut of a matrix from them a fiftieth of a second for each shape.
_SMALL_SIZES = (1 << 12, 1 << 16, 1 << 20)


def _drawn(key: Key[Array, ""], deviation: Float[Array, ""], shape: Shape, dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return a random matrix with a given standard deviation."""
    return (jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32)) * deviation).astype(dtype)


def _cut(
    numbers: Float[Array, " S"], deviation: Float[Array, ""], shape: Shape, dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Return a matrix made of the first of some numbers, which have a standard deviation of 1."""
    return (numbers[: math.prod(shape)].reshape(shape) * deviation).astype(dtype)


def init(
    config: M3Config,
    seed: int = 0,
    dtype: DTypeLike = "float32",
    mesh: Mesh | str | None = None,
    *,
    rngs: nnx.Rngs | None = None,
) -> M3:
    """Return a model with random weights (`MakeRandom`).

    Args:
      config: the model's configuration; `M3Config.tiny()` for experiments.
      seed: of the draw.
      dtype: of weights and activations; the router's is at least float32.
      mesh: where the weights lie: from `m3jax.make_mesh`, or text such as "expert=2,tensor=4"; None for the default
        device.
      rngs: its "params" stream draws the weights, in place of a seed.

    Raises:
      ValueError: no configuration, a dtype that a model cannot have, or a mesh with other axes.
    """
    if not isinstance(config, M3Config):
        raise ValueError(
            f"config is a {type(config).__name__}: must be an M3Config, such as M3Config.tiny() or "
            "M3Config.from_pretrained(FOLDER)"
        )
    key = jax.random.key(seed) if rngs is None else rngs.params()
    mesh = as_mesh(mesh)
    return M3(config, MakeRandom(key, dtype_name(dtype), mesh), mesh)


def abstract(
    config: M3Config,
    dtype: DTypeLike = "bfloat16",
    mesh: Mesh | str | None = None,
    weights: str = "dequantize",
) -> M3:
    """Return the model with `jax.ShapeDtypeStruct` leaves: enough to trace, lower and plan.

    Args:
      config, dtype, mesh: as in `init`.
      weights: "mxfp8" keeps the matrices of linear layers as codes and scales (docs/mxfp8.md).

    Raises:
      ValueError: a dtype that a model cannot have, a mesh with other axes, or one that cuts through MXFP8's blocks.
    """
    name, mesh = dtype_name(dtype), as_mesh(mesh)
    check_weights(weights)

    def describe(shape, axes, least_dtype):
        divided = None if mesh is None else sharding(shape, axes, mesh)
        return jax.ShapeDtypeStruct(shape, parameter_dtype(least_dtype, name), sharding=divided)

    return M3(config, MakeEach(describe, weights, mesh), mesh)


class LogicalAxes(tuple):
    """The logical axis names of one parameter; a leaf of the tree, not a container."""


def logical_axes(config: M3Config) -> M3:
    """Return the model with the tuple of logical axis names in place of each parameter.

    Args:
      config: the model's.
    """
    return M3(config, MakeEach(lambda shape, axes, least_dtype: LogicalAxes(axes)), None)


def shardings(config: M3Config, mesh: Mesh | None, weights: str = "dequantize") -> M3:
    """Return the model with the sharding of each parameter in its place.

    Args:
      config: the model's.
      mesh: as in `m3jax.parallel.sharding`.
      weights: as in `abstract`.
    """
    place = lambda shape, axes, least_dtype: sharding(shape, axes, mesh)
    return M3(config, MakeEach(place, weights, mesh), mesh)


def num_bytes(tree: nnx.Module) -> int:
    """Return the bytes of all parameters of a real or an abstract model."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
