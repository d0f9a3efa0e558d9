"""Attention of one layer on the devices that hold its pages: write the new tokens, select, attend."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.cache import LayerCall, LayerPages, StackCache
from m3jax.execution.projections import Projections
from m3jax.msa import SelectionRules
from m3jax.ops import Heads
from m3jax.parallel import PAGE_AXES, spec


def attend(
    heads: Heads | Projections, pages: LayerPages, call: LayerCall, rules: SelectionRules | None
) -> tuple[Float[Array, "B T N H"], LayerPages, dict[str, Array]]:
    """Attend with a layer's heads, over what its rows have.

    Args:
      heads: of the call's tokens; projections are finished here, if a kernel can do it that also writes the pages.
      pages: what the rows have in this stack.
      call: the layer, its tokens' places and positions.
      rules: of selection; None where the layer attends to every block.

    Returns:
      (output, the pages with the new tokens, values by name: attention, blocks where they were selected, and the heads
      unless a kernel wrote them).
    """
    heads, insert_backend = _finished(heads, pages, call)
    out, blocks, pages = _over_pages(heads, pages, call, rules, insert_backend)
    return out, pages, _by_name(heads, blocks, out)


def attend_over_mesh(
    heads: Heads | Projections, pages: StackCache, call: LayerCall, rules: SelectionRules | None, mesh: Mesh
) -> tuple[Float[Array, "B T N H"], StackCache, dict[str, Array]]:
    """Run `attend` on every device of a mesh, each over the pages that it holds.

    Pages are divided over the data, context and expert axes, and the KV heads over the tensor axis where it divides
    them; every device has all rows. Each device scores the pages that it holds, the scores are joined, each device
    attends over the selected pages that it holds, and the partial outputs are merged by log-sum-exp. Scores and outputs
    are brought together over the views' `device_axes`.

    Args:
      heads, pages, call, rules: as of `attend`.
      mesh: where the pages lie.
    """
    heads, insert_backend = _finished(heads, pages, call)
    device_axes = tuple(axis for axis in PAGE_AXES if axis in mesh.shape)
    (kv_axis,) = spec((pages.num_kv_heads,), ("kv_heads",), mesh)  # "tensor", or None where each device has all heads
    by_head = P(None, None, kv_axis)  # [B T heads H]; the G query heads of a KV head lie together

    def head_spec(name):
        """Return an array's partition: heads are divided; index keys, norm weights and angles are on every device.

        Names are paths, such as ".q" of `Heads`, or ".raw.q", ".norms.q" and ".cos" of `Projections`.
        """
        *_, field = name.split(".")
        is_weight_or_angle = name.startswith((".norms", ".cos", ".sin"))
        return P() if is_weight_or_angle or field == "index_k" else by_head

    named_heads, head_structure = jax.tree_util.tree_flatten_with_path(heads)
    head_specs = [head_spec(jax.tree_util.keystr(path)) for path, _ in named_heads]
    page_specs, page_structure = pages.partition_specs(mesh), jax.tree.structure(pages)

    def on_each_device(head_arrays, page_arrays, layer, places, positions, lengths, given_blocks):
        heads = jax.tree.unflatten(head_structure, head_arrays)
        pages = jax.tree.unflatten(page_structure, page_arrays)
        places = places.on_this_device(device_axes, pages.num_pages)
        own_call = call.replace(
            layer=layer, places=places, positions=positions, lengths=lengths, given_blocks=given_blocks
        )
        out, blocks, pages = _over_pages(heads, pages, own_call, rules, insert_backend)
        return out, blocks, jax.tree.leaves(pages)

    # Arrays cross as lists, so that each finds its own spec.
    on_mesh = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(head_specs, page_specs, P(), P(), P(), P(), P(None, kv_axis)),
        out_specs=(by_head, P(None, kv_axis), page_specs),
        check_vma=False,
    )
    arrays = jax.tree.leaves(heads), jax.tree.leaves(pages)
    out, blocks, page_arrays = on_mesh(
        *arrays, call.layer, call.places, call.positions, call.lengths, call.given_blocks
    )
    return out, jax.tree.unflatten(page_structure, page_arrays), _by_name(heads, blocks, out)


def _finished(heads: Heads | Projections, pages: LayerPages, call: LayerCall) -> tuple[Heads | Projections, str]:
    """Return the heads, and the backend whose kernel finishes and writes them if they are still projections."""
    if isinstance(heads, Heads):
        return heads, "xla"
    backend = pages.insert_backend(call, heads.raw.q, rotated=2 * heads.cos.shape[-1], dtype=heads.dtype)
    return (heads.finish() if backend == "xla" else heads), backend


def _by_name(
    heads: Heads | Projections, blocks: Int[Array, "B K T J"] | None, out: Float[Array, "B T N H"]
) -> dict[str, Array]:
    values = heads._asdict() if isinstance(heads, Heads) else {}
    values |= {"blocks": blocks, "attention": out}
    return {name: value for name, value in values.items() if value is not None}


def _over_pages(
    heads: Heads | Projections, pages: LayerPages, call: LayerCall, rules: SelectionRules | None, insert_backend: str
) -> tuple[Float[Array, "B T N H"], Int[Array, "B K T J"] | None, LayerPages]:
    """Run `attend` on the device that holds the pages; projections are left only for a kernel of `insert_backend`."""
    if isinstance(heads, Projections):
        heads, pages = pages.insert(
            call, heads.raw, heads.norms, heads.cos, heads.sin, eps=heads.eps, dtype=heads.dtype,
            backend=insert_backend,
        )  # fmt: skip
    else:
        pages = pages.write(call, heads.k, heads.v, heads.index_k)
    if rules is not None:
        # The only place where a layer's blocks are chosen; what follows attends to whatever ids it is given.
        blocks = pages.select(call, heads.index_q, rules)
        if call.given_blocks is not None:
            blocks = jnp.where(call.given_blocks[..., :1] >= 0, call.given_blocks, blocks)
        blocks = checkpoint_name(blocks, "msa_blocks")  # so that a backward pass cannot select otherwise (T30)
        out, pages = pages.attend_selected(call, heads.q, blocks)
        return out, blocks, pages
    # A schedule asked for by name is one of XLA's. The names of schedules for selected blocks mean nothing for dense
    # layers, which are then computed blockwise. There is no TPU kernel for dense layers.
    schedule = call.schedule if call.schedule in ("auto", "mask", "invariant") else "blockwise"
    backend = "auto" if call.backend == "mosaic_tpu" else call.backend
    out, pages = pages.attend_all(call.replace(schedule=schedule, backend=backend), heads.q)
    return out, None, pages
