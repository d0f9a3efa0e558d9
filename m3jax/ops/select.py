"""Selection: the blocks that each query keeps."""

import jax
from jaxtyping import Array, Float, Int

from m3jax.msa import IndexView, SelectionRules, index_walk
from m3jax.msa.schedules import select_invariant
from m3jax.msa.views import ContiguousIndex, PagedIndex
from m3jax.ops.backends import choose, interpreted
from m3jax.ops.cases import PagesCase
from m3jax.ops.kernel_pages import kernel_pages
from m3jax.ops.lanes import select_in_lanes


def select(
    index_q: Float[Array, "B T K I"],
    view: IndexView,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
    *,
    schedule: str = "auto",
    backend: str = "auto",
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps; no gradient goes through the selection.

    Args:
      index_q: index queries after norm and RoPE.
      view: the layer's index keys; where devices divide them, inside `shard_map`, all choose among all candidates.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      rules: J, which blocks are forced, and what a block's score is.
      schedule: "invariant" is one that gives a query the same bits in every call; any other leaves the choice here.
      backend: one of `m3jax.ops.BACKENDS`.

    Returns:
      Ascending ids, then -1.

    Raises:
      ValueError: a backend that cannot run this.
    """
    case = select_case(index_q, view, rules, schedule)
    chosen = choose(case, backend)
    if chosen == "xla":
        by_xla = select_invariant if schedule == "invariant" else index_walk
        return by_xla(index_q, view, positions, lengths, rules)
    # The next-token loss does not train the index branch: it has a loss of its own (paper, 3.2).
    index_q, keys = jax.lax.stop_gradient((index_q, kernel_pages(view, view.k)))
    if schedule == "invariant":
        return select_in_lanes(index_q, keys, positions, lengths, rules)
    forced = dict(top_k=rules.top_k, local_blocks=rules.local_blocks, init_blocks=rules.init_blocks)
    options = dict(**forced, interpret=interpreted(), backend=chosen)
    if case.is_decode:
        from pallas_kernels.index_topk_decode import index_topk_decode

        return index_topk_decode(index_q, keys, positions, lengths, **options)
    from pallas_kernels.index_topk import index_topk

    return index_topk(index_q, keys, positions, lengths, **options)


def select_case(
    index_q: Float[Array, "B T K I"], view: IndexView, rules: SelectionRules, schedule: str = "auto"
) -> PagesCase:
    """Return the case of a call of `select`: `choose(select_case(...))` is what "auto" takes."""
    has_pages = isinstance(view, ContiguousIndex | PagedIndex)
    return PagesCase(
        op="select", queries=index_q.shape[1], dtype=index_q.dtype, stored=view.k.dtype if has_pages else index_q.dtype,
        width=index_q.shape[-1], block_size=view.block_size, num_blocks=view.num_blocks, slots=rules.top_k,
        score=rules.score, schedule=schedule, divided=view.share is not None, pages=has_pages,
    )  # fmt: skip
