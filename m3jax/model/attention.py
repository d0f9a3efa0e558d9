"""Attention of one layer: projections, per-head norm, rotary embedding, selection, attention."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from m3jax.cache import OffloadedStack, StackCache
from m3jax.config import M3Config
from m3jax.model.cached import attending, cached_attention, selection_rules
from m3jax.model.context import Context
from m3jax.model.params import Make
from m3jax.model.projections import Finish, Tensors
from m3jax.msa import api, contiguous, contiguous_index
from m3jax.numerics import einsum


class Attention(nnx.Module):
    """Projections of a stack of layers; those of the index branch only where attention is sparse."""

    def __init__(self, depth: int, config: M3Config, sparse: bool, make: Make):
        width, head = config.hidden_size, config.head_dim
        heads, kv_heads, index = config.num_attention_heads, config.num_key_value_heads, config.index_head_dim
        kv = ("layers", None, "kv_heads", None)
        norm = ("layers", None)
        self.q_proj = nnx.Param(make((depth, width, heads, head), ("layers", None, "heads", None), None, width))
        self.k_proj = nnx.Param(make((depth, width, kv_heads, head), kv, None, width))
        self.v_proj = nnx.Param(make((depth, width, kv_heads, head), kv, None, width))
        self.o_proj = nnx.Param(make((depth, heads, head, width), ("layers", "heads", None, None), None, heads * head))
        self.q_norm = nnx.Param(make((depth, head), norm, None, None))
        self.k_norm = nnx.Param(make((depth, head), norm, None, None))
        if sparse:
            self.index_q_proj = nnx.Param(make((depth, width, kv_heads, index), kv, None, width))
            self.index_k_proj = nnx.Param(make((depth, width, index), ("layers", None, None), None, width))
            self.index_q_norm = nnx.Param(make((depth, index), norm, None, None))
            self.index_k_norm = nnx.Param(make((depth, index), norm, None, None))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: StackCache | OffloadedStack | None,
        layer: Int[Array, ""],
        config: M3Config,
    ) -> tuple[Float[Array, "B T D"], StackCache | OffloadedStack | None, dict[str, Array]]:
        """Attend with one layer's parameters.

        Returns:
          (output in the accumulator's dtype, the cache with the new tokens, named values on the way; where a kernel
          writes the cache only "attention" and "blocks").
        """
        if cache is None:
            values = self.values(x, context, config)
            values |= _alone(values, context, config)
        else:
            ready = self._project(x)
            finish = self._finish(context, config, x.dtype).on(ready, cache, layer, context.places, context.backend)
            if finish.backend == "xla":
                ready, finish = finish(ready), None
            out, blocks, cache = cached_attention(ready, finish, cache, layer, context, config, context.mesh)
            values = {} if finish else _named(ready)
            values |= {"attention": out} | ({} if blocks is None else {"blocks": blocks})
        # One contracted axis: over two, XLA's CPU backend would transpose the weights in every step.
        flat = values["attention"].reshape(*x.shape[:2], -1)
        out = einsum("btx,xd->btd", flat, self.o_proj[...].reshape(flat.shape[-1], -1))
        return out, cache, values

    def values(self, x: Float[Array, "B T D"], context: Context, config: M3Config) -> dict[str, Array]:
        """Queries, keys and values by name, and those of the index branch where it is."""
        return _named(self._finish(context, config, x.dtype)(self._project(x)))

    def _project(self, x: Float[Array, "B T D"]) -> Tensors:
        """Queries, keys and values before the norm, in the accumulator's dtype."""
        head = lambda x, weight: einsum("btd,d...h->bt...h", x, weight[...])
        index = None, None
        if hasattr(self, "index_q_proj"):
            # The index branch reads the trunk but does not train it (paper, 3.2; T33).
            detached = jax.lax.stop_gradient(x)
            index = head(detached, self.index_q_proj), head(detached, self.index_k_proj)
        return Tensors(head(x, self.q_proj), head(x, self.k_proj), head(x, self.v_proj), *index)

    def _finish(self, context: Context, config: M3Config, dtype: jnp.dtype) -> Finish:
        names = "q_norm", "k_norm", "index_q_norm", "index_k_norm"
        norms = (getattr(self, name)[...] if hasattr(self, name) else None for name in names)
        return Finish(tuple(norms), context.cos, context.sin, config.rms_norm_eps, dtype)


def _named(x: Tensors) -> dict[str, Array]:
    return {name: y for name, y in x._asdict().items() if y is not None}


def _alone(values: dict[str, Array], context: Context, config: M3Config) -> dict[str, Array]:
    """Selection and attention of a call that brings all its keys: "blocks" in sparse layers, and "attention"."""
    out, rows = {}, (context.positions, context.lengths)
    if "index_q" in values and context.schedule != "dense":
        index = contiguous_index(values["index_k"], config.index_block_size)
        blocks = api.select(values["index_q"], index, *rows, **selection_rules(config), backend=context.backend)
        out["blocks"] = checkpoint_name(blocks, "msa_blocks")
    view = contiguous(values["k"], values["v"], config.index_block_size)
    static = context.schedule, attending(context.backend, out.get("blocks"))
    out["attention"], _ = api.attention(values["q"], view, out.get("blocks"), *rows, *static)
    return out
