"""Sparse attention of a decode step, in one Mosaic TPU kernel.

A step holds the query heads of one token and one KV head, and the blocks that this token selected: their pages are
copied by hand into one of two sets of buffers while the other set is worked on. All keys of a step meet the queries in
one matrix product, so with M3's 16 slots the softmax is whole and nothing is merged; more slots than fit are taken in
pieces. A slot of -1 is no copy at all.
"""

import dataclasses
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
    check_view,
    dot_nn,
    dot_nt,
    each_page,
    flat_table,
    locate,
    pad_steps,
)
from pallas_kernels.sparse_decode.triton import MAX_QUERIES


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    slots: int = 16  # selected blocks of a piece, where VMEM holds them


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call."""

    k: Pages
    length: int
    heads: int
    kv_heads: int
    slots: int  # of a piece
    pieces: int
    width: int
    scaled: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def block_size(self) -> int:
        return self.k.block_size


def sparse_decode(
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
    """Attention over the selected blocks for at most 16 queries a row.

    Args:
      q: queries after norm and RoPE; bfloat16 or float32.
      k: keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn.
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
      ValueError: too many queries, or operands that do not fit together.
    """
    _check(q, k, v, blocks, interpret)
    chip = Chip.here(interpret)
    _, _, heads, width = q.shape
    kv_heads, total = blocks.shape[1], blocks.shape[3]
    slots = min(total, (config or TpuConfig()).slots)
    while slots > 1 and 4 * slots * k.pool[0].size * k.pool.dtype.itemsize > chip.vmem // 2:
        slots = -(-slots // 2)
    pieces = -(-total // slots)
    blocks = jnp.pad(blocks, [(0, 0)] * 3 + [(0, pieces * slots - total)], constant_values=-1)
    sizes = _Sizes(k, q.shape[1], heads, kv_heads, slots, pieces, width, scales is not None)
    factors = jnp.stack(scales).astype(jnp.float32) if scales else jnp.ones((2, kv_heads), jnp.float32)
    at = seen_positions(positions, lengths, q.shape[1])
    listed = blocks[0].size + (0 if k.table is None else k.num_blocks)
    group = max(1, PREFETCHED // listed)
    parts = []
    for start in range(0, len(q), group):
        rows = slice(start, start + group)
        parts.append(_rows(q[rows], v.pool, blocks[rows], at[rows], factors, rows, sizes, chip, interpret))
    out = tuple(jnp.concatenate(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return out if return_lse else out[:1]


def _rows(q, v, blocks, at, factors, rows: slice, sizes: _Sizes, chip: Chip, interpret):
    """As many rows of the batch as the prefetched lists allow."""
    batch, length, heads, width = q.shape
    k = sizes.k
    count = batch * length * sizes.kv_heads
    per_core = chip.shared(count)
    steps = per_core * chip.cores
    listed = steps * sizes.pieces * sizes.slots
    prefetched = (
        k.layer.reshape(1),
        pad_steps(jnp.swapaxes(blocks, 1, 2).reshape(-1), listed, -1),
        pad_steps(jnp.repeat(at.reshape(-1), sizes.kv_heads), steps, -1),
        *flat_table(k, rows),
    )
    grouped = pad_steps(q.reshape(count, sizes.group, width), steps)
    at_step = lambda core, i, *_: (i // sizes.pieces * chip.cores + core, 0, 0)
    buffer = pltpu.VMEM((2, sizes.slots, *k.pool.shape[1:]), k.pool.dtype)
    out, lse = pl.pallas_call(
        partial(_kernel, sizes=sizes, first_row=0 if k.table is not None else rows.start, tokens=batch * length),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(chip.cores, per_core * sizes.pieces),
            in_specs=[
                pl.BlockSpec((1, sizes.group, width), at_step),
                pl.BlockSpec(memory_space=pltpu.SMEM),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[pl.BlockSpec((1, sizes.group, width), at_step), pl.BlockSpec((1, sizes.group, 1), at_step)],
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.VMEM((sizes.group, width), jnp.float32),
                pltpu.VMEM((sizes.group, 1), jnp.float32),
                pltpu.VMEM((sizes.group, 1), jnp.float32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((steps, sizes.group, width), q.dtype),
            jax.ShapeDtypeStruct((steps, sizes.group, 1), jnp.float32),
        ],
        compiler_params=chip.params("parallel", "arbitrary"),
        interpret=interpret,
        name="sparse_decode",
    )(*prefetched, grouped, factors, k.pool, v)
    return out[:count].reshape(batch, length, heads, width), lse[:count].reshape(batch, length, heads)


def _kernel(layer_ref, blocks_ref, at_ref, *refs, sizes: _Sizes, first_row: int, tokens: int):
    table_ref, refs = (refs[0], refs[1:]) if sizes.k.table is not None else (None, refs)
    q_ref, factors_ref, k_pool, v_pool, out_ref, lse_ref, k_buffers, v_buffers, *state_refs, sems = refs
    core, i = pl.program_id(0), pl.program_id(1)
    cores, per_core = pl.num_programs(0), pl.num_programs(1)
    step_of = lambda i: i // sizes.pieces * cores + core

    def slots(i):
        """(page, seen) of each slot of a piece: a query sees the first tokens of a block, most often all."""
        step = step_of(i)
        row = first_row + jnp.minimum(step // sizes.kv_heads, tokens - 1) // sizes.length
        out = []
        for j in range(sizes.slots):
            block = blocks_ref[(step * sizes.pieces + i % sizes.pieces) * sizes.slots + j]
            inside = (block >= 0) & (block < sizes.k.num_blocks)
            page, held = locate(sizes.k, layer_ref, table_ref, row, step % sizes.kv_heads, jnp.where(inside, block, 0))
            seen = jnp.clip(at_ref[step] + 1 - block * sizes.block_size, 0, sizes.block_size)
            out.append((page, jnp.where(inside & held, seen, 0)))
        return out

    def copies(i, slots, do):
        wanted = [(page, seen > 0) for page, seen in slots]
        each_page(k_pool, k_buffers.at[i % 2], sems.at[i % 2, 0], wanted, do)
        each_page(v_pool, v_buffers.at[i % 2], sems.at[i % 2, 1], wanted, do)

    here = slots(i)

    @pl.when(i == 0)
    def _():
        copies(i, here, "start")

    @pl.when(i + 1 < per_core)
    def _():
        copies(i + 1, slots(i + 1), "start")

    values_ref, top_ref, total_ref = state_refs

    @pl.when(i % sizes.pieces == 0)
    def _():
        values_ref[...] = jnp.zeros(values_ref.shape, jnp.float32)
        top_ref[...] = jnp.full(top_ref.shape, UNSEEN, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    copies(i, here, "wait")
    head = step_of(i) % sizes.kv_heads
    buffers = k_buffers.at[i % 2], v_buffers.at[i % 2]
    state = _fold(q_ref[0], buffers, [seen for _, seen in here], factors_ref[0, head], state_refs, sizes)

    @pl.when(i % sizes.pieces == sizes.pieces - 1)
    def _():
        values, top, total = state
        seen = total != 0.0
        safe = jnp.where(seen, total, 1.0)
        out_ref[0] = (values * (factors_ref[1, head] / safe)).astype(out_ref.dtype)
        lse_ref[0] = jnp.where(seen, top + jnp.log(safe), -jnp.inf)


def _fold(q, buffers, visible, factor, state_refs, sizes: _Sizes):
    """Take a piece into the softmax under way."""
    k_buffer, v_buffer = buffers
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.block_size), 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (sizes.block_size, 1), 0)
    for j, seen in enumerate(visible):
        # What lies behind the query may hold anything, and 0 x NaN is NaN. Most slots are seen whole.
        @pl.when(seen < sizes.block_size)
        def _(j=j, seen=seen):
            clean = jnp.where(row < seen, v_buffer[j].astype(jnp.float32), 0.0)
            v_buffer[j] = clean.astype(v_buffer.dtype)

    flat = lambda ref: ref[...].astype(q.dtype).reshape(-1, sizes.width)
    mask = jnp.concatenate([lane < seen for seen in visible], axis=1)
    scores = jnp.where(mask, dot_nt(q, flat(k_buffer)) * (sizes.width**-0.5 * factor), -jnp.inf)
    values_ref, top_ref, total_ref = state_refs
    top = jnp.maximum(top_ref[...], jnp.max(scores, axis=1, keepdims=True))
    p, fade = jnp.exp(scores - top), jnp.exp(top_ref[...] - top)
    values = values_ref[...] * fade + dot_nn(p.astype(q.dtype), flat(v_buffer))
    total = total_ref[...] * fade + jnp.sum(p, axis=1, keepdims=True)
    values_ref[...], top_ref[...], total_ref[...] = values, top, total
    return values, top, total


def _check(q, k: Pages, v: Pages, blocks, interpret: Interpret) -> None:
    for name, pages in (("k", k), ("v", v)):
        check_view(name, pages, q.shape[0], interpret)
    batch, length, heads, width = q.shape
    if not 1 <= length <= MAX_QUERIES:
        raise ValueError(f"{length} queries a row: need 1 to {MAX_QUERIES} (sparse_prefill takes more)")
    if blocks.shape[:1] + blocks.shape[2:3] != (batch, length) or heads % blocks.shape[1]:
        raise ValueError(f"blocks has shape {blocks.shape}: must be [{batch} K {length} J], K a divisor of {heads}")
    if k.pool.dtype not in (q.dtype, jnp.float8_e4m3fn) or k.pool.dtype != v.pool.dtype or k.width != width:
        raise ValueError(
            f"q is {q.dtype} of width {width}, k {k.pool.dtype} of {k.width}, v {v.pool.dtype} of {v.width}: need the "
            "same width, and keys and values in the queries' dtype or float8_e4m3fn"
        )
    if k.pool.shape != v.pool.shape:
        raise ValueError(f"k has pages {k.pool.shape} and v {v.pool.shape}: they must lie in the same way")
