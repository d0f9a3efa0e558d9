"""The feed-forward experts of a mixture for a few tokens: each chosen one is read once, nothing is sorted."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.checks import check_expert_weights

__all__ = ["MOST_TOKENS", "few_experts"]

MOST_TOKENS = 64  # of a call


def few_experts(
    x: Float[Array, "X D"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    expert_ids: Int[Array, "X A"],
    *,
    activate: Callable[[Array, Array], Array],
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Float[Array, "X A D"]:
    """What each chosen expert makes of its tokens: `activate(x gate, x up) down`.

    Args:
      x: tokens, 1 to `MOST_TOKENS`; bfloat16, float16 or float32.
      gate: weights of a stack of layers, in x's dtype.
      up: likewise.
      down: likewise.
      layer: which layer of the stack; it is not copied.
      expert_ids: the experts that each token chose, in any order; -1 for one that is not held here.
      activate: of two arrays in float32, element by element.
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      Outputs in float32, not yet weighted; those of an expert that is not held are anything.

    Raises:
      ValueError: operands that do not fit together, no token or more than `MOST_TOKENS`, widths that are not whole
        pieces of a program, an unknown backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    check_expert_weights(x, gate, up, down)
    if not 1 <= len(x) <= MOST_TOKENS or len(expert_ids) != len(x):
        raise ValueError(
            f"{len(x)} tokens and the choices of {len(expert_ids)}: need as many, 1 to {MOST_TOKENS} (grouped_experts "
            "takes more)"
        )
    return runner.run(x, gate, up, down, layer, expert_ids, activate=activate, config=config, interpret=interpret)
