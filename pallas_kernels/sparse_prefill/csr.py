"""A selection inverted on the device: for each block the queries that chose it, as compressed rows."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.common import power_of_two
from pallas_kernels.sparse_prefill.operands import Sizes

_LANES = 256


class Inverted(NamedTuple):
    """The (query, slot) pairs of each bin, a bin being one block of one row and KV head."""

    pairs: Int[Array, " X"]  # sorted by bin; inside one, those that see only a part of the block come first
    first: Int[Array, " Y"]  # where a bin's pairs start, and one more
    whole: Int[Array, " Y"]  # where its pairs that see the whole block start
    works: Int[Array, " Y"]  # how many works (pieces of a bin) there are up to and with each bin


def seen_blocks(blocks: Int[Array, "B K T J"], at: Int[Array, "B T"], sizes: Sizes) -> Bool[Array, "B K T J"]:
    """Which slots count: a block that the query can see and the view holds."""
    own = jnp.where(at >= 0, at // sizes.k.block_size, -1)[:, None, :, None]
    seen = (blocks >= 0) & (blocks <= own) & (blocks < sizes.k.num_blocks)
    if sizes.k.table is None:
        return seen
    held = jax.vmap(lambda table, ids: sizes.k.holds(table[ids]))(sizes.k.table, jnp.where(seen, blocks, 0))
    return seen & held


def invert(
    blocks: Int[Array, "B K T J"], seen: Bool[Array, "B K T J"], at: Int[Array, "B T"], sizes: Sizes, per_work: int
) -> Inverted:
    """Invert query -> blocks into block -> queries by one sort of all pairs.

    Args:
      blocks: the selection.
      seen: which slots count.
      at: positions, -1 for padding.
      sizes: of the call.
      per_work: pairs that one program takes.
    """
    batch, heads = blocks.shape[:2]
    count = sizes.k.num_blocks
    bins = batch * heads * count
    base = (jnp.arange(batch * heads, dtype=jnp.int32) * count).reshape(batch, heads, 1, 1)
    behind = (blocks < (at // sizes.k.block_size)[:, None, :, None]).astype(jnp.int32)
    key = jnp.where(seen, (base + blocks) * 2 + behind, 2 * bins).astype(jnp.uint32).reshape(-1)
    # Unsigned keys with one payload are what XLA hands to a radix sort.
    key, pairs = jax.lax.sort((key, jnp.arange(key.size, dtype=jnp.uint32)), num_keys=1, is_stable=True)
    bounds = _bounds(key.astype(jnp.int32), 2 * bins + 1, sizes.interpret)
    first, whole = bounds[::2], bounds[1::2]
    works = jnp.cumsum(-(-(first[1:] - first[:-1]) // per_work), dtype=jnp.int32)
    return Inverted(pairs.astype(jnp.int32), first, whole, works)


def _bounds(keys: Int[Array, " X"], count: int, interpret: bool) -> Int[Array, " Y"]:
    """Where each of the keys 0 ... count - 1 would start in sorted keys."""
    padded = -(-count // _LANES) * _LANES
    out = pl.pallas_call(
        partial(_bounds_kernel, size=keys.size),
        grid=(padded // _LANES,),
        out_shape=jax.ShapeDtypeStruct((padded,), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=_LANES // 32, num_stages=1),
        interpret=interpret,
        name="csr_bounds",
    )(keys)
    return out[:count]


def _bounds_kernel(keys_ref, out_ref, *, size: int):
    lane = pl.program_id(0) * _LANES + jnp.arange(_LANES, dtype=jnp.int32)
    out_ref[lane] = search(lambda i: keys_ref[i] < lane, size, jnp.zeros_like(lane))


def search(before, size: int, zero: Int[Array, "..."]) -> Int[Array, "..."]:
    """How many of `size` sorted things are `before`, by bisection inside a kernel."""
    step = power_of_two(size + 1)

    def body(_, state):
        low, step = state
        step = step >> 1
        probe = low + step
        inside = probe <= size
        return jnp.where(inside & before(jnp.where(inside, probe, 1) - 1), probe, low), step

    return jax.lax.fori_loop(0, step.bit_length() - 1, body, (zero, jnp.int32(step)))[0]
