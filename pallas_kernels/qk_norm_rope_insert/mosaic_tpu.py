"""Gemma norm, partial rotary embedding and the write into KV and index pages, in Mosaic TPU kernels.

One kernel norms and rotates a tile of tokens; the partner of a rotated dim comes by a roll of the lanes. Another writes
new tokens into pages. Memory is tiled, so a token cannot be written alone: the tokens are sorted by where they go, and
a step reads the units (a page, or 32 tokens of one in a decode step) that some of them go to, puts them in by a matrix
product with a one-hot matrix, which moves rows exactly, and writes the units back. Each unit is touched by one step
only, so nothing has to be ordered.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import Pages, seen_positions
from pallas_kernels.mosaic_common import SUBLANES, Chip, Interpret, check_view, dot_tn
from pallas_kernels.qk_norm_rope_insert.triton import _E4M3_MAX, Projected, Written

_UNIT = 32  # tokens: whole tiles of any dtype
_UNITS = 8  # of a step
_TOKENS = 16  # of a step of the norm
_NOWHERE = 2**31 - 1


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
    interpret: Interpret = False,
) -> Written:
    """Norm, rotate and write a layer's new tokens.

    Args:
      x: q `[B T N H]`, k and v `[B T K H]`, and for a sparse layer index_q `[B T K I]` and index_k `[B T I]`; finite,
        and best in float32, as the projections accumulate.
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
      interpret: run on the CPU, with these parameters if they are given.

    Returns:
      Written. The pools keep their shapes `[pages P H]`.

    Raises:
      ValueError: index projections without index pages or the other way round, or pages of another width.

    Source: transformers `MiniMaxM3VLRMSNorm`, rotary embedding over half-split dims.
    """
    _check(x, k, v, index_k, cos)
    for name, pages in (("k", k), ("v", v), ("index_k", index_k)):
        if pages is not None:
            check_view(name, pages, x.q.shape[0], interpret)
    kv_heads = x.k.shape[2]
    scales = jnp.ones((3, kv_heads), jnp.float32) if scales is None else scales
    turn = partial(_norm_rope, cos=cos, sin=sin, eps=eps, interpret=interpret)
    put = partial(_insert, positions=positions, lengths=lengths, interpret=interpret)
    q = turn(x.q, norms.q, dtype=dtype)
    keys = put(k, turn(x.k, norms.k, dtype=jnp.float32) / scales[0][:, None])
    values = put(v, x.v.astype(jnp.float32) / scales[1][:, None])
    if index_k is None:
        return Written(q, None, keys, values, None)
    index_q = turn(x.index_q, norms.index_q, dtype=dtype)
    index = turn(x.index_k[:, :, None], norms.index_k, dtype=jnp.float32) / scales[2, 0]
    return Written(q, index_q, keys, values, put(index_k, index))


def _norm_rope(
    x: Float[Array, "B T N H"], weight: Float[Array, " H"], *, cos, sin, eps: float, dtype, interpret: Interpret
) -> Float[Array, "B T N H"]:
    batch, length, heads, width = x.shape
    half, count = cos.shape[-1], batch * length
    flat = lambda y: y.reshape(count, *y.shape[2:])
    cos, sin = flat(cos).astype(jnp.float32), flat(sin).astype(jnp.float32)
    rest = jnp.zeros((count, width - 2 * half), jnp.float32)
    # y = x * own + (x one half ahead) * ahead + (x one half behind) * behind
    own = jnp.concatenate([cos, cos, rest + 1.0], axis=1)
    ahead = jnp.concatenate([-sin, jnp.zeros_like(sin), rest], axis=1)
    behind = jnp.concatenate([jnp.zeros_like(sin), sin, rest], axis=1)
    tokens = min(_TOKENS, count)
    at_tile, every = lambda i: (i, 0, 0), lambda i: (0, 0)
    angle = pl.BlockSpec((tokens, 1, width), at_tile)
    out = pl.pallas_call(
        partial(_norm_rope_kernel, half=half, eps=eps),
        grid=(pl.cdiv(count, tokens),),
        in_specs=[pl.BlockSpec((tokens, heads, width), at_tile), pl.BlockSpec((1, width), every), angle, angle, angle],
        out_specs=pl.BlockSpec((tokens, heads, width), at_tile),
        out_shape=jax.ShapeDtypeStruct((count, heads, width), dtype),
        compiler_params=Chip.here(interpret).params("parallel"),
        interpret=interpret,
        name="norm_rope",
    )(flat(x), weight[None], own[:, None], ahead[:, None], behind[:, None])
    return out.reshape(x.shape)


def _norm_rope_kernel(x_ref, weight_ref, own_ref, ahead_ref, behind_ref, out_ref, *, half: int, eps: float):
    x = x_ref[...].astype(jnp.float32)
    width = x.shape[-1]
    square = jnp.sum(x * x, axis=-1, keepdims=True) / width
    x = x * jax.lax.rsqrt(square + eps) * (1.0 + weight_ref[...].astype(jnp.float32))
    out = x * own_ref[...]
    out += pltpu.roll(x, width - half, 2) * ahead_ref[...] + pltpu.roll(x, half, 2) * behind_ref[...]
    out_ref[...] = out.astype(out_ref.dtype)


def _insert(
    pages: Pages, x: Float[Array, "B T K H"], *, positions, lengths, interpret: Interpret
) -> Float[Array, "X P H"]:
    """The pool with these tokens in it, rounded to its dtype; e4m3 has no infinity and is cut at its largest number."""
    _, length, heads, width = x.shape
    size, stored = pages.block_size, pages.pool.dtype
    unit = _UNIT if length < size and size % _UNIT == 0 else size
    if stored == jnp.float8_e4m3fn:
        x = jnp.clip(x, -_E4M3_MAX, _E4M3_MAX)
    x = x.astype(stored).astype(jnp.float32)
    target = _targets(pages, seen_positions(positions, lengths, length))
    key, order = jax.lax.sort((target, jnp.arange(target.size, dtype=jnp.int32)), num_keys=1)
    # A slice of tokens starts at a whole tile and covers the unit's tokens wherever they start.
    window = -(-(unit + SUBLANES) // SUBLANES) * SUBLANES
    padded = -(-target.size // SUBLANES) * SUBLANES + window
    x = x.reshape(-1, heads, width)[order].swapaxes(0, 1)
    x = jnp.pad(x, ((0, 0), (0, padded - target.size), (0, 0)))
    slots = jnp.pad((key % unit).astype(jnp.float32), (0, padded - target.size))
    count, units, starts = _units(key, unit)
    chip = Chip.here(interpret)
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    prefetched = (count.reshape(1), units, starts)
    return pl.pallas_call(
        partial(_insert_kernel, unit=unit, heads=heads, head_stride=pages.head_stride),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(pl.cdiv(count, _UNITS),),
            in_specs=[any_memory] * 3,
            out_specs=any_memory,
            scratch_shapes=[
                pltpu.VMEM((_UNITS, heads, window, width), jnp.float32),
                pltpu.VMEM((_UNITS, window, width), jnp.float32),
                pltpu.VMEM((_UNITS, heads, unit, width), stored),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.pool.shape, stored),
        input_output_aliases={len(prefetched) + 2: 0},
        compiler_params=chip.params("arbitrary"),
        interpret=interpret,
        name="insert",
    )(*prefetched, x, jnp.broadcast_to(slots[:, None], (padded, width)), pages.pool)


def _targets(pages: Pages, at: Int[Array, "B T"]) -> Int[Array, " X"]:
    """Where in the pool each token's first head goes, in tokens."""
    size = pages.block_size
    block = jnp.maximum(at, 0) // size
    inside = (at >= 0) & (block < pages.num_blocks)
    block = jnp.where(inside, block, 0)
    page = pages.layer * pages.layer_stride
    row = jnp.arange(at.shape[0], dtype=jnp.int32)[:, None]
    if pages.table is None:
        page += row * pages.row_stride + block
    else:
        entry = jnp.take_along_axis(pages.table, block, axis=1)
        inside &= pages.holds(entry)
        page += entry * pages.page_stride
    return jnp.where(inside, page * size + jnp.maximum(at, 0) % size, _NOWHERE).reshape(-1).astype(jnp.int32)


def _units(key: Int[Array, " X"], unit: int) -> tuple[Int[Array, ""], Int[Array, " X"], Int[Array, " Y"]]:
    """(count, units, starts): the units that sorted targets lie in, and where the tokens of each start."""
    inside = key < _NOWHERE
    here = key // unit
    begins = inside & jnp.concatenate([jnp.ones(1, bool), here[1:] != here[:-1]])
    end = jnp.sum(inside, dtype=jnp.int32)
    starts = jnp.nonzero(begins, size=key.size, fill_value=0)[0].astype(jnp.int32)
    count = jnp.sum(begins, dtype=jnp.int32)
    starts = jnp.where(jnp.arange(key.size) < count, starts, end)
    return count, here[jnp.minimum(starts, key.size - 1)], jnp.append(starts, end)


def _insert_kernel(count_ref, units_ref, starts_ref, x_ref, slots_ref, _, pool_ref, *scratch, unit, heads, head_stride):
    x_buffer, slots_buffer, units_buffer, sems = scratch
    window, width = x_buffer.shape[2:]
    size = pool_ref.shape[1]
    first = pl.program_id(0) * _UNITS

    def place(i):
        """Where unit i lies: its first head's page, its first token there, its window of sorted tokens."""
        i = jnp.minimum(first + i, units_ref.shape[0] - 1)
        start = starts_ref[i] // SUBLANES * SUBLANES
        at = units_ref[i] % (size // unit) * unit
        return units_ref[i] // (size // unit), pl.multiple_of(at, unit), pl.multiple_of(start, SUBLANES)

    def unit_copies(i, back: bool):
        page, at, _ = place(i)
        for head in range(heads):
            there = pool_ref.at[page + head * head_stride, pl.ds(at, unit)]
            here = units_buffer.at[i, head]
            yield (
                pltpu.make_async_copy(here, there, sems.at[1])
                if back
                else pltpu.make_async_copy(there, here, sems.at[0])
            )

    def copies_in(i):
        start = place(i)[2]
        yield pltpu.make_async_copy(x_ref.at[:, pl.ds(start, window)], x_buffer.at[i], sems.at[0])
        yield pltpu.make_async_copy(slots_ref.at[pl.ds(start, window)], slots_buffer.at[i], sems.at[0])
        yield from unit_copies(i, False)

    def each(fn):
        jax.lax.fori_loop(0, jnp.minimum(_UNITS, count_ref[0] - first), lambda i, _: fn(i), None)

    each(lambda i: [copy.start() for copy in copies_in(i)] and None)
    each(lambda i: [copy.wait() for copy in copies_in(i)] and None)

    def merge(i):
        token = place(i)[2] + jax.lax.broadcasted_iota(jnp.int32, (window, 1), 0)
        mine = (token >= starts_ref[first + i]) & (token < starts_ref[first + i + 1])
        lane = jax.lax.broadcasted_iota(jnp.int32, (window, unit), 1).astype(jnp.float32)
        hot = (mine & (slots_buffer[i, :, :1] == lane)).astype(jnp.float32)
        kind = jnp.float32 if units_buffer.dtype == jnp.float32 else jnp.bfloat16
        written = dot_tn(hot.astype(kind), jnp.ones((window, width), kind)) > 0.5
        for head in range(heads):
            x = jnp.where(mine, x_buffer[i, head], 0.0).astype(kind)
            old = units_buffer[i, head].astype(jnp.float32)
            new = jnp.where(written, dot_tn(hot.astype(kind), x), old)
            units_buffer[i, head] = new.astype(units_buffer.dtype)
        for copy in unit_copies(i, True):
            copy.start()

    each(merge)
    each(lambda i: [copy.wait() for copy in unit_copies(i, True)] and None)


def _check(x: Projected, k: Pages, v: Pages, index_k: Pages | None, cos) -> None:
    if (x.index_q is None) != (index_k is None) or (x.index_k is None) != (index_k is None):
        raise ValueError("index_q, index_k and index pages come together: give all three, or none")
    widths = {x.q.shape[-1], x.k.shape[-1], k.width, v.width}
    if len(widths) > 1 or x.q.shape[2] % x.k.shape[2] or 2 * cos.shape[-1] > k.width:
        raise ValueError(
            f"q has shape {x.q.shape}, k {x.k.shape}, pages width {k.width} and {v.width}, cos {cos.shape}: need one "
            "width, query heads a multiple of KV heads, and at most half as many angles as dims"
        )
    if index_k is not None and (x.index_q.shape[-1] != index_k.width or x.index_q.shape[2] != x.k.shape[2]):
        raise ValueError(
            f"index_q has shape {x.index_q.shape} and index pages width {index_k.width}: need {x.k.shape[2]} heads of "
            "that width"
        )
