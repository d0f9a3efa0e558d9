"""The exchange of arrays between the devices of one host, each of which reads the others' memory."""

from typing import Literal, get_args

from jaxtyping import Array, Shaped

from pallas_kernels.backends import Interpret, load_backend

__all__ = ["Result", "read_peers"]

Result = Literal["parts", "sum", "part of sum"]


def read_peers(
    x: Shaped[Array, "A *X"],
    axes: tuple[str, ...],
    result: Result,
    *,
    backend: str,
    interpret: Interpret = False,
) -> Shaped[Array, "_ *X"] | Shaped[Array, "devices A *X"]:
    """Return the arrays of all devices along some mesh axes, or their sum, or a part of it; inside `jax.shard_map`.

    These are `jax.lax.all_gather`, `psum`, and `psum_scatter` over the first axis, in one kernel that a CUDA graph can
    hold. Sums are added up in the order of the devices: all of them get the same bits.

    No other exchange may run beside it, be it a call of this or one of XLA's collectives: of two in a program one must
    need what the other returns. Else devices may wait for each other for ever.

    Args:
      x: this device's array, of the same shape on all; numbers of 16 or 32 bits.
      axes: of the mesh, whose devices lie in the order of their ids from 0 on, all in this process.
      result: "parts" for every device's array; "sum" for the sum; "part of sum" for as much of the sum's first axis as
        one device has if they divide it evenly, each its own. Sums are in x's dtype; those of 16 bits are computed in
        float32.
      backend: "mosaic_gpu", for GPUs that reach each other's memory.
      interpret: False; there is no interpret mode.

    Raises:
      ValueError: another size of numbers, an unknown result or backend, or interpret mode.
    """
    runner = load_backend(__name__, backend, None, interpret)
    if x.dtype.itemsize not in (2, 4):
        raise ValueError(f"x is {x.dtype}: need numbers of 16 or 32 bits")
    if result not in get_args(Result):
        raise ValueError(f"result = {result!r}: need one of {', '.join(map(repr, get_args(Result)))}")
    return runner.run(x, axes, result, interpret=interpret)
