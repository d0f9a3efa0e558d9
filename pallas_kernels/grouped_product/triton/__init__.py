"""Products of tiles of rows with their groups' matrices in one Triton kernel.

A program takes the rows of one tile (or a part of them) and a piece of the output's columns, and walks the channels
that are summed over. Programs of a few neighbouring tiles, which are mostly of one group, take one piece of the columns
before those of the next begin, so that they share what they read of the matrix.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.grouped_product import Call
from pallas_kernels.triton_common import dot, in_groups
from pallas_kernels.triton_experts import Piece


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece, and in which order programs start."""

    rows: int
    piece: Piece
    group: int = 8  # tiles whose programs start before those of the next


LIMITS = Limits(config=Config)


def run(call: Call, config: Config | None) -> Float[Array, "Y C N"]:
    """Run `grouped_product` on a checked call.

    Raises:
      ValueError: sizes that are not whole pieces of a program.
    """
    config = config or default_config(call.rows.dtype)
    (num_tiles, tile_rows, inputs), outputs = call.rows.shape, call.weight.shape[1 if call.transposed else 2]
    if tile_rows % config.rows:
        raise ValueError(f"tiles of {tile_rows} rows: need a multiple of {config.rows}")
    num_pieces, parts = config.piece.count(inputs, outputs), tile_rows // config.rows
    return pl.pallas_call(
        partial(_kernel, transposed=call.transposed, config=config, num_pieces=num_pieces),
        grid=(num_tiles * parts * num_pieces,),
        out_shape=jax.ShapeDtypeStruct((num_tiles, tile_rows, outputs), jnp.float32),
        compiler_params=config.piece.compiler_params,
        interpret=call.interpret,
        name="grouped_product",
    )(call.group, call.used.reshape(1).astype(jnp.int32), call.rows, call.weight)


def default_config(dtype: jax.typing.DTypeLike) -> Config:
    """Return the sizes of a dtype."""
    if jnp.dtype(dtype).itemsize == 4:
        return Config(64, Piece(columns=64, depth=32, num_warps=8, num_stages=2))
    return Config(128, Piece(columns=256, depth=64, num_warps=8, num_stages=3))


def _kernel(group_ref, used_ref, rows_ref, weight_ref, out_ref, *, transposed: bool, config: Config, num_pieces: int):
    num_tiles, tile_rows, inputs = rows_ref.shape
    parts, piece = tile_rows // config.rows, config.piece
    part, index = in_groups(num_tiles * parts, num_pieces, config.group * parts)
    tile, columns = jax.lax.div(part, parts), pl.ds(index * piece.columns, piece.columns)
    own_rows = pl.ds(jax.lax.rem(part, parts) * config.rows, config.rows)

    @pl.when(tile < used_ref[0])
    def _():
        group = group_ref[tile]

        def take_depth(i, out):
            depth = pl.ds(i * piece.depth, piece.depth)
            matrix = weight_ref[group, columns, depth] if transposed else weight_ref[group, depth, columns]
            return out + dot(rows_ref[tile, own_rows, depth], matrix, transpose=transposed)

        zero = jnp.zeros((config.rows, piece.columns), jnp.float32)
        out_ref[tile, own_rows, columns] = jax.lax.fori_loop(0, inputs // piece.depth, take_depth, zero)
