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
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.backends import Interpret
from pallas_kernels.index_topk import Call, Selected
from pallas_kernels.index_topk.ranking import KEY_OF_MINUS_INF, selection, sort_key
from pallas_kernels.mosaic_common import (
    PREFETCHED,
    SUBLANES,
    Chip,
    dot_nt,
    each_page,
    flat_finder,
    kernel_cost,
    locate,
    pad_steps,
)
from pallas_kernels.numbers import BEHIND_ALL
from pallas_kernels.pages import FinderRefs, Pages, seen_positions


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
    return_keys: bool

    @property
    def pairs(self) -> int:
        """The number of (query, head) pairs of a tile."""
        return self.tokens * self.heads

    @property
    def fold_lanes(self) -> int:
        """The number of lanes that each copy of the pairs has in a step."""
        return self.width // self.folds

    @property
    def buffer_rows(self) -> int:
        """Rows of the list that one buffer of pages fills."""
        return self.pages // self.folds

    @property
    def list_rows(self) -> int:
        """Rows of the whole list."""
        return -(-self.index_k.num_blocks // self.pages) * self.buffer_rows + SUBLANES


def walk(call: Call, *, sizes: Sizes, chip: Chip, name: str) -> Selected:
    """The selections of all tiles, as many rows of the batch at a time as the tables allow; keys too if asked for."""
    options = dict(sizes=sizes, chip=chip, interpret=call.interpret, name=name)
    index_q, index_k, positions, lengths = call.index_q, call.index_k, call.positions, call.lengths
    if index_k.table is None:
        chosen = _walk_rows(index_q, index_k, positions, lengths, **options)
        return chosen if sizes.return_keys else chosen[0]
    parts, group = [], max(1, PREFETCHED // index_k.num_blocks)
    for start in range(0, len(index_q), group):
        rows = slice(start, start + group)
        pages = dataclasses.replace(index_k, table=index_k.table[rows])
        parts.append(_walk_rows(index_q[rows], pages, positions[rows], lengths[rows], **options))
    chosen = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return chosen if sizes.return_keys else chosen[0]


def _walk_rows(
    index_q: Float[Array, "B T K H"],
    index_k: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    sizes: Sizes,
    chip: Chip,
    interpret: Interpret,
    name: str,
) -> tuple[Shaped[Array, "B K T J"], ...]:
    batch, length, heads, width = index_q.shape
    tiles = -(-length // sizes.tokens)
    padded = tiles * sizes.tokens
    query_positions = seen_positions(positions, lengths, padded)
    own_block = jnp.where(query_positions >= 0, query_positions // index_k.block_size, -1)
    own_block = own_block.reshape(batch * tiles, sizes.tokens)
    # With one slot there is nothing to choose, and nothing to read.
    num_walked = index_k.num_blocks if sizes.top_k > 1 else 0
    stops = jnp.clip(jnp.max(own_block, axis=1), 0, num_walked).astype(jnp.int32)
    q = jnp.pad(index_q, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
    q = q.reshape(batch * tiles, sizes.pairs, width)  # [steps, pairs, H]

    def fold_lanes(x: Shaped[Array, "X Y ..."], fill: int) -> Shaped[Array, "X Z ..."]:
        """Return the pairs, filled up to `sizes.fold_lanes`, as many times side by side as a step has folds."""
        trailing = x.ndim - 2
        x = jnp.pad(x, [(0, 0), (0, sizes.fold_lanes - sizes.pairs), *[(0, 0)] * trailing], constant_values=fill)
        return jnp.tile(x, (1, sizes.folds, *[1] * trailing))

    per_core = chip.steps_per_core(batch * tiles)
    steps = per_core * chip.cores
    lanes_own = fold_lanes(jnp.repeat(own_block, heads, axis=1), -1)[:, None]  # [steps, 1, lanes]
    lanes_q = pad_steps(fold_lanes(q, 0), steps)  # [steps, lanes, H]
    lanes_own = pad_steps(lanes_own, steps, -1)
    finder = flat_finder(index_k, slice(None))
    # A core takes every cores-th step: late tiles have the most keys.
    at_step = lambda core, i, *_: (i * chip.cores + core, 0, 0)
    operands = finder, pad_steps(stops, steps), lanes_q, lanes_own
    outputs = [
        jax.ShapeDtypeStruct((steps, sizes.top_k, sizes.width), dtype)
        for dtype in (jnp.int32, jnp.float32)[: 1 + sizes.return_keys]
    ]
    walked = batch * tiles * num_walked
    chosen = pl.pallas_call(
        partial(_kernel, sizes=sizes, tiles=tiles, batch=batch),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(chip.cores, per_core),
            in_specs=[
                pl.BlockSpec((1, sizes.width, width), at_step),
                pl.BlockSpec((1, 1, sizes.width), at_step),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[pl.BlockSpec((1, sizes.top_k, sizes.width), at_step)] * (1 + sizes.return_keys),
            scratch_shapes=[
                pltpu.VMEM((2, sizes.pages, *index_k.pool.shape[1:]), index_k.pool.dtype),
                pltpu.VMEM((sizes.list_rows, sizes.width), jnp.float32),
                pltpu.VMEM((max(1, sizes.top_k - 1), sizes.width), jnp.int32),
                pltpu.VMEM((max(1, sizes.top_k - 1), sizes.width), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=outputs,
        compiler_params=chip.compiler_params("parallel", "arbitrary"),
        cost_estimate=kernel_cost(
            operands, outputs, copied=walked * index_k.page_bytes,
            products=2 * walked * index_k.block_size * sizes.fold_lanes * width,
        ),
        interpret=interpret,
        name=name,
    )(*operands, index_k.pool)  # fmt: skip

    def by_query(x):
        x = x[: batch * tiles, :, : sizes.pairs].reshape(batch, tiles, sizes.top_k, sizes.tokens, heads)
        return jnp.transpose(x, (0, 4, 1, 3, 2)).reshape(batch, heads, padded, sizes.top_k)[:, :, :length]  # [B K T J]

    return tuple(by_query(x) for x in chosen)


def _kernel(
    finder: FinderRefs,
    stops_ref,
    q_ref,
    own_ref,
    pool_ref,
    *refs,
    sizes: Sizes,
    tiles: int,
    batch: int,
):
    *chosen_refs, buffers, list_ref, ids_ref, keys_ref, walked_ref, sems = refs
    core, i = pl.program_id(0), pl.program_id(1)
    cores, per_core = pl.num_programs(0), pl.num_programs(1)
    step = i * cores + core
    chunks_of = lambda step: pl.cdiv(stops_ref[step], sizes.pages)

    def copy_pages(step, chunk, slot, do: str):
        """Start or await the copies of one buffer of pages; (page, is_wanted) of each."""
        row, first = jnp.minimum(step // tiles, batch - 1), chunk * sizes.pages
        places = []
        for j in range(sizes.pages):
            is_inside = first + j < stops_ref[step]
            page, is_held = locate(sizes.index_k, finder, row, 0, jnp.where(is_inside, first + j, 0))
            places.append((page, is_inside & is_held))
        each_page(pool_ref, buffers.at[slot], sems.at[slot], places, do)
        return places

    def start_next_step(slot):
        @pl.when(i + 1 < per_core)
        def _():
            copy_pages(step + cores, 0, slot, "start")

    @pl.when(i == 0)
    def _():
        walked_ref[0] = 0
        copy_pages(step, 0, 0, "start")

    # Which of the two buffers this step starts with: chunks walked by the steps before, modulo 2.
    base, chunks = walked_ref[0], chunks_of(step)
    walked_ref[0] = (base + chunks) % 2
    own_block, q = own_ref[0], q_ref[0]

    @pl.when(chunks == 0)
    def _():
        start_next_step(base)

    @pl.when(chunks > 0)
    def _():
        # The rows behind the last one of a register are read with it.
        last = pl.multiple_of((chunks * sizes.buffer_rows - 1) // SUBLANES * SUBLANES, SUBLANES)
        list_ref[pl.ds(last, SUBLANES), :] = jnp.full((SUBLANES, sizes.width), -jnp.inf, jnp.float32)

    def body(chunk, carry):
        slot = (base + chunk) % 2

        @pl.when(chunk + 1 < chunks)
        def _():
            copy_pages(step, chunk + 1, 1 - slot, "start")

        @pl.when(chunk + 1 == chunks)
        def _():
            start_next_step(1 - slot)

        places = copy_pages(step, chunk, slot, "wait")
        _score(chunk, [is_held for _, is_held in places], buffers.at[slot], q, own_block, list_ref, sizes)
        return carry

    jax.lax.fori_loop(0, chunks, body, 0)
    _take_best(pl.cdiv(chunks * sizes.buffer_rows, SUBLANES), list_ref, ids_ref, keys_ref, sizes)
    ids = tuple(ids_ref[j : j + 1, :] for j in range(sizes.top_k - 1))
    if not sizes.return_keys:
        for j, slot_ids in enumerate(selection(ids, own_block)):
            chosen_refs[0][0, j : j + 1, :] = slot_ids
        return
    # In the list's order, which their keys have too; the own block last.
    for j, slot_ids in enumerate((*ids, own_block)):
        is_own = j == len(ids)
        chosen_refs[0][0, j : j + 1, :] = jnp.where(slot_ids < BEHIND_ALL, slot_ids, -1)
        own_key = jnp.where(own_block >= 0, jnp.inf, -jnp.inf)
        chosen_refs[1][0, j : j + 1, :] = own_key if is_own else keys_ref[j : j + 1, :]


def _score(
    chunk: Int[Array, ""],
    is_held: list[Bool[Array, ""]],
    buffer_ref,
    q: Float[Array, "R H"],
    own_block: Int[Array, "1 R"],
    list_ref,
    sizes: Sizes,
) -> None:
    """Put the scores of one buffer of pages into the list."""
    lane_fold = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.width), 1) // sizes.fold_lanes
    for row in range(sizes.buffer_rows):
        key = None
        for fold in range(sizes.folds):
            j = row * sizes.folds + fold
            highest = jnp.max(dot_nt(buffer_ref[j].astype(q.dtype), q), axis=0, keepdims=True)
            highest = jnp.where(is_held[j], sort_key(highest), KEY_OF_MINUS_INF)
            key = highest if key is None else jnp.where(lane_fold == fold, highest, key)
        block = chunk * sizes.pages + row * sizes.folds + lane_fold
        if sizes.local_blocks > 1 or sizes.init_blocks > 0:
            is_forced = (block > own_block - sizes.local_blocks) | (block < sizes.init_blocks)
            key = jnp.where(is_forced, jnp.inf, key)
        list_ref[pl.ds(chunk * sizes.buffer_rows + row, 1), :] = jnp.where(block < own_block, key, -jnp.inf)


def _take_best(groups: Int[Array, ""], list_ref, ids_ref, keys_ref, sizes: Sizes) -> None:
    """Take the J - 1 best off the list, with their keys: each sweep finds the best and strikes out the one before."""
    sublane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, sizes.width), 0)
    lane_fold = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.width), 1) // sizes.fold_lanes

    def sweep(j, taken_block):
        def body(group, state):
            best_key, best_row = state
            rows = pl.ds(pl.multiple_of(group * SUBLANES, SUBLANES), SUBLANES)
            list_row = group * SUBLANES + sublane
            key = jnp.where(list_row * sizes.folds + lane_fold == taken_block, -jnp.inf, list_ref[rows, :])
            list_ref[rows, :] = key
            is_better = key > best_key
            return jnp.where(is_better, key, best_key), jnp.where(is_better, list_row, best_row)

        nothing = jnp.full((SUBLANES, sizes.width), -jnp.inf, jnp.float32), jnp.zeros_like(sublane)
        best_key, best_row = jax.lax.fori_loop(0, groups, body, nothing)
        top = jnp.max(best_key, axis=0, keepdims=True)
        is_top = best_key == top
        block = jnp.min(jnp.where(is_top, best_row * sizes.folds + lane_fold, BEHIND_ALL), axis=0, keepdims=True)
        # The best of all copies of a query, which lie `fold_lanes` apart.
        shift = sizes.fold_lanes
        while shift < sizes.width and sizes.folds > 1:
            other, other_block = pltpu.roll(top, shift, 1), pltpu.roll(block, shift, 1)
            is_better = (other > top) | ((other == top) & (other_block < block))
            top, block = jnp.where(is_better, other, top), jnp.where(is_better, other_block, block)
            shift *= 2
        block = jnp.where(top == -jnp.inf, BEHIND_ALL, block)
        ids_ref[pl.ds(j, 1), :] = block
        keys_ref[pl.ds(j, 1), :] = top
        return block

    jax.lax.fori_loop(0, sizes.top_k - 1, sweep, jnp.full((1, sizes.width), -1, jnp.int32))
