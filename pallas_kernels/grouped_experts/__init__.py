"""The feed-forward experts of a mixture, each for the tokens that chose it."""

from collections.abc import Callable

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend

__all__ = ["grouped_experts"]


def grouped_experts(
    x: Float[Array, "X D"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
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
    """What each expert makes of each of its tokens: `activate(x gate, x up) down`.

    Args:
      x: tokens; bfloat16, float16 or float32.
      gate: weights of a stack of layers, in x's dtype.
      up: likewise.
      down: likewise.
      layer: which layer of the stack; it is not copied.
      expert: of each tile.
      token: rows of x that a tile takes, C one of 16, 32 and 64.
      valid: which of them count. A tile with none is skipped, and its output is anything, as that of invalid rows.
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
    tile_tokens, width, hidden = token.shape[1], x.shape[1], gate.shape[3]
    if gate.shape != up.shape or gate.shape[2] != width or down.shape != (*gate.shape[:2], hidden, width):
        raise ValueError(
            f"x has width {width}, gate has shape {gate.shape}, up {up.shape}, down {down.shape}: need [L E D F] twice "
            f"and [L E F D] with D = {width}"
        )
    if len({x.dtype, gate.dtype, up.dtype, down.dtype}) > 1:
        raise ValueError(f"x is {x.dtype}, gate {gate.dtype}, up {up.dtype}, down {down.dtype}: need one dtype")
    if tile_tokens not in (16, 32, 64):
        raise ValueError(f"tiles of {tile_tokens} tokens: need 16, 32 or 64 tokens")
    return runner.run(
        x, gate, up, down, layer, expert, token, valid, activate=activate, config=config, interpret=interpret
    )
