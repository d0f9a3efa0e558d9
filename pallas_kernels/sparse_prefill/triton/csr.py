"""A selection inverted on the device: for each block the queries that chose it, as compressed rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.numbers import power_of_two
from pallas_kernels.sparse_prefill.triton.sizes import Sizes

_LANES = 256


class Inverted(NamedTuple):
    """The (query, slot) pairs of each bin, a bin being one block of one row and KV head.

    Arrays, or inside a kernel references to them.
    """

    pairs: Any  # [X] sorted by bin; inside one, those that see only a part of the block come first
    first: Any  # [Y] where a bin's pairs start, and one more
    first_whole: Any  # [Y] where its pairs that see the whole block start
    works: Any  # [Y] how many works (pieces of a bin) there are up to and with each bin


def seen_blocks(
    blocks: Int[Array, "B K T J"], query_positions: Int[Array, "B T"], sizes: Sizes
) -> Bool[Array, "B K T J"]:
    """Return True for each slot that counts: its block is one that the query can see and the view holds."""
    own_block = jnp.where(query_positions >= 0, query_positions // sizes.k.block_size, -1)[:, None, :, None]
    is_seen = (blocks >= 0) & (blocks <= own_block) & (blocks < sizes.k.num_blocks)
    if sizes.k.table is None:
        return is_seen
    is_held = jax.vmap(lambda table, ids: sizes.k.holds(table[ids]))(sizes.k.table, jnp.where(is_seen, blocks, 0))
    return is_seen & is_held


def invert(
    blocks: Int[Array, "B K T J"],
    is_seen: Bool[Array, "B K T J"],
    query_positions: Int[Array, "B T"],
    sizes: Sizes,
    per_work: int,
) -> Inverted:
    """Invert query -> blocks into block -> queries by one sort of all pairs.

    Args:
      blocks: the selection.
      is_seen: which slots count.
      query_positions: -1 for padding.
      sizes: of the call.
      per_work: pairs that one program takes.
    """
    batch, kv_heads = blocks.shape[:2]
    num_blocks = sizes.k.num_blocks
    bins = batch * kv_heads * num_blocks
    first_bin = jnp.arange(batch * kv_heads, dtype=jnp.int32) * num_blocks
    first_bin = first_bin.reshape(batch, kv_heads, 1, 1)  # [B K 1 1]
    own_block = (query_positions // sizes.k.block_size)[:, None, :, None]
    sees_whole = (blocks < own_block).astype(jnp.int32)
    key = jnp.where(is_seen, (first_bin + blocks) * 2 + sees_whole, 2 * bins).astype(jnp.uint32).reshape(-1)
    # Unsigned keys with one payload are what XLA hands to a radix sort.
    key, pairs = jax.lax.sort((key, jnp.arange(key.size, dtype=jnp.uint32)), num_keys=1, is_stable=True)
    bounds = _bounds(key.astype(jnp.int32), 2 * bins + 1, sizes.interpret)
    first, first_whole = bounds[::2], bounds[1::2]
    works = jnp.cumsum(-(-(first[1:] - first[:-1]) // per_work), dtype=jnp.int32)
    return Inverted(pairs.astype(jnp.int32), first, first_whole, works)


def _bounds(keys: Int[Array, " X"], count: int, interpret: bool) -> Int[Array, " Y"]:
    """Return the index at which each of the keys 0 ... count - 1 starts, or would start, in sorted keys."""
    padded = -(-count // _LANES) * _LANES
    bounds = pl.pallas_call(
        partial(_bounds_kernel, num_keys=keys.size),
        grid=(padded // _LANES,),
        out_shape=jax.ShapeDtypeStruct((padded,), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=_LANES // 32, num_stages=1),
        interpret=interpret,
        name="csr_bounds",
    )(keys)
    return bounds[:count]


def _bounds_kernel(keys_ref, bounds_ref, *, num_keys: int):
    lane = pl.program_id(0) * _LANES + jnp.arange(_LANES, dtype=jnp.int32)
    bounds_ref[lane] = search(lambda i: keys_ref[i] < lane, num_keys, jnp.zeros_like(lane))


def search(
    is_before: Callable[[Int[Array, "..."]], Bool[Array, "..."]], count: int, zero: Int[Array, "..."]
) -> Int[Array, "..."]:
    """Return how many of `count` sorted items are before the one that is looked for, by bisection inside a kernel."""
    step = power_of_two(count + 1)

    def body(_, state):
        low, step = state
        step = step >> 1
        probe = low + step
        is_inside = probe <= count
        return jnp.where(is_inside & is_before(jnp.where(is_inside, probe, 1) - 1), probe, low), step

    return jax.lax.fori_loop(0, step.bit_length() - 1, body, (zero, jnp.int32(step)))[0]
