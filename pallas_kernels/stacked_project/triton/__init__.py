"""Dense projections of up to 64 rows in Triton, at the memory's rate.

A program walks its part of the input channels for a piece of one matrix's columns, with what the next steps take under
way. Tensor cores multiply, for one row too, with the weights as their left operand.

In M3's sizes::

  x [16 rows, 32 of I] ── walks ──┐
                                  ├── W^T x^T on tensor cores ── [16 rows, 128 columns], of which those of x are written
  W [32, 128 columns] of a layer ── walks, four steps ahead ──┘
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.numbers import power_of_two
from pallas_kernels.stacked_project import Call
from pallas_kernels.triton_common import dot_columns, store_rows
from pallas_kernels.triton_experts import Piece
from pallas_kernels.triton_project import num_splits, project_pieces

_LEAST_ROWS = 16  # of a product on tensor cores


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program.

    Attributes:
      piece: its columns and depth.
      programs: into how many the work is cut, at most: input channels too are divided, and sums then added up.
    """

    piece: Piece
    programs: int = 264


LIMITS = Limits(config=Config)


def run(call: Call, config: Config | None) -> tuple[Float[Array, "X _"], ...]:
    """Run `stacked_project` on a checked call.

    Raises:
      ValueError: widths that are not whole pieces of a program.
    """
    (num_rows, inputs), widths = call.x.shape, [w.shape[2] for w in call.weights]
    config = default_config(call.x.dtype, inputs, widths) if config is None else config
    piece = config.piece
    if inputs % piece.depth or any(width % piece.columns for width in widths):
        raise ValueError(
            f"{inputs} input channels and {', '.join(map(str, widths))} outputs: need multiples of {piece.depth} and "
            f"{piece.columns}"
        )
    tiles = [width // piece.columns for width in widths]
    splits = num_splits(sum(tiles), inputs // piece.depth, config.programs)
    parts = project_pieces(
        call.x,
        tuple(call.weights),
        call.layer,
        multiply=partial(_multiply, piece=piece, steps=inputs // piece.depth // splits, interpret=call.interpret),
        tiles=tiles,
        row_tiles=1,
        splits=splits,
        parts=[jax.ShapeDtypeStruct((splits * num_rows, width), jnp.float32) for width in widths],
        compiler_params=piece.compiler_params,
        interpret=call.interpret,
        name="stacked_project",
    )
    return tuple(jnp.sum(part.reshape(splits, num_rows, -1), axis=0) for part in parts)


def default_config(dtype: jax.typing.DTypeLike, inputs: int, widths: list[int]) -> Config:
    """Return the sizes that were fastest among those that fit in shared memory and divide the widths."""
    if jnp.dtype(dtype).itemsize == 4 or inputs % 64 or any(width % 128 for width in widths):
        return Config(Piece(64, 32, 4, 2))
    # q, k, v and what the index has: as many programs as there are multiprocessors or fewer, and no sums behind them.
    if 64 <= sum(widths) // 128 <= 132:
        return Config(Piece(128, 64, 8, 5), programs=132)
    return Config(Piece(128, 32, 4, 5))


def _multiply(x_ref, row_tile, w_ref, layer, tile, split, out_ref, *, piece: Piece, steps: int, interpret: bool):
    num_rows, columns = x_ref.shape[0], pl.ds(tile * piece.columns, piece.columns)
    row = jnp.arange(max(_LEAST_ROWS, power_of_two(num_rows)), dtype=jnp.int32)  # [R]; those behind the last repeat it
    place = jnp.minimum(row, num_rows - 1)

    def take_depth(step, out):
        depth = pl.ds((split * steps + step) * piece.depth, piece.depth)
        return out + dot_columns(w_ref[layer, depth, columns], x_ref[place, depth])

    zero = jnp.zeros((piece.columns, len(row)), jnp.float32)
    out = jax.lax.fori_loop(0, steps, take_depth, zero).T  # [R columns]
    store_rows(out_ref, split * num_rows + place, columns, out, row < num_rows, interpret)
