"""The weights that activations are multiplied by: a matrix, in MXFP8, of a stack, or divided over a mesh."""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from m3jax.mxfp8 import MXFP8Array


@partial(jax.tree_util.register_dataclass, data_fields=("stack", "layer"), meta_fields=("backend", "is_ordered"))
@dataclass(frozen=True)
class StackedLayer:
    """One matrix of a stack, which a kernel reads where it lies: a slice would be a copy.

    Attributes:
      stack: one matrix a layer: `[L *inputs *outputs]`, or the same in MXFP8.
      layer: which of them.
      backend: what multiplies, one of `m3jax.ops.BACKENDS`. With "xla" the matrix is cut out once the activations that
        it is multiplied by are there: a scan would cut it out before the layer begins.
      is_ordered: whether by a kernel that gives a row the same bits whatever other rows there are.
    """

    stack: Any
    layer: Any
    backend: str = "auto"
    is_ordered: bool = False

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrix; a matrix in MXFP8 has none, and this raises AttributeError."""
        return self.stack.dtype

    def __getitem__(self, index: Any) -> "StackedLayer":
        """Return this object for the index `...`, with which every parameter is read.

        Raises:
          IndexError: any other index.
        """
        if index is not ...:
            raise IndexError("a matrix that is read in its stack has no rows by itself: take() it first")
        return self

    def take(self) -> Any:
        """Return the matrix, copied out of its stack."""
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False), self.stack)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weight",),
    meta_fields=("partition", "mesh", "least_tokens", "backend", "is_ordered"),
)
@dataclass(frozen=True)
class DividedWeight:
    """A matrix of one layer that lies on a mesh: each device multiplies by the part that it holds.

    Attributes:
      weight: the matrix, or the stack that a kernel reads it in.
      partition: the mesh axis that divides each axis `[*inputs *outputs]`, or None.
      mesh: where it lies.
      least_tokens: tokens of a call from which they are divided too (`m3jax.parallel.token_axes`).
      backend: of the sum of the devices' parts (`m3jax.ops.psum`).
      is_ordered: whether parts of a sum are added in the order of the devices (`m3jax.numerics.sum_over_devices`); only
        where tokens are never divided.
    """

    weight: Any
    partition: tuple[str | None, ...]
    mesh: Any
    least_tokens: int
    backend: str
    is_ordered: bool = False

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the matrix; a matrix in MXFP8 has none, and this raises AttributeError."""
        return self.weight.dtype

    @property
    def is_summed(self) -> bool:
        """True if inputs are divided: a device has a part of each sum."""
        return self.partition[0] is not None

    @property
    def specs(self) -> Any:
        """The partition, as `jax.shard_map` takes it for `weight`."""
        if isinstance(self.weight, StackedLayer):
            return replace(self.weight, stack=PartitionSpec(None, *self.partition), layer=PartitionSpec())
        return PartitionSpec(*self.partition)

    def __getitem__(self, index: Any) -> "DividedWeight":
        """Return this object for the index `...`, with which every parameter is read.

        Raises:
          IndexError: any other index.
        """
        if index is not ...:
            raise IndexError("a matrix that devices hold parts of has no rows by itself")
        return self


Weight = Shaped[Array, "..."] | MXFP8Array | StackedLayer | DividedWeight


def merge_inputs(weight: Weight, num_inputs: int) -> Weight:
    """Reshape a matrix so that its first axes, which a product sums over, become one.

    Args:
      weight: `[*inputs *outputs]`, without a stack, or a layer of one.
      num_inputs: how many axes become one.
    """
    if isinstance(weight, DividedWeight):  # devices hold whole heads: of the merged axes the first is divided
        partition = weight.partition[0], *weight.partition[num_inputs:]
        return replace(weight, weight=merge_inputs(weight.weight, num_inputs), partition=partition)
    if isinstance(weight, StackedLayer):
        return replace(weight, stack=_merge(weight.stack, 1, num_inputs))
    return _merge(weight, 0, num_inputs)


def merge_outputs(stack: Shaped[Array, "L I ..."] | MXFP8Array) -> Shaped[Array, "L I O"] | MXFP8Array:
    """Reshape a stack of matrices so that all axes of outputs become one.

    Args:
      stack: `[L I *outputs]`, one matrix a layer, its input axes merged.
    """
    flat = lambda y: y.reshape(*y.shape[:2], -1)  # [L I O], [L blocks O]
    if isinstance(stack, MXFP8Array):
        return MXFP8Array(flat(stack.codes), flat(stack.scales))
    return flat(stack)


def _merge(weight: Shaped[Array, "..."] | MXFP8Array, first: int, count: int) -> Shaped[Array, "..."] | MXFP8Array:
    """Reshape `count` axes from `first` on into one; MXFP8's scales have one axis for all inputs already."""
    if isinstance(weight, MXFP8Array):
        return replace(weight, codes=_merge(weight.codes, first, count), num_inputs=1)
    shape = weight.shape
    return weight.reshape(*shape[:first], prod(shape[first : first + count]), *shape[first + count :])
