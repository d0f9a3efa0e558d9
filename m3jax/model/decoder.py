"""A decoder layer: attention and a feed-forward part, each behind a norm and added to the residual stream."""

from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax.cache import LayerPages
from m3jax.config import M3Config, Stack
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
        self, x: Float[Array, "B T D"], context: Context, pages: LayerPages, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "B T D"], LayerPages, dict[str, Array]]:
        """Run one layer; `self` holds that layer's parameters, without the layer axis.

        Args:
          x: the residual stream.
          context: what the layers of this call share.
          pages: of the stack.
          layer: which layer of the stack.

        Returns:
          (residual stream, pages with the new tokens, named values on the way).
        """
        config, how, eps = context.config, context.how, context.config.rms_norm_eps

        # Only attention reads other tokens: what comes before and after it treats each token alone.
        @how.each_token
        def before_attention(x, cos, sin):
            _, normed = how.add_norm(x, None, self.input_layernorm[...], eps)
            return normed, self.self_attn.project(normed, cos, sin, context)

        attention_norm, heads = before_attention(x, context.cos, context.sin)
        attention, pages, values = self.self_attn(heads, context, pages, layer)
        values |= {"input": x, "attention_norm": attention_norm}

        def after_attention(x, attention):
            attention_out = self.self_attn.project_out(attention)
            x, ffn_norm = how.add_norm(x, attention_out, self.post_attention_layernorm[...], eps)
            return x, attention_out, ffn_norm

        if isinstance(self.mlp, MLP):

            @how.each_token
            def to_the_end(x, attention):
                x, attention_out, ffn_norm = after_attention(x, attention)
                ffn_out = self.mlp(ffn_norm, config.swiglu_alpha, config.swiglu_limit)
                return add(x, ffn_out), attention_out, ffn_norm, ffn_out

            x, attention_out, ffn_norm, ffn_out = to_the_end(x, attention)
        else:

            @how.each_token
            def to_the_experts(x, attention):
                x, attention_out, ffn_norm = after_attention(x, attention)
                return x, attention_out, ffn_norm, *self.mlp.route(ffn_norm, config, how)

            @how.each_token
            def after_the_experts(x, ffn_norm, both):
                ffn_out = self.mlp.add_shared(ffn_norm, *both, config)
                return add(x, ffn_out), ffn_out

            x, attention_out, ffn_norm, expert_ids, expert_weights = to_the_experts(x, attention)
            both = self.mlp.run_experts(ffn_norm, expert_ids, expert_weights, config, how)
            x, ffn_out = after_the_experts(x, ffn_norm, both)
            values |= {"expert_ids": expert_ids, "expert_weights": expert_weights}
        values |= {"attention_out": attention_out, "ffn_norm": ffn_norm, "ffn_out": ffn_out, "output": x}
        return x, pages, values
