"""A stack of decoder layers of one kind, scanned."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache import OffloadedStack, StackCache
from m3jax.config import M3Config, Stack
from m3jax.model.attention import Attention
from m3jax.model.context import Context
from m3jax.model.layers import MLP, gemma_norm
from m3jax.model.moe import Experts, MoE
from m3jax.model.params import Make

# Maps the named values of a layer to what the scan shall keep of them.
Probe = Callable[[dict[str, Array], Context], PyTree[Array]]


@struct.dataclass
class Taps:
    """The residual stream at A layers; the others write to a last place that nobody reads."""

    values: Float[Array, "A1 B T D"]
    first: int = struct.field(pytree_node=False)  # layers before the stack that is running
    layers: tuple[int, ...] = struct.field(pytree_node=False)

    @classmethod
    def start(cls, x: Float[Array, "B T D"], layers: tuple[int, ...]) -> "Taps":
        """Before the first layer: 0 is the embedding."""
        taken = [x if n == 0 else jnp.zeros_like(x) for n in layers]
        return cls(jnp.stack([*taken, jnp.zeros_like(x)]), 0, layers)

    def put(self, index: Int[Array, ""], x: Float[Array, "B T D"]) -> "Taps":
        """Keep a layer's output if it is asked for."""
        wanted = jnp.asarray(self.layers, jnp.int32) == self.first + index + 1
        place = jnp.where(jnp.any(wanted), jnp.argmax(wanted), len(self.layers))
        return self.replace(values=jax.lax.dynamic_update_index_in_dim(self.values, x, place, 0))

    def after(self, depth: int) -> "Taps":
        """For the next stack."""
        return self.replace(first=self.first + depth)


class Decoder(nnx.Module):
    """Pre-norm layers with two residuals; every parameter has a leading layer axis."""

    def __init__(self, stack: Stack, config: M3Config, make: Make):
        depth, width = stack.num_layers, config.hidden_size
        self.input_layernorm = nnx.Param(make((depth, width), ("layers", None), None, None))
        self.post_attention_layernorm = nnx.Param(make((depth, width), ("layers", None), None, None))
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
        cache: StackCache | OffloadedStack | None,
        config: M3Config,
        probe: Probe | None = None,
        remat: bool = False,
        taps: "Taps | None" = None,
    ) -> tuple[Float[Array, "B T D"], StackCache | OffloadedStack | None, PyTree[Array], "Taps | None"]:
        """Run all layers.

        Args:
          x: the residual stream.
          context: positions, lengths and tables.
          cache: the stack's cache, or None for a call that stands alone.
          config: the model's configuration.
          probe: what to keep of each layer's named values, stacked over layers; None keeps nothing.
          remat: recompute activations in the backward pass, with the selections saved (T30).
          taps: what was kept of the residual stream so far.

        Returns:
          (residual stream, cache, kept values, taps).
        """
        experts = self.mlp.experts if isinstance(self.mlp, MoE) else None
        graph = jax.tree.map(lambda p: p, self)  # a copy, to take the experts out of what is scanned
        if experts is not None:
            graph.mlp.experts = None

        def body(carry, xs):
            x, cache, taps = carry
            layer, index = xs
            x, cache, values = layer.one(x, context, cache, index, experts, config)
            taps = None if taps is None else taps.put(index, x)
            return (x, cache, taps), None if probe is None else probe(values, context)

        if remat:
            kept = jax.checkpoint_policies.save_only_these_names("msa_blocks", "expert_ids")
            body = jax.checkpoint(body, policy=kept)
        xs = graph, jnp.arange(self.depth, dtype=jnp.int32)
        (x, cache, taps), kept = jax.lax.scan(body, (x, cache, taps), xs)
        return x, cache, kept, None if taps is None else taps.after(self.depth)

    def one(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: StackCache | OffloadedStack | None,
        index: Int[Array, ""],
        experts: Experts | None,
        config: M3Config,
    ) -> tuple[Float[Array, "B T D"], StackCache | OffloadedStack | None, dict[str, Array]]:
        """One layer; `self` holds that layer's parameters, without the layer axis."""
        eps, values = config.rms_norm_eps, {"input": x}
        values["attention_norm"] = h = gemma_norm(x, self.input_layernorm[...], eps).astype(x.dtype)
        out, cache, inner = self.self_attn(h, context, cache, index, config)
        values |= inner
        values["attention_out"], x = out, add(x, out)
        values["ffn_norm"] = h = gemma_norm(x, self.post_attention_layernorm[...], eps).astype(x.dtype)
        if experts is None:
            out = self.mlp(h, config.swiglu_alpha, config.swiglu_limit)
        else:
            flat = h.reshape(-1, h.shape[-1])
            out, ids, weights = self.mlp(flat, experts, index, config, context.backend, context.mesh)
            out, ids, weights = (y.reshape(*h.shape[:2], -1) for y in (out, ids, weights))
            values |= {"expert_ids": ids, "expert_weights": weights}
        values["ffn_out"], x = out, add(x, out)
        return x, cache, values | {"output": x}


def add(x: Float[Array, "B T D"], update: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Residual addition in the accumulator's dtype, rounded once."""
    return (x.astype(update.dtype) + update).astype(x.dtype)
