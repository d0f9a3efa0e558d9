"""The common part of the Triton kernels of MXFP8 weights: numbers made in registers, and products of a few rows.

A number of E4M3 becomes float32 in two instructions, on the way over float16 (bfloat16 would take as many more).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.backends import TileConfig
from pallas_kernels.mxfp8 import BLOCK, NAN_SCALE, Weights
from pallas_kernels.mxfp8_ptx import FOUR_BFLOAT16, FOUR_FLOAT16
from pallas_kernels.triton_common import dot

QUARTER = 4  # rows of a block that a warp reads at once: 4 of 128 bytes, 16 bytes a thread
_TURNS = BLOCK // QUARTER
TILE_ROWS = 16  # of x, of the least product that tensor cores take
TILE_COLUMNS = 128  # of the output, of a warp


@dataclasses.dataclass(frozen=True)
class FewConfig(TileConfig):
    """Sizes of a program that multiplies a few rows without tensor cores.

    Attributes:
      columns: of the output.
      blocks: of input channels that it takes at a time.
      rows: of x.
      programs: into how many the work is cut, at most: input channels too are divided, and sums then added up.
    """

    columns: int = 128
    blocks: int = 4
    rows: int = 2
    num_warps: int = 4
    programs: int = 528


@dataclasses.dataclass(frozen=True)
class FragmentConfig(TileConfig):
    """Sizes of a program, one warp, that multiplies 16 rows and 128 columns by tensor cores.

    Attributes:
      programs: as of `FewConfig`.
    """

    programs: int = 1584


def powers(scales: UInt8[Array, "*X"]) -> Float[Array, "*X"]:
    """Return 2^(scale - 127), made from its bits: 2^-127 is subnormal, and scale 255 means NaN."""
    scales = scales.astype(jnp.int32)
    bits = jnp.where(scales == 0, 1 << 22, jnp.where(scales == NAN_SCALE, 0x7FC00000, scales << 23))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def e4m3(codes: UInt8[Array, "*X"]) -> Float[Array, "*X"]:
    """Return the numbers of E4M3 that codes stand for, in float32."""
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def numbers(
    codes: UInt8[Array, "*X 32 W"], scales: UInt8[Array, "*X W"], dtype: jax.typing.DTypeLike
) -> Float[Array, "*X 32 W"]:
    """Return blocks of weights: code times power of two, exact in float32, then cast to the activations' dtype."""
    return (e4m3(codes) * powers(scales)[..., None, :]).astype(dtype)


def numbers_for_tensor_cores(
    codes: UInt8[Array, "*X"], power: Float[Array, "..."], dtype: jax.typing.DTypeLike, interpret: bool
) -> Float[Array, "*X"]:
    """Return `numbers` of codes whose powers of two are there already, in as few instructions as there can be.

    Args:
      codes: of E4M3.
      power: of each, in float32; axes that are 1 are repeated.
      dtype: bfloat16 or float16.
      interpret: whether this is interpret mode.
    """
    if interpret:
        return (e4m3(codes) * power).astype(dtype)
    is_bfloat16 = dtype == jnp.bfloat16
    power = power.astype(dtype) if is_bfloat16 else power
    [values] = plgpu.elementwise_inline_asm(
        FOUR_BFLOAT16 if is_bfloat16 else FOUR_FLOAT16,
        args=[codes, jnp.broadcast_to(power, codes.shape)],
        constraints="=r,=r,r,r,r" if is_bfloat16 else "=r,=r,r,r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return values


def in_quarters(weights: Weights) -> Weights:
    """Reshape codes as `sum_rows` reads them, `[*stack blocks 8 4 O]`; no data moves."""
    *stack, inputs, outputs = weights.codes.shape
    return weights._replace(codes=weights.codes.reshape(*stack, inputs // BLOCK, _TURNS, QUARTER, outputs))


def rows_in_quarters(x: Shaped[Array, "X I"]) -> Shaped[Array, "X I32 8 4"]:
    """Reshape activations as `sum_rows` reads them; no data moves."""
    return x.reshape(len(x), -1, _TURNS, QUARTER)


def sum_rows(
    x_ref,
    rows: list[Any],
    weights: Weights,
    where: tuple,
    columns: Any,
    split: Int[Array, ""],
    splits: int,
    config: FewConfig,
) -> list[Float[Array, " W"]]:
    """Return the products of some rows of x with some columns, over one part of the input channels.

    Each thread keeps sums of its own over all that it reads, so that nothing moves between threads until the end.
    In bfloat16 a weight is its code times a power of two: codes are multiplied, and the sum of a block by its power.

    Args:
      x_ref: of `rows_in_quarters`.
      rows: of x, indices.
      weights: of `in_quarters`, references.
      where: the matrix in its stack.
      columns: a slice of `config.columns` outputs.
      split: which part of the input channels.
      splits: of how many.
      config: sizes.

    Returns:
      The sums of each row in float32.
    """
    num_steps = x_ref.shape[1] // config.blocks // splits
    is_exact = x_ref.dtype == jnp.bfloat16
    zero = jnp.zeros((config.blocks, QUARTER, config.columns), jnp.float32)

    def take_blocks(step, sums):
        blocks = pl.ds((split * num_steps + step) * config.blocks, config.blocks)
        codes = [weights.codes[(*where, blocks, turn, slice(None), columns)] for turn in range(_TURNS)]
        power = powers(weights.scales[(*where, blocks, columns)])[:, None, :]  # [blocks 1 W]
        parts = [zero] * len(rows)
        for turn, some_codes in enumerate(codes):
            values = e4m3(some_codes)  # [blocks 4 W]
            if not is_exact:
                values = (values * power).astype(x_ref.dtype).astype(jnp.float32)
            channels = [x_ref[row, blocks, turn, :].astype(jnp.float32)[:, :, None] for row in rows]  # [blocks 4 1]
            parts = [part + values * x for part, x in zip(parts, channels, strict=True)]
        return tuple(s + (part * power if is_exact else part) for s, part in zip(sums, parts, strict=True))

    sums = jax.lax.fori_loop(0, num_steps, take_blocks, (zero,) * len(rows))
    return [jnp.sum(s, axis=(0, 1)) for s in sums]


# Tensor cores want of each thread, for its columns, the numbers of four input channels out of 16. Which channels, and
# which columns, is free, as long as both sides of the product agree: so they are those that the thread has read, and
# nothing moves between threads. In memory a thread's 16 columns are neighbours, and eight threads have 128; four such
# groups have a row each, and read four rows one after the other. As tensor cores count, channel = (half, group, pair)
# and column = (own, thread); in memory channel = (half, pair, group) and column = (thread, own).


def in_fragments(weights: Weights) -> Weights:
    """Reshape weights as `multiply_tile` reads them; no data moves.

    Codes become `[*stack I32 2 half pair group O128 thread own]`, scales `[*stack I32 O128 thread own]`.
    """
    *stack, inputs, outputs = weights.codes.shape
    columns = outputs // TILE_COLUMNS, 8, 16
    return Weights(
        weights.codes.reshape(*stack, inputs // BLOCK, 2, 2, 2, 4, *columns),
        weights.scales.reshape(*stack, inputs // BLOCK, *columns),
    )


def rows_in_fragments(x: Shaped[Array, "X I"]) -> Shaped[Array, "X I"]:
    """Return activations with their channels in the order in which tensor cores count them."""
    channels = x.reshape(len(x), -1, 2, 2, 4)  # [X I16 half pair group]
    return channels.swapaxes(3, 4).reshape(x.shape)


def multiply_tile(
    x_ref, rows: Int[Array, " 16"], weights: Weights, where: tuple, tile: Any, split: Any, splits: int
) -> Float[Array, "16 8 16"]:
    """Return the products of 16 rows of x with 128 columns, over one part of the input channels.

    Args:
      x_ref: of `rows_in_fragments`.
      rows: of x.
      weights: of `in_fragments`, references.
      where: the matrix in its stack.
      tile: which 128 columns.
      split: which part of the input channels.
      splits: of how many.

    Returns:
      Sums in float32; columns as in memory.
    """
    num_blocks = x_ref.shape[1] // BLOCK // splits
    is_exact = x_ref.dtype == jnp.bfloat16

    def take_block(step, out):
        block = split * num_blocks + step
        values = e4m3(weights.codes[(*where, block, slice(None), slice(None), slice(None), slice(None), tile)])
        power = powers(weights.scales[(*where, block, tile)])  # [thread own]
        if not is_exact:
            values = values * power
        # [2 half pair group thread own] -> [2 half group pair own thread]
        values = values.astype(x_ref.dtype).transpose(0, 1, 3, 2, 5, 4).reshape(BLOCK, TILE_COLUMNS)
        product = dot(x_ref[rows, pl.ds(block * BLOCK, BLOCK)], values)
        return out + (product * power.T.reshape(1, TILE_COLUMNS) if is_exact else product)

    out = jax.lax.fori_loop(0, num_blocks, take_block, jnp.zeros((TILE_ROWS, TILE_COLUMNS), jnp.float32))
    return out.reshape(TILE_ROWS, 16, 8).swapaxes(1, 2)
