"""Dense causal attention over pages in a Triton kernel: the walk of query_union, over all blocks up to the diagonal."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.backends import Limits
from pallas_kernels.dense_causal import Call
from pallas_kernels.numbers import BEHIND_ALL
from pallas_kernels.pages import FinderRefs, seen_positions
from pallas_kernels.sparse_prefill.triton.query_union import default_config
from pallas_kernels.sparse_prefill.triton.sizes import Config, Sizes
from pallas_kernels.triton_common import Softmax, check_pool, div, dot, empty_softmax, finish, fold, late_first, rem

__all__ = ["LIMITS", "Config", "run"]

LIMITS = Limits(check_pages=check_pool, config=Config)


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `dense_causal` on a checked call."""
    batch, _, _, width = call.q.shape
    config = config or default_config(call.q.dtype)
    sizes = Sizes.of(call, call.kv_heads, 0, config)
    query_positions = seen_positions(call.positions, call.lengths, sizes.out_tokens)
    out, lse = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=(sizes.tiles, call.kv_heads, batch),
        out_shape=sizes.out_shape(batch, call.q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=call.interpret,
        name="dense_causal",
    )(call.q.reshape(batch, -1, width), query_positions, call.k.pool, call.k.finder(), call.v.pool)
    return sizes.trim(out, lse)


def _kernel(q_ref, positions_ref, k_ref, finder: FinderRefs, v_ref, out_ref, lse_ref, *, sizes: Sizes):
    tile, head, row = late_first(sizes.tiles), pl.program_id(1), pl.program_id(2)
    tile_token, member = sizes.tile_lanes()
    token = sizes.first_token(tile) + tile_token
    source = jnp.minimum(token, sizes.length - 1) * sizes.heads
    q = q_ref[row, source + head * sizes.group + jnp.minimum(member, sizes.group - 1), :]  # [R H]
    position = positions_ref[row, token]
    last_position = jnp.max(position)

    def take_piece(i, state: Softmax, *, is_masked: bool) -> Softmax:
        block, start = div(i, sizes.pieces), rem(i, sizes.pieces) * sizes.keys
        page, is_held = sizes.k.locate(finder, row, head, block)
        scores = dot(q, k_ref[page, pl.ds(start, sizes.keys), :], transpose=True)  # [R S]
        key_position = block * sizes.k.block_size + start + jnp.arange(sizes.keys, dtype=jnp.int32)
        # A page may be missing anywhere, and what it reads as may not be finite.
        is_seen, is_read = is_held, jnp.full(key_position.shape, is_held)
        if is_masked:
            is_seen = is_held & (key_position[None, :] <= position[:, None])
            is_read = is_held & (key_position <= last_position)
        if is_masked or finder.table is not None:
            scores = jnp.where(is_seen, scores, -jnp.inf)
        v = plgpu.load(v_ref.at[page, pl.ds(start, sizes.keys), :], mask=is_read[:, None], other=0.0)
        return fold(state, scores, None, v, scale=sizes.scale, interpret=sizes.interpret)

    state = empty_softmax(sizes.tile_rows, sizes.width)
    # Pieces before `whole` are seen whole by every query of the tile; from `stop` on none is seen.
    stop = jnp.minimum(div(last_position + sizes.keys, sizes.keys), sizes.k.num_blocks * sizes.pieces)
    first_position = jnp.min(jnp.where(position >= 0, position, BEHIND_ALL))
    whole = jnp.minimum(div(first_position + 1, sizes.keys), stop)
    state = jax.lax.fori_loop(0, whole, partial(take_piece, is_masked=False), state)
    state = jax.lax.fori_loop(whole, stop, partial(take_piece, is_masked=True), state)
    # Padding took part in the blocks that every query of the tile sees whole.
    out, lse = finish(state._replace(total=jnp.where(position >= 0, state.total, 0.0)))
    target = sizes.out_row(token, head, member)
    out_ref[row, target, :] = out.astype(out_ref.dtype)
    if lse_ref is not None:
        lse_ref[row, target] = lse
