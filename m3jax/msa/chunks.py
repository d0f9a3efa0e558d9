"""Walking long axes in pieces, so that nothing of size T x S is ever held."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from m3jax.platform import platform

_ACCELERATOR = 64


def map_chunks(fn: Callable, size: int, axis: int, *arrays: Array) -> PyTree[Array]:
    """Apply `fn` to pieces of `arrays` along `axis` and join the results along that axis.

    Args:
      fn: maps pieces to a pytree of arrays whose `axis` has the piece's length.
      size: rows of a piece. Ragged ends are padded with zeros, and cut off again.
      axis: the axis to walk, the same in every array and every result.
      *arrays: arrays that share the length of `axis`.
    """
    length = arrays[0].shape[axis]
    if length <= size:
        return fn(*arrays)
    count = -(-length // size)
    # The backward pass runs a piece again instead of keeping what it gathered (T30: selections are inputs here).
    out = jax.lax.map(jax.checkpoint(lambda xs: fn(*xs)), tuple(_split(x, count, size, axis) for x in arrays))
    return jax.tree.map(lambda x: _join(x, length, axis), out)


def _split(x: Array, count: int, size: int, axis: int) -> Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, pad)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def _join(x: Array, length: int, axis: int) -> Array:
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def budget(elements: int) -> int:
    """What a piece of work may hold: `elements`, which fit the cache of a CPU's core, or enough to fill a GPU."""
    return elements if platform() == "cpu" else _ACCELERATOR * elements


def rows_within(elements: int, per_row: int, length: int) -> int:
    """How many rows of `per_row` elements fit in a budget: a power of two, at least 1, at most enough for all."""
    rows = max(1, elements // max(1, per_row))
    return min(1 << (rows.bit_length() - 1), max(1, length))
