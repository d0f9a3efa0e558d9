"""Attention over the selected blocks, and over all of them."""

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float, Int

from m3jax.msa import DENSE_SCHEDULES, SCHEDULES, BlockView, Contiguous, Paged
from m3jax.msa.checks import checked
from m3jax.numerics import merge_over_devices
from m3jax.ops import measured
from m3jax.ops.backends import choose, interpreted
from m3jax.ops.cases import PagesCase
from m3jax.ops.collectives import gather_between
from m3jax.ops.kernel_pages import kernel_pages
from m3jax.ops.lanes import attend_in_lanes


@checked
def attend_selected(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    schedule: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Array, "*Y N H"], Float[Array, "*Y N"]]:
    """Attend to the selected blocks of one layer: `m3jax.msa.sparse_attention` over a view.

    Where several devices hold the blocks, inside `shard_map`, each attends over those that are its own, and the outputs
    are merged.

    Args:
      q: queries after norm and RoPE.
      view: the layer's keys and values.
      blocks: the selection.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      schedule: "auto", or one of `m3jax.msa.SCHEDULES`; with "mask" the definition runs, which holds all T x S scores.
      backend: one of `m3jax.ops.BACKENDS`. Over the keys of one call (`Contiguous`) kernels have the gradients of the
        XLA schedule, over a cache none.

    Returns:
      Outputs in q's dtype, and the LSE (-inf where nothing is visible) in the accumulator's dtype: of all B T queries,
      or, where the devices of the view's `share` divide them, of this device's own.

    Raises:
      ValueError: an unknown schedule, heads that do not fit, a selection of another shape, or a backend that cannot run
        this.
    """
    check_schedule(schedule, SCHEDULES)
    view = _on_one_device(view, schedule)
    if view.share is not None:
        # Each device attends to those selected blocks that it holds. A query may have none of them here: its part then
        # has lse -inf, and weight 0 in the merge.
        blocks = view.share.held(blocks)
        positions, lengths = view.share.positions(positions, lengths), view.share.lengths(lengths)
    suitable = "query_major" if q.shape[1] <= measured.GATHERED_QUERIES else "kv_block_major"
    case = attend_case("sparse", q, view, slots=blocks.shape[-1], schedule=schedule)
    return _attend(case, choose(case, backend), SCHEDULES, suitable, q, view, (blocks, positions, lengths))


@checked
def attend_all(
    q: Float[Array, "B T N H"],
    view: BlockView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    schedule: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Array, "*Y N H"], Float[Array, "*Y N"]]:
    """Attend to every block of one layer: `m3jax.msa.dense_attention` over a view.

    Args:
      q, view, positions, lengths, backend: as in `attend_selected`.
      schedule: "auto", or one of `m3jax.msa.DENSE_SCHEDULES`.

    Returns:
      As `attend_selected`.

    Raises:
      ValueError: an unknown schedule, heads that do not fit, or a backend that cannot run this.
    """
    check_schedule(schedule, DENSE_SCHEDULES)
    view = _on_one_device(view, schedule)
    if view.share is not None:
        positions, lengths = view.share.positions(positions, lengths), view.share.lengths(lengths)
    case = attend_case("dense", q, view, slots=0, schedule=schedule)
    return _attend(case, choose(case, backend), DENSE_SCHEDULES, "blockwise", q, view, (positions, lengths))


def attend_case(
    op: str, q: Float[Array, "B T N H"], view: BlockView, *, slots: int, schedule: str = "auto"
) -> PagesCase:
    """Return the case of a call of attention: "sparse" over `slots` selected blocks, or "dense"."""
    has_pages = isinstance(view, Contiguous | Paged)
    return PagesCase(
        op=op, queries=q.shape[1], dtype=q.dtype, stored=view.k.dtype if has_pages else q.dtype, width=q.shape[-1],
        block_size=view.block_size, num_blocks=view.num_blocks, group=q.shape[2] // view.num_heads, slots=slots,
        schedule=schedule, pages=has_pages,
    )  # fmt: skip


def _on_one_device(view: BlockView, schedule: str) -> BlockView:
    """Return a view that has all blocks where the schedule needs them on each device."""
    # In the invariant mode a merge of devices' parts would depend on the number of devices, and on where a row begins.
    return view.joined() if view.share is not None and schedule == "invariant" else view


def _attend(
    case: PagesCase,
    chosen: str,
    schedules: dict[str, Callable[..., tuple[Array, Array]]],
    suitable: str,
    q: Float[Array, "B T N H"],
    view: BlockView,
    rows: tuple[Int[Array, "..."], ...],
) -> tuple[Float[Array, "*Y N H"], Float[Array, "*Y N"]]:
    """Return the outputs and LSEs of one kind of attention, by a backend; devices' parts are merged.

    Args:
      case: the call.
      chosen: the backend that runs it.
      schedules: XLA's, by name.
      suitable: the one that "auto" means for so many queries.
      q: queries.
      view: keys and values.
      rows: the selection, if blocks are selected; positions; lengths.
    """
    is_invariant = case.schedule == "invariant"
    by_xla = schedules[suitable if case.schedule == "auto" else case.schedule]
    if chosen == "xla" and not is_invariant:
        out, lse = by_xla(q, view, *rows)
    else:
        # The invariant schedule is a loop of unknown length, which has no gradients of its own.
        gradient_of = schedules[suitable] if is_invariant else by_xla
        forward = by_xla if chosen == "xla" else partial(_by_kernel, case, chosen)
        out, lse = _with_gradient(forward, gradient_of, q, view, *rows)
    share = view.share
    if share is None:
        return out, lse
    gather = gather_between(share, len(q) * q.shape[1], chosen)
    return merge_over_devices(out, lse, share.axes, share.divided, gather)


def _by_kernel(
    case: PagesCase, backend: str, q: Float[Array, "B T N H"], view: BlockView, *rows: Int[Array, "..."]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return the outputs and LSEs of the kernel that a case is for."""
    keys, values, scales = kernel_pages(view, view.k), kernel_pages(view, view.v), getattr(view, "scales", None)
    if case.schedule == "invariant":
        blocks, positions, lengths = rows if case.op == "sparse" else (None, *rows)
        return attend_in_lanes(q, keys, values, blocks, positions, lengths, kv_heads=view.num_heads, scales=scales)
    options = dict(return_lse=True, interpret=interpreted(), backend=backend)
    if case.op == "sparse" and case.is_decode:
        from pallas_kernels.sparse_decode import sparse_decode

        return sparse_decode(q, keys, values, *rows, scales=scales, **options)
    if case.op == "sparse":
        from pallas_kernels.sparse_prefill import sparse_prefill

        return sparse_prefill(q, keys, values, *rows, schedule=case.schedule, **options)
    if case.is_decode:
        from pallas_kernels.dense_decode import dense_decode

        return dense_decode(q, keys, values, *rows, kv_heads=view.num_heads, scales=scales, **options)
    from pallas_kernels.dense_causal import cudnn, cudnn_prefix, dense_causal

    def attend_by(backend: str) -> tuple[Array, ...]:
        return dense_causal(q, keys, values, *rows, kv_heads=view.num_heads, **options | dict(backend=backend))

    by_cudnn, in_order = ("cudnn", cudnn.in_order) if view.share is None else ("cudnn_prefix", cudnn_prefix.in_order)
    if case.why_not(by_cudnn):
        return attend_by(backend)
    return jax.lax.cond(in_order(keys, *rows), partial(attend_by, by_cudnn), partial(attend_by, backend))


def _with_gradient(
    kernel: Callable[..., tuple[Array, Array]],
    schedule: Callable[..., tuple[Array, Array]],
    q: Float[Array, "B T N H"],
    view: BlockView,
    *selection_and_rows: Int[Array, "..."],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return what a kernel, or a schedule without gradients, gives, with the gradients of another schedule.

    Where keys and values are a cache's, not new, there are none.
    """
    if not isinstance(view, Contiguous):
        return kernel(q, view, *selection_and_rows)
    from pallas_kernels.gradient import with_gradient

    def of_arrays(attend):
        return lambda q, k, v, *rest: attend(q, view.replace(k=k, v=v), *rest)

    return with_gradient(of_arrays(kernel), of_arrays(schedule), 3)(q, view.k, view.v, *selection_and_rows)


def check_schedule(schedule: str, table: dict[str, Callable]) -> None:
    """Raise ValueError for a schedule that is neither "auto" nor in the table.

    Args:
      schedule: its name.
      table: schedules by name.
    """
    allowed = ("auto", *table)
    if schedule not in allowed:
        raise ValueError(f"schedule = {schedule!r}: allowed are {', '.join(map(repr, allowed))}")
