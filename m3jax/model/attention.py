"""Attention of one layer: projections, per-head norm, rotary embedding, selection, attention."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from m3jax.cache import StackCache
from m3jax.config import M3Config
from m3jax.model.context import Context
from m3jax.model.layers import apply_rope, gemma_norm
from m3jax.model.params import Make
from m3jax.msa import api, contiguous, index_topk
from m3jax.msa.numerics import einsum
from m3jax.msa.views import Contiguous


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
        cache: StackCache | None,
        layer: Int[Array, ""],
        config: M3Config,
    ) -> tuple[Float[Array, "B T D"], StackCache | None, dict[str, Array]]:
        """Attend with one layer's parameters.

        Returns:
          (output in the accumulator's dtype, the cache with the new tokens, named values on the way).
        """
        values = self._project(x, context, config)
        k, v, index_k = values["k"], values["v"], values.get("index_k")
        if cache is None:
            view = contiguous(k, v, config.index_block_size)
        else:
            cache = cache.update(layer, context.slots(cache.k.shape[3]), k, v, index_k)
            view = Contiguous(cache.k, cache.v, layer, config.index_block_size)
            index_k = None if index_k is None else cache.index_k[layer]
        if index_k is not None and context.schedule != "dense":
            blocks = select(values["index_q"], index_k, context, config)
            values["blocks"] = checkpoint_name(blocks, "msa_blocks")
        args = (values.get("blocks"), context.positions, context.lengths, context.schedule)
        values["attention"] = api.attention(values["q"], view, *args)
        return einsum("btnh,nhd->btd", values["attention"], self.o_proj[...]), cache, values

    def _project(self, x: Float[Array, "B T D"], context: Context, config: M3Config) -> dict[str, Array]:
        """Queries, keys and values; norm and RoPE run in the accumulator's dtype and are rounded once."""

        def head(x, weight, norm):
            y = einsum("btd,d...h->bt...h", x, weight[...])
            y = gemma_norm(y, norm[...], config.rms_norm_eps)
            squeeze = y.ndim == 3
            y = apply_rope(y[:, :, None] if squeeze else y, context.cos, context.sin).astype(x.dtype)
            return y[:, :, 0] if squeeze else y

        out = {
            "q": head(x, self.q_proj, self.q_norm),
            "k": head(x, self.k_proj, self.k_norm),
            "v": einsum("btd,dkh->btkh", x, self.v_proj[...]).astype(x.dtype),
        }
        if hasattr(self, "index_q_proj"):
            # The index branch reads the trunk but does not train it (paper, 3.2; T33).
            detached = jax.lax.stop_gradient(x)
            out["index_q"] = head(detached, self.index_q_proj, self.index_q_norm)
            out["index_k"] = head(detached, self.index_k_proj, self.index_k_norm)
        return out


def select(
    index_q: Float[Array, "B T K H"], index_k: Float[Array, "B S H"], context: Context, config: M3Config
) -> Int[Array, "B K T J"]:
    """The layer's block selection under the model's rules."""
    return index_topk(
        index_q, index_k, context.positions, context.lengths,
        block_size=config.index_block_size, top_k=config.index_topk_blocks, local_blocks=config.index_local_blocks,
        init_blocks=config.index_init_blocks, score=config.index_score_type,
    )  # fmt: skip
