"""Gemma norm, partial rotary embedding and the write into KV and index pages, in one Triton kernel.

A program takes one token and one KV head: its query heads, its key and value, its index query, and with head 0 the
index key. Everything is read once, computed in float32, rounded once and written to where it is used.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import Pages, check_pages, div, power_of_two, rem, seen_positions

_E4M3_MAX = 448.0


class Projected(NamedTuple):
    """Projections of a layer before norm, or the weights of their norms (then one vector each, and no `v`)."""

    q: Float[Array, "..."]
    k: Float[Array, "..."]
    v: Float[Array, "..."] | None
    index_q: Float[Array, "..."] | None = None
    index_k: Float[Array, "..."] | None = None


class Written(NamedTuple):
    """Queries ready for attention, and the pools with the new tokens in them."""

    q: Float[Array, "B T N H"]
    index_q: Float[Array, "B T K I"] | None
    k: Float[Array, "X P H"]
    v: Float[Array, "X P H"]
    index_k: Float[Array, "Y P I"] | None


def qk_norm_rope_insert(
    x: Projected,
    norms: Projected,
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    k: Pages,
    v: Pages,
    index_k: Pages | None = None,
    *,
    eps: float,
    dtype: jax.typing.DTypeLike,
    scales: Float[Array, "3 K"] | None = None,
    interpret: bool = False,
) -> Written:
    """Norm, rotate and write a layer's new tokens.

    Args:
      x: q `[B T N H]`, k and v `[B T K H]`, and for a sparse layer index_q `[B T K I]` and index_k `[B T I]`; best in
        float32, as the projections accumulate.
      norms: weights of the norms, `[H]` and `[I]`; applied as 1 + weight.
      cos: cosines of each token's angles, R of them; dims (i, i + R) of a head are rotated, those from 2R on are not.
      sin: sines.
      positions: slot of each token, counted in its row; < 0 or >= lengths marks padding, which is not written.
      lengths: valid keys of each row, these tokens included.
      k: where keys go; the pool is donated if the caller's jit donates it.
      v: where values go.
      index_k: where index keys go.
      eps: of the norm.
      dtype: of the queries.
      scales: what stored keys, values and index keys (head 0) are multiplied with when read: they are stored divided
        by it.
      interpret: run on the CPU.

    Returns:
      Written. The pools keep their shapes `[pages P H]`.

    Raises:
      ValueError: index projections without index pages or the other way round, or pages of another width.

    Source: transformers `MiniMaxM3VLRMSNorm`, rotary embedding over half-split dims.
    """
    _check(x, k, v, index_k, cos)
    batch, length, heads, width = x.q.shape
    sizes = _Sizes(k, v, index_k, length, heads, x.k.shape[2], width, cos.shape[-1], eps)
    if scales is None:
        scales = jnp.ones((3, sizes.kv_heads), jnp.float32)
    at = seen_positions(positions, lengths, length)
    index_in = () if index_k is None else (x.index_q, x.index_k, norms.index_q, norms.index_k)
    inputs = (at, cos, sin, scales, x.q, x.k, x.v, norms.q, norms.k, *index_in)
    pages = (k, v) if index_k is None else (k, v, index_k)
    places = tuple(y for p in pages for y in p.operands()[1:])
    pools = tuple(p.pool for p in pages)
    shape = (batch, length, sizes.kv_heads, sizes.padded_group)
    queries = [jax.ShapeDtypeStruct((*shape, width), dtype)]
    if index_k is not None:
        queries.append(jax.ShapeDtypeStruct(x.index_q.shape, dtype))
    first = len(inputs) + len(places)
    out = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=(batch * length, sizes.kv_heads),
        out_shape=(*queries, *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)),
        input_output_aliases={first + i: len(queries) + i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="qk_norm_rope_insert",
    )(*inputs, *places, *pools)
    q = out[0][:, :, :, : sizes.group].reshape(x.q.shape)
    if index_k is None:
        return Written(q, None, *out[1:], None)
    return Written(q, out[1], *out[2:])


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call."""

    k: Pages
    v: Pages
    index_k: Pages | None
    length: int
    heads: int
    kv_heads: int
    width: int
    half: int
    eps: float

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        return power_of_two(self.group)

    def parts(self, width: int) -> list[pl.Slice]:
        """The dims of a head: two halves that rotate into each other, and the rest. Triton cannot cut a tensor."""
        out = [pl.ds(0, self.half), pl.ds(self.half, self.half)]
        return out if width == 2 * self.half else [*out, pl.ds(2 * self.half, width - 2 * self.half)]


def _kernel(*refs, sizes: _Sizes):
    refs = list(refs)
    take = lambda n: [refs.pop(0) for _ in range(n)]
    at_ref, cos_ref, sin_ref, scales_ref, q_ref, k_ref, v_ref, q_norm, k_norm = take(9)
    index = sizes.index_k is not None
    index_q_ref, index_k_ref, index_q_norm, index_k_norm = take(4) if index else [None] * 4
    pages = (sizes.k, sizes.v, sizes.index_k) if index else (sizes.k, sizes.v)
    places = [take(1 if p.table is None else 2) for p in pages]
    take(len(pages))  # the pools as inputs: they are the outputs below
    out_refs = take(2 if index else 1)
    pools = take(len(pages))

    query, head = pl.program_id(0), pl.program_id(1)
    row, token = div(query, sizes.length), rem(query, sizes.length)
    at = at_ref[row, token]
    angles = (cos_ref[row, token, :], sin_ref[row, token, :])

    def put(which, values, head):
        """Write a head's new token into its page."""
        where = pages[which]
        block, slot = div(jnp.maximum(at, 0), where.block_size), rem(jnp.maximum(at, 0), where.block_size)
        inside = (at >= 0) & (block < where.num_blocks)
        block = jnp.where(inside, block, 0)
        layer_ref, *table = places[which]
        page, held = where.locate(layer_ref, table[0] if table else None, row, head, block)

        @pl.when(inside & held)
        def _():
            for dims, value in zip(sizes.parts(where.width), values, strict=True):
                pools[which][page, slot, dims] = _store(value / scales_ref[which, head], pools[which].dtype)

    lane = jnp.arange(sizes.padded_group, dtype=jnp.int32)
    source = head * sizes.group + jnp.minimum(lane, sizes.group - 1)
    q = [q_ref[row, token, source, dims] for dims in sizes.parts(sizes.width)]
    for dims, value in zip(sizes.parts(sizes.width), _norm_rope(q, q_norm, angles, sizes), strict=True):
        out_refs[0][row, token, head, lane, dims] = value.astype(out_refs[0].dtype)
    k = [k_ref[row, token, head, dims] for dims in sizes.parts(sizes.width)]
    put(0, _norm_rope(k, k_norm, angles, sizes), head)
    put(1, [v_ref[row, token, head, dims].astype(jnp.float32) for dims in sizes.parts(sizes.width)], head)
    if index:
        dims_of = sizes.parts(sizes.index_k.width)
        index_q = [index_q_ref[row, token, head, dims] for dims in dims_of]
        for dims, value in zip(dims_of, _norm_rope(index_q, index_q_norm, angles, sizes), strict=True):
            out_refs[1][row, token, head, dims] = value.astype(out_refs[1].dtype)

        @pl.when(head == 0)
        def _():
            index_k = [index_k_ref[row, token, dims] for dims in dims_of]
            put(2, _norm_rope(index_k, index_k_norm, angles, sizes), jnp.int32(0))


def _norm_rope(parts, weight_ref, angles, sizes: _Sizes):
    """A head in parts, through norm and rotation, in float32."""
    parts = [x.astype(jnp.float32) for x in parts]
    width = sum(x.shape[-1] for x in parts)
    square = sum(jnp.sum(x * x, axis=-1) for x in parts) / width
    factor = jax.lax.rsqrt(square + sizes.eps)
    factor = factor[:, None] if parts[0].ndim == 2 else factor
    weights = [1.0 + weight_ref[dims].astype(jnp.float32) for dims in sizes.parts(width)]
    first, second, *rest = [x * factor * w for x, w in zip(parts, weights, strict=True)]
    cos, sin = angles
    return [first * cos - second * sin, second * cos + first * sin, *rest]


def _store(x, dtype):
    """Rounded to the pool's dtype; e4m3 has no infinity, so it is cut at its largest number."""
    if dtype == jnp.float8_e4m3fn:
        x = jnp.minimum(jnp.maximum(x, -_E4M3_MAX), _E4M3_MAX)
    return x.astype(dtype)


def _check(x: Projected, k: Pages, v: Pages, index_k: Pages | None, cos) -> None:
    check_pages("k", k, x.q.shape[0])
    check_pages("v", v, x.q.shape[0])
    if (x.index_q is None) != (index_k is None) or (x.index_k is None) != (index_k is None):
        raise ValueError("index_q, index_k and index pages come together: give all three, or none")
    widths = (x.q.shape[-1], x.k.shape[-1], k.width, v.width)
    if len(set(widths)) > 1 or x.q.shape[2] % x.k.shape[2] or 2 * cos.shape[-1] > widths[0]:
        raise ValueError(
            f"q has shape {x.q.shape}, k {x.k.shape}, pages width {k.width} and {v.width}, cos {cos.shape}: need one "
            "width, query heads a multiple of KV heads, and at most half as many angles as dims"
        )
    if index_k is not None and (x.index_q.shape[-1] != index_k.width or x.index_q.shape[2] != x.k.shape[2]):
        raise ValueError(
            f"index_q has shape {x.index_q.shape} and index pages width {index_k.width}: need {x.k.shape[2]} heads of "
            "that width"
        )
