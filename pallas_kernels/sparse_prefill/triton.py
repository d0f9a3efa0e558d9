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

from pallas_kernels.common import LOG2E, UNSEEN, Pages, div, dot, exp2, rem, seen_positions
from pallas_kernels.sparse_prefill.operands import Config, Sizes, check
from pallas_kernels.sparse_prefill.union import union_blocks


def query_union(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    return_lse: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Attention over the selected blocks, a tile of neighbouring queries at a time.

    Args:
      q: queries after norm and RoPE; bfloat16, float16 or float32.
      k: keys, `contiguous` or `paged`, in the same dtype; finite wherever a query of the row can see them.
      v: values, in the same pages.
      blocks: distinct ids in any order, -1 for none.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      return_lse: also return the natural log-sum-exp of the scaled scores, -inf where nothing was seen.
      config: tile sizes; at most 31 tokens.
      interpret: run on the CPU.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.

    Raises:
      ValueError: operands that do not fit together.
    """
    check(q, k, v, blocks)
    _, length, heads, width = q.shape
    config = config or default_config(q.dtype)
    sizes = Sizes(k, config, length, heads, blocks.shape[1], blocks.shape[3], width, interpret, return_lse)
    at = seen_positions(positions, lengths, sizes.out_tokens)
    return walk_union(q, v, at, union_blocks(blocks, at, sizes), sizes)


def walk_union(q: Float[Array, "B T N H"], v: Pages, at: Int[Array, "B T2"], plan, sizes: Sizes) -> tuple[Array, ...]:
    """`query_union` with the unions at hand (`union_blocks`)."""
    batch, config = q.shape[0], sizes.config
    out = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=(sizes.tiles, sizes.kv_heads, batch),
        out_shape=sizes.out_shape(batch, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=sizes.interpret,
        name="query_union",
    )(q.reshape(batch, -1, sizes.width), at, *plan, sizes.k.pool, v.pool)
    return sizes.trim(out)


def _kernel(q_ref, at_ref, pages_ref, ids_ref, bits_ref, counts_ref, k_ref, v_ref, *out_refs, sizes: Sizes):
    tile, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    lane = jnp.arange(sizes.rows, dtype=jnp.int32)
    member, query = div(lane, sizes.padded_group), rem(lane, sizes.padded_group)
    token = sizes.first(tile) + member
    source = jnp.minimum(token, sizes.length - 1) * sizes.heads
    q = q_ref[row, source + head * sizes.group + jnp.minimum(query, sizes.group - 1), :]
    at = at_ref[row, token]
    last = jnp.max(at)
    pieces = sizes.k.block_size // sizes.keys

    def step(masked):
        def body(i, state):
            entry, start = div(i, pieces), rem(i, pieces) * sizes.keys
            page = pages_ref[row, head, tile, entry]
            wanted = ((bits_ref[row, head, tile, entry] >> member) & 1) == 1
            scores = dot(q, k_ref[page, pl.ds(start, sizes.keys), :], transpose=True)
            if not masked:
                v = v_ref[page, pl.ds(start, sizes.keys), :]
                return fold(state, scores, jnp.where(wanted, 0.0, -jnp.inf), v, sizes)
            slots = ids_ref[row, head, tile, entry] * sizes.k.block_size + start + jnp.arange(sizes.keys)
            visible = wanted[:, None] & (slots[None, :] <= at[:, None])
            v = plgpu.load(v_ref.at[page, pl.ds(start, sizes.keys), :], mask=(slots <= last)[:, None], other=0.0)
            return fold(state, jnp.where(visible, scores, -jnp.inf), None, v, sizes)

        return body

    state = (
        jnp.zeros((sizes.rows, sizes.width), jnp.float32),
        jnp.full((sizes.rows,), UNSEEN, jnp.float32),
        jnp.zeros((sizes.rows,), jnp.float32),
    )
    whole, count = counts_ref[row, head, tile, 0], counts_ref[row, head, tile, 1]
    state = jax.lax.fori_loop(0, whole * pieces, step(False), state)
    state = jax.lax.fori_loop(whole * pieces, count * pieces, step(True), state)
    out, lse = finish(state)
    target = (token * sizes.kv_heads + head) * sizes.padded_group + query
    out_refs[0][row, target, :] = out.astype(out_refs[0].dtype)
    if sizes.return_lse:
        out_refs[1][row, target] = lse


def fold(state, scores, bias, v, sizes: Sizes):
    """Take more keys into a softmax under way: (weighted values, highest exponent, sum), exponents in base 2.

    `bias` is 0 or -inf for a whole row. A row that has seen nothing stands at UNSEEN, a number, so no -inf - -inf.
    """
    values, top, total = state
    highest = jnp.max(scores, axis=1) * sizes.scale
    highest = highest if bias is None else highest + bias
    new_top = jnp.maximum(top, highest)
    shift = -new_top if bias is None else bias - new_top
    p = exp2(scores * sizes.scale + shift[:, None], sizes.interpret)
    fade = exp2(top - new_top, sizes.interpret)
    values = values * fade[:, None] + dot(p.astype(v.dtype), v)
    return values, new_top, total * fade + jnp.sum(p, axis=1)


def finish(state):
    """(out, natural lse) of a softmax; (0, -inf) for a row that has seen nothing."""
    values, top, total = state
    seen = total != 0.0
    safe = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, top / LOG2E + jnp.log(safe), -jnp.inf)
    return jnp.where(seen[:, None], values / safe[:, None], 0.0), lse


def default_config(dtype) -> Config:
    """Tile sizes that measured best on an H200; float32 products are slow and need small ones."""
    return Config(tokens=4, keys=32, num_warps=4, num_stages=1) if dtype == jnp.float32 else Config()
