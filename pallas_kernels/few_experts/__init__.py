"""The feed-forward experts of a mixture for a few tokens: each chosen one is read once, nothing is sorted."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_expert_weights

__all__ = ["MOST_TOKENS", "SharedExpert", "few_experts"]

MOST_TOKENS = 64  # of a call


class SharedExpert(NamedTuple):
    """The expert that every token meets beside those that it chose: weights of a stack of layers."""

    gate: Float[Array, "L D F"]
    up: Float[Array, "L D F"]
    down: Float[Array, "L F D"]


@dataclass(frozen=True)
class Call(backends.Call):
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

    Returns:
      Outputs in float32, not yet weighted; those of an expert that is not held are undefined. C = A, or A + 1 where
      there is a shared expert: its outputs come last.
    """

    x: Float[Array, "X D"]
    gate: Float[Array, "L E D F"]
    up: Float[Array, "L E D F"]
    down: Float[Array, "L E F D"]
    layer: Int[Array, ""]
    expert_ids: Int[Array, "X A"]
    _: KW_ONLY
    activate: Callable[[Array, Array], Array]
    shared: SharedExpert | None = None

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together, or there are too many tokens."""
        check_expert_weights(self.x, self.gate, self.up, self.down)
        num_tokens, num_choices = len(self.x), len(self.expert_ids)
        if not 1 <= num_tokens <= MOST_TOKENS or num_choices != num_tokens:
            raise ValueError(
                f"{num_tokens} tokens and the choices of {num_choices}: need as many, 1 to {MOST_TOKENS} "
                "(grouped_experts takes more)"
            )
        for name in () if self.shared is None else SharedExpert._fields:
            weight, routed = getattr(self.shared, name), getattr(self, name)
            shape = len(routed), *routed.shape[2:]
            if weight.shape != shape or weight.dtype != routed.dtype:
                raise ValueError(
                    f"shared.{name} has shape {weight.shape} in {weight.dtype}: need {shape} in {routed.dtype}, "
                    "like an expert of each layer"
                )


few_experts = op(Call)
