"""The one door to MSA: takes views, picks a schedule. Nothing else in m3jax will call a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa.dense import attend_group, blockwise_attention, causal, check_view, finish, hide
from m3jax.msa.kv_block_major import kv_block_major
from m3jax.msa.sparse import SCHEDULES, expand_blocks, query_major
from m3jax.msa.views import BlockView

_FEW_QUERIES = 8  # up to here gathering a query's blocks beats inverting the selection


def attention(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"] | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    schedule: str = "auto",
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

    Returns:
      Outputs in q's dtype, and the LSE (-inf where nothing is visible) in the accumulator's dtype.

    Raises:
      ValueError: an unknown schedule, head counts that do not divide, or a selection of another shape.
    """
    allowed = ("auto", *SCHEDULES) if blocks is not None else ("auto", "dense", *SCHEDULES)
    if schedule not in allowed:
        raise ValueError(f"schedule = {schedule!r}: allowed are {', '.join(map(repr, allowed))}")
    check_view(q, view.num_heads, blocks)
    if schedule == "auto":
        schedule = "query_major" if q.shape[1] <= _FEW_QUERIES else "kv_block_major"
    if schedule in ("dense", "mask"):
        return _definition(q, view, blocks, positions, lengths)
    if blocks is None:
        return blockwise_attention(q, view, positions, lengths, return_lse=True)
    fn = query_major if schedule == "query_major" else kv_block_major
    return fn(q, view, blocks, positions, lengths)


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
