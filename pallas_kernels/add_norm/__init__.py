"""A residual addition and the norm of its result."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op

__all__ = ["add_norm"]


@dataclass(frozen=True)
class Call(backends.Call):
    """(sum, its root-mean-square norm times (1 + weight)), each rounded once to x's dtype.

    Args:
      x: the residual stream.
      update: what is added to it, in float32; None adds nothing.
      weight: of the norm.
      eps: of the norm.

    Returns:
      Sum and norm, in x's dtype; the norm is that of the rounded sum.
    """

    x: Float[Array, "X D"]
    update: Float[Array, "X D"] | None
    weight: Float[Array, " D"]
    _: KW_ONLY
    eps: float

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        if self.weight.shape != self.x.shape[1:] or (self.update is not None and self.update.shape != self.x.shape):
            of_update = "" if self.update is None else f", the update {self.update.shape}"
            raise ValueError(
                f"x has shape {self.x.shape}{of_update}, the weight {self.weight.shape}: need [X D] and [D]"
            )


add_norm = op(Call)
