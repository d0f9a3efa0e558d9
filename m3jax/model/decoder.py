"""A decoder layer: attention and a feed-forward part, each behind a norm and added to the residual stream."""

from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax.cache import LayerPages
from m3jax.config import M3Config, Stack
from m3jax.execution import Tap
from m3jax.make import Make
from m3jax.model.attention import Attention
from m3jax.model.context import Context
from m3jax.model.layers import MLP, add
from m3jax.model.moe import MoE


class Decoder(nnx.Module):
    """The layers of a stack, which are of one kind; every parameter has a leading layer axis.

    A call runs one layer: `m3jax.execution.run_layers` makes a call for each, with the parameters of that layer.

    Attributes:
      apart: the parameters of each layer by itself, where they were taken apart (`M3.with_layers_apart`).
    """

    apart: nnx.List | None = None

    def __init__(self, stack: Stack, config: M3Config, make: Make):
        depth, width = stack.num_layers, config.hidden_size
        self.input_layernorm = make.norm((depth, width))
        self.post_attention_layernorm = make.norm((depth, width))
        self.self_attn = Attention(depth, config, stack.is_sparse, make)
        if stack.is_moe:
            self.mlp = MoE(depth, config, make)
        else:
            self.mlp = MLP(depth, width, config.dense_intermediate_size, make)

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return self.input_layernorm.shape[0]

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, pages: LayerPages, layer: Int[Array, ""], tap: Tap
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        """Run one layer; `self` holds that layer's parameters, without the layer axis.

        Args:
          x: Residual stream.
          context: Values that the layers of the call share.
          pages: Keys of the call's rows in this stack.
          layer: Index of the layer in its stack.
          tap: Function through which each named value passes, as `m3jax.spec.model.layer` names them.

        Returns:
          (residual stream, pages with the new tokens).
        """
        how, eps = context.how, context.config.rms_norm_eps
        x = tap("input", x)
        normed = tap("attention_norm", how.norm(x, self.input_layernorm[...], eps))
        attention, pages = self.self_attn(normed, context, pages, layer, tap)
        update = tap("attention_out", attention)  # in the accumulator's dtype: the sum is rounded once
        x, normed = how.add_norm(x, update, self.post_attention_layernorm[...], eps)
        update = tap("ffn_out", self.mlp(tap("ffn_norm", normed), context, layer, tap))
        return tap("output", add(x, update)), pages
