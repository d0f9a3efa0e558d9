"""The router of a mixture of experts, from its logits on."""

from jaxtyping import Array, Float32, Int32

from pallas_kernels.backends import Interpret, TileConfig, load_backend

__all__ = ["choose_experts"]


def choose_experts(
    logits: Float32[Array, "X E"],
    bias: Float32[Array, " E"],
    *,
    top_k: int,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Int32[Array, "X A"], Float32[Array, "X A"]]:
    """The experts with the highest sigmoid score plus bias, and their scores alone, divided by the sum of these.

    Args:
      logits: of each token for each expert.
      bias: counts in the choice only.
      top_k: A, experts of a token.
      backend: "triton".
      config: None: there are no sizes to choose.
      interpret: run on the CPU.

    Returns:
      (ids, weights), best first; of equal scores the lower id. Where a score or its bias is NaN the token's weights
      are, and its ids are any.

    Raises:
      ValueError: operands that do not fit together, more experts to choose than there are, a number of experts that is
        no power of two, an unknown backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    num_experts = logits.shape[1]
    if bias.shape != (num_experts,) or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"logits have shape {logits.shape}, the bias {bias.shape}, top_k = {top_k}: need [X E], [E] and 1 to E"
        )
    return runner.run(logits, bias, top_k=top_k, interpret=interpret)
