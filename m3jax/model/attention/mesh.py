"""Attention over pages that devices divide."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from m3jax.cache import StackCache
from m3jax.model.attention.projections import Projections
from m3jax.ops import Heads
from m3jax.parallel import PAGE_AXES, spec


def over_mesh(attend: Callable, mesh: Mesh, heads: Heads | Projections, pages: StackCache) -> Callable:
    """`attend_over_pages` on every device of a mesh, each over the pages that it holds.

    Pages are divided over the data, context and expert axes, and the KV heads over the tensor axis where it divides
    them; every device has all rows. Each scores the pages that it holds, the scores are joined, each attends over the
    selected pages that are its own, and the partial outputs are merged by log-sum-exp: the views' `device_axes` ask for
    both.

    Args:
      attend: a function of (heads, pages, layer, places, positions, lengths) -> (out, blocks, pages).
      mesh: where the pages lie.
      heads: of the call; only their structure counts.
      pages: of the stack; only shapes count.

    Returns:
      A function of the same arguments and results.
    """
    device_axes = tuple(axis for axis in PAGE_AXES if axis in mesh.shape)
    (kv_axis,) = spec((pages.num_kv_heads,), ("kv_heads",), mesh)  # "tensor", or None where each device has all heads
    by_head = P(None, None, kv_axis)  # [B T heads H]; the G query heads of a KV head lie together

    def head_spec(name):
        """Heads are divided, but for the one that all index keys share; norm weights and angles are on every device.

        Names are paths, such as ".q" of `Heads`, or ".raw.q", ".norms.q" and ".cos" of `Projections`.
        """
        *_, field = name.split(".")
        is_weight_or_angle = name.startswith((".norms", ".cos", ".sin"))
        return P() if is_weight_or_angle or field == "index_k" else by_head

    named_heads, head_structure = jax.tree_util.tree_flatten_with_path(heads)
    head_specs = [head_spec(jax.tree_util.keystr(path)) for path, _ in named_heads]
    page_specs, page_structure = pages.partition_specs(mesh), jax.tree.structure(pages)

    def on_each_device(head_arrays, page_arrays, layer, places, positions, lengths):
        heads = jax.tree.unflatten(head_structure, head_arrays)
        pages = jax.tree.unflatten(page_structure, page_arrays)
        places = places.on_this_device(device_axes, pages.num_pages)
        out, blocks, pages = attend(heads, pages, layer, places, positions, lengths)
        return out, blocks, jax.tree.leaves(pages)

    # Arrays cross as lists, so that each finds its own spec.
    on_mesh = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(head_specs, page_specs, P(), P(), P(), P()),
        out_specs=(by_head, P(None, kv_axis), page_specs),
        check_vma=False,
    )

    def attend_on_mesh(heads, pages, layer, places, positions, lengths):
        arrays = jax.tree.leaves(heads), jax.tree.leaves(pages)
        out, blocks, page_arrays = on_mesh(*arrays, layer, places, positions, lengths)
        return out, blocks, jax.tree.unflatten(page_structure, page_arrays)

    return attend_on_mesh
