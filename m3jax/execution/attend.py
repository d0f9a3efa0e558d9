"""Attention of one layer on the devices that hold its pages: write the new tokens, select, attend."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.cache import CallPages, LayerCall, LayerPages, StackCache
from m3jax.execution.projections import Projections
from m3jax.execution.tap import HEADS, Tap
from m3jax.msa import SelectionRules, walk_scores
from m3jax.ops import Heads
from m3jax.parallel import PAGE_AXES, TokenAxes, spec
from m3jax.spec.msa import select_blocks


def attend(
    projections: Projections, pages: LayerPages, call: LayerCall, rules: SelectionRules | None, tap: Tap
) -> tuple[Float[Array, "B T N H"], LayerPages]:
    """Write a layer's new tokens into its pages and attend over all that its rows have.

    Args:
      projections: Projections of the call's tokens. One kernel norms, rotates and writes them where it can.
      pages: Keys and values of the call's rows in this stack.
      call: The layer, and its tokens' places and positions.
      rules: Rules of selection; None if the layer attends to every block.
      tap: Tap of "q", "k", "v", "index_q", "index_k", "blocks" and "attention", and of "block_scores" if it wants them.

    Returns:
      (output, the pages with the new tokens).
    """
    heads, insert_backend = _finished(projections, pages, call, tap)
    out, pages = _over_pages(heads, pages, call, rules, insert_backend, tap)
    return tap("attention", checkpoint_name(out, "attention")), pages


def attend_over_mesh(
    projections: Projections,
    pages: StackCache,
    call: LayerCall,
    rules: SelectionRules | None,
    tap: Tap,
    mesh: Mesh,
    tokens: TokenAxes | None = None,
) -> tuple[Float[Array, "B T N H"], StackCache]:
    """Run `attend` on every device of a mesh, each over the pages that it holds.

    Pages are divided over the data, context and expert axes, those of a row in turn (`Places.on_this_device`), and the
    KV heads over the tensor axis where it divides them; every device has the queries of all rows. A device scores the
    pages that it holds and names the best of them, devices choose among what all have named, each attends over the
    chosen pages that it holds, and the partial outputs are merged by log-sum-exp. In dense layers each attends over all
    that it holds. Where the same devices divide the tokens, each gets the outputs of its own, as it is to project them.

    Args:
      projections, pages, call, rules, tap: As in `attend`.
      mesh: Devices that hold the pages.
      tokens: How the mesh divides the call's tokens; None for not at all.

    Raises:
      ValueError: the blocks are to be edited, or their scores asked for: each device selects by itself.
    """
    if tap.edits("blocks") or tap.wants("block_scores"):
        name = "block_scores" if tap.wants("block_scores") else "blocks"
        raise ValueError(
            f"{name} of a layer whose pages a mesh divides can be neither edited nor scored: give choices, "
            "leave the cache out, or load the model on one device"
        )
    heads, insert_backend = _finished(projections, pages, call, tap)
    page_axes = tuple(axis for axis in PAGE_AXES if axis in mesh.shape)
    (kv_axis,) = spec((pages.num_kv_heads,), ("kv_heads",), mesh)  # "tensor", or None where each device has all heads
    by_head = P(None, None, kv_axis)  # [B T heads H]; the G query heads of a KV head lie together
    # The invariant schedule merges nothing: every device has all outputs.
    is_divided = tokens is not None and bool(tokens.products) and not tokens.whole and call.schedule != "invariant"
    divided, out_spec = (tokens.dim, tokens.of_products(kv_axis)) if is_divided else (None, by_head)

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
        places = places.on_this_device(page_axes, pages.num_pages, pages.page_size, divided, mesh)
        own_call = call.replace(
            layer=layer, places=places, positions=positions, lengths=lengths, given_blocks=given_blocks
        )
        on_device = Tap()
        out, pages = _over_pages(heads, pages, own_call, rules, insert_backend, on_device)
        return out, on_device.values.get("blocks"), jax.tree.leaves(pages)

    # Arrays cross as lists, so that each finds its own spec.
    on_mesh = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(head_specs, page_specs, P(), P(), P(), P(), P(None, kv_axis)),
        out_specs=(out_spec, P(None, kv_axis), page_specs),
        check_vma=False,
    )
    arrays = jax.tree.leaves(heads), jax.tree.leaves(pages)
    out, blocks, page_arrays = on_mesh(
        *arrays, call.layer, call.places, call.positions, call.lengths, call.given_blocks
    )
    if blocks is not None:
        tap("blocks", blocks)  # for whoever keeps them: edits were refused above
    return tap("attention", out), jax.tree.unflatten(page_structure, page_arrays)


def attend_by_heads(
    projections: Projections,
    pages: CallPages,
    call: LayerCall,
    rules: SelectionRules | None,
    tap: Tap,
    mesh: Mesh,
) -> tuple[Float[Array, "B T N H"], CallPages]:
    """Run `attend` for a call without a cache on every device of a mesh, each for its own KV heads.

    Rows are divided over the data axis and KV heads over the tensor axis, as far as these divide them; no device needs
    anything of another. The compiler cannot divide a kernel's work: on a GPU it would gather all heads for it, on a TPU
    it refuses to, and cuDNN refuses queries that are divided in another way than their keys. Attention without kernels
    it divides well, unless heads lie apart.

    Args:
      projections, call, rules, tap: As in `attend`.
      pages: Pages of the call, which are empty before and after it.
      mesh: The model's mesh.
    """
    if mesh.shape["tensor"] == 1 and not pages.read_by_kernels:
        return attend(projections, pages, call, rules, tap)
    if tap.edits("blocks") or tap.wants("block_scores"):  # those of all heads, by programs that XLA can divide
        return attend(projections, pages, call.replace(backend="xla"), rules, tap)
    heads, _ = _finished(projections, pages, call, tap)
    row_axis, kv_axis = spec((heads.k.shape[0], heads.k.shape[2]), ("tokens", "kv_heads"), mesh)
    by_row, by_head, by_kv_head = P(row_axis), P(row_axis, None, kv_axis), P(row_axis, kv_axis)
    given = {name: head for name, head in heads._asdict().items() if head is not None}
    head_specs = {name: by_row if name == "index_k" else by_head for name in given}

    def on_each_device(heads, layer, places, positions, lengths, given_blocks):
        own_call = call.replace(
            layer=layer, places=places, positions=positions, lengths=lengths, given_blocks=given_blocks
        )
        own_heads, on_device = Heads(**{name: heads.get(name) for name in Heads._fields}), Tap()
        out, _ = _over_pages(own_heads, pages, own_call, rules, "xla", on_device)
        return out, on_device.values.get("blocks")

    on_mesh = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(head_specs, P(), by_row, by_row, by_row, by_kv_head),
        out_specs=(by_head, by_kv_head),
        check_vma=False,
    )
    out, blocks = on_mesh(given, call.layer, call.places, call.positions, call.lengths, call.given_blocks)
    if blocks is not None:
        tap("blocks", blocks)
    return tap("attention", checkpoint_name(out, "attention")), pages


def _finished(
    projections: Projections, pages: LayerPages, call: LayerCall, tap: Tap
) -> tuple[Heads | Projections, str]:
    """Return the heads and "xla", or the projections and the backend whose kernel finishes and writes them."""
    if not projections.is_finished:
        angles, dtype = projections.cos.shape[-1], projections.dtype
        backend = pages.insert_backend(call, projections.raw.q, rotated=2 * angles, dtype=dtype)
        if backend != "xla" and not tap.wants(*HEADS):
            return projections, backend
    heads = projections.finish()._asdict().items()
    return Heads(**{name: head if head is None else tap(name, head) for name, head in heads}), "xla"


def _over_pages(
    heads: Heads | Projections,
    pages: LayerPages,
    call: LayerCall,
    rules: SelectionRules | None,
    insert_backend: str,
    tap: Tap,
) -> tuple[Float[Array, "*Y N H"], LayerPages]:
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
        blocks = _selected(heads.index_q, pages, call, rules, tap)
        if call.given_blocks is not None:
            blocks = jnp.where(call.given_blocks[..., :1] >= 0, call.given_blocks, blocks)
        # By its name a backward pass finds the selection again, and cannot make another (T30).
        blocks = tap("blocks", checkpoint_name(blocks, "msa_blocks"))
        return pages.attend_selected(call, heads.q, blocks)
    # A schedule asked for by name is one of XLA's. The names of schedules for selected blocks mean nothing for dense
    # layers, which are then computed blockwise. A TPU has no kernel for a step's dense layers.
    schedule = call.schedule if call.schedule in ("auto", "mask", "invariant") else "blockwise"
    backend = "auto" if call.backend == "mosaic_tpu" else call.backend
    return pages.attend_all(call.replace(schedule=schedule, backend=backend), heads.q)


def _selected(
    index_q: Float[Array, "B T K I"], pages: LayerPages, call: LayerCall, rules: SelectionRules, tap: Tap
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps, by their scores where an edit changes these."""
    # Selection holds the scores of some queries at a time and gives none away: they are computed by themselves.
    if tap.wants("block_scores"):
        index = pages.index_view(call.layer, call.places, index_q.dtype)
        scores = walk_scores(index_q, index, call.positions, call.lengths, rules.score)  # [B K T M]
        scores = tap("block_scores", scores)
        if tap.edits("block_scores"):
            return select_blocks(scores, call.positions, call.lengths, rules, block_size=index.block_size)
    return pages.select(call, index_q, rules)
