"""The one door to MSA: takes views, picks a schedule and a backend. Nothing else in m3jax calls a kernel."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa import backends
from m3jax.msa.backends import BACKENDS, Case, choose, interpret, why_not
from m3jax.msa.dense import attend_group, blockwise_attention, causal, check_view, finish, hide
from m3jax.msa.kv_block_major import kv_block_major
from m3jax.msa.select import view_topk
from m3jax.msa.sparse import SCHEDULES, expand_blocks, query_major
from m3jax.msa.views import BlockView, Contiguous, ContiguousIndex, IndexView, Paged, PagedIndex

__all__ = ["BACKENDS", "Case", "attention", "attention_case", "choose", "interpret", "select", "select_case", "why_not"]

_FEW_QUERIES = 8  # up to here gathering a query's blocks beats inverting the selection


def select(
    index_q: Float[Array, "B T K H"],
    view: IndexView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    top_k: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
    score: str = "max",
    gather: Callable[[Float[Array, "B K T M"]], Float[Array, "B K T M"]] | None = None,
    backend: str = "auto",
) -> Int[Array, "B K T J"]:
    """The blocks that each query keeps; no gradient goes through it.

    Args:
      index_q: index queries after norm and RoPE.
      view: the layer's index keys.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one.
      init_blocks: forced blocks at the start.
      score: "max" or "lse".
      gather: where several devices hold the blocks, joins their scores.
      backend: one of `BACKENDS`.

    Returns:
      Ascending ids, then -1.

    Raises:
      ValueError: counts that contradict each other, or a backend that cannot run this.
    """
    rules = dict(top_k=top_k, local_blocks=local_blocks, init_blocks=init_blocks)
    case = select_case(index_q, view, top_k=top_k, score=score, divided=gather is not None)
    if choose(case, backend) == "xla":
        joined = {} if gather is None else {"gather": gather}
        return view_topk(index_q, view, positions, lengths, **rules, score=score, **joined)
    from pallas_kernels.index_topk import index_topk
    from pallas_kernels.index_topk_decode import index_topk_decode

    kernel = index_topk_decode if backends.few(case) else index_topk
    args = jax.lax.stop_gradient((index_q, _pages(view, view.k)))
    return kernel(*args, positions, lengths, **rules, interpret=backends.interpreted())


def attention(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"] | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    schedule: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attention of one layer over a view: dense where `blocks` is None, else over the selected blocks.

    Args:
      q: queries after norm and RoPE.
      view: the layer's keys and values.
      blocks: the selection, or None for a dense layer.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      schedule: "auto", or one of `m3jax.msa.SCHEDULES`; with "mask", or "dense" where there is no selection, the
        definitions run, which hold all T x S scores.
      backend: one of `BACKENDS`. Kernels have gradients: those of the XLA schedule.

    Returns:
      Outputs in q's dtype, and the LSE (-inf where nothing is visible) in the accumulator's dtype.

    Raises:
      ValueError: an unknown schedule, head counts that do not divide, a selection of another shape, or a backend that
        cannot run this.
    """
    allowed = ("auto", *SCHEDULES) if blocks is not None else ("auto", "dense", *SCHEDULES)
    if schedule not in allowed:
        raise ValueError(f"schedule = {schedule!r}: allowed are {', '.join(map(repr, allowed))}")
    check_view(q, view.num_heads, blocks)
    case = attention_case(q, view, blocks, schedule)
    xla = lambda q, view: _xla(q, view, blocks, positions, lengths, schedule)
    if choose(case, backend) == "xla":
        return xla(q, view)
    kernel = lambda q, view: _kernel(case, q, view, blocks, positions, lengths)
    if not isinstance(view, Contiguous):
        return kernel(q, view)
    from pallas_kernels.gradient import with_gradient

    of_arrays = lambda fn: lambda q, k, v: fn(q, view.replace(k=k, v=v))
    return with_gradient(of_arrays(kernel), of_arrays(xla))(q, view.k, view.v)


def select_case(
    index_q: Float[Array, "B T K H"], view: IndexView, *, top_k: int, score: str = "max", divided: bool = False
) -> Case:
    """What decides where `select` can run: `choose(select_case(...))` says what "auto" takes."""
    pages = isinstance(view, ContiguousIndex | PagedIndex)
    return Case(
        "select", index_q.shape[1], index_q.dtype, view.k.dtype if pages else index_q.dtype, index_q.shape[-1],
        view.block_size, view.num_blocks, slots=top_k, score=score, divided=divided, pages=pages,
    )  # fmt: skip


def attention_case(
    q: Float[Array, "B T N H"], view: BlockView, blocks: Int[Array, "B K T J"] | None, schedule: str = "auto"
) -> Case:
    """What decides where `attention` can run."""
    op, slots = ("dense", 0) if blocks is None else ("sparse", blocks.shape[-1])
    pages = isinstance(view, Contiguous | Paged)
    return Case(
        op, q.shape[1], q.dtype, view.k.dtype if pages else q.dtype, q.shape[-1], view.block_size, view.num_blocks,
        group=q.shape[2] // view.num_heads, slots=slots, schedule=schedule, pages=pages,
    )  # fmt: skip


def _xla(q, view, blocks, positions, lengths, schedule):
    if schedule == "auto":
        schedule = "query_major" if q.shape[1] <= _FEW_QUERIES else "kv_block_major"
    if schedule in ("dense", "mask"):
        return _definition(q, view, blocks, positions, lengths)
    if blocks is None:
        return blockwise_attention(q, view, positions, lengths, return_lse=True)
    fn = query_major if schedule == "query_major" else kv_block_major
    return fn(q, view, blocks, positions, lengths)


def _kernel(case, q, view, blocks, positions, lengths):
    from pallas_kernels.dense_causal import dense_causal
    from pallas_kernels.sparse_decode import sparse_decode
    from pallas_kernels.sparse_prefill import sparse_prefill

    pages = _pages(view, view.k), _pages(view, view.v)
    options = dict(return_lse=True, interpret=backends.interpreted())
    if backends.few(case):
        # A dense layer has all blocks selected, so its keys are split over programs as a selection's are.
        chosen = _all_blocks(view, q.shape[:2]) if blocks is None else blocks
        scales = getattr(view, "scales", None)
        return sparse_decode(q, *pages, chosen, positions, lengths, scales=scales, **options)
    if blocks is None:
        return dense_causal(q, *pages, positions, lengths, kv_heads=view.num_heads, **options)
    return sparse_prefill(q, *pages, blocks, positions, lengths, schedule=case.schedule, **options)


def _pages(view, array):
    from pallas_kernels.common import contiguous, paged

    if isinstance(view, Contiguous | ContiguousIndex):
        return contiguous(array, view.block_size)
    return paged(array, view.table, view.layer)


def _all_blocks(view, rows):
    blocks = jnp.arange(view.num_blocks, dtype=jnp.int32)
    return jnp.broadcast_to(blocks, (rows[0], view.num_heads, rows[1], view.num_blocks))


def _definition(q, view, blocks, positions, lengths):
    """`dense_attention` or the mask schedule of `sparse_attention`, over a view."""
    k, v = view.run(0, view.num_blocks)
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)
    held = jnp.repeat(view.present(0, view.num_blocks), view.block_size, axis=1)
    visible = (causal(positions, lengths, slots) & held[:, None])[:, None]
    if blocks is not None:
        visible &= expand_blocks(blocks, k.shape[2], view.block_size)
    v = jnp.where(held[:, None, :, None], hide(v, slots, lengths), 0)
    return finish(*attend_group(q, k, v, visible), q.dtype, True)
