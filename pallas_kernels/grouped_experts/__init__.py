"""The feed-forward experts of a mixture, each for the tokens that chose it."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_expert_weights, check_tiles

__all__ = ["grouped_experts"]

_TILES = (16, 32, 64, 128)  # tokens


@dataclass(frozen=True)
class Call(backends.Call):
    """Apply each expert to each of its tokens: `activate(x gate, x up) down`.

    A pair is a token and one of the A experts that it chose: pair p is token p // A's choice p % A.

    Args:
      x: tokens; bfloat16, float16 or float32.
      gate: weights of a stack of layers, in x's dtype.
      up: likewise.
      down: likewise.
      layer: which layer of the stack; it is not copied.
      expert: of each tile.
      pair: the pairs of a tile, C one of 16, 32, 64 and 128; what stands behind the first `count` may be any pair.
      count: how many of its pairs count. A tile of 0 is skipped.
      num_chosen: A.
      activate: of two arrays in float32, element by element.

    Returns:
      Outputs in float32, not yet weighted, each at its pair's token and choice; undefined for a pair in no tile.
    """

    x: Float[Array, "X D"]
    gate: Float[Array, "L E D F"]
    up: Float[Array, "L E D F"]
    down: Float[Array, "L E F D"]
    layer: Int[Array, ""]
    expert: Int[Array, " Y"]
    pair: Int[Array, "Y C"]
    count: Int[Array, " Y"]
    _: KW_ONLY
    num_chosen: int
    activate: Callable[[Array, Array], Array]

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        check_expert_weights(self.x, self.gate, self.up, self.down)
        check_tiles(self.pair, _TILES)


grouped_experts = op(Call)
