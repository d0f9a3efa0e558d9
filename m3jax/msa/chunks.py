"""Walking long axes in pieces, so that nothing of size T x S is ever held."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from m3jax.platform import platform

_ACCELERATOR_FACTOR = 64


def map_chunks(fn: Callable, chunk: int, axis: int, *arrays: Array) -> PyTree[Array]:
    """Apply `fn` to pieces of `arrays` along `axis` and join the results along that axis.

    Args:
      fn: maps pieces to a pytree of arrays whose `axis` has the piece's length.
      chunk: length of a piece. Ragged ends are padded with zeros, and cut off again.
      axis: the axis to walk, the same in every array and every result.
      *arrays: arrays that share the length of `axis`.
    """
    length = arrays[0].shape[axis]
    if length <= chunk:
        return fn(*arrays)
    count = -(-length // chunk)

    def split(x):
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, count * chunk - length)
        x = jnp.pad(x, padding).reshape(*x.shape[:axis], count, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)  # [count ... chunk ...]

    def join(x):
        x = jnp.moveaxis(x, 0, axis)  # [... count chunk ...]
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)

    # The backward pass runs a piece again instead of keeping what it gathered. It cannot select otherwise than the
    # forward pass did: selections are inputs here (T30).
    rerun = jax.checkpoint(lambda pieces: fn(*pieces))
    return jax.tree.map(join, jax.lax.map(rerun, tuple(split(x) for x in arrays)))


def elements_at_once(elements: int) -> int:
    """Return the most numbers of a piece of work: `elements`, which fit a CPU core's cache; elsewhere 64 times that."""
    return elements if platform() == "cpu" else _ACCELERATOR_FACTOR * elements


def rows_within(elements: int, per_row: int, num_rows: int) -> int:
    """Return the number of rows of `per_row` numbers that fit `elements`: a power of two, at most `num_rows`."""
    rows = max(1, elements // max(1, int(per_row)))
    return min(1 << (rows.bit_length() - 1), max(1, num_rows))
