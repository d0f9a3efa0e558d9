"""Sparse attention of a prefill on a TPU, schedule query_union: neighbouring queries walk the union of their blocks.

A step holds 16 tokens x 16 heads as 256 lanes. Scores are `[keys, lanes]`, so softmax statistics are rows and no lane
is ever moved. The pages of a union stream through four sets of buffers, copied by hand three blocks ahead, across the
end of a step. A lane whose token did not choose the block at hand is masked; a block that no token chose is not read.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret
from pallas_kernels.mosaic_common import (
    PREFETCHED,
    Chip,
    by_rows,
    clean_behind,
    divisor,
    each_page,
    flat_finder,
    fold_block,
    kernel_cost,
    locate,
    natural_lse,
    pad_steps,
)
from pallas_kernels.numbers import BEHIND_ALL, UNSEEN
from pallas_kernels.pages import FinderRefs, Pages, seen_positions
from pallas_kernels.sparse_prefill import Call
from pallas_kernels.sparse_prefill.mosaic_tpu.sizes import Config, Sizes

_BUFFERS = 4
_HEADER = 2  # numbers before the ids of a list: how many there are, and how many keys its last query sees


def query_union(call: Call, config: Config | None) -> tuple[Array, ...]:
    """`sparse_prefill` of a checked call by this schedule; one-byte keys and values have no scale here."""
    _, length, heads, width = call.q.shape
    kv_heads, slots = call.blocks.shape[1], call.blocks.shape[3]
    sizes = Sizes(call.k, (config or Config()).tokens, length, heads, kv_heads, slots, width)
    factors = jnp.ones((2, kv_heads), jnp.float32)
    padded = sizes.tiles * sizes.tokens
    query_positions = seen_positions(call.positions, call.lengths, padded)
    padding = padded - length
    q = jnp.pad(call.q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    blocks = jnp.pad(call.blocks, ((0, 0), (0, 0), (0, padding), (0, 0)), constant_values=-1)
    group = len(q) if call.k.table is None else max(1, PREFETCHED // call.k.num_blocks)
    options = dict(sizes=sizes, interpret=call.interpret)
    attend = lambda rows: _attend_rows(
        q[rows], call.v, blocks[rows], query_positions[rows], factors, rows=rows, **options
    )
    out, lse = by_rows(attend, len(q), group)
    return (out, lse) if call.return_lse else (out,)


def union_lists(blocks: Int[Array, "B K T J"], query_positions: Int[Array, "B T"], sizes: Sizes) -> Int[Array, "X 1 U"]:
    """For each tile of each row and KV head: a header, and the different ids that its queries see, ascending."""
    own_block = jnp.where(query_positions >= 0, query_positions // sizes.block_size, -1)[:, None, :, None]
    is_seen = (blocks >= 0) & (blocks <= own_block) & (blocks < sizes.k.num_blocks)
    ids = jnp.where(is_seen, blocks, BEHIND_ALL).reshape(*blocks.shape[:2], sizes.tiles, -1)  # [B K tiles U]
    ids = jnp.sort(ids, axis=-1)
    is_repeated = jnp.concatenate([jnp.zeros_like(ids[..., :1], bool), ids[..., 1:] == ids[..., :-1]], axis=-1)
    ids = jnp.sort(jnp.where(is_repeated, BEHIND_ALL, ids), axis=-1)
    count = jnp.sum(ids < BEHIND_ALL, axis=-1, dtype=jnp.int32)
    seen_keys = jnp.max(query_positions.reshape(len(query_positions), 1, sizes.tiles, -1), axis=-1) + 1
    header = jnp.stack([count, jnp.broadcast_to(seen_keys, count.shape)], axis=-1)
    return jnp.concatenate([header, ids], axis=-1).reshape(-1, 1, ids.shape[-1] + _HEADER).astype(jnp.int32)


def _attend_rows(
    q: Float[Array, "B T N H"],
    v: Pages,
    blocks: Int[Array, "B K T J"],
    query_positions: Int[Array, "B T"],
    factors: Float[Array, "2 K"],
    *,
    rows: slice,
    sizes: Sizes,
    interpret: Interpret,
) -> tuple[Float[Array, "B T2 N H"], Float[Array, "B T2 N"]]:
    """(out, lse) of as many rows of the batch as the prefetched table allows; of all where there is no table."""
    batch, padded, _, width = q.shape
    k, chip = sizes.k, Chip.current(interpret)
    lists = union_lists(blocks, query_positions, sizes)  # [count 1 U]
    count = len(lists)
    per_core = chip.steps_per_core(count)
    steps = per_core * chip.cores
    lists = pad_steps(lists, steps)
    # One column a lane: the slots of its token, and its position.
    chosen = jnp.swapaxes(blocks.reshape(-1, sizes.tokens, sizes.slots), 1, 2)  # [count J tokens]
    chosen = pad_steps(jnp.repeat(chosen, sizes.group, axis=2), steps, -1)  # [steps J lanes]
    lane_positions = query_positions.reshape(batch * sizes.tiles, 1, sizes.tokens)
    lane_positions = jnp.repeat(lane_positions, sizes.group, axis=2)  # [B * tiles, 1, lanes]
    grouped = q.reshape(batch, padded, sizes.kv_heads, sizes.group, width)  # [B T K G H]

    # A step is a (row, KV head, tile). Steps that only fill up a core's share repeat the last.
    step_of = lambda core, i: i * chip.cores + core
    real_step = lambda core, i: jnp.minimum(step_of(core, i), count - 1)
    row_of = lambda step: step // (sizes.kv_heads * sizes.tiles)
    at_step = lambda core, i, *_: (step_of(core, i), 0, 0)
    at_next = lambda core, i, *_: (step_of(core, jnp.minimum(i + 1, per_core - 1)), 0, 0)

    def at_tile(core, i, *_):
        return row_of(real_step(core, i)) * sizes.tiles + real_step(core, i) % sizes.tiles, 0, 0

    def at_queries(core, i, *_):
        step = real_step(core, i)
        return row_of(step), step % sizes.tiles, step // sizes.tiles % sizes.kv_heads, 0, 0

    # A step that only fills up a core's share writes into a place behind the last tile.
    def at_out(core, i, *_):
        row, tile, head, *zeros = at_queries(core, i)
        return row, jnp.where(step_of(core, i) < count, tile, sizes.tiles), head, *zeros

    queries = (1, sizes.tokens, 1, sizes.group, width)
    smem = dict(memory_space=pltpu.SMEM)
    buffers = pltpu.VMEM((_BUFFERS, *k.pool.shape[1:]), k.pool.dtype)
    out_tokens = padded + sizes.tokens * (steps > count)
    operands = flat_finder(k, rows), lists, lists, factors, chosen, lane_positions, grouped
    outputs = [
        jax.ShapeDtypeStruct((batch, out_tokens, *grouped.shape[2:]), q.dtype),
        jax.ShapeDtypeStruct((steps, 1, sizes.lanes), jnp.float32),
    ]
    # A tile's positions are read again for each KV head.
    read_once = *operands, *[lane_positions] * (sizes.kv_heads - 1)
    # Each query of a tile may choose blocks of its own; a device has its part of them, and no more than it holds.
    walked = count * min(sizes.tokens * sizes.slots / k.num_devices, k.num_blocks)
    out, lse = pl.pallas_call(
        partial(_kernel, sizes=sizes, row_of=row_of, count=count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chip.cores, per_core),
            in_specs=[
                pl.BlockSpec((1, *lists.shape[1:]), at_step, **smem),
                pl.BlockSpec((1, *lists.shape[1:]), at_next, **smem),
                pl.BlockSpec(**smem),
                pl.BlockSpec((1, *chosen.shape[1:]), at_step),
                pl.BlockSpec((1, *lane_positions.shape[1:]), at_tile),
                pl.BlockSpec(queries, at_queries),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[pl.BlockSpec(queries, at_out), pl.BlockSpec((1, 1, sizes.lanes), at_step)],
            scratch_shapes=[
                buffers,
                buffers,
                pltpu.VMEM((width, sizes.lanes), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((_BUFFERS,)),
            ],
        ),
        out_shape=outputs,
        compiler_params=chip.compiler_params("parallel", "arbitrary"),
        cost_estimate=kernel_cost(
            read_once, outputs, copied=2 * walked * k.page_bytes,
            products=4 * walked * k.block_size * sizes.lanes * width,
        ),
        interpret=interpret,
        name="query_union",
    )(*operands, k.pool, v.pool)  # fmt: skip
    lse = lse[:count].reshape(batch, sizes.kv_heads, padded, sizes.group).swapaxes(1, 2)  # [B T K G]
    out = out[:, : sizes.length].reshape(batch, sizes.length, sizes.heads, width)
    return out, lse[:, : sizes.length].reshape(batch, sizes.length, sizes.heads)


def _kernel(
    finder: FinderRefs,
    list_ref,
    next_list_ref,
    factors_ref,
    chosen_ref,
    positions_ref,
    q_ref,
    k_pool,
    v_pool,
    out_ref,
    lse_ref,
    k_buffers,
    v_buffers,
    values_ref,
    walked_ref,
    sems,
    *,
    sizes: Sizes,
    row_of: Callable[[Int[Array, ""]], Int[Array, ""]],
    count: int,
):
    core, i = pl.program_id(0), pl.program_id(1)
    cores, per_core = pl.num_programs(0), pl.num_programs(1)
    step = i * cores + core

    def copy_entry(list_ref, step, entry, slot, do: str):
        """Start or await an entry's copies: its id, and how many of its tokens the tile's last query sees."""
        block = list_ref[0, 0, _HEADER + entry]
        row, head = row_of(jnp.minimum(step, count - 1)), step // sizes.tiles % sizes.kv_heads
        page, is_held = locate(sizes.k, finder, row, head, block)
        for pool, buffers in ((k_pool, k_buffers), (v_pool, v_buffers)):
            each_page(pool, buffers.at[pl.ds(slot, 1)], sems.at[slot], [(page, is_held)], do)
        seen = jnp.clip(list_ref[0, 0, 1] - block * sizes.block_size, 0, sizes.block_size)
        return block, jnp.where(is_held, seen, 0)

    def start_entries(list_ref, step, first, stop, base) -> None:
        def body(entry, carry):
            copy_entry(list_ref, step, entry, (base + entry) % _BUFFERS, "start")
            return carry

        jax.lax.fori_loop(first, jnp.minimum(stop, list_ref[0, 0, 0]), body, 0)

    ahead = _BUFFERS - 1

    @pl.when(i == 0)
    def _():
        walked_ref[0] = 0
        start_entries(list_ref, step, 0, ahead, 0)

    # Which buffer a step starts with: entries walked by the steps before, modulo the buffers.
    base, entries = walked_ref[0], list_ref[0, 0, 0]
    next_base = (base + entries) % _BUFFERS
    walked_ref[0] = next_base
    is_last = i + 1 == per_core

    # A step starts the copies of its own entries from `ahead` on, and the first `ahead` of the next step.
    def start_next_step(first, stop) -> None:
        start_entries(next_list_ref, step + cores, first, jnp.where(is_last, 0, stop), next_base)

    start_next_step(0, ahead - entries)
    q, position, chosen = q_ref[0, :, 0].reshape(sizes.lanes, -1), positions_ref[0], chosen_ref[0]
    scale = sizes.width**-0.5 * factors_ref[0, step // sizes.tiles % sizes.kv_heads]
    values_ref[...] = jnp.zeros(values_ref.shape, jnp.float32)

    def take_entry(entry, state):
        slot, coming = (base + entry) % _BUFFERS, entry + ahead
        start_entries(list_ref, step, coming, coming + 1, base)
        start_next_step(jnp.maximum(coming - entries, 0), coming - entries + 1)
        block, seen = copy_entry(list_ref, step, entry, slot, "wait")
        clean_behind(v_buffers.at[slot], seen)
        is_wanted = jnp.max((chosen == block).astype(jnp.int32), axis=0, keepdims=True) > 0
        last_key = jnp.where(is_wanted & (seen > 0), position - block * sizes.block_size, -1)  # [1 lanes]
        return fold_block(q, k_buffers[slot], v_buffers[slot], last_key, scale, state, values_ref)

    nothing = jnp.full((1, sizes.lanes), UNSEEN, jnp.float32), jnp.zeros((1, sizes.lanes), jnp.float32)
    top, total = jax.lax.fori_loop(0, entries, take_entry, nothing)
    is_seen, total = divisor(total)
    out = values_ref[...] * (factors_ref[1, step // sizes.tiles % sizes.kv_heads] / total)  # [H lanes]
    out_ref[0, :, 0] = out.T.reshape(sizes.tokens, sizes.group, sizes.width).astype(out_ref.dtype)
    lse_ref[0] = natural_lse(top, is_seen, total)
