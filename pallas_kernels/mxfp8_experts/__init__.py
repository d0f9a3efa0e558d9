"""The feed-forward experts of a mixture, each for the tokens that chose it, with weights in MXFP8."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.mxfp8 import Weights, check_experts

__all__ = ["Weights", "mxfp8_experts"]


@dataclass(frozen=True)
class Call(backends.Call):
    """Apply each expert to each of its tokens: `activate(x gate, x up) down`, of weights in x's dtype.

    Codes and scales become numbers in registers, so that 1 + 1/32 bytes are read from memory for each weight.

    Args:
      x: tokens; bfloat16 or float16.
      gate: of shape [L E D F].
      up: likewise.
      down: of shape [L E F D].
      layer: which layer of the stack; it is not copied.
      expert: of each tile.
      token: rows of x that a tile takes, C one of 1, 16, 32 and 64. Tiles of 1 are for few pairs of a token
        and an expert, whose products need no tensor cores.
      valid: True for the rows that count. A tile without any is skipped; its output, like an invalid row's, is
        undefined.
      activate: of two arrays in float32, element by element.

    Returns:
      Outputs in float32, not yet weighted.
    """

    x: Float[Array, "X D"]
    gate: Weights
    up: Weights
    down: Weights
    layer: Int[Array, ""]
    expert: Int[Array, " Y"]
    token: Int[Array, "Y C"]
    valid: Bool[Array, "Y C"]
    _: KW_ONLY
    activate: Callable[[Array, Array], Array]

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        check_experts(self.x, self.gate, self.up, self.down)
        if self.token.shape[1] not in (1, 16, 32, 64):
            raise ValueError(f"tiles of {self.token.shape[1]} tokens: need 1, 16, 32 or 64 tokens")


mxfp8_experts = op(Call)
