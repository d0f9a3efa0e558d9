"""Sparse attention of a decode step, split over the selected blocks, and the merge of the splits: two Triton kernels.

A program holds the query heads of one token and one KV head and walks a part of the blocks that this token selected.
Each token of a row has a selection and a position of its own. Its partial output goes to memory in float32.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import (
    LOG2E,
    UNSEEN,
    Pages,
    check_pages,
    div,
    dot,
    exp2,
    matmul_dtype,
    power_of_two,
    rem,
    seen_position,
)

MAX_QUERIES = 16
_FEW_SPLITS = 4
_MULTIPROCESSORS = 132  # of an H200
_UNSEEN_FROM = 2**30  # where a block that is not to be read starts: behind every query


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    programs: int = 264  # of the whole grid, two a multiprocessor: selections are cut in as many pieces as that allows
    keys: int = 64  # keys of one matrix product
    num_warps: int = 4
    num_stages: int = 3


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call."""

    k: Pages
    config: Config
    length: int
    heads: int
    kv_heads: int
    slots: int
    width: int
    splits: int
    interpret: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        return max(16, power_of_two(self.group))

    @property
    def keys(self) -> int:
        return min(self.config.keys, self.k.block_size)

    @property
    def units(self) -> int:
        """Pieces of selected blocks."""
        return self.slots * self.pieces

    @property
    def pieces(self) -> int:
        return self.k.block_size // self.keys


def sparse_decode(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None,
    return_lse: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Attention over the selected blocks for at most 16 queries a row.

    Args:
      q: queries after norm and RoPE; bfloat16, float16 or float32.
      k: keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn.
      v: values, in the same pages.
      blocks: distinct ids in any order, -1 for none.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      scales: what stored keys and values of each KV head are to be multiplied with.
      return_lse: also return the natural log-sum-exp of the scaled scores, -inf where nothing was seen.
      config: tile sizes.
      interpret: run on the CPU.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.

    Raises:
      ValueError: too many queries, or operands that do not fit together.
    """
    _check(q, k, v, blocks.shape)
    sizes = _sizes(q, k, blocks.shape[1], blocks.shape[3], config, interpret)
    return _run(q, k, v, (blocks,), positions, lengths, scales, return_lse, sizes)


def dense_decode(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    kv_heads: int,
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None,
    return_lse: bool = False,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """`sparse_decode` over everything that a query sees, in as many pieces as its position asks for.

    Args:
      q: queries after norm and RoPE.
      k: keys.
      v: values.
      positions: absolute position of each query.
      lengths: valid keys of each row.
      kv_heads: K.
      scales: as in `sparse_decode`.
      return_lse: also return the LSE.
      config: tile sizes.
      interpret: run on the CPU.

    Returns:
      As `sparse_decode`.

    Raises:
      ValueError: too many queries, or operands that do not fit together.
    """
    _check(q, k, v, (q.shape[0], kv_heads, q.shape[1]))
    sizes = _sizes(q, k, kv_heads, k.num_blocks, config or Config(), interpret)
    return _run(q, k, v, (), positions, lengths, scales, return_lse, sizes)


def _sizes(q, k: Pages, kv_heads: int, slots: int, config: Config | None, interpret: bool) -> _Sizes:
    batch, length, heads, width = q.shape
    config = config or _default(k.pool.dtype, batch * kv_heads, length)
    units = slots * (k.block_size // min(config.keys, k.block_size))
    splits = max(1, min(units, config.programs // (batch * length * kv_heads)))
    return _Sizes(k, config, length, heads, kv_heads, slots, width, splits, interpret)


def _default(stored, selections: int, length: int) -> Config:
    # Of a single query a program takes whole blocks: as many programs as run at once, one or (of one-byte numbers) two
    # a multiprocessor. Several queries of a row share what they read, and many rows fill the GPU in any case. Whole
    # blocks in float32, fetched ahead, are more than a multiprocessor's shared memory holds.
    itemsize = jnp.dtype(stored).itemsize
    if length == 1 and itemsize == 1:
        return Config(programs=2 * _MULTIPROCESSORS, keys=128)
    if length == 1 and itemsize == 2 and selections <= _MULTIPROCESSORS:
        return Config(programs=_MULTIPROCESSORS, keys=128)
    return Config()


def _run(q, k: Pages, v: Pages, blocks, positions, lengths, scales, return_lse: bool, sizes: _Sizes):
    """Both kernels; `blocks` is empty where all are read."""
    batch, length, heads, width = q.shape
    config, kv_heads, splits = sizes.config, sizes.kv_heads, sizes.splits
    scales = tuple(x.astype(jnp.float32) for x in scales or ())
    at = positions.astype(jnp.int32), lengths.astype(jnp.int32)
    shape = (batch, length, kv_heads, splits, sizes.rows)
    kind = q.dtype if splits == 1 else jnp.float32
    parts, lses = pl.pallas_call(
        partial(_kernel, dense=not blocks, sizes=sizes),
        grid=(splits, kv_heads, batch * length),
        out_shape=(jax.ShapeDtypeStruct((*shape, width), kind), jax.ShapeDtypeStruct(shape, jnp.float32)),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=sizes.interpret,
        name="sparse_decode" if blocks else "dense_decode",
    )(q, *at, *blocks, *k.operands(), v.pool, *scales)
    out = (parts[:, :, :, 0], lses[:, :, :, 0]) if splits == 1 else _merge(parts, lses, q.dtype, sizes)
    out = tuple(x[:, :, :, : sizes.group].reshape(batch, length, heads, *x.shape[4:]) for x in out)
    return out if return_lse else out[:1]


def _merge(parts: Float[Array, "B T K Z R H"], lses: Float[Array, "B T K Z R"], dtype, sizes: _Sizes):
    """Output and LSE of all splits together."""
    batch, queries = parts.shape[0], parts.shape[0] * sizes.length
    few = sizes.splits <= _FEW_SPLITS
    shape = (batch, sizes.length, sizes.kv_heads, sizes.rows if few else sizes.group)
    return pl.pallas_call(
        partial(_merge_few_kernel if few else _merge_kernel, sizes=sizes),
        grid=(sizes.kv_heads, queries) if few else (sizes.group, sizes.kv_heads, queries),
        out_shape=(jax.ShapeDtypeStruct((*shape, sizes.width), dtype), jax.ShapeDtypeStruct(shape, jnp.float32)),
        compiler_params=plgpu.CompilerParams(num_warps=4 if few else 2, num_stages=1),
        interpret=sizes.interpret,
        name="sparse_decode_merge",
    )(parts, lses)


def _kernel(q_ref, at_ref, lengths_ref, *rest, dense: bool, sizes: _Sizes):
    blocks_ref, k_ref, layer_ref, *rest = (None, *rest) if dense else rest
    table, rest = (rest[:1], rest[1:]) if sizes.k.table is not None else ((), rest)
    v_ref, *scales, out_ref, lse_ref = rest
    split, head, query = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, token = div(query, sizes.length), rem(query, sizes.length)
    lane = jnp.arange(sizes.rows, dtype=jnp.int32)
    q = q_ref[row, token, head * sizes.group + jnp.minimum(lane, sizes.group - 1), :].astype(
        matmul_dtype(q_ref.dtype, k_ref.dtype)
    )
    at = seen_position(at_ref, lengths_ref, row, token)
    scale = sizes.width**-0.5 * LOG2E * (scales[0][head] if scales else 1.0)
    # A dense query has no slots to look through, but all pieces up to its own position.
    units = jnp.minimum(div(at + sizes.keys, sizes.keys), sizes.units) if dense else sizes.units
    per_split = div(units + sizes.splits - 1, sizes.splits) if dense else -(-units // sizes.splits)

    def find(block):
        """(page, first position) of blocks."""
        inside = (block >= 0) & (block < sizes.k.num_blocks)
        safe = jnp.where(inside, block, 0)
        page, held = sizes.k.locate(layer_ref, table[0] if table else None, row, head, safe)
        return page, jnp.where(inside & held, safe * sizes.k.block_size, _UNSEEN_FROM)

    if not dense:
        # All at once and before the walk: a page found inside it would hold up the keys and values that wait for it.
        every = jnp.arange(power_of_two(sizes.slots), dtype=jnp.int32)
        found = find(blocks_ref[row, head, token, jnp.minimum(every, sizes.slots - 1)])

    def body(unit, state):
        values, top, total = state
        slot, start = div(unit, sizes.pieces), rem(unit, sizes.pieces) * sizes.keys
        page, first = find(slot) if dense else (jnp.sum(jnp.where(every == slot, x, 0)) for x in found)
        # Neither an unused slot nor what lies behind the query is read: that memory may hold anything.
        visible = first + start + jnp.arange(sizes.keys, dtype=jnp.int32) <= at
        read = lambda ref: plgpu.load(ref.at[page, pl.ds(start, sizes.keys), :], mask=visible[:, None], other=0.0)
        scores = dot(q, read(k_ref).astype(q.dtype), transpose=True) * scale
        scores = jnp.where(visible[None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        p = exp2(scores - new_top[:, None], sizes.interpret)
        fade = exp2(top - new_top, sizes.interpret)
        values = values * fade[:, None] + dot(p.astype(q.dtype), read(v_ref).astype(q.dtype))
        return values, new_top, total * fade + jnp.sum(p, axis=1)

    state = (
        jnp.zeros((sizes.rows, sizes.width), jnp.float32),
        jnp.full((sizes.rows,), UNSEEN, jnp.float32),
        jnp.zeros((sizes.rows,), jnp.float32),
    )
    start = split * per_split
    stop = jnp.minimum(start + per_split, units)
    values, top, total = jax.lax.fori_loop(start, stop, body, state)
    seen = total != 0.0
    safe = jnp.where(seen, total, 1.0)
    out = values / safe[:, None] * (scales[1][head] if scales else 1.0)
    out_ref[row, token, head, split, lane, :] = out.astype(out_ref.dtype)
    # For the merge in powers of two; where there is none this is the result.
    lse = top / LOG2E + jnp.log(safe) if sizes.splits == 1 else top + jnp.log(safe) * LOG2E
    lse_ref[row, token, head, split, lane] = jnp.where(seen, lse, -jnp.inf)


def _merge_kernel(parts_ref, lses_ref, out_ref, lse_ref, *, sizes: _Sizes):
    """Many splits: a program takes one query head, and all of its splits at once."""
    group, head, query = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, token = div(query, sizes.length), rem(query, sizes.length)
    split = jnp.arange(power_of_two(sizes.splits), dtype=jnp.int32)
    source = jnp.minimum(split, sizes.splits - 1)
    lses = jnp.where(split < sizes.splits, lses_ref[row, token, head, source, group], -jnp.inf)
    top = jnp.maximum(jnp.max(lses), UNSEEN)
    weights = exp2(lses - top, sizes.interpret)
    total = jnp.sum(weights)
    values = jnp.sum(parts_ref[row, token, head, source, group, :] * weights[:, None], axis=0)
    seen = total != 0.0
    safe = jnp.where(seen, total, 1.0)
    out_ref[row, token, head, group, :] = (values / safe).astype(out_ref.dtype)
    lse_ref[row, token, head, group] = jnp.where(seen, top / LOG2E + jnp.log(safe), -jnp.inf)


def _merge_few_kernel(parts_ref, lses_ref, out_ref, lse_ref, *, sizes: _Sizes):
    """Few splits: a program takes all query heads of a KV head, and one split after the other."""
    head, query = pl.program_id(0), pl.program_id(1)
    row, token = div(query, sizes.length), rem(query, sizes.length)
    lane = jnp.arange(sizes.rows, dtype=jnp.int32)
    lses = [lses_ref[row, token, head, split, lane] for split in range(sizes.splits)]
    top = jnp.full((sizes.rows,), UNSEEN, jnp.float32)
    for lse in lses:
        top = jnp.maximum(top, lse)
    total, values = jnp.zeros_like(top), jnp.zeros((sizes.rows, sizes.width), jnp.float32)
    for split, lse in enumerate(lses):
        weight = exp2(lse - top, sizes.interpret)
        total += weight
        values += parts_ref[row, token, head, split, lane, :] * weight[:, None]
    seen = total != 0.0
    safe = jnp.where(seen, total, 1.0)
    out_ref[row, token, head, lane, :] = (values / safe[:, None]).astype(out_ref.dtype)
    lse_ref[row, token, head, lane] = jnp.where(seen, top / LOG2E + jnp.log(safe), -jnp.inf)


def _check(q, k: Pages, v: Pages, shape: tuple[int, ...]) -> None:
    check_pages("k", k, q.shape[0])
    check_pages("v", v, q.shape[0])
    batch, length, heads, width = q.shape
    if not 1 <= length <= MAX_QUERIES:
        raise ValueError(f"{length} queries a row: need 1 to {MAX_QUERIES} (sparse_prefill takes more)")
    if shape[:1] + shape[2:3] != (batch, length) or heads % shape[1]:
        raise ValueError(f"blocks has shape {shape}: must be [{batch} K {length} J], K a divisor of {heads}")
    if k.pool.dtype not in (q.dtype, jnp.float8_e4m3fn) or k.pool.dtype != v.pool.dtype or k.width != width:
        raise ValueError(
            f"q is {q.dtype} of width {width}, k {k.pool.dtype} of {k.width}, v {v.pool.dtype} of {v.width}: need the "
            "same width, and keys and values in the queries' dtype or float8_e4m3fn"
        )
    if k.pool.shape != v.pool.shape:
        raise ValueError(f"k has pages {k.pool.shape} and v {v.pool.shape}: they must lie in the same way")
