"""Virtual pages: MSA decode through a paged attention that knows nothing of MSA (docs/cache.md)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from m3jax.msa.checks import checked
from m3jax.msa.views import Paged


class VirtualPages(NamedTuple):
    """Pages of single KV heads, and for each (row, KV head) the ones it selected, in order, without gaps."""

    k: Num[Array, "Y P H"]
    v: Num[Array, "Y P H"]
    table: Int[Array, "R J"]
    lengths: Int[Array, " R"]


@checked
def virtual_pages(
    view: Paged, blocks: Int[Array, "B K J"], positions: Int[Array, " B"], lengths: Int[Array, " B"]
) -> VirtualPages:
    """Fold the KV heads into the batch: row b and head k become row b * K + k with one KV head.

    `[pages K P H]` seen as `[pages * K, P, H]` gives each head pages of its own, so a selection per KV head is a page
    table per virtual row. The own block is the last one selected, so all pages before it are full.

    Args:
      view: one layer of a cache, without scales.
      blocks: the selection of one query a row, ascending, then -1.
      positions: of that query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.

    Returns:
      R = B x K virtual rows; one of padding has length 0. Unused table entries are page 0.
    """
    batch, heads, _ = blocks.shape
    page_ids = jnp.take_along_axis(view.table[:, None], jnp.maximum(blocks, 0), axis=-1)  # [B K J]
    # Page p has its heads' parts at p x K, p x K + 1, ...: pages of one head each, without a copy.
    table = jnp.where(blocks >= 0, page_ids * heads + jnp.arange(heads, dtype=jnp.int32)[:, None], 0)
    full_pages = jnp.maximum(jnp.sum(blocks >= 0, axis=-1, dtype=jnp.int32) - 1, 0)  # [B K]
    is_token = (positions >= 0) & (positions < lengths)
    num_tokens = full_pages * view.block_size + (positions % view.block_size)[:, None] + 1
    num_tokens = jnp.where(is_token[:, None], num_tokens, 0)  # [B K]
    k, v = (x[view.layer].reshape(-1, view.block_size, x.shape[-1]) for x in (view.k, view.v))  # [X*K P H]
    return VirtualPages(k, v, table.reshape(batch * heads, -1), num_tokens.reshape(-1))
