"""Sparse attention of a prefill on a TPU, schedule query_union: neighbouring queries walk the union of their blocks.

A step holds 16 tokens x 16 heads as 256 lanes. Scores are `[keys, lanes]`, so softmax statistics are rows and no lane
is ever moved. The pages of a union stream through four sets of buffers, copied by hand three blocks ahead, across the
end of a step. A lane whose token did not choose the block at hand is masked; a block that no token chose is not read.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import UNSEEN, Pages, seen_positions
from pallas_kernels.mosaic_common import (
    PREFETCHED,
    Chip,
    Interpret,
    dot_nt,
    dot_tn,
    each_page,
    flat_table,
    locate,
    pad_steps,
)
from pallas_kernels.sparse_prefill.mosaic_tpu_block_major import kv_block_major
from pallas_kernels.sparse_prefill.mosaic_tpu_operands import TpuConfig, TpuSizes, check, clean

SCHEDULES = ("auto", "query_union", "kv_block_major")
_LAST = 2**30
_BUFFERS = 4
_HEADER = 2  # numbers before the ids of a list: how many there are, and how many keys its last query sees


def sparse_prefill(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    schedule: str = "auto",
    return_lse: bool = False,
    interpret: Interpret = False,
) -> tuple[Array, ...]:
    """Attention over the selected blocks. Arguments and results are those of `query_union`.

    Args:
      q: queries after norm and RoPE.
      k: keys.
      v: values.
      blocks: distinct ids in any order, -1 for none.
      positions: absolute position of each query.
      lengths: valid keys of each row.
      schedule: "query_union", "kv_block_major", or "auto", which is the first: it moves less until a tile's union holds
        about six times what one query chose, and no TPU was at hand to measure where the second overtakes it.
      return_lse: also return the LSE.
      interpret: run on the CPU, with these parameters if they are given.

    Raises:
      ValueError: an unknown schedule, or operands that do not fit together.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule = {schedule!r}: allowed are {', '.join(map(repr, SCHEDULES))}")
    op = kv_block_major if schedule == "kv_block_major" else query_union
    return op(q, k, v, blocks, positions, lengths, return_lse=return_lse, interpret=interpret)


def query_union(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None,
    return_lse: bool = False,
    config: TpuConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Array, ...]:
    """Attention over the selected blocks, a tile of neighbouring queries at a time.

    Args:
      q: queries after norm and RoPE; bfloat16 or float32.
      k: keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn; finite wherever a query of the row
        can see them.
      v: values, in the same pages.
      blocks: distinct ids in any order, -1 for none.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      scales: what stored keys and values of each KV head are to be multiplied with.
      return_lse: also return the natural log-sum-exp of the scaled scores, -inf where nothing was seen.
      config: tile sizes.
      interpret: run on the CPU, with these parameters if they are given.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.

    Raises:
      ValueError: operands that do not fit together.
    """
    check(q, k, v, blocks, interpret)
    sizes = TpuSizes.of(q, k, blocks, config or TpuConfig())
    factors = jnp.stack(scales).astype(jnp.float32) if scales else jnp.ones((2, sizes.kv_heads), jnp.float32)
    padded = sizes.tiles * sizes.tokens
    at = seen_positions(positions, lengths, padded)
    fill = padded - sizes.length
    q = jnp.pad(q, ((0, 0), (0, fill), (0, 0), (0, 0)))
    blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, fill), (0, 0)), constant_values=-1)
    group = len(q) if k.table is None else max(1, PREFETCHED // k.num_blocks)
    parts = []
    for start in range(0, len(q), group):
        rows = slice(start, start + group)
        parts.append(_rows(q[rows], v.pool, blocks[rows], at[rows], factors, rows, sizes, interpret))
    out = tuple(jnp.concatenate(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return out if return_lse else out[:1]


def union_lists(blocks: Int[Array, "B K T J"], at: Int[Array, "B T"], sizes: TpuSizes) -> Int[Array, "X 1 U"]:
    """For each tile of each row and KV head: a header, and the different ids that its queries see, ascending."""
    own = jnp.where(at >= 0, at // sizes.block_size, -1)[:, None, :, None]
    seen = (blocks >= 0) & (blocks <= own) & (blocks < sizes.k.num_blocks)
    ids = jnp.where(seen, blocks, _LAST).reshape(*blocks.shape[:2], sizes.tiles, -1)
    ids = jnp.sort(ids, axis=-1)
    again = jnp.concatenate([jnp.zeros_like(ids[..., :1], bool), ids[..., 1:] == ids[..., :-1]], axis=-1)
    ids = jnp.sort(jnp.where(again, _LAST, ids), axis=-1)
    count = jnp.sum(ids < _LAST, axis=-1, dtype=jnp.int32)
    end = jnp.max(at.reshape(len(at), 1, sizes.tiles, -1), axis=-1) + 1
    header = jnp.stack([count, jnp.broadcast_to(end, count.shape)], axis=-1)
    return jnp.concatenate([header, ids], axis=-1).reshape(-1, 1, ids.shape[-1] + _HEADER).astype(jnp.int32)


def _rows(q, v, blocks, at, factors, rows: slice, sizes: TpuSizes, interpret):
    """As many rows of the batch as the prefetched table allows."""
    batch, padded, _, width = q.shape
    k, chip = sizes.k, Chip.here(interpret)
    lists = union_lists(blocks, at, sizes)
    count = len(lists)
    per_core = chip.shared(count)
    steps = per_core * chip.cores
    lists = pad_steps(lists, steps)
    # One column a lane: the slots of its token, and its position.
    chosen = jnp.swapaxes(blocks.reshape(-1, sizes.tokens, sizes.slots), 1, 2)
    chosen = pad_steps(jnp.repeat(chosen, sizes.group, axis=2), steps, -1)
    lanes_at = jnp.repeat(at.reshape(batch * sizes.tiles, 1, sizes.tokens), sizes.group, axis=2)
    grouped = q.reshape(batch, padded, sizes.kv_heads, sizes.group, width)

    step_of = lambda core, i: i * chip.cores + core
    whole = lambda core, i: jnp.minimum(step_of(core, i), count - 1)
    row_of = lambda step: step // (sizes.kv_heads * sizes.tiles)
    at_step = lambda core, i, *_: (step_of(core, i), 0, 0)
    at_next = lambda core, i, *_: (step_of(core, jnp.minimum(i + 1, per_core - 1)), 0, 0)
    at_tile = lambda core, i, *_: (row_of(whole(core, i)) * sizes.tiles + whole(core, i) % sizes.tiles, 0, 0)

    def at_queries(core, i, *_):
        step = whole(core, i)
        return row_of(step), step % sizes.tiles, step // sizes.tiles % sizes.kv_heads, 0, 0

    # A step that only fills up a core's share writes into a place behind the last tile.
    def at_out(core, i, *_):
        row, tile, head, *zeros = at_queries(core, i)
        return row, jnp.where(step_of(core, i) < count, tile, sizes.tiles), head, *zeros

    queries = (1, sizes.tokens, 1, sizes.group, width)
    smem = dict(memory_space=pltpu.SMEM)
    buffers = pltpu.VMEM((_BUFFERS, *k.pool.shape[1:]), k.pool.dtype)
    prefetched = (k.layer.reshape(1), *flat_table(k, rows))
    spare = padded + sizes.tokens * (steps > count)
    out, lse = pl.pallas_call(
        partial(_kernel, sizes=sizes, row_of=row_of, first_row=0 if k.table is not None else rows.start, count=count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(chip.cores, per_core),
            in_specs=[
                pl.BlockSpec((1, *lists.shape[1:]), at_step, **smem),
                pl.BlockSpec((1, *lists.shape[1:]), at_next, **smem),
                pl.BlockSpec(**smem),
                pl.BlockSpec((1, *chosen.shape[1:]), at_step),
                pl.BlockSpec((1, *lanes_at.shape[1:]), at_tile),
                pl.BlockSpec(queries, at_queries),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[pl.BlockSpec(queries, at_out), pl.BlockSpec((1, 1, sizes.rows), at_step)],
            scratch_shapes=[
                buffers,
                buffers,
                pltpu.VMEM((width, sizes.rows), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((_BUFFERS,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, spare, *grouped.shape[2:]), q.dtype),
            jax.ShapeDtypeStruct((steps, 1, sizes.rows), jnp.float32),
        ],
        compiler_params=chip.params("parallel", "arbitrary"),
        interpret=interpret,
        name="query_union",
    )(*prefetched, lists, lists, factors, chosen, lanes_at, grouped, k.pool, v)
    lse = lse[:count].reshape(batch, sizes.kv_heads, padded, sizes.group).swapaxes(1, 2)
    out = out[:, : sizes.length].reshape(batch, sizes.length, sizes.heads, width)
    return out, lse[:, : sizes.length].reshape(batch, sizes.length, sizes.heads)


def _kernel(layer_ref, *refs, sizes: TpuSizes, row_of, first_row: int, count: int):
    table_ref, refs = (refs[0], refs[1:]) if sizes.k.table is not None else (None, refs)
    list_ref, next_ref, factors_ref, chosen_ref, at_ref, q_ref, k_pool, v_pool, *refs = refs
    out_ref, lse_ref, k_buffers, v_buffers, values_ref, walked_ref, sems = refs
    core, i = pl.program_id(0), pl.program_id(1)
    cores, per_core = pl.num_programs(0), pl.num_programs(1)
    step = i * cores + core

    def fetch(list_ref, step, entry, slot, do):
        """The id of an entry, and how many of its tokens the last query of the tile sees."""
        block = list_ref[0, 0, _HEADER + entry]
        row, head = row_of(jnp.minimum(step, count - 1)), step // sizes.tiles % sizes.kv_heads
        page, held = locate(sizes.k, layer_ref, table_ref, first_row + row, head, block)
        for pool, buffers in ((k_pool, k_buffers), (v_pool, v_buffers)):
            each_page(pool, buffers.at[pl.ds(slot, 1)], sems.at[slot], [(page, held)], do)
        seen = jnp.clip(list_ref[0, 0, 1] - block * sizes.block_size, 0, sizes.block_size)
        return block, jnp.where(held, seen, 0)

    def start(list_ref, step, first, stop, base):
        def body(entry, carry):
            fetch(list_ref, step, entry, (base + entry) % _BUFFERS, "start")
            return carry

        jax.lax.fori_loop(first, jnp.minimum(stop, list_ref[0, 0, 0]), body, 0)

    ahead = _BUFFERS - 1

    @pl.when(i == 0)
    def _():
        walked_ref[0] = 0
        start(list_ref, step, 0, ahead, 0)

    base, entries = walked_ref[0], list_ref[0, 0, 0]
    after = (base + entries) % _BUFFERS
    walked_ref[0] = after
    last = i + 1 == per_core
    # A step starts the copies of its own entries from `ahead` on, and the first `ahead` of the next step.
    start_next = lambda first, stop: start(next_ref, step + cores, first, jnp.where(last, 0, stop), after)
    start_next(0, ahead - entries)
    q, at, chosen = q_ref[0, :, 0].reshape(sizes.rows, -1), at_ref[0], chosen_ref[0]
    scale = sizes.width**-0.5 * factors_ref[0, step // sizes.tiles % sizes.kv_heads]
    values_ref[...] = jnp.zeros(values_ref.shape, jnp.float32)
    key = jax.lax.broadcasted_iota(jnp.int32, (sizes.block_size, 1), 0)

    def body(entry, state):
        top, total = state
        slot, coming = (base + entry) % _BUFFERS, entry + ahead
        start(list_ref, step, coming, coming + 1, base)
        start_next(jnp.maximum(coming - entries, 0), coming - entries + 1)
        block, seen = fetch(list_ref, step, entry, slot, "wait")
        clean(v_buffers.at[slot], seen)
        wanted = jnp.max((chosen == block).astype(jnp.int32), axis=0, keepdims=True) > 0
        limit = jnp.where(wanted & (seen > 0), at - block * sizes.block_size, -1)
        scores = dot_nt(k_buffers[slot].astype(q.dtype), q) * scale
        scores = jnp.where(key <= limit, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=0, keepdims=True))
        p, fade = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        values_ref[...] = values_ref[...] * fade + dot_tn(v_buffers[slot].astype(q.dtype), p.astype(q.dtype))
        return new_top, total * fade + jnp.sum(p, axis=0, keepdims=True)

    nothing = jnp.full((1, sizes.rows), UNSEEN, jnp.float32), jnp.zeros((1, sizes.rows), jnp.float32)
    top, total = jax.lax.fori_loop(0, entries, body, nothing)
    any_seen = total != 0.0
    safe = jnp.where(any_seen, total, 1.0)
    out = values_ref[...] * (factors_ref[1, step // sizes.tiles % sizes.kv_heads] / safe)
    out_ref[0, :, 0] = out.T.reshape(sizes.tokens, sizes.group, sizes.width).astype(out_ref.dtype)
    lse_ref[0] = jnp.where(any_seen, top + jnp.log(safe), -jnp.inf)
