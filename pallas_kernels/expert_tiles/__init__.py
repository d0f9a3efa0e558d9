"""The feed-forward experts of a mixture, for tiles of tokens that are gathered already."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_expert_weights

__all__ = ["expert_tiles"]


@dataclass(frozen=True)
class Call(backends.Call):
    """Apply each tile's expert to its tokens, and weight the outputs: `weight * (activate(x gate, x up) down)`.

    Args:
      tokens: by tile, in the weights' dtype.
      gate: weights of a stack of layers.
      up: likewise.
      down: likewise.
      layer: which layer of the stack; it is not copied.
      expert: of each tile.
      used: how many tiles, the first ones, are to be computed; the outputs of the others are undefined.
      row_weights: of each output in the sum that it is for.
      activate: of two arrays in float32, element by element.

    Returns:
      Outputs in float32.
    """

    tokens: Float[Array, "Y C D"]
    gate: Float[Array, "L E D F"]
    up: Float[Array, "L E D F"]
    down: Float[Array, "L E F D"]
    layer: Int[Array, ""]
    expert: Int[Array, " Y"]
    used: Int[Array, ""]
    row_weights: Float[Array, "Y C"]
    _: KW_ONLY
    activate: Callable[[Array, Array], Array]

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        check_expert_weights(self.tokens.reshape(-1, self.tokens.shape[-1]), self.gate, self.up, self.down)


expert_tiles = op(Call)
