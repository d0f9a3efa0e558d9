"""The exchange of arrays between the devices of one host, each of which reads the others' memory."""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Array, Shaped

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op

__all__ = ["Result", "read_peers"]

Result = Literal["parts", "sum", "part of sum"]


@dataclass(frozen=True)
class Call(backends.Call):
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
    """

    x: Shaped[Array, "A *X"]
    axes: tuple[str, ...]
    result: Result

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        if self.x.dtype.itemsize not in (2, 4):
            raise ValueError(f"x is {self.x.dtype}: need numbers of 16 or 32 bits")
        if self.result not in get_args(Result):
            raise ValueError(f"result = {self.result!r}: need one of {', '.join(map(repr, get_args(Result)))}")


read_peers = op(Call)
