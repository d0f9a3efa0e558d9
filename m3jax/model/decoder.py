"""A stack of decoder layers of one kind, scanned."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import LayerPages
from m3jax.config import M3Config, Stack
from m3jax.make import Make
from m3jax.model.attention import Attention
from m3jax.model.context import Context
from m3jax.model.layers import MLP, gemma_norm
from m3jax.model.moe import Experts, MoE

# Maps the named values of a layer to what the scan shall keep of them.
Probe = Callable[[dict[str, Array], Context], PyTree[Array]]


@struct.dataclass
class Taps:
    """The residual stream at the layers asked for, kept while the stacks run.

    Attributes:
      values: one for each, and a last place that all other layers write to and nobody reads (A1 = A + 1).
      first: how many layers lie before the stack that is running.
      layers: 0 is the embedding, n the output of the n-th layer, counted from 1.
    """

    values: Float[Array, "A1 B T D"]
    first: int = struct.field(pytree_node=False)
    layers: tuple[int, ...] = struct.field(pytree_node=False)

    @classmethod
    def start(cls, x: Float[Array, "B T D"], layers: tuple[int, ...]) -> "Taps":
        """The taps before the first layer: 0 asks for the embedding, which is there already."""
        taken = [x if n == 0 else jnp.zeros_like(x) for n in layers]
        return cls(jnp.stack([*taken, jnp.zeros_like(x)]), 0, layers)

    def put(self, index: Int[Array, ""], x: Float[Array, "B T D"]) -> "Taps":
        """Keep a layer's output if it is asked for."""
        is_wanted = jnp.asarray(self.layers, jnp.int32) == self.first + index + 1  # [A]
        place = jnp.where(jnp.any(is_wanted), jnp.argmax(is_wanted), len(self.layers))
        return self.replace(values=jax.lax.dynamic_update_index_in_dim(self.values, x, place, 0))

    def after(self, depth: int) -> "Taps":
        """The same taps, counted on for the next stack of layers."""
        return self.replace(first=self.first + depth)


class Decoder(nnx.Module):
    """Pre-norm layers with two residuals; every parameter has a leading layer axis."""

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
        self,
        x: Float[Array, "B T D"],
        context: Context,
        pages: LayerPages,
        config: M3Config,
        probe: Probe | None = None,
        remat: bool = False,
        taps: Taps | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerPages, PyTree[Array], Taps | None]:
        """Run all layers.

        Args:
          x: the residual stream.
          context: what the layers of this call share.
          pages: the keys that the call's rows have in this stack, or those that the call is about to make.
          config: the model's configuration.
          probe: what to keep of each layer's named values, stacked over layers; None keeps nothing.
          remat: recompute activations in the backward pass, with the selections saved: selecting again could choose
            other blocks (T30).
          taps: what was kept of the residual stream so far.

        Returns:
          (residual stream, pages with the new tokens, kept values, taps).
        """
        experts = self.mlp.experts if isinstance(self.mlp, MoE) else None
        scanned = jax.tree.map(lambda parameter: parameter, self)  # a copy, to take the experts out of what is scanned
        if experts is not None:
            scanned.mlp.experts = None

        def run_layer(carry, parameters_and_layer):
            x, pages, taps = carry
            one_layer, layer = parameters_and_layer
            x, pages, values = one_layer.run_layer(x, context, pages, layer, experts, config)
            taps = None if taps is None else taps.put(layer, x)
            return (x, pages.after_layer(), taps), None if probe is None else probe(values, context)

        if remat:
            saved = jax.checkpoint_policies.save_only_these_names("msa_blocks", "expert_ids")
            run_layer = jax.checkpoint(run_layer, policy=saved)
        layer_ids = jnp.arange(self.depth, dtype=jnp.int32)
        (x, pages, taps), kept = jax.lax.scan(run_layer, (x, pages, taps), (scanned, layer_ids))
        return x, pages, kept, None if taps is None else taps.after(self.depth)

    def run_layer(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        pages: LayerPages,
        layer: Int[Array, ""],
        experts: Experts | None,
        config: M3Config,
    ) -> tuple[Float[Array, "B T D"], LayerPages, dict[str, Array]]:
        """One layer; `self` holds that layer's parameters, without the layer axis.

        Args:
          x: the residual stream.
          context: what the layers of this call share.
          pages: of the stack.
          layer: which layer of the stack.
          experts: of the whole stack; None where the MLP is dense.
          config: the model's configuration.

        Returns:
          (residual stream, pages with the new tokens, named values on the way).
        """
        eps = config.rms_norm_eps
        norm = lambda x, weight: context.by_token(lambda x: gemma_norm(x, weight[...], eps).astype(x.dtype), x)
        attention_norm = norm(x, self.input_layernorm)
        attention_out, pages, values = self.self_attn(attention_norm, context, pages, layer, config)
        values |= {"input": x, "attention_norm": attention_norm, "attention_out": attention_out}
        x = context.by_token(add, x, attention_out)
        ffn_norm = norm(x, self.post_attention_layernorm)
        if experts is None:
            ffn_out = context.by_token(lambda x: self.mlp(x, config.swiglu_alpha, config.swiglu_limit), ffn_norm)
        else:
            tokens = ffn_norm.reshape(-1, ffn_norm.shape[-1])  # [B*T D]
            ffn_out, expert_ids, expert_weights = self.mlp(
                tokens, experts, layer, config,
                backend=context.backend, mesh=context.mesh, expert_path=context.expert_path,
                token_tile=context.token_tile,
            )  # fmt: skip
            ffn_out, expert_ids, expert_weights = (
                y.reshape(*x.shape[:2], -1) for y in (ffn_out, expert_ids, expert_weights)
            )  # [B T D], [B T A], [B T A]
            values |= {"expert_ids": expert_ids, "expert_weights": expert_weights}
        x = context.by_token(add, x, ffn_out)
        return x, pages, values | {"ffn_norm": ffn_norm, "ffn_out": ffn_out, "output": x}


def add(x: Float[Array, "B T D"], update: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Residual addition in the accumulator's dtype, rounded once."""
    return (x.astype(update.dtype) + update).astype(x.dtype)
