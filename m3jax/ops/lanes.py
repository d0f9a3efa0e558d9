"""Kernels in the invariant mode: those of a decode step, for any number of queries, cut in one way.

A program of these kernels takes one query (of attention, with the heads of one KV head), and reads no other. What else
decides the order of its sums is fixed here: how many pieces a query's keys are cut in, and the height of the tiles
that index queries are multiplied in. Prompts then read keys that neighbouring queries could have shared.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m3jax.msa import SelectionRules
from m3jax.ops.backends import interpreted
from m3jax.ops.cases import MAX_DECODE_QUERIES

_TILE_ROWS = 16  # (query, head) pairs of an index tile: the least that a GPU multiplies
_SPARSE_SPLITS = 4  # pieces that a query's blocks are cut in: enough to keep a GPU busy with few rows
_DENSE_SPLITS = 8  # likewise, of all keys that a query sees


def select_in_lanes(
    index_q: Float[Array, "B T K I"],
    keys: Any,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    rules: SelectionRules,
) -> Int[Array, "B K T J"]:
    """Return the blocks that each query keeps, by the Triton kernels of a decode step.

    Args:
      index_q: index queries.
      keys: index keys, `pallas_kernels.pages.Pages`.
      positions: of each query.
      lengths: valid keys of each row.
      rules: of selection, with score "max".
    """
    from pallas_kernels.index_topk_decode import index_topk_decode

    batch, num_queries, num_heads = index_q.shape[:3]
    lane = max(1, _TILE_ROWS // num_heads)
    index_q, _, positions, lengths, keys = _cut(lane, index_q, None, positions, lengths, keys)
    blocks = index_topk_decode(
        index_q, keys, positions, lengths, top_k=rules.top_k, local_blocks=rules.local_blocks,
        init_blocks=rules.init_blocks, backend="triton", interpret=interpreted(),
    )  # fmt: skip
    return _join(blocks.swapaxes(1, 2), batch, num_queries).swapaxes(1, 2)  # [lanes K C J] -> [B K T J]


def attend_in_lanes(
    q: Float[Array, "B T N H"],
    keys: Any,
    values: Any,
    blocks: Int[Array, "B K T J"] | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    kv_heads: int,
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Compute attention by the Triton kernels of a decode step, for any number of queries.

    Args:
      q: queries after norm and RoPE.
      keys: `pallas_kernels.pages.Pages`.
      values: likewise.
      blocks: the selection; None for all that a query sees.
      positions: of each query.
      lengths: valid keys of each row.
      kv_heads: K.
      scales: what stored keys and values of each KV head are to be multiplied with.
    """
    from pallas_kernels.dense_decode import dense_decode
    from pallas_kernels.sparse_decode import sparse_decode
    from pallas_kernels.sparse_decode.triton import Config

    batch, num_queries = q.shape[:2]
    chosen = None if blocks is None else blocks.swapaxes(1, 2)  # [B T K J]
    lane_q, chosen, lane_positions, lane_lengths, keys, values = _cut(
        MAX_DECODE_QUERIES, q, chosen, positions, lengths, keys, values
    )
    options = dict(scales=scales, return_lse=True, backend="triton", interpret=interpreted())
    if chosen is None:
        config = Config(splits=_DENSE_SPLITS)
        out, lse = dense_decode(
            lane_q, keys, values, lane_positions, lane_lengths, kv_heads=kv_heads, config=config, **options
        )
    else:
        config = Config(splits=_SPARSE_SPLITS)
        chosen = chosen.swapaxes(1, 2)  # [lanes K C J]
        out, lse = sparse_decode(lane_q, keys, values, chosen, lane_positions, lane_lengths, config=config, **options)
    return _join(out, batch, num_queries), _join(lse, batch, num_queries)


def _cut(
    size: int,
    queries: Float[Array, "B T ..."],
    chosen: Int[Array, "B T K J"] | None,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *pages: Any,
) -> tuple[Any, ...]:
    """Return the arguments with lanes of at most `size` queries as their rows, padded behind a row's last query."""
    batch, num_queries = positions.shape
    if num_queries <= size:
        return queries, chosen, positions, lengths, *(_with_table(p, batch) for p in pages)
    lanes_per_row = -(-num_queries // size)

    def cut(x, filling):
        padding = ((0, 0), (0, lanes_per_row * size - num_queries)) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, padding, constant_values=filling).reshape(-1, size, *x.shape[2:])

    def repeat(pages):
        pages = _with_table(pages, batch)
        return replace(pages, table=jnp.repeat(pages.table, lanes_per_row, axis=0))

    # A position of -1 is padding: such a query sees nothing, selects nothing, and is cut off by `_join`.
    queries, positions = cut(queries, 0), cut(positions, -1)
    chosen = None if chosen is None else cut(chosen, -1)
    return queries, chosen, positions, jnp.repeat(lengths, lanes_per_row), *(repeat(p) for p in pages)


def _join(x: Array, batch: int, num_queries: int) -> Array:
    """Return lanes [X C ...] as rows of queries [B T ...]."""
    return x.reshape(batch, -1, *x.shape[2:])[:, :num_queries]


def _with_table(pages: Any, batch: int) -> Any:
    """Return pages that a table names, also where rows lie in order: several lanes then read one row by one program."""
    if pages.table is not None:
        return pages
    row, block = jnp.arange(batch, dtype=jnp.int32), jnp.arange(pages.num_blocks, dtype=jnp.int32)
    return replace(pages, table=row[:, None] * pages.row_stride + block, page_stride=1)
