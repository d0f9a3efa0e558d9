"""Gate, up and down projections of routed experts in two Mosaic kernels for Hopper, which make numbers in registers.

A work (`pallas_kernels.hopper_mxfp8`) is a piece of two matrices for all tokens of a tile: so an expert's weights are
read, and made numbers of, once for all of them. In M3's sizes::

    x [16 to 128 tokens of one expert] ── times ── gate and up [128 columns of each] ── activation ── hidden, memory
    hidden ── times ── two pieces of down, half of its columns apart ── a float32 row of each pair

Rows of x lie in memory as tiles take them (an XLA gather makes them so), each tile's from a multiple of 8 on: what
fetches them counts in eights.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper_registers as registers
from pallas_kernels.backends import Limits
from pallas_kernels.hopper_mxfp8 import EIGHT, MOST_WIDE_ROWS, Config, Pair, Work, check_operands, multiply_pieces
from pallas_kernels.hopper_registers import DEPTH
from pallas_kernels.mxfp8_grouped import Call

_ROWS = (16, 32, 64, 128, 256)  # tokens of a product: a tile takes the fewest that are enough
_UNIT = 128  # what widths are multiples of

LIMITS = Limits(config=Config)


class _Tiles(NamedTuple):
    """The tiles of a call; inside the kernel, references."""

    layer: Any  # [1] of the stack
    used: Any  # [1] tiles up to the last one with tokens
    expert: Any  # [Y]
    first_row: Any  # [Y] of the rows of x
    count: Any  # [Y] of its tokens
    pair: Any  # [Y C]


def run(call: Call, config: Config | None) -> Float[Array, "X A D"]:
    """Run `mxfp8_grouped` on a checked call.

    Raises:
      ValueError: interpret mode, activations that are not bfloat16, or widths that are not whole pieces of a program.
    """
    (num_tiles, tile_rows), (width, hidden_width) = call.pair.shape, call.gate.codes.shape[2:]
    check_operands(call.x, call.interpret)
    if width % _UNIT or hidden_width % _UNIT:
        raise ValueError(f"widths {width} and {hidden_width}: need multiples of {_UNIT}")
    config = config or default_config(tile_rows, width)
    num_pairs = len(call.x) * call.num_chosen
    of_row, first_row = rows_of_tiles(call.pair, call.count, num_pairs)
    used = jnp.max(jnp.where(call.count > 0, jnp.arange(1, num_tiles + 1, dtype=jnp.int32), 0), initial=0)
    tiles = _Tiles(
        call.layer.reshape(1).astype(jnp.int32), used.reshape(1), call.expert, first_row, call.count, call.pair
    )

    def start(write, rows, matrices: Pair, apart: int, columns: int, out: jax.ShapeDtypeStruct, name: str) -> Array:
        num_pieces, num_steps = columns // config.columns, rows.shape[1] // DEPTH

        def work(tiles: _Tiles, index: Int[Array, ""]) -> Work:
            tile = index // num_pieces
            count = tiles.count[tile]
            return Work(
                pair=jnp.int32(0), place=(tiles.layer[0], tiles.expert[tile]), piece=index % num_pieces,
                first_step=jnp.int32(0), num_steps=jnp.where(count > 0, num_steps, 0),
                first_row=tiles.first_row[tile], count=count, target=tile,
            )  # fmt: skip

        [written] = multiply_pieces(
            rows, [matrices], [apart // config.columns], tiles,
            num_works=lambda tiles: tiles.used[0] * num_pieces, work=work, write=write, outs=[out],
            heights=[height for height in _ROWS if height <= tile_rows], config=config, name=name,
        )  # fmt: skip
        return written

    def write_hidden(_, sums, buffer, outs, columns, work: Work, tiles: _Tiles) -> None:
        [out] = outs
        values = call.activate(*registers.exchange(sums, buffer)).astype(out.dtype)
        registers.write_halves(out.at[pl.ds(work.first_row, sums.shape[1]), columns], values, work.count)

    def write_out(_, sums, buffer, outs, columns, work: Work, tiles: _Tiles) -> None:
        [out] = outs
        registers.write_pairs(out.at[:, columns], sums, work.count, tiles.pair.at[work.target], width // 2)

    hidden = start(
        write_hidden, call.x[of_row // call.num_chosen], Pair(call.gate, call.up), 0, hidden_width,
        jax.ShapeDtypeStruct((len(of_row), hidden_width), call.x.dtype), "mxfp8_grouped_hidden",
    )  # fmt: skip
    out = start(
        write_out, hidden, Pair(call.down, call.down), width // 2, width // 2,
        jax.ShapeDtypeStruct((num_pairs, width), jnp.float32), "mxfp8_grouped_out",
    )  # fmt: skip
    return out.reshape(len(call.x), call.num_chosen, width)


def default_config(tile_rows: int, width: int) -> Config:
    """Return the sizes for tiles of so many tokens, and matrices whose halves are whole pieces.

    Args:
      tile_rows: tokens of a tile, at most.
      width: D.
    """
    is_wide = tile_rows <= MOST_WIDE_ROWS and width % (2 * _UNIT) == 0
    return Config.of(_UNIT if is_wide else _UNIT // 2, tile_rows)


def rows_of_tiles(
    pair: Int[Array, "Y C"], count: Int[Array, " Y"], num_pairs: int
) -> tuple[Int[Array, " R"], Int[Array, " Y"]]:
    """Put the pairs that count one tile behind the other, each tile's from a multiple of 8 on.

    Args:
      pair: of each tile.
      count: how many of its pairs count.
      num_pairs: at most, over all tiles.

    Returns:
      The pair of each row, 0 where there is none, and the first row of each tile.
    """
    num_tiles, tile = pair.shape
    eights = -(-count // EIGHT) * EIGHT
    first_row = jnp.cumsum(eights, dtype=jnp.int32) - eights
    most = num_pairs + (EIGHT - 1) * min(num_tiles, num_pairs)
    num_rows = -(-most // EIGHT) * EIGHT
    place = jnp.arange(tile, dtype=jnp.int32)
    row = jnp.where(place < count[:, None], first_row[:, None] + place, num_rows)  # [Y C]
    return jnp.zeros(num_rows, jnp.int32).at[row].set(pair, mode="drop"), first_row
