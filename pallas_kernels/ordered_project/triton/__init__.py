"""Dense projections in Triton whose sums have one order: a program walks the input channels from first to last.

A program takes some rows and some columns of one matrix. Tensor cores add what they multiply to what they are given:
sixteen input channels at a time, after those before. So an element's order does not depend on how many rows or columns
its program has, nor on which side of the product they stand, and tiles may be as high as a call has rows.

Products in float32 are not for tensor cores, and cut at fixed channels, so that one row too has many programs.

In M3's sizes::

    x [16 to 128 rows, 64 of 6,144] ── walks ──┐
                                               ├── [rows, 64 to 256 columns] in float32 ── memory
    W in the stack, [64, columns] ── walks ────┘
"""

import dataclasses
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.mxfp8 import BLOCK, Weights, check_reach
from pallas_kernels.numbers import power_of_two
from pallas_kernels.ordered_project import Call
from pallas_kernels.triton_common import dot, in_groups, run_own, store_rows
from pallas_kernels.triton_mxfp8 import numbers

_DEPTH = 64  # input channels of a step
_PART = 256  # input channels of one sum in float32; these sums are added one after the other
_LEAST_ROWS, _MOST_FEW_ROWS = 16, 64


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program, which change no bit of the result.

    Attributes:
      rows: of x.
      columns: of a matrix, at most: as many as divide its width.
      columns_first: the columns stand on the side of the product of which tensor cores want 64 at once.
      num_warps: of a program.
      num_stages: steps that are under way at once, all but one of them being fetched.
      group: row tiles whose programs start before those of the next, so that they share the columns that they read.
    """

    rows: int
    columns: int
    columns_first: bool
    num_warps: int
    num_stages: int
    group: int = 8


LIMITS = Limits(config=Config)


def default_config(dtype: jax.typing.DTypeLike, num_rows: int, is_mxfp8: bool) -> Config:
    """Sizes for a call of so many rows."""
    if jnp.dtype(dtype).itemsize == 4:
        return Config(rows=32, columns=32, columns_first=False, num_warps=4, num_stages=2)
    if num_rows <= _MOST_FEW_ROWS:
        rows = max(_LEAST_ROWS, power_of_two(num_rows))
        return Config(rows=rows, columns=64, columns_first=True, num_warps=4, num_stages=3 if is_mxfp8 else 6)
    columns, stages = (128, 3) if is_mxfp8 else (256, 4)
    return Config(rows=128, columns=columns, columns_first=False, num_warps=8, num_stages=stages)


def run(call: Call, config: Config | None) -> tuple[Float[Array, "X _"], ...]:
    """Run `ordered_project` on a checked call.

    Raises:
      ValueError: widths that are not whole pieces of a program, or codes out of reach.
    """
    is_mxfp8 = any(isinstance(w, Weights) for w in call.weights)
    config = config or default_config(call.x.dtype, len(call.x), is_mxfp8)
    num_rows, inputs = call.x.shape
    check_reach(*(w for w in call.weights if isinstance(w, Weights)))
    widths = [outputs_of(w, call.by_output) for w in call.weights]
    part = inputs if call.x.dtype.itemsize == 2 else min(inputs, _PART)
    least = 64 if call.x.dtype.itemsize == 2 else 16  # columns
    if inputs % _DEPTH or inputs % part or any(width % least for width in widths):
        raise ValueError(
            f"{inputs} input channels and {', '.join(map(str, widths))} outputs: need multiples of "
            f"{_DEPTH if part == inputs else part} and {least}"
        )
    columns = [min(width & -width, config.columns) for width in widths]
    pieces = [width // some for width, some in zip(widths, columns, strict=True)]
    row_tiles, num_parts = pl.cdiv(num_rows, config.rows), inputs // part
    sums = pl.pallas_call(
        partial(_kernel, columns=columns, pieces=pieces, by_output=call.by_output, steps=part // _DEPTH, config=config,
                interpret=call.interpret),
        grid=(row_tiles * sum(pieces), num_parts),
        out_shape=[jax.ShapeDtypeStruct((num_parts * num_rows, width), jnp.float32) for width in widths],
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=call.interpret,
        name="ordered_project",
    )(call.layer.reshape(1).astype(jnp.int32), call.x, tuple(map(_in_blocks, call.weights)))  # fmt: skip
    return tuple(reduce(jnp.add, y.reshape(num_parts, num_rows, -1)) for y in sums)


def outputs_of(weight: Array | Weights, by_output: bool) -> int:
    """Return the number of outputs of a matrix."""
    return (weight.codes if isinstance(weight, Weights) else weight).shape[1 if by_output else 2]


def _in_blocks(weight: Array | Weights) -> Array | Weights:
    """Codes with an axis for the channels that share a scale; nothing moves."""
    if not isinstance(weight, Weights):
        return weight
    layers, inputs, outputs = weight.codes.shape
    return weight._replace(codes=weight.codes.reshape(layers, inputs // BLOCK, BLOCK, outputs))


def _kernel(
    layer_ref,
    x_ref,
    weights: tuple[Any, ...],
    *out_refs,
    columns: list[int],
    pieces: list[int],
    by_output: bool,
    steps: int,
    config: Config,
    interpret: bool,
):
    num_rows = x_ref.shape[0]
    row_tile, own_piece = in_groups(pl.cdiv(num_rows, config.rows), sum(pieces), config.group)
    part = pl.program_id(1)
    rows = row_tile * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    read_rows = jnp.minimum(rows, num_rows - 1)  # rows behind the last repeat it

    def run(matrix: int, piece: Int[Array, ""]) -> None:
        weight, num_columns = weights[matrix], columns[matrix]
        some_columns = pl.ds(piece * num_columns, num_columns)

        def take_depth(i, total):
            step = part * steps + i
            x = x_ref[read_rows, pl.ds(step * _DEPTH, _DEPTH)]  # [R depth]
            taken = _read(weight, layer_ref[0], step, some_columns, by_output, x.dtype)
            if config.columns_first:
                return total + dot(taken, x, transpose_a=not by_output, transpose=True)  # [C R]
            return total + dot(x, taken, transpose=by_output)  # [R C]

        shape = (num_columns, config.rows) if config.columns_first else (config.rows, num_columns)
        total = jax.lax.fori_loop(0, steps, take_depth, jnp.zeros(shape, jnp.float32))
        total = total.T if config.columns_first else total
        store_rows(out_refs[matrix], part * num_rows + read_rows, some_columns, total, rows < num_rows, interpret)

    run_own(own_piece, pieces, run)


def _read(weight, layer, step, columns: pl.Slice, by_output: bool, dtype) -> Float[Array, "_ _"]:
    """A step of some columns' channels: [depth C], or [C depth] where the outputs come first."""
    depth = pl.ds(step * _DEPTH, _DEPTH)
    if not isinstance(weight, Weights):
        return weight[layer, columns, depth] if by_output else weight[layer, depth, columns]
    blocks = pl.ds(step * (_DEPTH // BLOCK), _DEPTH // BLOCK)
    codes, scales = weight.codes[layer, blocks, :, columns], weight.scales[layer, blocks, columns]
    return numbers(codes, scales, dtype).reshape(_DEPTH, columns.size)
