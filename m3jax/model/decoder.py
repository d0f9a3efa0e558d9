"""A stack of decoder layers of one kind, scanned."""

import copy
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import LayerPages
from m3jax.config import M3Config, Stack
from m3jax.make import Make
from m3jax.model.attention import Attention
from m3jax.model.context import Context
from m3jax.model.layers import MLP, gemma_norm
from m3jax.model.moe import Experts, MoE
from m3jax.mxfp8 import MXFP8Array, MXFP8Layer

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
    """Pre-norm layers with two residuals; every parameter has a leading layer axis.

    Attributes:
      apart: the parameters of each layer by themselves, but for the experts'; None where layers are scanned.
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

    def with_layers_apart(self) -> "Decoder":
        """The same layers, to be run one after the other instead of scanned; see `M3.with_layers_apart`."""
        without_experts = self._without_experts()
        other = copy.copy(self)
        other.apart = nnx.List(
            [jax.tree.map(lambda x, layer=layer: x[layer], without_experts) for layer in range(self.depth)]
        )
        return other

    def _without_experts(self) -> "Decoder":
        """A copy without what layers do not have by themselves: experts stay stacked and are read where they lie."""
        other = jax.tree.map(lambda parameter: parameter, self)
        if isinstance(self.mlp, MoE):
            other.mlp.experts = None
        return other

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

        def run_layer(carry, parameters_and_layer):
            x, pages, taps = carry
            one_layer, layer = parameters_and_layer
            one_layer = jax.tree.map(partial(_for_kernels, context, x.dtype), one_layer, is_leaf=_is_mxfp8)
            x, pages, values = one_layer.run_layer(x, context, pages, layer, experts, config)
            taps = None if taps is None else taps.put(layer, x)
            return (x, pages.after_layer(), taps), None if probe is None else probe(values, context)

        if remat:
            saved = jax.checkpoint_policies.save_only_these_names("msa_blocks", "expert_ids")
            run_layer = jax.checkpoint(run_layer, policy=saved)
        carry = x, pages, taps
        if self.apart is None:
            leaves, structure = jax.tree.flatten(self._without_experts(), is_leaf=_is_mxfp8)
            # A scan would copy a layer's matrix for a kernel to read it.
            is_kept = [_is_mxfp8(leaf) and context.kernel_reads(leaf, x.dtype) for leaf in leaves]

            def run_scanned(carry, scanned_and_layer):
                scanned, layer = scanned_and_layer
                parameters = [
                    MXFP8Layer(leaf, layer, context.backend) if keeps else one_layer
                    for leaf, one_layer, keeps in zip(leaves, scanned, is_kept, strict=True)
                ]
                return run_layer(carry, (jax.tree.unflatten(structure, parameters), layer))

            of_layers = [None if keeps else leaf for leaf, keeps in zip(leaves, is_kept, strict=True)]
            layer_ids = jnp.arange(self.depth, dtype=jnp.int32)
            carry, kept = jax.lax.scan(run_scanned, carry, (of_layers, layer_ids))
        else:
            kept_of_each, run_layer = [], jax.jit(run_layer)  # traced once, for all layers of the stack
            for layer, one_layer in enumerate(self.apart):
                carry, kept = run_layer(carry, (one_layer, jnp.int32(layer)))
                kept_of_each.append(kept)
            kept = jax.tree.map(lambda *layers: jnp.stack(layers), *kept_of_each)
        x, pages, taps = carry
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
        norm = lambda x, weight: gemma_norm(x, weight[...], config.rms_norm_eps).astype(x.dtype)

        def before_attention(x, cos, sin):
            normed = norm(x, self.input_layernorm)
            heads = self.self_attn.project(normed, cos, sin, config)
            return normed, heads if context.token_tile is None else heads.finish()

        attention_norm, heads = context.by_token(before_attention, x, context.cos, context.sin)
        attention, pages, values = self.self_attn(heads, context, pages, layer)
        values |= {"input": x, "attention_norm": attention_norm}

        def after_attention(x, attention):
            attention_out = self.self_attn.project_out(attention)
            x = add(x, attention_out)
            return x, attention_out, norm(x, self.post_attention_layernorm)

        # All that a token needs no other for, up to the experts, is computed a tile at a time.
        if experts is None:

            def to_the_end(x, attention):
                x, attention_out, ffn_norm = after_attention(x, attention)
                ffn_out = self.mlp(ffn_norm, config.swiglu_alpha, config.swiglu_limit)
                return add(x, ffn_out), attention_out, ffn_norm, ffn_out

            x, attention_out, ffn_norm, ffn_out = context.by_token(to_the_end, x, attention)
        else:

            def to_the_experts(x, attention):
                x, attention_out, ffn_norm = after_attention(x, attention)
                return x, attention_out, ffn_norm, *self.mlp.route(ffn_norm, config)

            x, attention_out, ffn_norm, expert_ids, expert_weights = context.by_token(to_the_experts, x, attention)
            tokens, ids, weights = (y.reshape(-1, y.shape[-1]) for y in (ffn_norm, expert_ids, expert_weights))
            routed = experts(
                tokens, ids, weights, layer, config.swiglu_alpha, config.swiglu_limit,
                backend=context.backend, mesh=context.mesh, path=context.expert_path, token_tile=context.token_tile,
            ).reshape(x.shape)  # fmt: skip  # [B*T D] -> [B T D]

            def after_experts(x, ffn_norm, routed):
                ffn_out = self.mlp.add_shared(ffn_norm, routed, config)
                return add(x, ffn_out), ffn_out

            x, ffn_out = context.by_token(after_experts, x, ffn_norm, routed)
            values |= {"expert_ids": expert_ids, "expert_weights": expert_weights}
        values |= {"attention_out": attention_out, "ffn_norm": ffn_norm, "ffn_out": ffn_out, "output": x}
        return x, pages, values


def add(x: Float[Array, "B T D"], update: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Residual addition in the accumulator's dtype, rounded once."""
    return (x.astype(update.dtype) + update).astype(x.dtype)


def _is_mxfp8(leaf: object) -> bool:
    return isinstance(leaf, MXFP8Array | MXFP8Layer)


def _for_kernels(context: Context, dtype: DTypeLike, leaf: object) -> object:
    """A matrix of a layer by itself as a stack of one, where a kernel reads it; anything else as it is."""
    if not isinstance(leaf, MXFP8Array):
        return leaf
    stack = jax.tree.map(lambda x: x[None], leaf)
    return MXFP8Layer(stack, jnp.int32(0), context.backend) if context.kernel_reads(stack, dtype) else leaf
