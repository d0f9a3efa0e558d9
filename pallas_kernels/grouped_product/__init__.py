"""The product of each tile of rows with the matrix of its group, such as a tile of tokens with its expert's."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op

__all__ = ["grouped_product"]


@dataclass(frozen=True)
class Call(backends.Call):
    """Multiply each tile's rows by its group's matrix.

    Args:
      rows: by tile; C a multiple of 16 (of a program's rows, where those are more).
      weight: a matrix of each group, `[E K N]`, in the rows' dtype.
      group: of each tile.
      used: how many tiles, the first ones, are multiplied; the products of the others are undefined.
      transposed: whether the matrices are `[E N K]`.

    Returns:
      Products in float32.
    """

    rows: Float[Array, "Y C K"]
    weight: Float[Array, "E ..."]
    group: Int[Array, " Y"]
    used: Int[Array, ""]
    _: KW_ONLY
    transposed: bool = False

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        inputs = self.weight.shape[2 if self.transposed else 1]
        if self.rows.shape[-1] != inputs or self.rows.dtype != self.weight.dtype:
            raise ValueError(
                f"rows of {self.rows.shape[-1]} channels in {self.rows.dtype} and matrices that take {inputs} in "
                f"{self.weight.dtype}: both must be the same"
            )


grouped_product = op(Call)
