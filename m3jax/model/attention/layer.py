"""Attention of one layer, top to bottom: project -> write -> select -> attend -> project."""

from functools import partial

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from m3jax.cache import LayerPages, Places
from m3jax.config import M3Config
from m3jax.make import Make
from m3jax.model.attention.mesh import over_mesh
from m3jax.model.attention.projections import Projections
from m3jax.model.context import Context
from m3jax.msa import SelectionRules
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
        self,
        heads: Heads | Projections,
        context: Context,
        pages: LayerPages,
        layer: Int[Array, ""],
    ) -> tuple[Float[Array, "B T X"], LayerPages, dict[str, Array]]:
        """Attend with one layer's parameters, between `project` and `project_out`.

        Args:
          heads: of the call's tokens; projections may be finished here, by a kernel that writes pages too.
          context: what the layers of this call share.
          pages: the keys that the call's rows have in this stack, or those that the call is about to make.
          layer: which layer of the stack.

        Returns:
          (outputs of all heads side by side, X = N * H, in the model's dtype, the pages with the new tokens, named
          values on the way: q, k, v, index_q, index_k, blocks, attention; where a kernel writes the pages only blocks
          and attention).
        """
        insert_backend = "xla"
        if isinstance(heads, Projections):
            # A kernel that norms, rotates and writes in one go does so where the pages are; "xla": there is none.
            insert_backend = pages.insert_backend(
                layer, context.places, heads.raw.q,
                rotated=2 * context.cos.shape[-1], dtype=heads.dtype, backend=context.backend,
            )  # fmt: skip
            heads = heads.finish() if insert_backend == "xla" else heads
        attend = partial(
            attend_over_pages,
            rules=context.rules,
            selects=self.is_sparse and not context.dense,
            schedule=context.schedule,
            backend=context.backend,
            insert_backend=insert_backend,
        )
        if context.is_divided:  # only a cache on the device is: `pages` is a `StackCache`
            attend = over_mesh(attend, context.mesh, heads, pages)
        attention, blocks, pages = attend(
            heads, pages, layer, context.places, context.positions, context.lengths
        )  # [B T N H], [B K T J]
        values = heads._asdict() if isinstance(heads, Heads) else {}
        values |= {"attention": attention, "blocks": blocks}
        flat = attention.reshape(*attention.shape[:2], -1)  # [B T N*H]
        return flat, pages, {name: value for name, value in values.items() if value is not None}

    def project_out(self, attention: Float[Array, "B T X"]) -> Float[Array, "B T D"]:
        """The output projection, left in the accumulator's dtype."""
        # One contracted axis: over two, XLA's CPU backend would transpose the weights in every step.
        return project("btx,xd->btd", attention, merge_inputs(self.o_proj[...], 2))

    def project(
        self, x: Float[Array, "B T D"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"], config: M3Config
    ) -> Projections:
        """Queries, keys and values before norm and rotation, in the accumulator's dtype."""
        weights, index_q_norm, index_k_norm = [self.q_proj, self.k_proj, self.v_proj], None, None
        if self.is_sparse:
            weights += [self.index_q_proj, self.index_k_proj]
            index_q_norm, index_k_norm = self.index_q_norm[...], self.index_k_norm[...]
        # "..." is the axis of heads; index keys have one head, and no axis for it. The index branch reads the residual
        # stream but does not train it (paper, 3.2; T33).
        products = project_each(
            "btd,d...h->bt...h", x, [weight[...] for weight in weights], num_detached=len(weights) - 3
        )
        heads = Heads(*products) if self.is_sparse else Heads(*products, None, None)
        norms = Heads(self.q_norm[...], self.k_norm[...], None, index_q_norm, index_k_norm)
        return Projections(heads, norms, cos, sin, config.rms_norm_eps, x.dtype)

    @property
    def is_sparse(self) -> bool:
        """Whether these layers have an index branch."""
        return hasattr(self, "index_q_proj")


def attend_over_pages(
    heads: Heads | Projections,
    pages: LayerPages,
    layer: Int[Array, ""],
    places: Places,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    rules: SelectionRules,
    selects: bool,
    schedule: str = "auto",
    backend: str = "auto",
    insert_backend: str = "xla",
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K T J"] | None, LayerPages]:
    """What happens where the pages are: write the new tokens, select, attend.

    Args:
      heads: of the call's tokens; projections where `insert_backend` is a kernel's, which finishes and writes them.
      pages: what the rows have.
      layer: which layer of the stack.
      places: where the tokens go, and where their rows' past lies.
      positions: absolute position of each token; < 0 or >= lengths marks padding.
      lengths: valid tokens of each row after this call.
      rules: of selection.
      selects: whether the layer attends to selected blocks alone.
      schedule: "auto", or one of `m3jax.msa.SCHEDULES`.
      backend: one of `m3jax.ops.BACKENDS`.
      insert_backend: as the pages said.

    Returns:
      (output, selection or None, the pages with the new tokens).
    """
    if isinstance(heads, Projections):
        projections = heads
        heads, pages = pages.insert(
            layer, places, projections.raw, projections.norms, projections.cos, projections.sin, positions, lengths,
            eps=projections.eps, dtype=projections.dtype, backend=insert_backend,
        )  # fmt: skip
    else:
        pages = pages.write(layer, places, heads.k, heads.v, heads.index_k)
    if selects:
        blocks = pages.select(layer, places, heads.index_q, positions, lengths, rules, schedule, backend)
        blocks = checkpoint_name(blocks, "msa_blocks")  # so that a backward pass cannot select otherwise (T30)
        out, pages = pages.attend_selected(layer, places, heads.q, blocks, positions, lengths, schedule, backend)
        return out, blocks, pages
    # A schedule asked for by name is one of XLA's. Those of selected blocks say nothing of dense layers: these then go
    # blockwise. There is no TPU kernel for dense layers.
    dense_schedule = schedule if schedule in ("auto", "mask", "invariant") else "blockwise"
    dense_backend = "auto" if backend == "mosaic_tpu" else backend
    out, pages = pages.attend_all(layer, places, heads.q, positions, lengths, dense_schedule, dense_backend)
    return out, None, pages
