"""The feed-forward experts of a mixture for many tokens each, with weights in MXFP8."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.mxfp8 import Weights, check_weights

__all__ = ["Weights", "mxfp8_grouped"]

_TILES = (16, 32, 64, 128, 256)  # tokens


def mxfp8_grouped(
    x: Float[Array, "X D"],
    gate: Weights,
    up: Weights,
    down: Weights,
    layer: Int[Array, ""],
    expert: Int[Array, " Y"],
    pair: Int[Array, "Y C"],
    count: Int[Array, " Y"],
    *,
    num_chosen: int,
    activate: Callable[[Array, Array], Array],
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Float[Array, "X A D"]:
    """Apply each expert to each of its tokens: `activate(x gate, x up) down`, of weights in x's dtype.

    It computes what `pallas_kernels.grouped_experts` does of the dequantised weights. A pair is a token and one of the
    A experts that it chose: pair p is token p // A's choice p % A.

    Args:
      x: tokens; bfloat16 or float16.
      gate: of shape [L E D F].
      up: likewise.
      down: of shape [L E F D].
      layer: which layer of the stack; it is not copied.
      expert: of each tile.
      pair: the pairs of a tile, C one of 16, 32, 64, 128 and, by Mosaic, 256; what stands behind the first `count` may
        be any pair.
      count: how many of its pairs count. A tile of 0 is skipped.
      num_chosen: A.
      activate: of two arrays in float32, element by element.
      backend: "triton", or "mosaic_gpu" on a Hopper GPU, in bfloat16.
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      Outputs in float32, not yet weighted, each at its pair's token and choice; undefined for a pair in no tile.

    Raises:
      ValueError: operands that do not fit together, widths that are not whole pieces of a program, an unknown backend,
        or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    width = x.shape[1]
    layers, experts, inputs, hidden = gate.codes.shape
    if gate.codes.shape != up.codes.shape or inputs != width or down.codes.shape != (layers, experts, hidden, width):
        raise ValueError(
            f"x has width {width}, gate has shape {gate.codes.shape}, up {up.codes.shape}, down {down.codes.shape}: "
            f"need [L E D F] twice and [L E F D] with D = {width}"
        )
    for name, weights in (("gate", gate), ("up", up), ("down", down)):
        check_weights(name, weights)
    if x.dtype.itemsize != 2:
        raise ValueError(f"x is {x.dtype}: need bfloat16 or float16")
    if pair.shape[1] not in _TILES:
        raise ValueError(f"tiles of {pair.shape[1]} tokens: need {', '.join(map(str, _TILES[:-1]))} or {_TILES[-1]}")
    return runner.run(
        x, gate, up, down, layer, expert, pair, count,
        num_chosen=num_chosen, activate=activate, config=config, interpret=interpret,
    )  # fmt: skip
