"""Dense causal attention over pages in a Triton kernel: the walk of query_union, over all blocks up to the diagonal."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import UNSEEN, Pages, check_pages, div, dot, rem, seen_positions
from pallas_kernels.sparse_prefill.operands import Config, Sizes
from pallas_kernels.sparse_prefill.triton import default_config, finish, fold

_BIG = 2**30


def dense_causal(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    kv_heads: int,
    return_lse: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Grouped-query causal attention over everything that a query sees.

    Args:
      q: queries after norm and RoPE; bfloat16, float16 or float32.
      k: keys, `contiguous` or `paged`, in the same dtype; finite wherever a query of the row can see them.
      v: values, in the same pages.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      kv_heads: K.
      return_lse: also return the natural log-sum-exp of the scaled scores, -inf where nothing was seen.
      config: tile sizes.
      interpret: run on the CPU.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.

    Raises:
      ValueError: operands that do not fit together.
    """
    check_pages("k", k, q.shape[0])
    check_pages("v", v, q.shape[0])
    batch, length, heads, width = q.shape
    if not (q.dtype == k.pool.dtype == v.pool.dtype and width == k.width == v.width) or heads % kv_heads:
        raise ValueError(
            f"q is {q.dtype} of shape {q.shape}, k {k.pool.dtype} of width {k.width}, v {v.pool.dtype} of {v.width}, "
            f"kv_heads = {kv_heads}: need one dtype and width, and query heads a multiple of KV heads"
        )
    config = config or default_config(q.dtype)
    sizes = Sizes(k, config, length, heads, kv_heads, 0, width, interpret, return_lse)
    at = seen_positions(positions, lengths, sizes.out_tokens)
    out = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=(sizes.tiles, kv_heads, batch),
        out_shape=sizes.out_shape(batch, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="dense_causal",
    )(q.reshape(batch, -1, width), at, *k.operands(), v.pool)
    return sizes.trim(out)


def _kernel(q_ref, at_ref, k_ref, layer_ref, *rest, sizes: Sizes):
    *table, v_ref = rest[: 1 if sizes.k.table is None else 2]
    out_refs = rest[1 + len(table) :]
    # Late tiles have the most keys: they come first.
    tile, head, row = sizes.tiles - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
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
            block, start = div(i, pieces), rem(i, pieces) * sizes.keys
            page, held = sizes.k.locate(layer_ref, table[0] if table else None, row, head, block)
            scores = dot(q, k_ref[page, pl.ds(start, sizes.keys), :], transpose=True)
            slots = block * sizes.k.block_size + start + jnp.arange(sizes.keys, dtype=jnp.int32)
            # A page may be missing anywhere, and what it reads as may not be finite.
            seen, read = held, jnp.full(slots.shape, held)
            if masked:
                seen, read = held & (slots[None, :] <= at[:, None]), held & (slots <= last)
            if masked or table:
                scores = jnp.where(seen, scores, -jnp.inf)
            v = plgpu.load(v_ref.at[page, pl.ds(start, sizes.keys), :], mask=read[:, None], other=0.0)
            return fold(state, scores, None, v, sizes)

        return body

    state = (
        jnp.zeros((sizes.rows, sizes.width), jnp.float32),
        jnp.full((sizes.rows,), UNSEEN, jnp.float32),
        jnp.zeros((sizes.rows,), jnp.float32),
    )
    stop = jnp.minimum(div(last + sizes.keys, sizes.keys), sizes.k.num_blocks * pieces)
    whole = div(jnp.min(jnp.where(at >= 0, at, _BIG)) + 1, sizes.keys)
    whole = jnp.minimum(whole, stop)
    state = jax.lax.fori_loop(0, whole, step(False), state)
    state = jax.lax.fori_loop(whole, stop, step(True), state)
    # Padding took part in the blocks that every query of the tile sees whole.
    out, lse = finish((*state[:2], jnp.where(at >= 0, state[2], 0.0)))
    target = (token * sizes.kv_heads + head) * sizes.padded_group + query
    out_refs[0][row, target, :] = out.astype(out_refs[0].dtype)
    if sizes.return_lse:
        out_refs[1][row, target] = lse
