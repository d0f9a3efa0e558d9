"""The feed-forward experts of a mixture for many tokens each, with weights in MXFP8."""

from dataclasses import dataclass

from pallas_kernels import grouped_experts
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_tiles
from pallas_kernels.mxfp8 import Weights, check_experts

__all__ = ["Weights", "mxfp8_grouped"]

_TILES = (16, 32, 64, 128, 256)  # tokens


@dataclass(frozen=True)
class Call(grouped_experts.Call):
    """Apply each expert to each of its tokens: `activate(x gate, x up) down`, of weights in x's dtype.

    Its fields and results are those of `grouped_experts` of the dequantised weights; x is bfloat16 or float16, and C
    may also be 256 by "mosaic_gpu", which is for bfloat16 on a Hopper GPU.

    Args:
      gate: of shape [L E D F].
      up: likewise.
      down: of shape [L E F D].
    """

    gate: Weights
    up: Weights
    down: Weights

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together, and for tiles of another height."""
        check_experts(self.x, self.gate, self.up, self.down)
        check_tiles(self.pair, _TILES)


mxfp8_grouped = op(Call)
