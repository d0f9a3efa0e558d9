"""A stack of decoder layers of one kind, scanned."""

import copy
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int, PyTree, Shaped

from m3jax import ops
from m3jax.cache import LayerPages
from m3jax.config import M3Config, Stack
from m3jax.make import Make
from m3jax.model.attention import Attention
from m3jax.model.context import Context, InPlace, backend_of_products
from m3jax.model.layers import MLP, gemma_norm
from m3jax.model.moe import Experts, MoE
from m3jax.model.summary import dotted_path
from m3jax.mxfp8 import MXFP8Array
from m3jax.weights import StackedLayer

_NUM_INPUTS = {"o_proj": 2}  # axes that a product with a layer's matrix sums over; one for all others

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
      apart: the parameters of each layer, but for the experts', by themselves or where they lie in the stack, if a
        kernel reads them there; None where layers are scanned.
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

    def with_layers_apart(self, in_place: InPlace) -> "Decoder":
        """The same layers, to be run one after the other instead of scanned; see `M3.with_layers_apart`."""
        stacks, structure = self._stacks(in_place)

        def parameters(layer: int) -> "Decoder":
            index, how = jnp.int32(layer), (in_place.backend, in_place.is_ordered)
            of_layer = [StackedLayer(stack, index, *how) if is_kept else stack[layer] for stack, is_kept in stacks]
            return jax.tree.unflatten(structure, of_layer)

        other = copy.copy(self)
        other.apart = nnx.List([parameters(layer) for layer in range(self.depth)])
        return other

    def _stacks(
        self, in_place: InPlace
    ) -> tuple[list[tuple[Shaped[Array, "L ..."] | MXFP8Array, bool]], jax.tree_util.PyTreeDef]:
        """Every parameter but the experts', and whether a kernel reads its layers where they lie."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(self._without_experts(), is_leaf=_is_mxfp8)

        def is_kept(path: tuple, stack: Shaped[Array, "L ..."] | MXFP8Array) -> bool:
            name = dotted_path(path).rpartition(".")[2]
            is_matrix = name.endswith("_proj") or (in_place.is_ordered and name == "gate")
            return is_matrix and in_place.reads(stack, _NUM_INPUTS.get(name, 1))

        return [(stack, is_kept(path, stack)) for path, stack in leaves], structure

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
            one_layer = context.prepared(one_layer)
            x, pages, values = one_layer.run_layer(x, context, pages, layer, experts, config)
            taps = None if taps is None else taps.put(layer, x)
            return (x, pages.after_layer(), taps), None if probe is None else probe(values, context)

        if remat:
            saved = jax.checkpoint_policies.save_only_these_names("msa_blocks", "expert_ids")
            run_layer = jax.checkpoint(run_layer, policy=saved)
        carry = x, pages, taps
        if self.apart is None:
            num_rows = x.shape[0] * x.shape[1]
            # Gradients are those of layers, not of stacks.
            is_ordered = context.is_ordered and context.has_cache
            in_place = InPlace(num_rows, x.dtype, context.backend, context.token_tile, context.mesh, is_ordered)
            stacks, structure = self._stacks(in_place)

            # A scan would copy a layer's matrix for a kernel to read it.
            def run_scanned(carry, scanned_and_layer):
                scanned, layer = scanned_and_layer
                parameters = [
                    StackedLayer(stack, layer, context.backend, is_ordered) if is_kept else one_layer
                    for (stack, is_kept), one_layer in zip(stacks, scanned, strict=True)
                ]
                return run_layer(carry, (jax.tree.unflatten(structure, parameters), layer))

            of_layers = [None if is_kept else stack for stack, is_kept in stacks]
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
        backend = backend_of_products(context.backend, context.token_tile, context.mesh)

        def add_and_norm(x, update, weight):
            by_xla = lambda x, update, weight: add_norm(x, update, weight, config.rms_norm_eps)
            options = dict(eps=config.rms_norm_eps, backend=backend, is_ordered=context.is_ordered)
            return ops.add_norm(by_xla, x, update, weight[...], **options)

        def before_attention(x, cos, sin):
            _, normed = add_and_norm(x, None, self.input_layernorm)
            heads = self.self_attn.project(normed, cos, sin, config)
            return normed, heads if context.token_tile is None else heads.finish(context.is_ordered)

        attention_norm, heads = context.by_token(before_attention, x, context.cos, context.sin)
        attention, pages, values = self.self_attn(heads, context, pages, layer)
        values |= {"input": x, "attention_norm": attention_norm}

        def after_attention(x, attention):
            attention_out = self.self_attn.project_out(attention)
            x, normed = add_and_norm(x, attention_out, self.post_attention_layernorm)
            return x, attention_out, normed

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
                return x, attention_out, ffn_norm, *self.mlp.route(ffn_norm, config, backend)

            x, attention_out, ffn_norm, expert_ids, expert_weights = context.by_token(to_the_experts, x, attention)
            tokens, ids, weights = (y.reshape(-1, y.shape[-1]) for y in (ffn_norm, expert_ids, expert_weights))
            both = experts(
                tokens, ids, weights, layer, config.swiglu_alpha, config.swiglu_limit,
                backend=context.backend, mesh=context.mesh, path=context.expert_path, token_tile=context.token_tile,
                is_ordered=context.is_ordered, shared=self.mlp.shared_experts,
            )  # fmt: skip
            both = jax.tree.map(lambda y: y.reshape(x.shape), both)  # [B*T D] -> [B T D]

            def after_experts(x, ffn_norm, both):
                ffn_out = self.mlp.add_shared(ffn_norm, *both, config)
                return add(x, ffn_out), ffn_out

            x, ffn_out = context.by_token(after_experts, x, ffn_norm, both)
            values |= {"expert_ids": expert_ids, "expert_weights": expert_weights}
        values |= {"attention_out": attention_out, "ffn_norm": ffn_norm, "ffn_out": ffn_out, "output": x}
        return x, pages, values


def add(x: Float[Array, "B T D"], update: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Residual addition in the accumulator's dtype, rounded once."""
    return (x.astype(update.dtype) + update).astype(x.dtype)


def add_norm(
    x: Float[Array, "B T D"], update: Float[Array, "B T D"] | None, weight: Float[Array, " D"], eps: float
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """(residual addition, its norm), each rounded once; without an update the norm of x."""
    x = x if update is None else add(x, update)
    return x, gemma_norm(x, weight, eps).astype(x.dtype)


def _is_mxfp8(leaf: object) -> bool:
    return isinstance(leaf, MXFP8Array | StackedLayer)
