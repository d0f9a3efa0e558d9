"""Gemma norm, partial rotary embedding and the write into KV and index pages, in Mosaic TPU kernels.

One kernel norms and rotates a tile of tokens; the partner of a rotated dim comes by a roll of the lanes. Another writes
new tokens into pages. Memory is tiled, so a token cannot be written alone: the tokens are sorted by where they go, and
a step reads the units (a page, or 32 tokens of one in a decode step) that some of them go to, puts them in by a matrix
product with a one-hot matrix, which moves rows exactly, and writes the units back. Each unit is touched by one step
only, so nothing has to be ordered.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, Limits
from pallas_kernels.mosaic_common import INTERPRETERS, SUBLANES, Chip, check_tiles, dot_tn, kernel_cost
from pallas_kernels.numbers import E4M3_MAX
from pallas_kernels.pages import Pages, seen_positions
from pallas_kernels.qk_norm_rope_insert import Call, Written

LIMITS = Limits(check_pages=check_tiles, interpreters=INTERPRETERS)

_UNIT = 32  # tokens: whole tiles of any dtype
_UNITS = 8  # of a step
_TOKENS = 16  # of a step of the norm
_NOWHERE = 2**31 - 1


def run(call: Call, config: None) -> Written:
    """Run `qk_norm_rope_insert` on a checked call."""
    kv_heads = call.x.k.shape[2]
    scales = jnp.ones((3, kv_heads), jnp.float32) if call.scales is None else call.scales
    norm_rope = partial(_norm_rope, cos=call.cos, sin=call.sin, eps=call.eps, interpret=call.interpret)
    insert = partial(_insert, positions=call.positions, lengths=call.lengths, interpret=call.interpret)
    finished = lambda queries, norm: queries if norm is None else norm_rope(queries, norm, dtype=call.dtype)
    q = finished(call.x.q, call.norms.q)
    keys = insert(call.k, norm_rope(call.x.k, call.norms.k, dtype=jnp.float32) / scales[0][:, None])
    values = insert(call.v, call.x.v.astype(jnp.float32) / scales[1][:, None])
    if call.index_k is None:
        return Written(q, None, keys, values, None)
    index_q = finished(call.x.index_q, call.norms.index_q)
    index_keys = norm_rope(call.x.index_k[:, :, None], call.norms.index_k, dtype=jnp.float32)  # [B T 1 I]
    index_keys = index_keys / scales[2, 0]
    return Written(q, index_q, keys, values, insert(call.index_k, index_keys))


def _norm_rope(
    x: Float[Array, "B T N H"],
    weight: Float[Array, " H"],
    *,
    cos: Float[Array, "B T R"],
    sin: Float[Array, "B T R"],
    eps: float,
    dtype: jax.typing.DTypeLike,
    interpret: Interpret,
) -> Float[Array, "B T N H"]:
    """Each head through norm and rotation."""
    batch, length, heads, width = x.shape
    half, count = cos.shape[-1], batch * length
    flat = lambda y: y.reshape(count, *y.shape[2:])  # [B*T ...]
    cos, sin = flat(cos).astype(jnp.float32), flat(sin).astype(jnp.float32)
    rest = jnp.zeros((count, width - 2 * half), jnp.float32)
    # y = x * in_place + (x one half ahead) * from_ahead + (x one half behind) * from_behind
    in_place = jnp.concatenate([cos, cos, rest + 1.0], axis=1)  # [B*T H]
    from_ahead = jnp.concatenate([-sin, jnp.zeros_like(sin), rest], axis=1)
    from_behind = jnp.concatenate([jnp.zeros_like(sin), sin, rest], axis=1)
    tokens = min(_TOKENS, count)
    at_tile, at_start = lambda i: (i, 0, 0), lambda i: (0, 0)
    angle = pl.BlockSpec((tokens, 1, width), at_tile)
    out = pl.pallas_call(
        partial(_norm_rope_kernel, half=half, eps=eps),
        grid=(pl.cdiv(count, tokens),),
        in_specs=[
            pl.BlockSpec((tokens, heads, width), at_tile), pl.BlockSpec((1, width), at_start), angle, angle, angle,
        ],
        out_specs=pl.BlockSpec((tokens, heads, width), at_tile),
        out_shape=jax.ShapeDtypeStruct((count, heads, width), dtype),
        compiler_params=Chip.current(interpret).compiler_params("parallel"),
        interpret=interpret,
        name="norm_rope",
    )(flat(x), weight[None], in_place[:, None], from_ahead[:, None], from_behind[:, None])  # fmt: skip
    return out.reshape(x.shape)


def _norm_rope_kernel(
    x_ref, weight_ref, in_place_ref, from_ahead_ref, from_behind_ref, out_ref, *, half: int, eps: float
):
    x = x_ref[...].astype(jnp.float32)  # [tokens N H]
    width = x.shape[-1]
    square = jnp.sum(x * x, axis=-1, keepdims=True) / width
    x = x * jax.lax.rsqrt(square + eps) * (1.0 + weight_ref[...].astype(jnp.float32))
    out = x * in_place_ref[...]
    out += pltpu.roll(x, width - half, 2) * from_ahead_ref[...] + pltpu.roll(x, half, 2) * from_behind_ref[...]
    out_ref[...] = out.astype(out_ref.dtype)


class Lists(NamedTuple):
    """The arrays that are prefetched into scalar memory; inside the kernel, references to them."""

    count: Any  # [1] units that some token goes to
    units: Any  # [X] each of these units, counted from the pool's start
    starts: Any  # [X + 1] where the tokens of each start among the sorted ones


class Buffers(NamedTuple):
    """Memory of a step in VMEM."""

    x: Any  # [units N window H] windows of the sorted tokens
    slots: Any  # [units window H] which place of its unit each of them has
    units: Any  # [units N unit H] the units that they go to


def _insert(
    pages: Pages,
    x: Float[Array, "B T K H"],
    *,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    interpret: Interpret,
) -> Float[Array, "X P H"]:
    """The pool with these tokens in it, rounded to its dtype; e4m3 has no infinity and is cut at its largest number."""
    _, length, heads, width = x.shape
    size, stored = pages.block_size, pages.pool.dtype
    unit = _UNIT if length < size and size % _UNIT == 0 else size
    if stored == jnp.float8_e4m3fn:
        x = jnp.clip(x, -E4M3_MAX, E4M3_MAX)
    x = x.astype(stored).astype(jnp.float32)
    target = _targets(pages, seen_positions(positions, lengths, length))
    key, order = jax.lax.sort((target, jnp.arange(target.size, dtype=jnp.int32)), num_keys=1)
    # A slice of tokens starts at a whole tile and covers the unit's tokens wherever they start.
    window = -(-(unit + SUBLANES) // SUBLANES) * SUBLANES
    padded = -(-target.size // SUBLANES) * SUBLANES + window
    x = x.reshape(-1, heads, width)[order].swapaxes(0, 1)  # [K B*T H]
    x = jnp.pad(x, ((0, 0), (0, padded - target.size), (0, 0)))
    slots = jnp.pad((key % unit).astype(jnp.float32), (0, padded - target.size))
    slots = jnp.broadcast_to(slots[:, None], (padded, width))
    count, units, starts = _units(key, unit)
    chip = Chip.current(interpret)
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    lists = Lists(count.reshape(1), units, starts)
    buffers = Buffers(
        x=pltpu.VMEM((_UNITS, heads, window, width), jnp.float32),
        slots=pltpu.VMEM((_UNITS, window, width), jnp.float32),
        units=pltpu.VMEM((_UNITS, heads, unit, width), stored),
    )
    # A row's tokens follow each other. A unit comes with its window of tokens and of slots, and goes back.
    touched = positions.shape[0] * ((length + 2 * unit - 2) // unit) / pages.num_devices
    of_unit = 2 * heads * unit * width * stored.itemsize + 4 * (heads + 1) * window * width
    cost = kernel_cost(lists, [], copied=touched * of_unit, products=2 * touched * (heads + 1) * unit * window * width)
    return pl.pallas_call(
        partial(_insert_kernel, unit=unit, heads=heads, head_stride=pages.head_stride),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(count, _UNITS),),
            in_specs=[any_memory] * 3,
            out_specs=any_memory,
            scratch_shapes=[buffers, pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.pool.shape, stored),
        input_output_aliases={len(lists) + 2: 0},
        compiler_params=chip.compiler_params("arbitrary"),
        cost_estimate=cost,
        interpret=interpret,
        name="insert",
    )(lists, x, slots, pages.pool)


def _targets(pages: Pages, token_positions: Int[Array, "B T"]) -> Int[Array, " X"]:
    """Return the place of each token's first head in the pool, in tokens; `_NOWHERE` for one that is not written."""
    size = pages.block_size
    block = jnp.maximum(token_positions, 0) // size
    is_inside = (token_positions >= 0) & (block < pages.num_blocks)
    block = jnp.where(is_inside, block, 0)
    page = pages.layer * pages.layer_stride
    row = jnp.arange(token_positions.shape[0], dtype=jnp.int32)[:, None]
    if pages.table is None:
        page += row * pages.row_stride + block
    else:
        entry = jnp.take_along_axis(pages.table, block, axis=1)
        is_inside &= pages.holds(entry)
        page += entry * pages.page_stride
    target = jnp.where(is_inside, page * size + jnp.maximum(token_positions, 0) % size, _NOWHERE)
    return target.reshape(-1).astype(jnp.int32)


def _units(key: Int[Array, " X"], unit: int) -> tuple[Int[Array, ""], Int[Array, " X"], Int[Array, " Y"]]:
    """Return (count, units, starts): the units that sorted targets lie in, and where the tokens of each start."""
    is_inside = key < _NOWHERE
    unit_of = key // unit
    is_start = is_inside & jnp.concatenate([jnp.ones(1, bool), unit_of[1:] != unit_of[:-1]])
    end = jnp.sum(is_inside, dtype=jnp.int32)
    starts = jnp.nonzero(is_start, size=key.size, fill_value=0)[0].astype(jnp.int32)
    count = jnp.sum(is_start, dtype=jnp.int32)
    starts = jnp.where(jnp.arange(key.size) < count, starts, end)
    return count, unit_of[jnp.minimum(starts, key.size - 1)], jnp.append(starts, end)


def _insert_kernel(
    lists: Lists,
    x_ref,
    slots_ref,
    old_pool_ref,
    pool_ref,
    buffers: Buffers,
    sems,
    *,
    unit: int,
    heads: int,
    head_stride: int,
):
    del old_pool_ref  # the same memory as `pool_ref`
    window, width = buffers.x.shape[2:]
    units_of_page = pool_ref.shape[1] // unit
    first = pl.program_id(0) * _UNITS

    def place(i):
        """Return (page of the first head, first token in it, start of the window of sorted tokens) of unit i."""
        i = jnp.minimum(first + i, lists.units.shape[0] - 1)
        start = lists.starts[i] // SUBLANES * SUBLANES
        token = lists.units[i] % units_of_page * unit
        page = lists.units[i] // units_of_page
        return page, pl.multiple_of(token, unit), pl.multiple_of(start, SUBLANES)

    def unit_copies(i, is_write: bool):
        page, token, _ = place(i)
        for head in range(heads):
            in_pool = pool_ref.at[page + head * head_stride, pl.ds(token, unit)]
            in_buffer = buffers.units.at[i, head]
            if is_write:
                yield pltpu.make_async_copy(in_buffer, in_pool, sems.at[1])
            else:
                yield pltpu.make_async_copy(in_pool, in_buffer, sems.at[0])

    def copies_in(i):
        start = place(i)[2]
        yield pltpu.make_async_copy(x_ref.at[:, pl.ds(start, window)], buffers.x.at[i], sems.at[0])
        yield pltpu.make_async_copy(slots_ref.at[pl.ds(start, window)], buffers.slots.at[i], sems.at[0])
        yield from unit_copies(i, False)

    def each_unit(fn):
        jax.lax.fori_loop(0, jnp.minimum(_UNITS, lists.count[0] - first), lambda i, _: fn(i), None)

    def merge(i):
        token = place(i)[2] + jax.lax.broadcasted_iota(jnp.int32, (window, 1), 0)
        is_own = (token >= lists.starts[first + i]) & (token < lists.starts[first + i + 1])
        lane = jax.lax.broadcasted_iota(jnp.int32, (window, unit), 1).astype(jnp.float32)
        one_hot = (is_own & (buffers.slots[i, :, :1] == lane)).astype(jnp.float32)  # [window unit]
        dtype = jnp.float32 if buffers.units.dtype == jnp.float32 else jnp.bfloat16
        is_written = dot_tn(one_hot.astype(dtype), jnp.ones((window, width), dtype)) > 0.5  # [unit H]
        for head in range(heads):
            x = jnp.where(is_own, buffers.x[i, head], 0.0).astype(dtype)
            old = buffers.units[i, head].astype(jnp.float32)
            new = jnp.where(is_written, dot_tn(one_hot.astype(dtype), x), old)
            buffers.units[i, head] = new.astype(buffers.units.dtype)
        for copy in unit_copies(i, True):
            copy.start()

    each_unit(lambda i: [copy.start() for copy in copies_in(i)] and None)
    each_unit(lambda i: [copy.wait() for copy in copies_in(i)] and None)
    each_unit(merge)
    each_unit(lambda i: [copy.wait() for copy in unit_copies(i, True)] and None)
