"""A few rows of activations times matrices of one layer, read where they lie in their stack."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op

__all__ = ["MOST_ROWS", "stacked_project"]

MOST_ROWS = 64  # of a call


@dataclass(frozen=True)
class Call(backends.Call):
    """`x W` for each matrix W of a layer: one pass over x for all of them, and over each weight.

    So few rows are bounded by the memory's rate, at which weights are read; a slice out of the stack would be a copy.

    Args:
      x: activations, 1 to `MOST_ROWS` rows; bfloat16, float16 or float32.
      weights: each of shape [L I O], with its own O, in x's dtype.
      layer: which layer of the stacks.

    Returns:
      The products in float32, in the order of the weights. Sums have one order for a number of rows.
    """

    x: Float[Array, "X I"]
    weights: Sequence[Float[Array, "L I _"]]
    layer: Int[Array, ""]

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        if not 1 <= len(self.x) <= MOST_ROWS:
            raise ValueError(f"{len(self.x)} rows: need 1 to {MOST_ROWS} rows; XLA multiplies more")
        for i, w in enumerate(self.weights):
            if w.ndim != 3 or w.shape[1] != self.x.shape[1] or len(w) != len(self.weights[0]):
                raise ValueError(
                    f"x has width {self.x.shape[1]}, weights[{i}] shape {w.shape}: need [L I O], all of one L, with "
                    f"I = {self.x.shape[1]}"
                )
            if w.dtype != self.x.dtype:
                raise ValueError(f"x is {self.x.dtype}, weights[{i}] {w.dtype}: need one dtype")


stacked_project = op(Call)
