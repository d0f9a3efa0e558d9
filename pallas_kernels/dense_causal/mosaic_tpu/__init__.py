"""Dense causal attention over pages in a Mosaic TPU kernel: a walk over all blocks up to the diagonal.

A step holds the query heads of a tile of tokens and one KV head as lanes. The pages of their row stream through four
sets of buffers, copied by hand three blocks ahead.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, Limits, TileConfig
from pallas_kernels.dense_causal import Call
from pallas_kernels.mosaic_common import (
    INTERPRETERS,
    PREFETCHED,
    Chip,
    by_rows,
    check_tiles,
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
from pallas_kernels.numbers import UNSEEN
from pallas_kernels.pages import FinderRefs, Pages, seen_positions

__all__ = ["LIMITS", "Config", "run"]

_BUFFERS = 4


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step."""

    tokens: int = 64  # queries of a step: a product with them takes longer than reading the block that they meet


LIMITS = Limits(check_pages=check_tiles, config=Config, interpreters=INTERPRETERS)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    k: Pages
    tokens: int
    tiles: int
    kv_heads: int
    group: int
    width: int

    @property
    def lanes(self) -> int:
        """Lanes of a step: its tokens x G."""
        return self.tokens * self.group


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `dense_causal` on a checked call."""
    batch, length, heads, width = call.q.shape
    tokens = (config or Config()).tokens
    tiles = -(-length // tokens)
    sizes = Sizes(call.k, tokens, tiles, call.kv_heads, heads // call.kv_heads, width)
    query_positions = seen_positions(call.positions, call.lengths, tiles * tokens)
    q = jnp.pad(call.q, ((0, 0), (0, tiles * tokens - length), (0, 0), (0, 0)))
    rows_at_once = batch if call.k.table is None else max(1, PREFETCHED // call.k.num_blocks)
    options = dict(sizes=sizes, interpret=call.interpret)
    attend = lambda rows: _attend_rows(q[rows], call.v, query_positions[rows], rows=rows, **options)
    out, lse = (part[:, :length] for part in by_rows(attend, batch, rows_at_once))
    return (out, lse) if call.return_lse else (out,)


def _attend_rows(
    q: Float[Array, "B T2 N H"],
    v: Pages,
    query_positions: Int[Array, "B T2"],
    *,
    rows: slice,
    sizes: Sizes,
    interpret: Interpret,
) -> tuple[Float[Array, "B T2 N H"], Float[Array, "B T2 N"]]:
    """(out, lse) of as many rows of the batch as the prefetched table allows; of all where there is no table."""
    batch, padded, heads, width = q.shape
    k, chip = sizes.k, Chip.current(interpret)
    count = batch * sizes.kv_heads * sizes.tiles
    per_core = chip.steps_per_core(count)
    steps = per_core * chip.cores
    # A step is a (row, KV head, tile), whose lanes are (token, member of the group).
    tile_positions = query_positions.reshape(batch, 1, sizes.tiles, sizes.tokens)
    tile_positions = jnp.broadcast_to(tile_positions, (batch, sizes.kv_heads, sizes.tiles, sizes.tokens))
    tile_positions = tile_positions.reshape(count, sizes.tokens)
    seen_keys = jnp.max(tile_positions, axis=1) + 1  # [count]; 0 where all is padding
    seen_keys = pad_steps(jnp.minimum(seen_keys, k.num_blocks * k.block_size), steps)
    lane_positions = pad_steps(jnp.repeat(tile_positions, sizes.group, axis=1)[:, None], steps, -1)  # [steps 1 lanes]
    grouped = q.reshape(batch, sizes.tiles, sizes.tokens, sizes.kv_heads, sizes.group, width)
    grouped = jnp.moveaxis(grouped, 3, 1).reshape(count, sizes.lanes, width)  # [count lanes H]
    at_step = lambda core, i, *_: (i * chip.cores + core, 0, 0)  # late tiles have the most keys: cores take turns
    buffers = pltpu.VMEM((_BUFFERS, *k.pool.shape[1:]), k.pool.dtype)
    operands = flat_finder(k, rows), seen_keys.astype(jnp.int32), pad_steps(grouped, steps), lane_positions
    outputs = [
        jax.ShapeDtypeStruct((steps, sizes.lanes, width), q.dtype),
        jax.ShapeDtypeStruct((steps, 1, sizes.lanes), jnp.float32),
    ]
    out, lse = pl.pallas_call(
        partial(_kernel, sizes=sizes, count=count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(chip.cores, per_core),
            in_specs=[
                pl.BlockSpec((1, sizes.lanes, width), at_step),
                pl.BlockSpec((1, 1, sizes.lanes), at_step),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[pl.BlockSpec((1, sizes.lanes, width), at_step), pl.BlockSpec((1, 1, sizes.lanes), at_step)],
            scratch_shapes=[
                buffers,
                buffers,
                pltpu.VMEM((width, sizes.lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((_BUFFERS,)),
            ],
        ),
        out_shape=outputs,
        compiler_params=chip.compiler_params("parallel", "arbitrary"),
        cost_estimate=kernel_cost(
            operands, outputs, copied=2 * count * k.num_blocks * k.page_bytes,
            products=4 * count * k.num_blocks * k.block_size * sizes.lanes * width,
        ),
        interpret=interpret,
        name="dense_causal",
    )(*operands, k.pool, v.pool)  # fmt: skip
    by_token = lambda x, *last: jnp.moveaxis(
        x[:count].reshape(batch, sizes.kv_heads, padded, sizes.group, *last), 1, 2
    ).reshape(batch, padded, heads, *last)
    return by_token(out, width), by_token(lse)


def _kernel(
    finder: FinderRefs,
    seen_keys_ref,
    q_ref,
    positions_ref,
    k_pool,
    v_pool,
    out_ref,
    lse_ref,
    k_buffers,
    v_buffers,
    values_ref,
    sems,
    *,
    sizes: Sizes,
    count: int,
):
    step = pl.program_id(1) * pl.num_programs(0) + pl.program_id(0)
    real_step = jnp.minimum(step, count - 1)  # one that only fills up a core's share sees no key
    row, head = real_step // (sizes.kv_heads * sizes.tiles), real_step // sizes.tiles % sizes.kv_heads
    seen_keys = seen_keys_ref[step]
    stop, block_size = pl.cdiv(seen_keys, sizes.k.block_size), sizes.k.block_size

    def copy_block(block, do: str):
        """Start or await a block's copies; return how many of its tokens the tile's last query sees."""
        page, is_held = locate(sizes.k, finder, row, head, block)
        slot = block % _BUFFERS
        for pool, buffers in ((k_pool, k_buffers), (v_pool, v_buffers)):
            each_page(pool, buffers.at[pl.ds(slot, 1)], sems.at[slot], [(page, is_held)], do)
        return jnp.where(is_held, jnp.clip(seen_keys - block * block_size, 0, block_size), 0)

    def start_blocks(first, end) -> None:
        def body(block, carry):
            copy_block(block, "start")
            return carry

        jax.lax.fori_loop(first, jnp.minimum(end, stop), body, 0)

    ahead = _BUFFERS - 1
    start_blocks(0, ahead)
    values_ref[...] = jnp.zeros(values_ref.shape, jnp.float32)
    q, position = q_ref[0], positions_ref[0]

    def take_block(block, state):
        start_blocks(block + ahead, block + ahead + 1)
        seen, slot = copy_block(block, "wait"), block % _BUFFERS
        clean_behind(v_buffers.at[slot], seen)
        # A page may be missing anywhere: then no query sees a key of the block.
        last_key = jnp.where(seen > 0, position - block * block_size, -1)  # [1 lanes]
        return fold_block(q, k_buffers[slot], v_buffers[slot], last_key, sizes.width**-0.5, state, values_ref)

    nothing = jnp.full((1, sizes.lanes), UNSEEN, jnp.float32), jnp.zeros((1, sizes.lanes), jnp.float32)
    top, total = jax.lax.fori_loop(0, stop, take_block, nothing)
    is_seen, total = divisor(total)
    out_ref[0] = (values_ref[...] / total).T.astype(out_ref.dtype)
    lse_ref[0] = natural_lse(top, is_seen, total)
