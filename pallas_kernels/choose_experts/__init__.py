"""The router of a mixture of experts, from its logits on."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float32

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op

__all__ = ["choose_experts"]


@dataclass(frozen=True)
class Call(backends.Call):
    """The experts with the highest sigmoid score plus bias, and their scores alone, divided by the sum of these.

    Args:
      logits: of each token for each expert.
      bias: counts in the choice only.
      top_k: A, experts of a token.

    Returns:
      (ids, weights), best first; of equal scores the lower id. Where a score or its bias is NaN the token's weights
      are, and its ids are any.
    """

    logits: Float32[Array, "X E"]
    bias: Float32[Array, " E"]
    _: KW_ONLY
    top_k: int

    def check(self, limits: Limits) -> None:
        """Raise ValueError where shapes do not fit together, or fewer experts exist than are to be chosen."""
        num_experts = self.logits.shape[1]
        if self.bias.shape != (num_experts,) or not 1 <= self.top_k <= num_experts:
            raise ValueError(
                f"logits have shape {self.logits.shape}, the bias {self.bias.shape}, top_k = {self.top_k}: need [X E], "
                "[E] and 1 to E"
            )


choose_experts = op(Call)
