"""The mixture of experts: a float32 router, and dropless experts (docs/numerics.md)."""

from collections.abc import Callable
from functools import partial

from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax.config import M3Config
from m3jax.execution import Tap, plain
from m3jax.execution.experts import DOWN_AXES, UP_AXES
from m3jax.make import Make
from m3jax.model.context import Context
from m3jax.model.layers import MLP, activation
from m3jax.ops import project
from m3jax.weights import Weight

# Chooses experts by (logits, bias, top_k), as `m3jax.execution.plain.choose_experts` does.
Choose = Callable[[Float[Array, "X E"], Float[Array, " E"], int], tuple[Int[Array, "X A"], Float[Array, "X A"]]]


def route(
    x: Float[Array, "X D"],
    gate: Weight,
    bias: Float[Array, " E"],
    top_k: int,
    choose: Choose = plain.choose_experts,
    given_ids: Int[Array, "X A"] | None = None,
) -> tuple[Int[Array, "X A"], Float[Array, "X A"]]:
    """Choose experts by sigmoid score plus bias; weigh them by their scores alone, divided by the sum of these.

    The router is always in float32 (or float64): the checkpoint keeps it so, and vLLM and SGLang compute it so.

    Args:
      x: tokens.
      gate: the router's matrix [D E], not the gate of SwiGLU.
      bias: counts in the choice only.
      top_k: A, experts of a token.
      choose: computes the choice from the logits.
      given_ids: experts that tokens take in place of those with the highest scores; -1 first where none are given.

    Returns:
      (ids, weights), best first; of equal scores the lower id. Weights are NaN where a score or its bias is NaN.
    """
    # Tokens are widened to the gate's dtype; the gate is never rounded to theirs.
    logits = project("xd,de->xe", x.astype(gate.dtype), gate)  # [X E]
    expert_ids, weights = choose(logits, bias, top_k)
    if given_ids is None:
        return expert_ids, weights
    return plain.replay_experts(expert_ids, weights, given_ids, logits)


class Experts(nnx.Module):
    """The routed experts of a whole stack of layers: gate_proj and up_proj [L E D F], down_proj [L E F D]."""

    def __init__(self, depth: int, config: M3Config, make: Make):
        experts, width, hidden = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_proj = make.linear((depth, experts, width, hidden), UP_AXES)
        self.up_proj = make.linear((depth, experts, width, hidden), UP_AXES)
        self.down_proj = make.linear((depth, experts, hidden, width), DOWN_AXES)

    def matrices(self) -> tuple[Weight, Weight, Weight]:
        """Return gate, up and down of all experts of one layer."""
        return self.gate_proj[...], self.up_proj[...], self.down_proj[...]


class MoE(nnx.Module):
    """Router, routed experts and the shared expert of a stack of layers."""

    def __init__(self, depth: int, config: M3Config, make: Make):
        width, experts = config.hidden_size, config.num_local_experts
        # In float32 also in a bfloat16 model: among scores that nearly tie, a rounded one would choose another expert.
        self.gate = make.weight((depth, width, experts), ("layers", None, None), fan_in=width, dtype="float32")
        self.e_score_correction_bias = make.norm((depth, experts), dtype="float32")
        self.experts = Experts(depth, config, make)
        self.shared_experts = MLP(depth, width, config.shared_intermediate_size, make)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, layer: Int[Array, ""], tap: Tap
    ) -> Float[Array, "B T D"]:
        """Return one layer's routed experts, scaled, plus its shared expert, in the accumulator's dtype.

        Args:
          x: Output of the layer's second norm.
          context: Values that the layers of the call share.
          layer: Index of the layer in its stack.
          tap: Tap of the router's choice, expert_ids and expert_weights [B T A].
        """
        config, how = context.config, context.how
        # The only place where a layer's experts are chosen; what follows runs whatever ids it is given.
        route, given_ids = how.each_token(partial(self.route, context=context)), context.given(layer).expert_ids
        expert_ids, weights = route(x) if given_ids is None else route(x, given_ids)  # [B T A] twice
        expert_ids = tap("expert_ids", expert_ids)
        if tap.edits("expert_ids"):  # edited experts are weighed by the router's scores
            _, weights = route(x, expert_ids)
        weights = tap("expert_weights", weights)
        # The factor scales the routed sum alone: the router does not weigh the shared expert.
        routed, shared, scale = self.experts.matrices(), self.shared_experts.matrices(), config.routed_scaling_factor
        return how.experts(x, expert_ids, weights, routed, activation(config, x.dtype), shared, scale)

    def route(
        self,
        x: Float[Array, "B T D"],
        given_ids: Int[Array, "B T A"] | None = None,
        *,
        context: Context,
    ) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:
        """Return (ids, weights) of the experts that each token chooses, by one layer's router."""
        tokens, bias = x.reshape(-1, x.shape[-1]), self.e_score_correction_bias[...]  # [X D], [E]
        given_ids = None if given_ids is None else given_ids.reshape(len(tokens), -1)  # [X A]
        top_k, choose = context.config.num_experts_per_tok, context.how.choose_experts
        expert_ids, weights = route(tokens, self.gate[...], bias, top_k, choose, given_ids)
        by_token = (*x.shape[:2], top_k)
        return expert_ids.reshape(by_token), weights.reshape(by_token)
