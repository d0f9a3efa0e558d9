"""The interface by which a module makes its parameters; `m3jax.model.build` makes shapes, axes or random weights."""

from typing import Protocol, runtime_checkable

import jax
from flax import nnx


class Frozen(nnx.Variable):
    """A parameter that no gradient moves: a matrix that is kept in MXFP8 (`m3jax.mxfp8.MXFP8Array`)."""


@runtime_checkable
class MakeArrays(Protocol):
    """Makes the parameters of a tree that are arrays in every model."""

    def weight(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], *, fan_in: int, dtype: str | None = None
    ) -> nnx.Param:
        """Make a matrix, or a stack of them.

        Args:
          shape: of the parameter.
          axes: a logical name for each dimension (`m3jax.parallel.RULES`), or None for one that is never divided.
          fan_in: terms of a sum over it: random weights have a standard deviation of fan_in**-0.5.
          dtype: the least that it is kept in, whatever the model's dtype is; None for the model's.
        """
        ...

    def norm(self, shape: tuple[int, ...], *, dtype: str | None = None, start: float = 0.0) -> nnx.Param:
        """Make the weights of a norm, or a bias, which every device holds whole.

        Args:
          shape: of the parameter.
          dtype: as of a weight.
          start: the value of all of them in a model with random weights.
        """
        ...


@runtime_checkable
class Make(MakeArrays, Protocol):
    """Makes the parameters of a tree: each constructor of a module takes one."""

    def linear(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], *, inputs: int = 1, outputs: int = 1
    ) -> nnx.Param | Frozen:
        """Make a matrix that activations are multiplied by, or a stack of them; MXFP8 checkpoints keep these in 8 bits.

        Args:
          shape: `[*stack *inputs *outputs]`.
          axes: as of `weight`.
          inputs: how many axes the product sums over.
          outputs: how many axes are the product's.
        """
        ...


def dotted_path(keys: tuple) -> str:
    """Return the name of a parameter in its tree, as in "stacks.0.self_attn.q_proj"."""
    # An nnx.Param is a node of its own, with its array, or the parts of one in MXFP8, under "value".
    name = jax.tree_util.keystr(keys, simple=True, separator=".")
    return name.removesuffix(".value").replace(".value.", ".")
