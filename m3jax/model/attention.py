"""Attention of one layer: project, write, select, attend, project."""

from functools import partial

from flax import nnx
from jaxtyping import Array, Float, Int

from m3jax.cache import LayerCall, LayerPages
from m3jax.config import M3Config
from m3jax.execution import Projections, Tap
from m3jax.make import Make
from m3jax.model.context import Context
from m3jax.ops import Heads, project, project_each
from m3jax.weights import merge_inputs


class Attention(nnx.Module):
    """Grouped-query attention of a stack of layers; those that are sparse have an index branch too.

    Shapes: q_proj [L D N H], k_proj and v_proj [L D K H], o_proj [L N H D], index_q_proj [L D K I], index_k_proj
    [L D I]. A call has the parameters of one layer, without L.
    """

    def __init__(self, depth: int, config: M3Config, sparse: bool, make: Make):
        width, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        kv_axes = ("layers", None, "kv_heads", None)
        self.q_proj = make.linear((depth, width, heads, head_dim), ("layers", None, "heads", None), outputs=2)
        self.k_proj = make.linear((depth, width, kv_heads, head_dim), kv_axes, outputs=2)
        self.v_proj = make.linear((depth, width, kv_heads, head_dim), kv_axes, outputs=2)
        self.o_proj = make.linear((depth, heads, head_dim, width), ("layers", "heads", None, None), inputs=2)
        self.q_norm = make.norm((depth, head_dim))
        self.k_norm = make.norm((depth, head_dim))
        if sparse:
            self.index_q_proj = make.linear((depth, width, kv_heads, index_dim), kv_axes, outputs=2)
            self.index_k_proj = make.linear((depth, width, index_dim), ("layers", None, None))
            self.index_q_norm = make.norm((depth, index_dim))
            self.index_k_norm = make.norm((depth, index_dim))

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, pages: LayerPages, layer: Int[Array, ""], tap: Tap
    ) -> tuple[Float[Array, "B T D"], LayerPages]:
        """Return one layer's attention.

        Args:
          x: Output of the layer's first norm.
          context: Values that the layers of the call share.
          pages: Keys of the call's rows in this stack, or empty pages in a call without a cache.
          layer: Index of the layer in its stack.
          tap: Tap of q, k, v, index_q, index_k, block_scores, blocks and attention.

        Returns:
          (the output projection, in the accumulator's dtype; the pages with the new tokens).
        """
        how, eps = context.how, context.config.rms_norm_eps
        weights = [self.q_proj[...], self.k_proj[...], self.v_proj[...]]
        norms = Heads(q=self.q_norm[...], k=self.k_norm[...])
        if self.is_sparse:
            weights += [self.index_q_proj[...], self.index_k_proj[...]]
            norms = norms._replace(index_q=self.index_q_norm[...], index_k=self.index_k_norm[...])
        # "..." is the axis of heads; index keys have one head, and no axis for it. The index branch reads the residual
        # stream but does not train it (paper, 3.2; T33).
        project = partial(project_each, "btd,d...h->bt...h", weights=weights, num_detached=len(weights) - 3)
        # Left in float32: a head is rounded once, after its norm and its rotation.
        heads = Heads(*how.each_token(project)(x))
        projections = Projections(heads, norms, context.cos, context.sin, eps, x.dtype)
        # Without rules the layer attends to every block; a sparse one does so in the dense warm-up of training.
        rules = context.rules if self.is_sparse and not context.dense else None
        given = context.given(layer).blocks
        call = LayerCall(layer, context.places, context.positions, context.lengths, given)
        attention, pages = how.attend(projections, pages, call, rules, tap)  # [B T N H]
        attention = attention.reshape(*attention.shape[:2], -1)  # [B T N*H]
        return how.each_token(self.project_out)(attention), pages

    def project_out(self, attention: Float[Array, "B T X"]) -> Float[Array, "B T D"]:
        """Return the output projection of all heads side by side, X = N * H, left in the accumulator's dtype."""
        # One contracted axis: over two, XLA's CPU backend would transpose the weights in every step.
        return project("btx,xd->btd", attention, merge_inputs(self.o_proj[...], 2))

    @property
    def is_sparse(self) -> bool:
        """True if these layers have an index branch."""
        return hasattr(self, "index_q_proj")
