"""Arrays on their way from the host to a call, all in one: each by itself would be a copy of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef
from jaxtyping import Int32

from m3jax.decoding.sampling import HostOrDevice

_Tree = TypeVar("_Tree")
_Leaf = tuple[tuple[int, ...], str] | None  # shape and dtype of a host's array; None for one that a device had before


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parcel(Generic[_Tree]):
    """A tree of arrays, as an argument of a program.

    Of the some twenty arrays that a prompt's call takes each would be a copy to the device, by a thread of its own: the
    device waits for the last of them (docs/notes/performance.md).

    Attributes:
      words: the bits of the host's arrays, one behind the other.
      others: the arrays that are on a device.
      structure: of the tree.
      leaves: which kind each leaf is, in the tree's order.
    """

    words: Int32[HostOrDevice, " W"]
    others: Sequence[jax.Array]
    structure: PyTreeDef = field(metadata=dict(static=True))
    leaves: tuple[_Leaf, ...] = field(metadata=dict(static=True))

    @classmethod
    def of(cls, tree: _Tree) -> "Parcel[_Tree]":
        """Return a tree's parcel, which `opened` makes the tree again.

        Args:
          tree: of arrays of 32-bit numbers, or bools; those of numpy are the host's.

        Raises:
          TypeError: a host's array of another dtype.
        """
        arrays, structure = jax.tree.flatten(tree)
        words, others, leaves = [np.zeros(0, np.int32)], [], []
        for x in arrays:
            if isinstance(x, np.ndarray | np.generic):
                words.append(_words(np.asarray(x)))
                leaves.append((x.shape, x.dtype.name))
            else:
                others.append(x)
                leaves.append(None)
        return cls(np.concatenate(words), others, structure, tuple(leaves))


def opened(tree: "Parcel[_Tree] | _Tree") -> _Tree:
    """Return the tree that a parcel has, in a program that is being traced; anything else as it is."""
    if not isinstance(tree, Parcel):
        return tree
    arrays, others, start = [], iter(tree.others), 0
    for leaf in tree.leaves:
        if leaf is None:
            arrays.append(next(others))
            continue
        shape, dtype = leaf
        words = lax.slice_in_dim(tree.words, start, start + prod(shape)).reshape(shape)
        arrays.append(words != 0 if dtype == "bool" else lax.bitcast_convert_type(words, jnp.dtype(dtype)))
        start += prod(shape)
    return jax.tree.unflatten(tree.structure, arrays)


def _words(array: np.ndarray) -> Int32[np.ndarray, " W"]:
    """Return the bits of an array, 32 for each element."""
    if array.dtype == np.bool_:
        return array.ravel().astype(np.int32)
    if array.dtype.itemsize != 4:
        raise TypeError(f"an array is {array.dtype}: a parcel has 32-bit numbers, and bools")
    return np.ascontiguousarray(array).ravel().view(np.int32)
