"""The one door to MSA: takes views, picks a schedule. Nothing else in m3jax will call a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa.dense import blockwise_attention, check_view, dense_attention
from m3jax.msa.kv_block_major import kv_block_major
from m3jax.msa.sparse import SCHEDULES, query_major, sparse_attention
from m3jax.msa.views import BlockView

_FEW_QUERIES = 8  # up to here gathering a query's blocks beats inverting the selection


def attention(
    q: Float[Array, "B T N H"],
    view: BlockView,
    blocks: Int[Array, "B K T J"] | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    schedule: str = "auto",
) -> Float[Array, "B T N H"]:
    """Attention of one layer over a view: dense where `blocks` is None, else over the selected blocks.

    Args:
      q: queries after norm and RoPE.
      view: the layer's keys and values.
      blocks: the selection, or None for a dense layer.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      schedule: "auto", or one of `m3jax.msa.SCHEDULES`; with "mask", or "dense" where there is no selection, the
        definitions run, which hold all T x S scores.

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
        k, v = (jnp.swapaxes(x, 1, 2) for x in view.run(0, view.num_blocks))
        if blocks is None:
            return dense_attention(q, k, v, positions, lengths)
        return sparse_attention(q, k, v, blocks, positions, lengths, block_size=view.block_size)
    if blocks is None:
        return blockwise_attention(q, view, positions, lengths)
    fn = query_major if schedule == "query_major" else kv_block_major
    return fn(q, view, blocks, positions, lengths)[0]
