"""Attention of a decode step, split over blocks: the Triton kernel that `sparse_decode` and `dense_decode` share.

A program holds the query heads of one token and one KV head and walks a part of the blocks that this token selected,
or, dense, of all that it sees. Each token of a row has a selection and a position of its own. Its partial output goes
to memory in float32.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.backends import TileConfig
from pallas_kernels.numbers import power_of_two
from pallas_kernels.pages import FinderRefs, Pages
from pallas_kernels.sparse_decode.triton.merge import merge
from pallas_kernels.triton_common import (
    LOG2E,
    Softmax,
    div,
    divisor,
    dot,
    empty_softmax,
    exp2,
    matmul_dtype,
    natural_lse,
    rem,
    seen_position,
)

_MULTIPROCESSORS = 132  # of an H200
_UNSEEN_FROM = 2**30  # where a block that is not to be read starts: behind every query


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of the grid and of a step."""

    programs: int = 264  # of the whole grid, two a multiprocessor: selections are cut in as many pieces as that allows
    splits: int | None = None  # so many pieces, whatever else the call has
    keys: int = 64  # keys of one matrix product
    num_warps: int = 4
    num_stages: int = 3


class Scales(NamedTuple):
    """The scales `[K]` of each KV head's stored keys and values; inside the kernel, references to them."""

    k: Any
    v: Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    k: Pages
    config: Config
    length: int
    heads: int
    kv_heads: int
    slots: int  # blocks of a query: J, or M where attention is dense
    width: int
    splits: int
    interpret: bool

    @property
    def group(self) -> int:
        """G, query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def tile_rows(self) -> int:
        """R, rows of the matrix product: G, filled up to what Triton can multiply."""
        return max(16, power_of_two(self.group))

    @property
    def keys(self) -> int:
        """Keys of one matrix product, which lie in one block."""
        return min(self.config.keys, self.k.block_size)

    @property
    def pieces(self) -> int:
        """Matrix products that cover one block."""
        return self.k.block_size // self.keys

    @property
    def units(self) -> int:
        """Pieces of all blocks of a query."""
        return self.slots * self.pieces


def default_config(stored: jax.typing.DTypeLike, selections: int, length: int) -> Config:
    """Tile sizes of `sparse_decode` that measured best on an H200.

    Of a single query a program takes whole blocks: as many programs as run at once, one or (of one-byte numbers) two
    a multiprocessor. Several queries of a row share what they read, and many rows fill the GPU in any case. Whole
    blocks in float32, fetched ahead, are more than a multiprocessor's shared memory holds.

    Args:
      stored: dtype of keys and values in memory.
      selections: rows of the batch x KV heads.
      length: queries of a row.
    """
    itemsize = jnp.dtype(stored).itemsize
    if length == 1 and itemsize == 1:
        return Config(programs=2 * _MULTIPROCESSORS, keys=128)
    if length == 1 and itemsize == 2 and selections <= _MULTIPROCESSORS:
        return Config(programs=_MULTIPROCESSORS, keys=128)
    return Config()


def attend(
    call: Any, blocks: Int[Array, "B K T J"] | None, *, kv_heads: int, slots: int, config: Config, name: str
) -> tuple[Array, ...]:
    """Both kernels: attention of each split, and the merge where there are several.

    Args:
      call: a checked `Call` of `sparse_decode` or `dense_decode`.
      blocks: the selection; None for everything that a query sees.
      kv_heads: K.
      slots: blocks of a query at most.
      config: tile sizes.
      name: of the first kernel.
    """
    q, k = call.q, call.k
    batch, length, heads, width = q.shape
    units = slots * (k.block_size // min(config.keys, k.block_size))
    splits = config.splits or max(1, min(units, config.programs // (batch * length * kv_heads)))
    sizes = Sizes(k, config, length, heads, kv_heads, slots, width, splits, call.interpret)
    scales = None if call.scales is None else Scales(*(scale.astype(jnp.float32) for scale in call.scales))
    positions, lengths = call.positions.astype(jnp.int32), call.lengths.astype(jnp.int32)
    shape = (batch, length, kv_heads, splits, sizes.tile_rows)
    part_dtype = q.dtype if splits == 1 else jnp.float32
    parts, part_lses = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=(splits, kv_heads, batch * length),
        out_shape=(jax.ShapeDtypeStruct((*shape, width), part_dtype), jax.ShapeDtypeStruct(shape, jnp.float32)),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=call.interpret,
        name=name,
    )(q, positions, lengths, blocks, k.pool, k.finder(), call.v.pool, scales)
    if splits == 1:
        out, lse = parts[:, :, :, 0], part_lses[:, :, :, 0]  # [B T K R H], [B T K R]
    else:
        out, lse = merge(parts, part_lses, q.dtype, group=sizes.group, interpret=call.interpret)

    def without_padding(x: Shaped[Array, "B T K R ..."]) -> Shaped[Array, "B T N ..."]:
        return x[:, :, :, : sizes.group].reshape(batch, length, heads, *x.shape[4:])

    return (without_padding(out), without_padding(lse)) if call.return_lse else (without_padding(out),)


def _kernel(
    q_ref,
    positions_ref,
    lengths_ref,
    blocks_ref,
    k_ref,
    finder: FinderRefs,
    v_ref,
    scales: Scales | None,
    parts_ref,
    part_lses_ref,
    *,
    sizes: Sizes,
):
    """One split; `blocks_ref` is None where attention is dense."""
    is_dense = blocks_ref is None
    split, head, query = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, token = div(query, sizes.length), rem(query, sizes.length)
    lane = jnp.arange(sizes.tile_rows, dtype=jnp.int32)
    q = q_ref[row, token, head * sizes.group + jnp.minimum(lane, sizes.group - 1), :].astype(
        matmul_dtype(q_ref.dtype, k_ref.dtype)
    )  # [R H]
    position = seen_position(positions_ref, lengths_ref, row, token)
    scale = sizes.width**-0.5 * LOG2E * (1.0 if scales is None else scales.k[head])
    # A dense query has no slots to look through, but all pieces up to its own position.
    units = jnp.minimum(div(position + sizes.keys, sizes.keys), sizes.units) if is_dense else sizes.units
    per_split = div(units + sizes.splits - 1, sizes.splits) if is_dense else -(-units // sizes.splits)

    def find(block: Int[Array, "..."]) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
        """(page, first position) of blocks."""
        is_inside = (block >= 0) & (block < sizes.k.num_blocks)
        safe_block = jnp.where(is_inside, block, 0)
        page, is_held = sizes.k.locate(finder, row, head, safe_block)
        return page, jnp.where(is_inside & is_held, safe_block * sizes.k.block_size, _UNSEEN_FROM)

    if not is_dense:
        # All at once and before the walk: a page found inside it would hold up the keys and values that wait for it.
        slots = jnp.arange(power_of_two(sizes.slots), dtype=jnp.int32)
        found = find(blocks_ref[row, head, token, jnp.minimum(slots, sizes.slots - 1)])

    def take_unit(unit, state: Softmax) -> Softmax:
        slot, start = div(unit, sizes.pieces), rem(unit, sizes.pieces) * sizes.keys
        if is_dense:
            page, first_position = find(slot)
        else:
            page, first_position = (jnp.sum(jnp.where(slots == slot, of_slots, 0)) for of_slots in found)
        # Neither an unused slot nor what lies behind the query is read: that memory may hold anything.
        is_visible = first_position + start + jnp.arange(sizes.keys, dtype=jnp.int32) <= position  # [S]

        def read(pool_ref) -> Float[Array, "S H"]:
            keys = pool_ref.at[page, pl.ds(start, sizes.keys), :]
            return plgpu.load(keys, mask=is_visible[:, None], other=0.0).astype(q.dtype)

        scores = dot(q, read(k_ref), transpose=True) * scale  # [R S]
        scores = jnp.where(is_visible[None, :], scores, -jnp.inf)
        top = jnp.maximum(state.top, jnp.max(scores, axis=1))
        weights = exp2(scores - top[:, None], sizes.interpret)
        fade = exp2(state.top - top, sizes.interpret)
        values = state.values * fade[:, None] + dot(weights.astype(q.dtype), read(v_ref))
        return Softmax(values, top, state.total * fade + jnp.sum(weights, axis=1))

    state = empty_softmax(sizes.tile_rows, sizes.width)
    start = split * per_split
    stop = jnp.minimum(start + per_split, units)
    values, top, total = jax.lax.fori_loop(start, stop, take_unit, state)
    is_seen, total = divisor(total)
    out = values / total[:, None] * (1.0 if scales is None else scales.v[head])
    parts_ref[row, token, head, split, lane, :] = out.astype(parts_ref.dtype)
    if sizes.splits == 1:
        part_lses_ref[row, token, head, split, lane] = natural_lse(top, is_seen, total)
    else:  # for the merge, in powers of two
        part_lses_ref[row, token, head, split, lane] = jnp.where(is_seen, top + jnp.log(total) * LOG2E, -jnp.inf)
