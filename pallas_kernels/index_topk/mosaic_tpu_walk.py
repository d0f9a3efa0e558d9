"""The walk over index keys that prefill and decode share: scores and the best blocks, in one Mosaic TPU kernel.

A step holds the queries of a tile and walks the index keys of their row, some pages at a time, copied by hand into one
of two buffers while the other is worked on; the copy for the next step starts in this one. Keys stream through the MXU
past the queries, so a page's scores are `[keys, queries]` and their maximum needs no movement between lanes. It goes
into a list in VMEM of one number a block and query, and the best are taken off that list one by one. No score is
written to HBM. Every token of a block before the own one is visible and the own block is always chosen, so no token is
ever masked and no own block read.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import ABOVE, Pages, seen_positions
from pallas_kernels.index_topk.ranking import ordered, selection
from pallas_kernels.mosaic_common import (
    PREFETCHED,
    SUBLANES,
    Chip,
    Interpret,
    check_view,
    dot_nt,
    each_page,
    flat_table,
    locate,
    pad_steps,
)

_LAST = 2**30


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call.

    A step has `width` lanes: `folds` copies of the (query, head) pairs of a tile, each for other blocks of a group,
    so that few queries still fill a vector register.
    """

    index_k: Pages
    tokens: int
    heads: int
    folds: int
    width: int
    pages: int
    top_k: int
    local_blocks: int
    init_blocks: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.heads

    @property
    def fold(self) -> int:
        """Lanes of one copy."""
        return self.width // self.folds

    @property
    def rows(self) -> int:
        """Rows of the list that one buffer of pages fills."""
        return self.pages // self.folds

    @property
    def listed(self) -> int:
        """Rows of the whole list."""
        return -(-self.index_k.num_blocks // self.pages) * self.rows + SUBLANES


def walk(
    index_q: Float[Array, "B T K H"],
    index_k: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    sizes: Sizes,
    chip: Chip,
    interpret: Interpret,
    name: str,
) -> Int[Array, "B K T J"]:
    """The selections of all tiles, as many rows of the batch at a time as the tables allow."""
    check(name, index_q, sizes, interpret)
    if index_k.table is None:
        return _walk(index_q, index_k, positions, lengths, sizes, chip, interpret, name)
    out, group = [], max(1, PREFETCHED // index_k.num_blocks)
    for start in range(0, len(index_q), group):
        rows = slice(start, start + group)
        where = dataclasses.replace(index_k, table=index_k.table[rows])
        out.append(_walk(index_q[rows], where, positions[rows], lengths[rows], sizes, chip, interpret, name))
    return jnp.concatenate(out) if len(out) > 1 else out[0]


def _walk(index_q, index_k, positions, lengths, sizes: Sizes, chip: Chip, interpret, name):
    batch, length, heads, width = index_q.shape
    tiles = -(-length // sizes.tokens)
    padded = tiles * sizes.tokens
    at = seen_positions(positions, lengths, padded)
    own = jnp.where(at >= 0, at // index_k.block_size, -1).reshape(batch * tiles, sizes.tokens)
    # With one slot there is nothing to choose, and nothing to read.
    stops = jnp.clip(jnp.max(own, axis=1), 0, index_k.num_blocks if sizes.top_k > 1 else 0).astype(jnp.int32)
    q = jnp.pad(index_q, ((0, 0), (0, padded - length), (0, 0), (0, 0))).reshape(batch * tiles, sizes.pairs, width)
    fold = lambda x, value: jnp.tile(
        jnp.pad(x, [(0, 0), (0, sizes.fold - sizes.pairs), *[(0, 0)] * (x.ndim - 2)], constant_values=value),
        (1, sizes.folds, *[1] * (x.ndim - 2)),
    )
    per_core = chip.shared(batch * tiles)
    steps = per_core * chip.cores
    lanes_own = fold(jnp.repeat(own, heads, axis=1), -1)[:, None]
    operands = (pad_steps(fold(q, 0), steps), pad_steps(lanes_own, steps, -1))
    table = flat_table(index_k, slice(None))
    prefetched = (index_k.layer.reshape(1), pad_steps(stops, steps), *table)
    # A core takes every cores-th step: late tiles have the most keys.
    at_step = lambda core, i, *_: (i * chip.cores + core, 0, 0)
    out = pl.pallas_call(
        partial(_kernel, sizes=sizes, tiles=tiles, batch=batch, paged=bool(table)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(chip.cores, per_core),
            in_specs=[
                pl.BlockSpec((1, sizes.width, width), at_step),
                pl.BlockSpec((1, 1, sizes.width), at_step),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, sizes.top_k, sizes.width), at_step),
            scratch_shapes=[
                pltpu.VMEM((2, sizes.pages, *index_k.pool.shape[1:]), index_k.pool.dtype),
                pltpu.VMEM((sizes.listed, sizes.width), jnp.float32),
                pltpu.VMEM((max(1, sizes.top_k - 1), sizes.width), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((steps, sizes.top_k, sizes.width), jnp.int32),
        compiler_params=chip.params("parallel", "arbitrary"),
        interpret=interpret,
        name=name,
    )(*prefetched, *operands, index_k.pool)
    out = out[: batch * tiles, :, : sizes.pairs].reshape(batch, tiles, sizes.top_k, sizes.tokens, heads)
    out = jnp.transpose(out, (0, 4, 1, 3, 2)).reshape(batch, heads, padded, sizes.top_k)
    return out[:, :, :length]


def _kernel(layer_ref, stops_ref, *rest, sizes: Sizes, tiles: int, batch: int, paged: bool):
    table_ref = rest[0] if paged else None
    q_ref, own_ref, pool_ref, out_ref, buffers, list_ref, ids_ref, walked_ref, sems = rest[paged:]
    core, i = pl.program_id(0), pl.program_id(1)
    cores, per_core = pl.num_programs(0), pl.num_programs(1)
    step = i * cores + core
    chunks_of = lambda step: pl.cdiv(stops_ref[step], sizes.pages)

    def pages(step, chunk, slot, do):
        row, first = jnp.minimum(step // tiles, batch - 1), chunk * sizes.pages
        places = []
        for j in range(sizes.pages):
            inside = first + j < stops_ref[step]
            page, held = locate(sizes.index_k, layer_ref, table_ref, row, 0, jnp.where(inside, first + j, 0))
            places.append((page, inside & held))
        each_page(pool_ref, buffers.at[slot], sems.at[slot], places, do)
        return places

    def start_next(slot):
        @pl.when(i + 1 < per_core)
        def _():
            pages(step + cores, 0, slot, "start")

    @pl.when(i == 0)
    def _():
        walked_ref[0] = 0
        pages(step, 0, 0, "start")

    base, chunks = walked_ref[0], chunks_of(step)
    walked_ref[0] = (base + chunks) % 2
    own, q = own_ref[0], q_ref[0]

    @pl.when(chunks == 0)
    def _():
        start_next(base)

    @pl.when(chunks > 0)
    def _():
        # The rows behind the last one of a register are read with it.
        last = pl.multiple_of((chunks * sizes.rows - 1) // SUBLANES * SUBLANES, SUBLANES)
        list_ref[pl.ds(last, SUBLANES), :] = jnp.full((SUBLANES, sizes.width), -jnp.inf, jnp.float32)

    def body(chunk, carry):
        slot = (base + chunk) % 2

        @pl.when(chunk + 1 < chunks)
        def _():
            pages(step, chunk + 1, 1 - slot, "start")

        @pl.when(chunk + 1 == chunks)
        def _():
            start_next(1 - slot)

        places = pages(step, chunk, slot, "wait")
        _score(chunk, [held for _, held in places], buffers.at[slot], q, own, list_ref, sizes)
        return carry

    jax.lax.fori_loop(0, chunks, body, 0)
    _take_best(pl.cdiv(chunks * sizes.rows, SUBLANES), list_ref, ids_ref, sizes)
    ids = [ids_ref[j : j + 1, :] for j in range(sizes.top_k - 1)]
    for j, slot_ids in enumerate(selection(ids, own)):
        out_ref[0, j : j + 1, :] = slot_ids


def _score(chunk, held, buffer_ref, q, own, list_ref, sizes: Sizes) -> None:
    """Put the scores of one buffer of pages into the list."""
    lane_fold = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.width), 1) // sizes.fold
    for row in range(sizes.rows):
        key = None
        for f in range(sizes.folds):
            j = row * sizes.folds + f
            best = jnp.max(dot_nt(buffer_ref[j].astype(q.dtype), q), axis=0, keepdims=True)
            best = jnp.where(held[j], ordered(best), ABOVE)
            key = best if key is None else jnp.where(lane_fold == f, best, key)
        block = chunk * sizes.pages + row * sizes.folds + lane_fold
        if sizes.local_blocks > 1 or sizes.init_blocks > 0:
            key = jnp.where((block > own - sizes.local_blocks) | (block < sizes.init_blocks), jnp.inf, key)
        list_ref[pl.ds(chunk * sizes.rows + row, 1), :] = jnp.where(block < own, key, -jnp.inf)


def _take_best(groups, list_ref, ids_ref, sizes: Sizes) -> None:
    """Take the J - 1 best off the list: each sweep finds the best and strikes out the one before."""
    sublane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, sizes.width), 0)
    lane_fold = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.width), 1) // sizes.fold

    def sweep(j, before):
        def body(g, state):
            best, row = state
            rows = pl.ds(pl.multiple_of(g * SUBLANES, SUBLANES), SUBLANES)
            here = g * SUBLANES + sublane
            key = jnp.where(here * sizes.folds + lane_fold == before, -jnp.inf, list_ref[rows, :])
            list_ref[rows, :] = key
            better = key > best
            return jnp.where(better, key, best), jnp.where(better, here, row)

        none = jnp.full((SUBLANES, sizes.width), -jnp.inf, jnp.float32), jnp.zeros_like(sublane)
        best, row = jax.lax.fori_loop(0, groups, body, none)
        top = jnp.max(best, axis=0, keepdims=True)
        block = jnp.min(jnp.where(best == top, row * sizes.folds + lane_fold, _LAST), axis=0, keepdims=True)
        shift = sizes.fold
        while shift < sizes.width and sizes.folds > 1:
            other, other_block = pltpu.roll(top, shift, 1), pltpu.roll(block, shift, 1)
            better = (other > top) | ((other == top) & (other_block < block))
            top, block = jnp.where(better, other, top), jnp.where(better, other_block, block)
            shift *= 2
        block = jnp.where(top == -jnp.inf, _LAST, block)
        ids_ref[pl.ds(j, 1), :] = block
        return block

    jax.lax.fori_loop(0, sizes.top_k - 1, sweep, jnp.full((1, sizes.width), -1, jnp.int32))


def check(name: str, index_q, sizes: Sizes, interpret: Interpret) -> None:
    """Raise ValueError where the operands of an index kernel do not fit together."""
    index_k = sizes.index_k
    check_view("index_k", index_k, index_q.shape[0], interpret)
    if sizes.local_blocks < 1 or sizes.init_blocks < 0 or sizes.local_blocks + sizes.init_blocks > sizes.top_k:
        raise ValueError(
            f"local_blocks = {sizes.local_blocks}, init_blocks = {sizes.init_blocks}, top_k = {sizes.top_k}: need "
            "local_blocks >= 1, init_blocks >= 0, and both together at most top_k"
        )
    if index_k.pool.dtype not in (index_q.dtype, jnp.float8_e4m3fn) or index_q.shape[-1] != index_k.width:
        raise ValueError(
            f"index_q is {index_q.dtype} of width {index_q.shape[-1]} and index_k {index_k.pool.dtype} of "
            f"{index_k.width}: need the same width, and keys in the queries' dtype or float8_e4m3fn"
        )
