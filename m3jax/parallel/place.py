"""Arrays between a host and devices of which some are other hosts': each process sends and reads what is its own."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped

_Tree = TypeVar("_Tree")


def put(array: Shaped[np.ndarray | Array, "..."] | np.generic, where: Sharding) -> Shaped[Array, "..."]:
    """Return an array on devices, of which this process fills its own.

    Where a sharding has other processes' devices, `jax.device_put` of a host's array first compares it between all
    processes, which is a collective of its size; here each process is trusted to have the same one.

    Args:
      array: all of it, the same on every process.
      where: its sharding.
    """
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    host_array = np.asarray(array)
    return jax.make_array_from_callback(host_array.shape, where, lambda index: host_array[index])


def whole(tree: _Tree, like: Sharding | None) -> _Tree:
    """Return arrays of a program that is being traced so that the host of each process can read all of them.

    Args:
      tree: of traced arrays.
      like: the sharding of an array of the same program; where all of its devices are this process's nothing is asked
        for, and the compiler places the arrays as it likes. None is for one device.
    """
    if like is None or like.is_fully_addressable:
        return tree
    everywhere = NamedSharding(like.mesh, PartitionSpec())
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, everywhere), tree)


def read(tree: _Tree) -> _Tree:
    """Return arrays on the host, all of them, whichever processes have their parts; every process has to call it.

    An array that no process has whole is copied to every device first, one array after the other: a device holds one
    such copy at a time, and one collective is under way. (With several, a device may begin a later one before another
    device of its process has begun the first; on a CPU, where a collective holds a thread, that is a deadlock.)

    Args:
      tree: of arrays.
    """
    return jax.device_get(jax.tree.map(_readable, tree))


def _readable(array: Shaped[Array | np.ndarray, "..."]) -> Shaped[Array | np.ndarray, "..."]:
    """Return an array as it is if this process can read it, else all of it on the host."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return array
    everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
    return jax.device_get(jax.jit(jnp.copy, out_shardings=everywhere)(array))
