"""Sparse attention of a prefill, schedule kv_block_major: each block meets the queries that chose it.

The selection is inverted (csr.py). A program holds one block of keys and values and walks the queries that chose it,
a few queries x 16 heads at a time. It writes their normalised partial outputs, each (query, slot) pair to a place of
its own, and a second kernel merges them by log-sum-exp (paper, section 4). Nothing is added in an order that could
change.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pages import FinderRefs, seen_positions
from pallas_kernels.sparse_prefill import Call
from pallas_kernels.sparse_prefill.triton.csr import Inverted, invert, search, seen_blocks
from pallas_kernels.sparse_prefill.triton.sizes import Config, Sizes
from pallas_kernels.triton_common import LOG2E, div, divisor, dot, exp2, natural_lse, rem

_WORK_TILES = 32  # tiles of queries that share one load of a block
_CHUNK_PAIRS = 1 << 17  # (query, slot) pairs of a KV head whose partial outputs are held at once


def kv_block_major(call: Call, config: Config | None, chunk: int | None = None) -> tuple[Array, ...]:
    """`sparse_prefill` of a checked call by this schedule.

    `chunk` is how many queries of a row have their partial outputs, J of them each, in memory at once.
    """
    length, slots = call.q.shape[1], call.blocks.shape[3]
    config = default_config(call.q.dtype) if config is None else config
    query_positions = seen_positions(call.positions, call.lengths, length)
    chunk = min(length, chunk or max(1, _CHUNK_PAIRS // slots))
    sizes = Sizes.of(call, call.blocks.shape[1], slots, config)
    out, lse = None, None
    for start in range(0, length, chunk):
        piece = slice(start, start + chunk)
        out, lse = _attend_chunk(
            call, call.blocks[:, :, piece], query_positions[:, piece], (out, lse), start=start, sizes=sizes
        )

    def trim(x: Array) -> Array:
        """Drop the heads that fill a group up to a power of two: `[B T N ...]`."""
        x = x.reshape(x.shape[0], sizes.length, sizes.kv_heads, sizes.padded_group, *x.shape[2:])
        x = x[:, :, :, : sizes.group]
        return x.reshape(*x.shape[:2], sizes.heads, *x.shape[4:])

    return (trim(out),) if lse is None else (trim(out), trim(lse))


def default_config(dtype: jax.typing.DTypeLike) -> Config:
    """Return the sizes for queries in this dtype; 32-bit numbers fill registers and shared memory twice as fast."""
    return Config(tokens=2, num_warps=4, num_stages=1) if dtype == jnp.float32 else Config(tokens=4, num_stages=3)


def _attend_chunk(
    call: Call,
    blocks: Int[Array, "B K C J"],
    query_positions: Int[Array, "B C"],
    before: tuple[Float[Array, "B X H"] | None, Float[Array, "B X"] | None],
    *,
    start: int,
    sizes: Sizes,
) -> tuple[Float[Array, "B X H"], Float[Array, "B X"] | None]:
    """(out, lse) of the queries from `start` on, written into those of the chunks before."""
    batch, kv_heads, length, _ = blocks.shape
    config, k = sizes.config, sizes.k
    is_seen = seen_blocks(blocks, query_positions, sizes)
    per_work = sizes.tile_tokens * _WORK_TILES
    inverted = invert(blocks, is_seen, query_positions, sizes, per_work)
    pairs = blocks.size
    bins = batch * kv_heads * k.num_blocks
    # The last tile's lanes without a pair write behind the end.
    lanes = (pairs + sizes.tile_tokens) * sizes.padded_group
    parts, part_lses = pl.pallas_call(
        partial(
            _block_kernel, sizes=sizes, start=start, length=length, bins=bins, per_work=per_work, pairs=pairs
        ),
        grid=(pairs // per_work + min(pairs, bins),),
        out_shape=(
            jax.ShapeDtypeStruct((lanes, sizes.width), call.q.dtype),
            jax.ShapeDtypeStruct((lanes,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=sizes.interpret,
        name="kv_block_major",
    )(
        call.q.reshape(-1, sizes.width), query_positions.reshape(-1), call.lengths, inverted,
        k.pool, k.finder(), call.v.pool,
    )  # fmt: skip
    return _merge(parts, part_lses, is_seen, before, start=start, sizes=sizes)


def _block_kernel(
    q_ref,
    positions_ref,
    lengths_ref,
    inverted: Inverted,
    k_ref,
    finder: FinderRefs,
    v_ref,
    parts_ref,
    part_lses_ref,
    *,
    sizes: Sizes,
    start: int,
    length: int,
    bins: int,
    per_work: int,
    pairs: int,
):
    """One piece of the queries that chose one block; `start` and `length` are those of the chunk of queries."""
    work = pl.program_id(0)
    bin_ = search(lambda i: inverted.works[i] <= work, bins, jnp.int32(0))

    @pl.when(bin_ < bins)
    def _():
        block = rem(bin_, sizes.k.num_blocks)
        row_head = div(bin_, sizes.k.num_blocks)
        row, head = div(row_head, sizes.kv_heads), rem(row_head, sizes.kv_heads)
        page, _ = sizes.k.locate(finder, row, head, block)
        # The works before this one in the same bin.
        earlier = work - jnp.where(bin_ > 0, inverted.works[jnp.maximum(bin_ - 1, 0)], 0)
        first_pair = inverted.first[bin_] + earlier * per_work
        stop_pair = jnp.minimum(first_pair + per_work, inverted.first[bin_ + 1])
        # Pairs that see only a part of the block come first.
        partly = jnp.clip(inverted.first_whole[bin_] - first_pair, 0, stop_pair - first_pair)
        key_position = block * sizes.k.block_size + jnp.arange(sizes.k.block_size, dtype=jnp.int32)
        k = k_ref[page, :, :]  # [P H]
        v = plgpu.load(v_ref.at[page, :, :], mask=(key_position < lengths_ref[row])[:, None], other=0.0)
        tile_pair, member = sizes.tile_lanes()

        def attend_tile(i, state, *, is_masked: bool):
            place = first_pair + i * sizes.tile_tokens + tile_pair
            is_real = place < stop_pair
            pair = inverted.pairs[jnp.where(is_real, place, first_pair)]
            # Pairs count (row, KV head, query of the chunk, slot); rows of q count (row, query, head).
            token = div(pair, sizes.slots) - row_head * length
            group_head = head * sizes.group + jnp.minimum(member, sizes.group - 1)
            q = q_ref[(row * sizes.length + start + token) * sizes.heads + group_head, :]  # [R H]
            scores = dot(q, k, transpose=True)  # [R P]
            if is_masked:
                position = positions_ref[row * length + token]
                scores = jnp.where(key_position[None, :] <= position[:, None], scores, -jnp.inf)
            top = jnp.max(scores, axis=1) * sizes.scale
            weights = exp2(scores * sizes.scale - top[:, None], sizes.interpret)
            total = jnp.sum(weights, axis=1)
            out = dot(weights.astype(v.dtype), v) / total[:, None]
            target = jnp.where(is_real, pair, pairs + tile_pair) * sizes.padded_group + member
            parts_ref[target, :] = out.astype(parts_ref.dtype)
            part_lses_ref[target] = top + jnp.log(total) * LOG2E
            return state

        tiles = lambda count: div(count + sizes.tile_tokens - 1, sizes.tile_tokens)
        masked_tiles = tiles(partly)
        # The loops carry a number that nobody reads: Pallas's Triton loops must carry something.
        state = jax.lax.fori_loop(0, masked_tiles, partial(attend_tile, is_masked=True), jnp.int32(0))
        jax.lax.fori_loop(masked_tiles, tiles(stop_pair - first_pair), partial(attend_tile, is_masked=False), state)


def _merge(
    parts: Float[Array, "L H"],
    part_lses: Float[Array, " L"],
    is_seen: Bool[Array, "B K C J"],
    before: tuple[Float[Array, "B X H"] | None, Float[Array, "B X"] | None],
    *,
    start: int,
    sizes: Sizes,
) -> tuple[Float[Array, "B X H"], Float[Array, "B X"] | None]:
    """Join the J partial outputs of each query of a chunk, and write them into the outputs of the chunks before."""
    batch, kv_heads, length, _ = is_seen.shape
    rows = sizes.length * kv_heads * sizes.padded_group
    out_shape = jax.ShapeDtypeStruct((batch, rows, sizes.width), parts.dtype)
    lse_shape = jax.ShapeDtypeStruct((batch, rows), jnp.float32) if sizes.return_lse else None
    num_aliased = len(jax.tree.leaves(before))
    return pl.pallas_call(
        partial(_merge_kernel, sizes=sizes, start=start, length=length),
        grid=(length, kv_heads, batch),
        out_shape=(out_shape, lse_shape),
        input_output_aliases={3 + i: i for i in range(num_aliased)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=sizes.interpret,
        name="kv_block_major_merge",
    )(parts, part_lses, is_seen.astype(jnp.int32), before)


def _merge_kernel(parts_ref, part_lses_ref, is_seen_ref, before, out_ref, lse_ref, *, sizes: Sizes, start, length):
    del before  # the same memory as the outputs
    token, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    member = jnp.arange(sizes.padded_group, dtype=jnp.int32)
    first_pair = ((row * sizes.kv_heads + head) * length + token) * sizes.slots

    is_seen = lambda j: is_seen_ref[row, head, token, j] != 0

    def part_lse(j):
        part = part_lses_ref[(first_pair + j) * sizes.padded_group + member]
        return jnp.where(is_seen(j), part, -jnp.inf)

    top = jnp.full((sizes.padded_group,), -jnp.inf, jnp.float32)
    top = jax.lax.fori_loop(0, sizes.slots, lambda j, top: jnp.maximum(top, part_lse(j)), top)
    top = jnp.where(top == -jnp.inf, 0.0, top)

    def add_part(j, state):
        values, total = state
        weight = exp2(part_lse(j) - top, sizes.interpret)
        # A place that nothing wrote holds anything: 0 x NaN would be NaN. It is not read either.
        place = pl.ds((first_pair + j) * sizes.padded_group, sizes.padded_group)
        part = plgpu.load(parts_ref.at[place, :], mask=jnp.full(values.shape, is_seen(j)), other=0.0)
        part = part.astype(jnp.float32)
        part = jnp.where(weight[:, None] != 0.0, part * weight[:, None], 0.0)
        return values + part, total + weight

    nothing = jnp.zeros((sizes.padded_group, sizes.width), jnp.float32), jnp.zeros((sizes.padded_group,), jnp.float32)
    values, total = jax.lax.fori_loop(0, sizes.slots, add_part, nothing)
    sees_any, safe_total = divisor(total)
    target = sizes.out_row(start + token, head, member)
    out_ref[row, target, :] = (values / safe_total[:, None]).astype(out_ref.dtype)
    if lse_ref is not None:
        lse_ref[row, target] = natural_lse(top, sees_any, safe_total)
