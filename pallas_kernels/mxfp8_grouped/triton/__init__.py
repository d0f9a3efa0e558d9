"""Gate, up and down projections of routed experts in two Triton kernels that make numbers of MXFP8 in registers.

Products are turned: weights^T times tokens^T. The left operand of Hopper's tensor cores may lie in registers, so a
number that a thread has made there goes into the product without passing through shared memory. The right operand, the
tokens, lies in shared memory. In M3's sizes, a program of 4 warps::

    codes in the stack ── [64 channels, 128 columns] ── shared memory ── numbers in registers [128, 64] ──┐
                                                                                                          ├─ [128, 128]
    pairs of one expert ── x [128 tokens, 64 of 6,144] ── shared memory ── transposed [64, 128] ──────────┘

    gate, to memory and back ── activation with up ── hidden, memory ── the same with down ── a row of each pair

A thread keeps the sums of gate for as long as it walks through them, and then needs its registers for up: gate's sums
wait in memory, where the second level of the cache holds them.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, UInt8

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.mxfp8 import BLOCK, Weights, check_reach
from pallas_kernels.mxfp8_grouped import Call
from pallas_kernels.triton_common import as_high_as_needed, div, dot, in_groups, store_rows
from pallas_kernels.triton_mxfp8 import numbers_for_tensor_cores, powers

_CHUNK = 16  # bytes that a thread fetches at once
_MOST_ROWS = 128  # of a tile


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece, and in which order programs start.

    Attributes:
      columns: of the output; a multiple of 16 for each warp.
      depth: input channels of a step; whole blocks.
      num_warps: of the program, four or eight: tensor cores take four at once.
      num_stages: steps that are under way at once.
      group: tiles whose programs start before those of the next.
    """

    columns: int = 128
    depth: int = 64
    num_warps: int = 4
    num_stages: int = 3
    group: int = 8

    @property
    def own(self) -> int:
        """Neighbouring columns whose numbers a thread makes."""
        return self.columns // (8 * self.num_warps)


LIMITS = Limits(config=Config)


def run(call: Call, config: Config | None) -> Float[Array, "X A D"]:
    """Run `mxfp8_grouped` on a checked call.

    Raises:
      ValueError: tiles that are too high, widths that are not whole pieces of a program, or codes out of reach.
    """
    (num_tiles, tile_tokens), (width, hidden_width) = call.pair.shape, call.gate.codes.shape[2:]
    config = Config() if config is None else config
    if tile_tokens > _MOST_ROWS:
        raise ValueError(f"tiles of {tile_tokens} tokens: backend = 'triton' takes up to {_MOST_ROWS}")
    if any(n % max(config.columns, config.depth) for n in (width, hidden_width)):
        unit = max(config.columns, config.depth)
        raise ValueError(f"widths {width} and {hidden_width}: need multiples of {unit}")
    check_reach(call.gate, advice="join layers")

    def start(kernel, outputs: int, out_shape, name: str):
        num_pieces = outputs // config.columns
        return pl.pallas_call(
            partial(kernel, num_pieces=num_pieces, config=config, interpret=call.interpret),
            grid=(num_tiles * num_pieces,),
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
            interpret=call.interpret,
            name=name,
        )

    tiles = call.layer.reshape(1).astype(jnp.int32), call.expert, call.pair, call.count
    shape = (num_tiles, tile_tokens, hidden_width)
    hidden_kernel = partial(_hidden_kernel, num_chosen=call.num_chosen, activate=call.activate)
    hidden_shapes = jax.ShapeDtypeStruct(shape, call.x.dtype), jax.ShapeDtypeStruct(shape, jnp.float32)
    hidden, _ = start(hidden_kernel, hidden_width, hidden_shapes, "mxfp8_grouped_hidden")(
        *tiles, call.x, call.gate, call.up
    )
    out_shape = jax.ShapeDtypeStruct((len(call.x) * call.num_chosen, width), jnp.float32)
    out = start(_out_kernel, width, out_shape, "mxfp8_grouped_out")(*tiles, hidden, call.down)
    return out.reshape(len(call.x), call.num_chosen, width)


def _hidden_kernel(
    layer_ref,
    expert_ref,
    pair_ref,
    count_ref,
    x_ref,
    gate: Weights,
    up: Weights,
    hidden_ref,
    gate_ref,
    *,
    num_chosen: int,
    activate: Callable[[Array, Array], Array],
    num_pieces: int,
    config: Config,
    interpret: bool,
):
    num_tiles, tile_tokens = pair_ref.shape
    tile, piece = in_groups(num_tiles, num_pieces, config.group)
    first_column, where = piece * config.columns, (layer_ref[0], expert_ref[tile])

    def take(num_rows: int) -> None:
        rows, columns = pl.ds(0, num_rows), pl.ds(first_column, config.columns)
        token = div(pair_ref[tile, rows], num_chosen)
        take_x = lambda depth: x_ref[token, depth]  # [rows depth]
        product = partial(_product, take_x, num_rows, x_ref.shape[1], x_ref.dtype, where=where)
        product = partial(product, first_column=first_column, config=config, interpret=interpret)
        gate_ref[tile, rows, columns] = product(gate)
        up_sum = product(up)
        if not interpret:
            plgpu.debug_barrier()  # threads may read what others wrote
        hidden_ref[tile, rows, columns] = activate(gate_ref[tile, rows, columns], up_sum).astype(hidden_ref.dtype)

    as_high_as_needed(take, count_ref[tile], tile_tokens, max(tile_tokens // 2, 16))


def _out_kernel(
    layer_ref,
    expert_ref,
    pair_ref,
    count_ref,
    hidden_ref,
    down: Weights,
    out_ref,
    *,
    num_pieces: int,
    config: Config,
    interpret: bool,
):
    num_tiles, tile_tokens = pair_ref.shape
    tile, piece = in_groups(num_tiles, num_pieces, config.group)
    first_column, where, count = piece * config.columns, (layer_ref[0], expert_ref[tile]), count_ref[tile]

    def take(num_rows: int) -> None:
        rows, columns = pl.ds(0, num_rows), pl.ds(first_column, config.columns)
        take_hidden = lambda depth: hidden_ref[tile, rows, depth]  # [rows depth]
        out = _product(
            take_hidden, num_rows, hidden_ref.shape[2], hidden_ref.dtype, down,
            where=where, first_column=first_column, config=config, interpret=interpret,
        )  # fmt: skip
        is_used = jnp.arange(num_rows, dtype=jnp.int32) < count
        store_rows(out_ref, pair_ref[tile, rows], columns, out, is_used, interpret)

    as_high_as_needed(take, count, tile_tokens, max(tile_tokens // 2, 16))


# Tensor cores want of a thread, for each of two of 16 columns and for columns that are 64 or more apart, the numbers of
# four input channels out of 16: as they count, channel = (eight, position, pair) and column = (far, warp, half, group),
# with a thread for each position and group. Which column of memory that is, is free: the columns of a thread are
# neighbours there, column = (warp, group, far, half), so that it reads them at once.


def _product(
    take_rows: Callable[[pl.Slice], Float[Array, "R depth"]],
    num_rows: int,
    num_channels: int,
    dtype: jax.typing.DTypeLike,
    weights: Weights,
    *,
    where: tuple,
    first_column: Any,
    config: Config,
    interpret: bool,
) -> Float[Array, "R W"]:
    """Return the products of a tile's rows with some columns of one matrix, in float32.

    Args:
      take_rows: returns some input channels of the rows.
      num_rows: R.
      num_channels: of the input.
      dtype: of the rows.
      weights: of the stack, references.
      where: the matrix in its stack.
      first_column: of `config.columns`.
      config: sizes.
      interpret: whether this is interpret mode.
    """

    def take_depth(step, out):
        codes = _codes(weights, where, step, first_column, config)
        power = _powers(weights, where, step, first_column, config)
        values = numbers_for_tensor_cores(codes, power, dtype, interpret)
        # [block ten eight pair warp group position far half] -> [far warp half group] [block ten eight position pair]
        turned = values.transpose(7, 4, 8, 5, 0, 1, 2, 6, 3).reshape(config.columns, config.depth)
        return out + dot(turned, take_rows(pl.ds(step * config.depth, config.depth)), transpose=True)

    zero = jnp.zeros((config.columns, num_rows), jnp.float32)
    out = jax.lax.fori_loop(0, num_channels // config.depth, take_depth, zero)
    out = out.reshape(config.own // 2, config.num_warps, 2, 8, num_rows)  # [far warp half group R]
    return out.transpose(4, 1, 3, 0, 2).reshape(num_rows, config.columns)


def _codes(
    weights: Weights, where: tuple, step: Any, first_column: Any, config: Config
) -> UInt8[Array, "_ 2 2 2 warps 8 4 _ 2"]:
    """Return a step's codes as [block sixteen eight pair warp group position far half]."""
    num_sixteens, num_chunks, own = config.depth // 16, config.columns // _CHUNK, config.own
    sizes = dict(position=4, sixteen=num_sixteens, eight=2, pair=2, chunk=num_chunks, byte=_CHUNK)
    # Shared memory has them in this order, but the position next to the bytes: so a warp's threads meet all its banks.
    names = "position", "sixteen", "eight", "pair", "chunk", "byte"
    shape = tuple(sizes[name] for name in names)
    along = lambda name: jax.lax.broadcasted_iota(jnp.int32, shape, names.index(name))
    channel = step * config.depth + along("sixteen") * 16 + along("eight") * 8 + along("position") * 2 + along("pair")
    column = first_column + along("chunk") * _CHUNK + along("byte")
    codes = weights.codes[(*where, channel, column)].transpose(1, 2, 3, 4, 0, 5)
    groups = _CHUNK // own  # threads whose columns are in one chunk
    codes = codes.reshape(num_sixteens // 2, 2, 2, 2, num_chunks, 4, groups, own).swapaxes(5, 6)
    return codes.reshape(num_sixteens // 2, 2, 2, 2, config.num_warps, 8, 4, own // 2, 2)


def _powers(
    weights: Weights, where: tuple, step: Any, first_column: Any, config: Config
) -> Float[Array, "_ 1 1 1 warps 8 4 _ 2"]:
    """Return a step's powers of two as `_codes` has the codes; the threads of a group read the same ones."""
    num_blocks, own = config.depth // BLOCK, config.own
    shape = (num_blocks, config.num_warps, 8, 4, own)
    along = lambda axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    column = first_column + along(1) * (8 * own) + along(2) * own + along(4)
    scales = weights.scales[(*where, step * num_blocks + along(0), column)]
    return powers(scales).reshape(num_blocks, 1, 1, 1, config.num_warps, 8, 4, own // 2, 2)
