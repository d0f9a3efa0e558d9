"""Sums of products of rows by group in one Triton kernel.

A program takes a piece of one group's matrix, and walks the rows of the group's tiles.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.grouped_outer import Call
from pallas_kernels.triton_common import dot, in_groups


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece.

    Attributes:
      left: columns of the left rows.
      right: columns of the right rows.
      depth: rows that are multiplied in a step.
      num_warps: of a program.
      num_stages: steps that are under way at once.
      group: pieces of the left columns whose programs start before those of the next.
    """

    left: int = 128
    right: int = 256
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 3
    group: int = 8


LIMITS = Limits(config=Config)


def run(call: Call, config: Config | None) -> Float[Array, "E K N"]:
    """Run `grouped_outer` on a checked call.

    Raises:
      ValueError: sizes that are not whole pieces of a program.
    """
    config = config or default_config(call.left.dtype)
    (_, tile_rows, inputs), outputs = call.left.shape, call.right.shape[-1]
    if inputs % config.left or outputs % config.right or tile_rows % config.depth:
        raise ValueError(
            f"tiles of {tile_rows} rows with {inputs} and {outputs} columns: need multiples of {config.depth}, "
            f"{config.left} and {config.right}"
        )
    pieces = (inputs // config.left, outputs // config.right)
    return pl.pallas_call(
        partial(_kernel, config=config),
        grid=(pieces[0] * pieces[1], len(call.first_tile)),
        out_shape=jax.ShapeDtypeStruct((len(call.first_tile), inputs, outputs), call.left.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=call.interpret,
        name="grouped_outer",
    )(call.first_tile, call.num_tiles, call.left, call.right)


def default_config(dtype: jax.typing.DTypeLike) -> Config:
    """Return the sizes of a dtype."""
    return Config(64, 64, 32, 8, 2) if jnp.dtype(dtype).itemsize == 4 else Config()


def _kernel(first_ref, num_ref, left_ref, right_ref, out_ref, *, config: Config):
    _, inputs, outputs = out_ref.shape
    group, steps = pl.program_id(1), left_ref.shape[1] // config.depth
    left_piece, right_piece = in_groups(inputs // config.left, outputs // config.right, config.group)
    left_columns = pl.ds(left_piece * config.left, config.left)
    right_columns = pl.ds(right_piece * config.right, config.right)
    first = first_ref[group]

    def take_rows(i, total):
        tile, rows = first + jax.lax.div(i, steps), pl.ds(jax.lax.rem(i, steps) * config.depth, config.depth)
        left, right = left_ref[tile, rows, left_columns], right_ref[tile, rows, right_columns]
        return total + dot(left, right, transpose_a=True)

    zero = jnp.zeros((config.left, config.right), jnp.float32)
    total = jax.lax.fori_loop(0, num_ref[group] * steps, take_rows, zero)
    out_ref[group, left_columns, right_columns] = total.astype(out_ref.dtype)
