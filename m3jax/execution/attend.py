"""Attention of one layer on the devices that hold its pages: write the new tokens, select, attend."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from m3jax.arrays import without_checks
from m3jax.cache import CallPages, LayerCall, LayerPages, StackCache
from m3jax.execution.named import HEADS, Values
from m3jax.execution.projections import Projections
from m3jax.msa import SelectionRules, select_blocks, walk_scores
from m3jax.ops import Heads
from m3jax.parallel import PAGE_AXES, TokenAxes, spec

# A model's arrays are checked where it is called, not again in each layer.
_select_blocks = without_checks(select_blocks)


def attend(
    heads: Heads | Projections, pages: LayerPages, call: LayerCall, rules: SelectionRules | None, values: Values
) -> tuple[Float[Array, "B T N H"], LayerPages]:
    """Attend with a layer's heads, over what its rows have.

    Args:
      heads: of the call's tokens; projections are finished here, if a kernel can do it that also writes the pages.
      pages: what the rows have in this stack.
      call: the layer, its tokens' places and positions.
      rules: of selection; None where the layer attends to every block.
      values: gets attention, blocks where they are selected, their scores if asked for, and the heads unless a kernel
        writes them.

    Returns:
      (output, the pages with the new tokens).
    """
    heads, insert_backend = _finished(heads, pages, call, values)
    out, pages = _over_pages(heads, pages, call, rules, insert_backend, values)
    values["attention"] = checkpoint_name(out, "attention")
    return values["attention"], pages


def attend_over_mesh(
    heads: Heads | Projections,
    pages: StackCache,
    call: LayerCall,
    rules: SelectionRules | None,
    values: Values,
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
      heads, pages, call, rules, values: as of `attend`.
      mesh: where the pages lie.
      tokens: how it divides the call's tokens; None for not at all.

    Raises:
      ValueError: the blocks are to be edited, or their scores asked for: each device selects by itself.
    """
    if unreachable := sorted(values.edited & {"blocks"} | values.asked & {"block_scores"}):
        raise ValueError(
            f"{unreachable[0]} of a layer whose pages a mesh divides can be neither edited nor scored: give choices, "
            "leave the cache out, or load the model on one device"
        )
    heads, insert_backend = _finished(heads, pages, call, values)
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
        on_device = Values()
        out, pages = _over_pages(heads, pages, own_call, rules, insert_backend, on_device)
        return out, on_device.get("blocks"), jax.tree.leaves(pages)

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
        values["blocks"] = blocks
    values["attention"] = out
    return values["attention"], jax.tree.unflatten(page_structure, page_arrays)


def attend_by_heads(
    heads: Heads | Projections,
    pages: CallPages,
    call: LayerCall,
    rules: SelectionRules | None,
    values: Values,
    mesh: Mesh,
) -> tuple[Float[Array, "B T N H"], CallPages]:
    """Run `attend` for a call without a cache on every device of a mesh, each for its own KV heads.

    Rows are divided over the data axis and KV heads over the tensor axis, as far as these divide them; no device needs
    anything of another. The compiler cannot divide a kernel's work: on a GPU it would gather all heads for it, on a TPU
    it refuses to, and cuDNN refuses queries that are divided in another way than their keys. Attention without kernels
    it divides well, unless heads lie apart.

    Args:
      heads, call, rules, values: as of `attend`.
      pages: of the call, which hold nothing before and after it.
      mesh: of the model.
    """
    if mesh.shape["tensor"] == 1 and not pages.read_by_kernels:
        return attend(heads, pages, call, rules, values)
    if values.edited & {"blocks"} or values.asked & {"block_scores"}:  # of all heads, by programs that can be divided
        return attend(heads, pages, call.replace(backend="xla"), rules, values)
    heads, _ = _finished(heads, pages, call, values)
    row_axis, kv_axis = spec((heads.k.shape[0], heads.k.shape[2]), ("tokens", "kv_heads"), mesh)
    by_row, by_head, by_kv_head = P(row_axis), P(row_axis, None, kv_axis), P(row_axis, kv_axis)
    given = {name: head for name, head in heads._asdict().items() if head is not None}
    head_specs = {name: by_row if name == "index_k" else by_head for name in given}

    def on_each_device(heads, layer, places, positions, lengths, given_blocks):
        own_call = call.replace(
            layer=layer, places=places, positions=positions, lengths=lengths, given_blocks=given_blocks
        )
        own_heads, on_device = Heads(**{name: heads.get(name) for name in Heads._fields}), Values()
        out, _ = _over_pages(own_heads, pages, own_call, rules, "xla", on_device)
        return out, on_device.get("blocks")

    on_mesh = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(head_specs, P(), by_row, by_row, by_row, by_kv_head),
        out_specs=(by_head, by_kv_head),
        check_vma=False,
    )
    out, blocks = on_mesh(given, call.layer, call.places, call.positions, call.lengths, call.given_blocks)
    if blocks is not None:
        values["blocks"] = blocks
    values["attention"] = checkpoint_name(out, "attention")
    return values["attention"], pages


def _finished(
    heads: Heads | Projections, pages: LayerPages, call: LayerCall, values: Values
) -> tuple[Heads | Projections, str]:
    """Return the heads, and the backend whose kernel finishes and writes them if they are still projections."""
    if isinstance(heads, Projections):
        backend = pages.insert_backend(call, heads.raw.q, rotated=2 * heads.cos.shape[-1], dtype=heads.dtype)
        if backend != "xla" and not values.asked & HEADS:
            return heads, backend
        heads = heads.finish()
    for name, head in heads._asdict().items():
        if head is not None:
            values[name] = head
    return Heads(**{name: values.get(name) for name in Heads._fields}), "xla"


def _over_pages(
    heads: Heads | Projections,
    pages: LayerPages,
    call: LayerCall,
    rules: SelectionRules | None,
    insert_backend: str,
    values: Values,
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
        blocks = _selected(heads.index_q, pages, call, rules, values)
        if call.given_blocks is not None:
            blocks = jnp.where(call.given_blocks[..., :1] >= 0, call.given_blocks, blocks)
        # By its name a backward pass finds the selection again, and cannot make another (T30).
        values["blocks"] = checkpoint_name(blocks, "msa_blocks")
        return pages.attend_selected(call, heads.q, values["blocks"])
    # A schedule asked for by name is one of XLA's. The names of schedules for selected blocks mean nothing for dense
    # layers, which are then computed blockwise. A TPU has no kernel for a step's dense layers.
    schedule = call.schedule if call.schedule in ("auto", "mask", "invariant") else "blockwise"
    backend = "auto" if call.backend == "mosaic_tpu" else call.backend
    return pages.attend_all(call.replace(schedule=schedule, backend=backend), heads.q)


def _selected(
    index_q: Float[Array, "B T K I"], pages: LayerPages, call: LayerCall, rules: SelectionRules, values: Values
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps, by their scores where an edit changes these."""
    # Selection holds the scores of some queries at a time and gives none away: they are computed by themselves.
    if "block_scores" in values.asked:
        index = pages.index_view(call.layer, call.places, index_q.dtype)
        scores = walk_scores(index_q, index, call.positions, call.lengths, rules.score)  # [B K T M]
        values["block_scores"] = scores
        if values["block_scores"] is not scores:
            return _select_blocks(
                values["block_scores"], call.positions, call.lengths, rules, block_size=index.block_size
            )
    return pages.select(call, index_q, rules)
