"""The feed-forward experts of a mixture, each for the tokens that chose it, with weights in MXFP8."""

from collections.abc import Callable

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.mxfp8 import Weights, check_weights

__all__ = ["Weights", "mxfp8_experts"]


def mxfp8_experts(
    x: Float[Array, "X D"],
    gate: Weights,
    up: Weights,
    down: Weights,
    layer: Int[Array, ""],
    expert: Int[Array, " Y"],
    token: Int[Array, "Y C"],
    valid: Bool[Array, "Y C"],
    *,
    activate: Callable[[Array, Array], Array],
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Float[Array, "Y C D"]:
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
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      Outputs in float32, not yet weighted.

    Raises:
      ValueError: operands that do not fit together, widths that are not whole tiles of the backend, an unknown backend,
        or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    tile_tokens, width = token.shape[1], x.shape[1]
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
    if tile_tokens not in (1, 16, 32, 64):
        raise ValueError(f"tiles of {tile_tokens} tokens: need 1, 16, 32 or 64 tokens")
    return runner.run(
        x, gate, up, down, layer, expert, token, valid, activate=activate, config=config, interpret=interpret
    )
