"""Selection: the blocks that each query keeps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa import IndexView, SelectionRules, index_walk
from m3jax.msa.candidates import Candidates, join_over_devices
from m3jax.msa.schedules import select_invariant
from m3jax.msa.share import Share
from m3jax.msa.views import ContiguousIndex, PagedIndex
from m3jax.ops.backends import choose, interpreted
from m3jax.ops.cases import PagesCase
from m3jax.ops.collectives import gather_between
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
    if case.is_decode:
        from pallas_kernels.index_topk_decode import index_topk_decode as kernel
    else:
        from pallas_kernels.index_topk import index_topk as kernel
    if view.share is not None:
        candidates = _candidates(kernel, index_q, keys, positions, lengths, rules, view.share, chosen)
        gather = gather_between(view.share, len(index_q) * index_q.shape[1], chosen)
        return join_over_devices(candidates, rules.top_k, view.share.axes, gather)
    forced = dict(local_blocks=rules.local_blocks, init_blocks=rules.init_blocks)
    options = dict(top_k=rules.top_k, **forced, interpret=interpreted(), backend=chosen)
    return kernel(index_q, keys, positions, lengths, **options)


def _candidates(
    kernel: Callable[..., tuple[Array, Array]],
    index_q: Float[Array, "B T K I"],
    keys: Any,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
    share: Share,
    backend: str,
) -> Candidates:
    """Return `best_of_share` by a kernel, for rules that force a query's own block alone.

    A kernel takes the best blocks before a query's own one, and that one unseen. Each query is put at the beginning of
    the first block held here that lies not before its own: this one, or one behind it, which no query sees. What the
    kernel takes before it are the candidates, and its own block is one if it is held here.
    """
    is_token = (positions >= 0) & (positions < lengths[:, None])
    own_block = jnp.where(is_token, positions // share.block_size, -1)  # [B T]
    num_before = (own_block - share.first[:, None] + share.num_devices - 1) // share.num_devices  # held before the own
    first_slot = jnp.where(is_token, num_before * share.block_size, -1)
    behind_all = jnp.full_like(lengths, jnp.iinfo(jnp.int32).max)  # first_slot says what is padding
    blocks, order = kernel(
        index_q, keys, first_slot, behind_all, top_k=rules.top_k + 1, return_keys=True, interpret=interpreted(),
        backend=backend,
    )  # fmt: skip
    # The unseen block takes the slot that was added, and a query's own block is there if it is held here.
    is_unseen = blocks == num_before[:, None, :, None]
    is_own = share.in_rows(blocks) == own_block[:, None, :, None]
    return Candidates(share.in_rows(blocks), jnp.where(is_unseen & ~is_own, -jnp.inf, order))


def select_case(
    index_q: Float[Array, "B T K I"], view: IndexView, rules: SelectionRules, schedule: str = "auto"
) -> PagesCase:
    """Return the case of a call of `select`: `choose(select_case(...))` is what "auto" takes."""
    has_pages = isinstance(view, ContiguousIndex | PagedIndex)
    return PagesCase(
        op="select", queries=index_q.shape[1], dtype=index_q.dtype, stored=view.k.dtype if has_pages else index_q.dtype,
        width=index_q.shape[-1], block_size=view.block_size, num_blocks=view.num_blocks,
        slots=rules.top_k + (view.share is not None),  # beside the candidates a kernel lists the unseen block
        score=rules.score, schedule=schedule, divided=view.share is not None, pages=has_pages,
        forced=rules.local_blocks + rules.init_blocks,
    )  # fmt: skip
