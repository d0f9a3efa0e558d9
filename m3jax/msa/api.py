"""The one door to MSA: takes views, picks a schedule and a backend. Nothing else in m3jax calls a kernel."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax.msa import backends
from m3jax.msa.backends import BACKENDS, Case, choose, interpret, why_not
from m3jax.msa.csr import Tiles
from m3jax.msa.dense import attend_group, blockwise_attention, causal, check_view, finish, hide
from m3jax.msa.kv_block_major import kv_block_major
from m3jax.msa.select import view_topk
from m3jax.msa.sparse import SCHEDULES, expand_blocks, query_major
from m3jax.msa.views import BlockView, Contiguous, ContiguousIndex, IndexView, Paged, PagedIndex
from m3jax.platform import platform

__all__ = [
    "BACKENDS", "Case", "attention", "attention_case", "choose", "insert", "insert_case", "interpret", "select",
    "select_case", "why_not",
]  # fmt: skip

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
    chosen = choose(case, backend)
    if chosen == "xla":
        joined = {} if gather is None else {"gather": gather}
        return view_topk(index_q, view, positions, lengths, **rules, score=score, **joined)
    kernel = _op("index_topk_decode" if backends.few(case) else "index_topk", chosen)
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
    rows = blocks, positions, lengths
    chosen = choose(case, backend)
    if chosen == "xla":
        return _xla(q, view, *rows, schedule)
    kernel = partial(_kernel, case, chosen)
    if not isinstance(view, Contiguous):
        return kernel(q, view, *rows)
    of_arrays = lambda fn: lambda q, k, v, *rows: fn(q, view.replace(k=k, v=v), *rows)
    attend = differentiable(of_arrays(kernel), of_arrays(partial(_xla, schedule=schedule)), 3)
    return attend(q, view.k, view.v, *rows)


def insert(
    x: Sequence[Array | None],
    norms: Sequence[Array | None],
    angles: tuple[Float[Array, "B T R"], Float[Array, "B T R"]],
    view: Paged,
    index: PagedIndex | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    eps: float,
    scales: Float[Array, "3 K"],
    backend: str,
) -> tuple[Array, Array | None, Array, Array, Array | None]:
    """Norm, rotate and write a layer's projections by a kernel (XLA does it in the model's own layers).

    Args:
      x: q, k, v, index_q and index_k before the norm, in float32; the last two are None where attention is dense.
      norms: their weights, without v's.
      angles: cosines and sines.
      view: where keys and values go; queries come in its dtype.
      index: where index keys go.
      positions: slot of each token; < 0 or >= lengths marks padding, which is not written.
      lengths: valid keys of each row, these tokens included.
      eps: of the norm.
      scales: what stored keys, values and index keys (head 0) are multiplied with when read.
      backend: what `choose` said of the `insert_case`; not "xla".

    Returns:
      (q, index_q, and the arrays of keys, values and index keys with the new tokens).
    """
    projected = importlib.import_module("pallas_kernels.qk_norm_rope_insert").Projected
    targets = (view, view.k), (view, view.v), (index, None if index is None else index.k)
    pages = [None if array is None else _pages(where, array) for where, array in targets]
    x, norms = projected(*x), projected(*norms[:2], None, *norms[2:])
    static = dict(eps=eps, dtype=view.dtype, interpret=backends.interpreted())
    kernel = _op("qk_norm_rope_insert", backend)
    out = kernel(x, norms, *angles, positions, lengths, *pages, scales=scales, **static)
    written = zip((out.k, out.v, out.index_k), targets, strict=True)
    return out.q, out.index_q, *(None if pool is None else pool.reshape(array.shape) for pool, (_, array) in written)


def runs_experts(dtype: DTypeLike, *widths: int, backend: str = "auto") -> bool:
    """Whether `experts` can run: 16-bit numbers, widths in whole pieces, on one GPU whose backend is not "xla".

    There is nothing to ask for by name: what a kernel cannot take, XLA's tiles do.
    """
    here = platform() == "gpu" or backends.interpreted()
    return bool(
        here and backend in ("auto", "triton") and jnp.dtype(dtype).itemsize == 2 and not any(w % 128 for w in widths)
    )


def experts(
    x: Float[Array, "X D"],
    weights: tuple[Float[Array, "L E D F"], Float[Array, "L E D F"], Float[Array, "L E F D"]],
    tiles: Tiles,
    layer: Int[Array, ""],
    activate: Callable[[Array, Array], Array],
) -> Float[Array, "Y C D"]:
    """What each expert makes of the tokens of its tiles, by a kernel.

    Args:
      x: tokens.
      weights: gate, up and down projections of a stack of layers.
      tiles: an inverted choice of experts.
      layer: which layer of the stack.
      activate: of gate and up, element by element.

    Returns:
      Outputs in float32; what lies in unused places is anything.
    """
    args = layer, tiles.block, tiles.query, tiles.valid
    kernel = _op("grouped_experts", "triton")
    return kernel(x, *weights, *args, activate=activate, interpret=backends.interpreted())


def differentiable(kernel: Callable[..., Array], schedule: Callable[..., Array], count: int) -> Callable[..., Array]:
    """`kernel`, with the gradients of `schedule` in the first `count` arguments."""
    from pallas_kernels.gradient import with_gradient

    return with_gradient(kernel, schedule, count)


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


def insert_case(q: Float[Array, "B T N H"], view: Paged, index: PagedIndex | None, rotated: int) -> Case:
    """What decides where `insert` can run; of keys and index keys, the one that is less usual counts."""
    widths = (view.k.shape[-1], *(() if index is None else (index.k.shape[-1],)))
    stored = (view.k.dtype, *(() if index is None else (index.k.dtype,)))
    small = jnp.dtype("float8_e4m3fn")
    other = next((x for x in stored if x not in (view.dtype, small)), view.k.dtype)
    return Case(
        "insert", q.shape[1], jnp.dtype(view.dtype), other, max(widths), view.block_size, view.num_blocks,
        group=q.shape[2] // view.num_heads, rotated=rotated,
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


def _kernel(case, backend, q, view, blocks, positions, lengths):
    pages, rows = (_pages(view, view.k), _pages(view, view.v)), (positions, lengths)
    options = dict(return_lse=True, interpret=backends.interpreted())
    whole = dict(kv_heads=view.num_heads) if blocks is None else {}
    if backends.few(case):
        options |= whole | dict(scales=getattr(view, "scales", None))
        if blocks is None:
            return _op("sparse_decode", backend, "dense_decode")(q, *pages, *rows, **options)
        return _op("sparse_decode", backend)(q, *pages, blocks, *rows, **options)
    if blocks is None:
        return _op("dense_causal", backend)(q, *pages, *rows, **whole, **options)
    return _op("sparse_prefill", backend)(q, *pages, blocks, *rows, schedule=case.schedule, **options)


def _op(folder, backend, name=None):
    """A kernel, imported when it is first wanted: each op is a folder, each backend a file in it."""
    file = {("sparse_prefill", "triton"): "auto"}.get((folder, backend), backend)
    return getattr(importlib.import_module(f"pallas_kernels.{folder}.{file}"), name or folder)


def _pages(view, array):
    from pallas_kernels.common import contiguous, paged

    if isinstance(view, Contiguous | ContiguousIndex):
        return contiguous(array, view.block_size)
    return paged(array, view.table, view.layer)


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
