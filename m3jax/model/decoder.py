"""A decoder layer: attention and a feed-forward part, each behind a norm and added to the residual stream."""

from functools import partial

from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax.cache import LayerPages
from m3jax.config import M3Config, Stack
from m3jax.execution import Values
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
        self, x: Float[Array, "B T D"], context: Context, pages: LayerPages, layer: Int[Array, ""], values: Values
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        """Run one layer; `self` holds that layer's parameters, without the layer axis.

        Args:
          x: the residual stream.
          context: what the layers of this call share.
          pages: of the stack.
          layer: which layer of the stack.
          values: gets the named values on the way, as `m3jax.model.definition.layer` has them.

        Returns:
          (residual stream, pages with the new tokens).
        """
        # What has a name is written into `values` and read from there by what follows: an edit is made in between.
        config, how, eps = context.config, context.how, context.config.rms_norm_eps
        # A token meets other tokens in two places only: attention reads those before it, and an expert runs those that
        # chose it. What lies between treats each token alone, and `each_token` may run it on some tokens at a time.
        values["input"] = x
        values["attention_norm"] = how.norm(values["input"], self.input_layernorm[...], eps)
        project = how.each_token(partial(self.self_attn.project, context=context))
        heads = project(values["attention_norm"], context.cos, context.sin)
        attention, pages = self.self_attn(heads, context, pages, layer, values)  # [B T N*H]
        values["attention_out"] = how.each_token(self.self_attn.project_out)(attention)  # in the accumulator's dtype

        # The sum is rounded once, and is what the next norm reads: its terms are not rounded before.
        middle, values["ffn_norm"] = how.add_norm(
            values["input"], values["attention_out"], self.post_attention_layernorm[...], eps
        )
        if isinstance(self.mlp, MLP):
            values["ffn_out"] = how.each_token(partial(self.mlp, config=config))(values["ffn_norm"])
        else:
            given_ids = context.given(layer).expert_ids
            values["ffn_out"] = self.mlp(values["ffn_norm"], config, how, given_ids, values)
        values["output"] = add(middle, values["ffn_out"])
        return values["output"], pages
