"""Gemma norm, partial rotary embedding and the write into KV and index pages, in one Triton kernel.

A program takes one token and one KV head: its query heads, its key and value, its index query, and with head 0 the
index key. Everything is read once, computed in float32, rounded once and written to where it is used.

In M3's sizes::

    q of 16 heads, index_q ── norm ── rotate 64 of 128 ── round ── memory, where attention reads them
    k, index_k (of head 0) ── norm ── rotate 64 of 128 ── round ── table ── page and row of the token
    v ─────────────────────────────────────────────────── round ── table ── page and row of the token
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits
from pallas_kernels.numbers import E4M3_MAX, power_of_two
from pallas_kernels.pages import FinderRefs, Pages, seen_positions
from pallas_kernels.qk_norm_rope_insert import Call, Written
from pallas_kernels.triton_common import check_pool, div, rem
from pallas_kernels.triton_heads import head_parts, norm_rope

LIMITS = Limits(check_pages=check_pool)


class Inputs(NamedTuple):
    """The operands that the kernel reads; inside it, references.

    Queries are None where they are finished already, the last four where attention is dense.
    """

    positions: Any  # [B T], -1 for padding
    cos: Any  # [B T R]
    sin: Any  # [B T R]
    scales: Any  # [3 K] of keys, values and index keys
    q: Any | None  # [B T N H]
    k: Any  # [B T K H]
    v: Any  # [B T K H]
    q_norm: Any | None  # [H]
    k_norm: Any  # [H]
    index_q: Any | None  # [B T K I]
    index_k: Any | None  # [B T I]
    index_q_norm: Any | None  # [I]
    index_k_norm: Any | None  # [I]


class Targets(NamedTuple):
    """A value for each pool that is written: its pages, its finder, or the pool itself."""

    k: Any
    v: Any
    index_k: Any | None  # None where attention is dense


class Queries(NamedTuple):
    """Queries ready for attention, as the kernel writes them; None where they were finished before."""

    q: Any | None  # [B T K G H], G filled up to a power of two
    index_q: Any | None  # [B T K I]; None where attention is dense too


def run(call: Call, config: None) -> Written:
    """Run `qk_norm_rope_insert` on a checked call."""
    batch, length, heads, width = call.x.q.shape
    pages = Targets(call.k, call.v, call.index_k)
    sizes = Sizes(pages, length, heads, call.x.k.shape[2], width, call.cos.shape[-1], call.eps)
    scales = jnp.ones((3, sizes.kv_heads), jnp.float32) if call.scales is None else call.scales
    index_q_norm = None if call.index_k is None else call.norms.index_q
    inputs = Inputs(
        positions=seen_positions(call.positions, call.lengths, length), cos=call.cos, sin=call.sin, scales=scales,
        q=None if call.norms.q is None else call.x.q, k=call.x.k, v=call.x.v, q_norm=call.norms.q, k_norm=call.norms.k,
        index_q=None if index_q_norm is None else call.x.index_q, index_k=call.x.index_k, index_q_norm=index_q_norm,
        index_k_norm=None if call.index_k is None else call.norms.index_k,
    )  # fmt: skip
    finders = Targets(*(None if target is None else target.finder() for target in pages))
    pools = Targets(*(None if target is None else target.pool for target in pages))
    abstract = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)
    padded = batch, length, sizes.kv_heads, sizes.padded_group, width
    queries = Queries(
        q=None if call.norms.q is None else jax.ShapeDtypeStruct(padded, call.dtype),
        index_q=None if index_q_norm is None else jax.ShapeDtypeStruct(call.x.index_q.shape, call.dtype),
    )
    # The pools are inputs and outputs in one: aliases count arrays.
    first_input = len(jax.tree.leaves((inputs, finders)))
    first_output = len(jax.tree.leaves(queries))
    queries, pools = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=(batch * length, sizes.kv_heads),
        out_shape=(queries, jax.tree.map(abstract, pools)),
        input_output_aliases={first_input + i: first_output + i for i in range(len(jax.tree.leaves(pools)))},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=call.interpret,
        name="qk_norm_rope_insert",
    )(inputs, finders, pools)
    q = call.x.q if queries.q is None else queries.q[:, :, :, : sizes.group].reshape(call.x.q.shape)  # [B T N H]
    index_q = call.x.index_q if queries.index_q is None else queries.index_q
    return Written(q, index_q, pools.k, pools.v, pools.index_k)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    pages: Targets
    length: int
    heads: int
    kv_heads: int
    width: int
    half: int  # angles of a head
    eps: float

    @property
    def group(self) -> int:
        """G, query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        """G as a power of two: Triton has no other shapes."""
        return power_of_two(self.group)


def _kernel(x: Inputs, finders: Targets, old_pools: Targets, queries: Queries, pools: Targets, *, sizes: Sizes):
    del old_pools  # the same memory as `pools`
    query, head = pl.program_id(0), pl.program_id(1)
    row, token = div(query, sizes.length), rem(query, sizes.length)
    position = x.positions[row, token]
    cos, sin = x.cos[row, token, :], x.sin[row, token, :]
    to_norm_rope = partial(norm_rope, cos=cos, sin=sin, eps=sizes.eps)

    def write(pages: Pages, finder: FinderRefs, pool_ref, parts: list[Array], scale_row: int, head) -> None:
        """Write a head's new token into its page."""
        block, slot = div(jnp.maximum(position, 0), pages.block_size), rem(jnp.maximum(position, 0), pages.block_size)
        is_inside = (position >= 0) & (block < pages.num_blocks)
        block = jnp.where(is_inside, block, 0)
        page, is_held = pages.locate(finder, row, head, block)

        @pl.when(is_inside & is_held)
        def _():
            for dims, part in zip(head_parts(pages.width, sizes.half), parts, strict=True):
                pool_ref[page, slot, dims] = _rounded(part / x.scales[scale_row, head], pool_ref.dtype)

    parts = head_parts(sizes.width, sizes.half)
    if x.q is not None:
        lane = jnp.arange(sizes.padded_group, dtype=jnp.int32)
        group_head = head * sizes.group + jnp.minimum(lane, sizes.group - 1)
        q = [x.q[row, token, group_head, dims] for dims in parts]
        for dims, part in zip(parts, to_norm_rope(q, x.q_norm), strict=True):
            queries.q[row, token, head, lane, dims] = part.astype(queries.q.dtype)
    k = [x.k[row, token, head, dims] for dims in parts]
    write(sizes.pages.k, finders.k, pools.k, to_norm_rope(k, x.k_norm), 0, head)
    v = [x.v[row, token, head, dims].astype(jnp.float32) for dims in parts]
    write(sizes.pages.v, finders.v, pools.v, v, 1, head)
    if sizes.pages.index_k is None:
        return
    index_parts = head_parts(sizes.pages.index_k.width, sizes.half)
    if x.index_q is not None:
        index_q = [x.index_q[row, token, head, dims] for dims in index_parts]
        for dims, part in zip(index_parts, to_norm_rope(index_q, x.index_q_norm), strict=True):
            queries.index_q[row, token, head, dims] = part.astype(queries.index_q.dtype)

    @pl.when(head == 0)
    def _():
        index_k = [x.index_k[row, token, dims] for dims in index_parts]
        index_k = to_norm_rope(index_k, x.index_k_norm)
        write(sizes.pages.index_k, finders.index_k, pools.index_k, index_k, 2, jnp.int32(0))


def _rounded(x: Float[Array, "..."], dtype: jax.typing.DTypeLike) -> Float[Array, "..."]:
    """Round values to the pool's dtype; for e4m3, which has no infinity, clip them to its largest number."""
    if dtype == jnp.float8_e4m3fn:
        x = jnp.minimum(jnp.maximum(x, -E4M3_MAX), E4M3_MAX)
    return x.astype(dtype)
