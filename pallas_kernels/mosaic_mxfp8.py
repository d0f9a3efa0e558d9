"""The common part of the TPU kernels of MXFP8 weights: a product of tiles of rows, each with a matrix of a stack.

A step holds a tile's rows, and reads a piece of a matrix as codes and scales by an index map; they become numbers in
VMEM, on the way to the MXU.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig
from pallas_kernels.mosaic_common import LANES, Chip, dot_nn
from pallas_kernels.mxfp8 import BLOCK, NAN_SCALE, Weights


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step.

    Attributes:
      rows: of a tile, at most.
      columns: of the output.
      depth: of the input; 32 blocks, whose scales are a whole tile of memory. A narrower input is one step.
    """

    rows: int = 256
    columns: int = 256
    depth: int = 1024


def check_widths(weights: tuple[Weights, ...], config: Config, interpret: Interpret) -> None:
    """Raise ValueError for matrices that are not made of whole pieces."""
    for w in weights:
        inputs, outputs = w.codes.shape[-2:]
        fits = outputs % LANES == 0 and (inputs % config.depth == 0 or inputs < config.depth)
        if not (fits or interpret):
            raise ValueError(
                f"{inputs} input channels and {outputs} outputs: a TPU kernel needs a multiple of {config.depth}, or "
                f'fewer, and a multiple of {LANES}; use backend="xla" for others'
            )


def project_tiles(
    x: Float[Array, "Y C I"],
    weights: Weights,
    layer: Int[Array, ""],
    matrix: Int[Array, " Y"],
    is_used: Int[Array, " Y"],
    *,
    config: Config,
    interpret: Interpret,
    name: str,
) -> Float[Array, "Y C O"]:
    """Each tile of rows times its matrix, in float32.

    Args:
      x: tiles of rows.
      weights: `[L E I O]`.
      layer: which of the stack.
      matrix: which of the layer's, of each tile.
      is_used: 0 where a tile's output may be anything.
      config: sizes.
      interpret: how to run.
      name: of the call.
    """
    num_tiles, num_rows, inputs = x.shape
    outputs = weights.codes.shape[3]
    depth = config.depth if inputs % config.depth == 0 else inputs
    columns = config.columns if outputs % config.columns == 0 else min(outputs, LANES)

    def x_place(tile, piece, step, layer, matrix, is_used):
        return tile, 0, step

    def weight_place(tile, piece, step, layer, matrix, is_used):
        return layer[0], matrix[tile], step, piece

    kernel = pl.pallas_call(
        partial(_kernel, num_steps=inputs // depth),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_tiles, outputs // columns, inputs // depth),
            in_specs=[
                pl.BlockSpec((1, num_rows, depth), x_place),
                pl.BlockSpec((1, 1, depth, columns), weight_place),
                pl.BlockSpec((1, 1, depth // BLOCK, columns), weight_place),
            ],
            out_specs=pl.BlockSpec((1, num_rows, columns), lambda tile, piece, step, *_: (tile, 0, piece)),
            scratch_shapes=[pltpu.VMEM((num_rows, columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tiles, num_rows, outputs), jnp.float32),
        compiler_params=Chip.current(interpret).compiler_params("parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name=name,
    )
    return kernel(layer.reshape(1).astype(jnp.int32), matrix, is_used, x, weights.codes, weights.scales)


def _kernel(layer_ref, matrix_ref, is_used_ref, x_ref, codes_ref, scales_ref, out_ref, sum_ref, *, num_steps: int):
    tile, step = pl.program_id(0), pl.program_id(2)

    @pl.when(step == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(is_used_ref[tile] > 0)
    def _():
        scales = scales_ref[0, 0].astype(jnp.int32)  # [blocks W]
        # The power of two by its bits; 2^-127 has no leading one.
        bits = jnp.where(scales == 0, 1 << 22, jnp.where(scales == NAN_SCALE, 0x7FC00000, scales << 23))
        powers = jax.lax.bitcast_convert_type(bits, jnp.float32)
        values = jax.lax.bitcast_convert_type(codes_ref[0, 0], jnp.float8_e4m3fn).astype(jnp.float32)  # [depth W]
        blocks, columns = powers.shape
        numbers = values.reshape(blocks, BLOCK, columns) * powers[:, None]
        sum_ref[...] += dot_nn(x_ref[0], numbers.reshape(values.shape).astype(x_ref.dtype))

    @pl.when(step == num_steps - 1)
    def _():
        out_ref[0] = sum_ref[...]
