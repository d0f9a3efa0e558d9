"""Sparse attention of a prefill, schedule query_union: a tile of neighbouring queries walks the union of their blocks.

Neighbouring queries choose nearly the same blocks, so a tile of 8 queries x 16 heads loads each block once for 128 rows
of a matrix product. A row that did not choose the block at hand drops out of it by the offset of its exponents, which
costs nothing: `2 ** (s * scale - inf) = 0`. Only blocks near the diagonal are masked token by token.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import Pages, seen_positions
from pallas_kernels.sparse_prefill import Call
from pallas_kernels.sparse_prefill.triton.sizes import Config, Sizes
from pallas_kernels.sparse_prefill.triton.union import Unions, union_blocks
from pallas_kernels.triton_common import Softmax, div, dot, empty_softmax, finish, fold, rem


def query_union(call: Call, config: Config | None) -> tuple[Array, ...]:
    """`sparse_prefill` of a checked call by this schedule."""
    sizes = Sizes.of(call, call.blocks.shape[1], call.blocks.shape[3], config or default_config(call.q.dtype))
    query_positions = seen_positions(call.positions, call.lengths, sizes.out_tokens)
    return walk_unions(call.q, call.v, query_positions, union_blocks(call.blocks, query_positions, sizes), sizes)


def walk_unions(
    q: Float[Array, "B T N H"], v: Pages, query_positions: Int[Array, "B T2"], unions: Unions, sizes: Sizes
) -> tuple[Array, ...]:
    """The second half of `query_union`: attention, with the unions at hand."""
    batch, config = q.shape[0], sizes.config
    out, lse = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=(sizes.tiles, sizes.kv_heads, batch),
        out_shape=sizes.out_shape(batch, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=sizes.interpret,
        name="query_union",
    )(q.reshape(batch, -1, sizes.width), query_positions, unions, sizes.k.pool, v.pool)
    return sizes.trim(out, lse)


def _kernel(q_ref, positions_ref, unions: Unions, k_ref, v_ref, out_ref, lse_ref, *, sizes: Sizes):
    tile, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tile_token, member = sizes.tile_lanes()
    token = sizes.first_token(tile) + tile_token
    source = jnp.minimum(token, sizes.length - 1) * sizes.heads
    q = q_ref[row, source + head * sizes.group + jnp.minimum(member, sizes.group - 1), :]  # [R H]
    position = positions_ref[row, token]
    last_position = jnp.max(position)

    def take_piece(i, state: Softmax, *, is_masked: bool) -> Softmax:
        entry, start = div(i, sizes.pieces), rem(i, sizes.pieces) * sizes.keys
        page = unions.pages[row, head, tile, entry]
        is_wanted = ((unions.bits[row, head, tile, entry] >> tile_token) & 1) == 1
        scores = dot(q, k_ref[page, pl.ds(start, sizes.keys), :], transpose=True)  # [R S]
        if not is_masked:
            v = v_ref[page, pl.ds(start, sizes.keys), :]
            bias = jnp.where(is_wanted, 0.0, -jnp.inf)
            return fold(state, scores, bias, v, scale=sizes.scale, interpret=sizes.interpret)
        first = unions.ids[row, head, tile, entry] * sizes.k.block_size
        key_position = first + start + jnp.arange(sizes.keys)
        is_visible = is_wanted[:, None] & (key_position[None, :] <= position[:, None])
        is_read = (key_position <= last_position)[:, None]
        v = plgpu.load(v_ref.at[page, pl.ds(start, sizes.keys), :], mask=is_read, other=0.0)
        scores = jnp.where(is_visible, scores, -jnp.inf)
        return fold(state, scores, None, v, scale=sizes.scale, interpret=sizes.interpret)

    state = empty_softmax(sizes.tile_rows, sizes.width)
    whole, entries = unions.counts[row, head, tile, 0], unions.counts[row, head, tile, 1]
    state = jax.lax.fori_loop(0, whole * sizes.pieces, partial(take_piece, is_masked=False), state)
    state = jax.lax.fori_loop(whole * sizes.pieces, entries * sizes.pieces, partial(take_piece, is_masked=True), state)
    out, lse = finish(state)
    target = sizes.out_row(token, head, member)
    out_ref[row, target, :] = out.astype(out_ref.dtype)
    if lse_ref is not None:
        lse_ref[row, target] = lse


def default_config(dtype: jax.typing.DTypeLike) -> Config:
    """Tile sizes that measured best on an H200; float32 products are slow and need small ones."""
    return Config(tokens=4, keys=32, num_warps=4, num_stages=1) if dtype == jnp.float32 else Config()
