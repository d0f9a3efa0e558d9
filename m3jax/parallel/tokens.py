"""The division of a call's tokens over a mesh, for all that treats each token alone."""

import math
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from m3jax.parallel.rules import PAGE_AXES

TENSOR = "tensor"


@dataclass(frozen=True)
class TokenAxes:
    """The mesh axes over which a call's tokens are divided; none where they are few.

    A layer has two layouts of its tokens. Norms, the router and the residual stream have a token on one device.
    Products with a matrix that the tensor axis divides need it on all devices of that axis: the inputs of the first
    product are gathered over it, and the sums of the second are scattered. That moves 3/4 of the bytes of an
    all-reduce: a sum is in 32 bits, what is gathered in 16.

    Attributes:
      mesh: of the devices.
      products: axes of the tokens of a product, of `PAGE_AXES`, in the order in which they divide.
      is_scattered: True if norms and the residual stream have them divided over the tensor axis too.
      dim: which of the leading axes is divided: 0 for tokens [X D], else the rows or the columns of [B T D].
      num_leading: how many there are.
    """

    mesh: Mesh
    products: tuple[str, ...]
    is_scattered: bool
    dim: int
    num_leading: int

    @property
    def whole(self) -> tuple[str, ...]:
        """The axes of several devices, all of which have the same tokens in a product; without the tensor axis."""
        return tuple(axis for axis in PAGE_AXES if self.mesh.shape[axis] > 1 and axis not in self.products)

    def of_products(self, *channels: str | None) -> PartitionSpec:
        """Return the partition of arrays in a product, given the mesh axes of their channels."""
        return self._partition(self.products, channels)

    def of_stream(self) -> PartitionSpec:
        """Return the partition of the residual stream, and of what norms and the router make of it."""
        return self._partition((*self.products, TENSOR) if self.is_scattered else self.products, ())

    def _partition(self, axes: tuple[str, ...], channels: tuple[str | None, ...]) -> PartitionSpec:
        leading = [None] * self.num_leading
        leading[self.dim] = axes or None
        return PartitionSpec(*leading, *channels)


def token_axes(shape: tuple[int, ...], mesh: Mesh, least: int) -> TokenAxes:
    """Return how a mesh divides tokens.

    An axis that does not divide their number is left out: its devices compute the same tokens. Of a batch of rows that
    have several tokens each, the rows are divided.

    Args:
      shape: of the tokens: (X,) or (B, T).
      mesh: with the axes of `make_mesh`.
      least: tokens of a call from which they are divided. What a product with fewer takes is the time to read its
        matrix, which every device does.
    """
    dim = 1 if len(shape) == 2 and shape[0] == 1 else 0
    products, parts, is_scattered = [], 1, False
    if math.prod(shape) >= least:
        for axis in PAGE_AXES:
            if mesh.shape[axis] > 1 and shape[dim] % (parts * mesh.shape[axis]) == 0:
                products.append(axis)
                parts *= mesh.shape[axis]
        is_scattered = mesh.shape[TENSOR] > 1 and shape[dim] % (parts * mesh.shape[TENSOR]) == 0
    return TokenAxes(mesh, tuple(products), is_scattered, dim, len(shape))
