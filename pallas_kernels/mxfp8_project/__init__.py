"""Activations times matrices of one layer, with weights in MXFP8."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.mxfp8 import Weights, check_weights

__all__ = ["Weights", "mxfp8_project"]


@dataclass(frozen=True)
class Call(backends.Call):
    """`x W` for each matrix W of a layer, of weights in x's dtype: one pass over x for all of them.

    Codes and scales become numbers in registers: of memory a byte a weight is read, and a thirty-second, where they lie
    in the stack of layers. On Hopper also by "mosaic_gpu", in bfloat16.

    Args:
      x: activations; bfloat16 or float16.
      weights: each of shape [L I O], with its own O.
      layer: which layer of the stacks; it is not copied.

    Returns:
      The products in float32, in the order of the weights.
    """

    x: Float[Array, "X I"]
    weights: Sequence[Weights]
    layer: Int[Array, ""]

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        width, num_layers = self.x.shape[1], len(self.weights[0].codes)
        for i, w in enumerate(self.weights):
            check_weights(f"weights[{i}]", w)
            if w.codes.ndim != 3 or w.codes.shape[1] != width or len(w.codes) != num_layers:
                raise ValueError(
                    f"x has width {width}, weights[{i}] shape {w.codes.shape}: need [L I O], all of one L, with "
                    f"I = {width}"
                )
        if self.x.dtype.itemsize != 2:
            raise ValueError(f"x is {self.x.dtype}: need bfloat16 or float16")


mxfp8_project = op(Call)
