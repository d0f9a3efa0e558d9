"""The feed-forward experts of a mixture, for tiles of tokens that are gathered already."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.checks import check_expert_weights

__all__ = ["expert_tiles"]


def expert_tiles(
    tokens: Float[Array, "Y C D"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    expert: Int[Array, " Y"],
    used: Int[Array, ""],
    row_weights: Float[Array, "Y C"],
    *,
    activate: Callable[[Array, Array], Array],
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Float[Array, "Y C D"]:
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
      backend: "mosaic_tpu".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU; also `pltpu.InterpretParams`.

    Returns:
      Outputs in float32.

    Raises:
      ValueError: operands that do not fit together, widths that are not whole pieces, an unknown backend, or an option
        of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    check_expert_weights(tokens.reshape(-1, tokens.shape[-1]), gate, up, down)
    return runner.run(
        tokens, gate, up, down, layer, expert, used, row_weights,
        activate=activate, config=config, interpret=interpret,
    )  # fmt: skip
