"""Activations times matrices of one layer, with one order for the sum of a row, however many rows there are."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.mxfp8 import Weights, check_weights

__all__ = ["Weights", "ordered_project"]


@dataclass(frozen=True)
class Call(backends.Call):
    """`x W` for each matrix W of a layer, where a row's bits are its own.

    Every element is a sum over the input channels in their order, from the first to the last: neither the number of
    rows, nor a row's place among them, nor the tile sizes that follow from both change it.

    Args:
      x: activations; bfloat16, float16 or float32.
      weights: each of shape [L I O], with its own O, in x's dtype; or in MXFP8, whose numbers are rounded to x's dtype.
      layer: which layer of the stacks; it is not copied.
      by_output: weights are of shape [L O I] instead, as an unembedding is stored; none of them in MXFP8.

    Returns:
      The products in float32, in the order of the weights.
    """

    x: Float[Array, "X I"]
    weights: Sequence[Float[Array, "_ _ _"] | Weights]
    layer: Int[Array, ""]
    _: KW_ONLY
    by_output: bool = False

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        width, dtype = self.x.shape[1], self.x.dtype
        for i, w in enumerate(self.weights):
            is_mxfp8 = isinstance(w, Weights)
            if is_mxfp8:
                check_weights(f"weights[{i}]", w)
            shape = w.codes.shape if is_mxfp8 else w.shape
            inputs = shape[2 if self.by_output else 1] if len(shape) == 3 else None
            first = self.weights[0].codes if isinstance(self.weights[0], Weights) else self.weights[0]
            if inputs != width or shape[0] != len(first) or (self.by_output and is_mxfp8):
                raise ValueError(
                    f"x has width {width}, weights[{i}] shape {shape}{' in MXFP8' if is_mxfp8 else ''}: need "
                    f"{'[L O I], not in MXFP8,' if self.by_output else '[L I O]'}, all of one L, with I = {width}"
                )
            if (not is_mxfp8 and w.dtype != dtype) or (is_mxfp8 and dtype.itemsize != 2):
                raise ValueError(f"x is {dtype}, weights[{i}] {'MXFP8' if is_mxfp8 else w.dtype}: need one dtype")


ordered_project = op(Call)
