"""The feed-forward experts of a mixture for a few tokens: each chosen one is read once, nothing is sorted."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.checks import check_expert_weights

__all__ = ["MOST_TOKENS", "SharedExpert", "few_experts"]

MOST_TOKENS = 64  # of a call


class SharedExpert(NamedTuple):
    """The expert that every token meets beside those that it chose: weights of a stack of layers."""

    gate: Float[Array, "L D F"]
    up: Float[Array, "L D F"]
    down: Float[Array, "L F D"]


def few_experts(
    x: Float[Array, "X D"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    expert_ids: Int[Array, "X A"],
    *,
    activate: Callable[[Array, Array], Array],
    shared: SharedExpert | None = None,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Float[Array, "X C D"]:
    """Apply each chosen expert to its tokens: `activate(x gate, x up) down`.

    Args:
      x: tokens, 1 to `MOST_TOKENS`; bfloat16, float16 or float32.
      gate: weights of a stack of layers, in x's dtype.
      up: likewise.
      down: likewise.
      layer: which layer of the stack; it is not copied.
      expert_ids: the experts that each token chose, in any order; -1 for an expert that these weights do not hold.
      activate: of two arrays in float32, element by element.
      shared: an expert that all tokens meet, as wide as the others and in their dtype.
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      Outputs in float32, not yet weighted; those of an expert that is not held are undefined. C = A, or A + 1 where
      there is a shared expert: its outputs come last.

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
    if shared is not None:
        of_layers = SharedExpert(*(jax.ShapeDtypeStruct((len(w), *w.shape[2:]), w.dtype) for w in (gate, up, down)))
        for name, weight, like in zip(shared._fields, shared, of_layers, strict=True):
            if weight.shape != like.shape or weight.dtype != like.dtype:
                raise ValueError(
                    f"shared.{name} has shape {weight.shape} in {weight.dtype}: need {like.shape} in {like.dtype}, "
                    "like an expert of each layer"
                )
    return runner.run(
        x, gate, up, down, layer, expert_ids, activate=activate, shared=shared, config=config, interpret=interpret
    )
