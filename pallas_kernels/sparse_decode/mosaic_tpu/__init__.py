"""Sparse attention of a decode step, in one Mosaic TPU kernel.

A step holds the query heads of one token and one KV head, and the blocks that this token selected: their pages are
copied by hand into one of two sets of buffers while the other set is worked on. All keys of a step meet the queries in
one matrix product, so with M3's 16 slots the softmax is whole and nothing is merged; more slots than fit are taken in
pieces. A slot of -1 is no copy at all.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, Limits, TileConfig
from pallas_kernels.mosaic_common import (
    INTERPRETERS,
    PREFETCHED,
    Chip,
    by_rows,
    check_tiles,
    divisor,
    dot_nn,
    dot_nt,
    each_page,
    flat_finder,
    kernel_cost,
    locate,
    natural_lse,
    pad_steps,
)
from pallas_kernels.numbers import UNSEEN
from pallas_kernels.pages import FinderRefs, Pages, seen_positions
from pallas_kernels.sparse_decode import Call


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step."""

    slots: int = 16  # selected blocks of a piece, where VMEM holds them


LIMITS = Limits(check_pages=check_tiles, config=Config, stored=(jnp.float8_e4m3fn,), interpreters=INTERPRETERS)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    k: Pages
    length: int
    heads: int
    kv_heads: int
    slots: int  # of a piece
    pieces: int
    width: int

    @property
    def group(self) -> int:
        """G, query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def block_size(self) -> int:
        """P, tokens of a block."""
        return self.k.block_size


class Lists(NamedTuple):
    """The arrays that are prefetched into scalar memory; inside the kernel, references to them."""

    finder: FinderRefs
    blocks: Any  # [steps * pieces * slots] the selections
    positions: Any  # [steps] of the query of each step, -1 for padding


class SoftmaxRefs(NamedTuple):
    """A softmax under way in VMEM, for the query heads of a step."""

    values: Any  # [G H]
    top: Any  # [G 1]
    total: Any  # [G 1]


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `sparse_decode` on a checked call."""
    chip = Chip.current(call.interpret)
    _, length, heads, width = call.q.shape
    kv_heads, total_slots = call.blocks.shape[1], call.blocks.shape[3]
    slots = min(total_slots, (config or Config()).slots)
    while slots > 1 and 4 * slots * call.k.pool[0].size * call.k.pool.dtype.itemsize > chip.vmem // 2:
        slots = -(-slots // 2)
    pieces = -(-total_slots // slots)
    blocks = jnp.pad(call.blocks, [(0, 0)] * 3 + [(0, pieces * slots - total_slots)], constant_values=-1)
    sizes = Sizes(call.k, length, heads, kv_heads, slots, pieces, width)
    factors = jnp.stack(call.scales).astype(jnp.float32) if call.scales else jnp.ones((2, kv_heads), jnp.float32)
    query_positions = seen_positions(call.positions, call.lengths, length)
    listed = blocks[0].size + (0 if call.k.table is None else call.k.num_blocks)
    group = max(1, PREFETCHED // listed)
    options = dict(sizes=sizes, chip=chip, interpret=call.interpret)
    attend = lambda rows: _attend_rows(
        call.q[rows], call.v, blocks[rows], query_positions[rows], factors, rows=rows, **options
    )
    out, lse = by_rows(attend, len(call.q), group)
    return (out, lse) if call.return_lse else (out,)


def _attend_rows(
    q: Float[Array, "B T N H"],
    v: Pages,
    blocks: Int[Array, "B K T J"],
    query_positions: Int[Array, "B T"],
    factors: Float[Array, "2 K"],
    *,
    rows: slice,
    sizes: Sizes,
    chip: Chip,
    interpret: Interpret,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """(out, lse) of as many rows of the batch as the prefetched lists allow."""
    batch, length, heads, width = q.shape
    k = sizes.k
    count = batch * length * sizes.kv_heads
    per_core = chip.steps_per_core(count)
    steps = per_core * chip.cores
    # A step is a (row, token, KV head).
    step_blocks = jnp.swapaxes(blocks, 1, 2).reshape(-1)  # [B T K J] flat
    step_positions = jnp.repeat(query_positions.reshape(-1), sizes.kv_heads)
    lists = Lists(
        finder=flat_finder(k, rows),
        blocks=pad_steps(step_blocks, steps * sizes.pieces * sizes.slots, -1),
        positions=pad_steps(step_positions, steps, -1),
    )
    grouped = pad_steps(q.reshape(count, sizes.group, width), steps)  # [steps G H]
    at_step = lambda core, i, *_: (i // sizes.pieces * chip.cores + core, 0, 0)
    buffer = pltpu.VMEM((2, sizes.slots, *k.pool.shape[1:]), k.pool.dtype)
    state = SoftmaxRefs(
        values=pltpu.VMEM((sizes.group, width), jnp.float32),
        top=pltpu.VMEM((sizes.group, 1), jnp.float32),
        total=pltpu.VMEM((sizes.group, 1), jnp.float32),
    )
    first_row = 0 if k.table is not None else rows.start
    operands = lists, grouped, factors
    outputs = [
        jax.ShapeDtypeStruct((steps, sizes.group, width), q.dtype),
        jax.ShapeDtypeStruct((steps, sizes.group, 1), jnp.float32),
    ]
    read = count * min(blocks.shape[-1] / k.num_devices, k.num_blocks)  # of devices, the average one's slots
    out, lse = pl.pallas_call(
        partial(_kernel, sizes=sizes, first_row=first_row, tokens=batch * length),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chip.cores, per_core * sizes.pieces),
            in_specs=[
                pl.BlockSpec((1, sizes.group, width), at_step),
                pl.BlockSpec(memory_space=pltpu.SMEM),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[pl.BlockSpec((1, sizes.group, width), at_step), pl.BlockSpec((1, sizes.group, 1), at_step)],
            scratch_shapes=[buffer, buffer, state, pltpu.SemaphoreType.DMA((2, 2))],
        ),
        out_shape=outputs,
        compiler_params=chip.compiler_params("parallel", "arbitrary"),
        cost_estimate=kernel_cost(
            operands, outputs, copied=2 * read * k.page_bytes,
            products=4 * count * sizes.pieces * sizes.slots * k.block_size * sizes.group * width,
        ),
        interpret=interpret,
        name="sparse_decode",
    )(*operands, k.pool, v.pool)  # fmt: skip
    return out[:count].reshape(batch, length, heads, width), lse[:count].reshape(batch, length, heads)


def _kernel(
    lists: Lists,
    q_ref,
    factors_ref,
    k_pool,
    v_pool,
    out_ref,
    lse_ref,
    k_buffers,
    v_buffers,
    state: SoftmaxRefs,
    sems,
    *,
    sizes: Sizes,
    first_row: int,
    tokens: int,
):
    core, i = pl.program_id(0), pl.program_id(1)
    cores, per_core = pl.num_programs(0), pl.num_programs(1)
    step_of = lambda i: i // sizes.pieces * cores + core

    def slots_of(i):
        """(page, seen) of each slot of a piece: a query sees the first tokens of a block, most often all."""
        step = step_of(i)
        row = first_row + jnp.minimum(step // sizes.kv_heads, tokens - 1) // sizes.length
        head = step % sizes.kv_heads
        slots = []
        for j in range(sizes.slots):
            block = lists.blocks[(step * sizes.pieces + i % sizes.pieces) * sizes.slots + j]
            is_inside = (block >= 0) & (block < sizes.k.num_blocks)
            page, is_held = locate(sizes.k, lists.finder, row, head, jnp.where(is_inside, block, 0))
            seen = jnp.clip(lists.positions[step] + 1 - block * sizes.block_size, 0, sizes.block_size)
            slots.append((page, jnp.where(is_inside & is_held, seen, 0)))
        return slots

    def copy_pages(i, slots, do: str) -> None:
        wanted = [(page, seen > 0) for page, seen in slots]
        each_page(k_pool, k_buffers.at[i % 2], sems.at[i % 2, 0], wanted, do)
        each_page(v_pool, v_buffers.at[i % 2], sems.at[i % 2, 1], wanted, do)

    slots = slots_of(i)

    @pl.when(i == 0)
    def _():
        copy_pages(i, slots, "start")

    @pl.when(i + 1 < per_core)
    def _():
        copy_pages(i + 1, slots_of(i + 1), "start")

    @pl.when(i % sizes.pieces == 0)
    def _():
        state.values[...] = jnp.zeros(state.values.shape, jnp.float32)
        state.top[...] = jnp.full(state.top.shape, UNSEEN, jnp.float32)
        state.total[...] = jnp.zeros(state.total.shape, jnp.float32)

    copy_pages(i, slots, "wait")
    head = step_of(i) % sizes.kv_heads
    k_buffer, v_buffer = k_buffers.at[i % 2], v_buffers.at[i % 2]
    seen_keys = [seen for _, seen in slots]
    values, top, total = _fold(q_ref[0], k_buffer, v_buffer, seen_keys, factors_ref[0, head], state, sizes)

    @pl.when(i % sizes.pieces == sizes.pieces - 1)
    def _():
        is_seen, safe_total = divisor(total)
        out_ref[0] = (values * (factors_ref[1, head] / safe_total)).astype(out_ref.dtype)
        lse_ref[0] = natural_lse(top, is_seen, safe_total)


def _fold(
    q: Float[Array, "G H"],
    k_buffer,
    v_buffer,
    seen_keys: list[Int[Array, ""]],
    factor: Float[Array, ""],
    state: SoftmaxRefs,
    sizes: Sizes,
) -> tuple[Float[Array, "G H"], Float[Array, "G 1"], Float[Array, "G 1"]]:
    """Take a piece into the softmax under way: (values, top, total), which are also in its memory then."""
    key = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.block_size), 1)
    buffer_row = jax.lax.broadcasted_iota(jnp.int32, (sizes.block_size, 1), 0)
    for j, seen in enumerate(seen_keys):
        # What lies behind the query may hold anything, and 0 x NaN is NaN. Most slots are seen whole.
        @pl.when(seen < sizes.block_size)
        def _(j=j, seen=seen):
            clean = jnp.where(buffer_row < seen, v_buffer[j].astype(jnp.float32), 0.0)
            v_buffer[j] = clean.astype(v_buffer.dtype)

    read_flat = lambda ref: ref[...].astype(q.dtype).reshape(-1, sizes.width)  # [slots * P, H]
    is_visible = jnp.concatenate([key < seen for seen in seen_keys], axis=1)
    scores = dot_nt(q, read_flat(k_buffer)) * (sizes.width**-0.5 * factor)  # [G, slots * P]
    scores = jnp.where(is_visible, scores, -jnp.inf)
    top = jnp.maximum(state.top[...], jnp.max(scores, axis=1, keepdims=True))
    weights, fade = jnp.exp(scores - top), jnp.exp(state.top[...] - top)
    values = state.values[...] * fade + dot_nn(weights.astype(q.dtype), read_flat(v_buffer))
    total = state.total[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
    state.values[...], state.top[...], state.total[...] = values, top, total
    return values, top, total
