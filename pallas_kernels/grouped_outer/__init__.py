"""The sum of products of rows, group by group: the gradient of the matrices of `grouped_product`."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op

__all__ = ["grouped_outer"]


@dataclass(frozen=True)
class Call(backends.Call):
    """Sum, over the tiles of each group, the products of the tile's left rows, transposed, with its right rows.

    Args:
      left: rows by tile. A row that does not count must be 0 here or in `right`.
      right: likewise, in the same dtype.
      first_tile: of each group; a group's tiles stand next to each other.
      num_tiles: of each group; the sum of a group without tiles is 0.

    Returns:
      Sums in float32, rounded once to the rows' dtype.
    """

    left: Float[Array, "Y C K"]
    right: Float[Array, "Y C N"]
    first_tile: Int[Array, " E"]
    num_tiles: Int[Array, " E"]

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        left, right = self.left, self.right
        if left.shape[:2] != right.shape[:2] or left.dtype != right.dtype:
            raise ValueError(
                f"{left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}: need the same tiles and dtype"
            )


grouped_outer = op(Call)
