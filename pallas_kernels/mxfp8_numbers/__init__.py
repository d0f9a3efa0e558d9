"""A matrix of a stack in MXFP8 as numbers in memory, for a product of many rows."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.mxfp8 import Weights, check_weights

__all__ = ["Weights", "mxfp8_numbers"]


@dataclass(frozen=True)
class Call(backends.Call):
    """The numbers of one layer: `e4m3(code) * 2^(scale - 127)` in float32, which holds it, then `dtype`.

    Args:
      weights: of shape [L I O].
      layer: which layer of the stack; it is not copied.
      dtype: bfloat16 or float16.
    """

    weights: Weights
    layer: Int[Array, ""]
    dtype: jax.typing.DTypeLike

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        check_weights("weights", self.weights)


mxfp8_numbers = op(Call)
