"""Gate, up and down projections of routed experts in two Mosaic kernels for Hopper, which make numbers in registers.

As in the Triton kernels, products are turned: weights^T times tokens^T, because the left operand of Hopper's tensor
cores may lie in registers. Each multiprocessor runs one program, whose warpgroups have a part each: one fetches what
the next steps need, two make numbers and multiply. A program takes one piece of the columns of two matrices after the
other, for all tokens of a tile: so an expert's weights are read, and made numbers of, once for all of them. In M3's
sizes::

    codes, scales of both [64 channels, 128 columns] ───┐
                                                        ├── one of some places in shared memory
    x [16 to 128 tokens of one expert, 64 of 6,144] ────┘

    a warpgroup: 32 columns of both ── turned ── numbers in registers [64, 64] ── times x^T ── sums [64, tokens]
                 32 more columns of both ── ...

    gate and up [128 columns of each] ── activation ── hidden, memory
    two pieces of down, half of its columns apart ── a float32 row of each pair

Memory gives lines of 128 bytes, which are rows of such a piece: for half as wide ones it reaches 70% of its rate and
not 95%. In a tile of 256 tokens a warpgroup has room for the sums of 32 columns alone, and pieces have 64.

Rows of x lie in memory as tiles take them (an XLA gather makes them so), each tile's from a multiple of 8 on: what
fetches them counts in eights.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.mxfp8 import BLOCK, Weights
from pallas_kernels.mxfp8_grouped.mosaic_gpu import registers
from pallas_kernels.mxfp8_grouped.mosaic_gpu.registers import DEPTH, PART, WARPGROUPS

_FETCHING = WARPGROUPS  # the warpgroup that fetches is behind those that multiply
_ROWS = (16, 32, 64, 128, 256)  # tokens of a product: a tile takes the fewest that are enough
_EIGHT = 8  # rows that a fetch counts in
_UNIT = 128  # what widths are multiples of
_MOST_SUMS = 128  # of a thread, each in a register
_SHARED_MEMORY = 206 << 10  # bytes that places take, of 227 KiB
_MULTIPROCESSORS = 132  # of an H100 and an H200, where there is no device to ask


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program.

    Attributes:
      columns: 64 or 128, of a piece of each matrix.
      num_stages: steps whose operands are in shared memory.
    """

    columns: int
    num_stages: int


LIMITS = Limits(config=Config)


class _Tiles(NamedTuple):
    """The tiles of a call; inside the kernel, references, or one tile's values."""

    layer: Any  # [1] of the stack
    used: Any  # [1] tiles up to the last one with tokens
    expert: Any  # [Y]
    first_row: Any  # [Y] of the rows of x
    count: Any  # [Y] of its tokens
    pair: Any  # [Y C]


def run(
    x: Float[Array, "X D"],
    gate: Weights,
    up: Weights,
    down: Weights,
    layer: Int[Array, ""],
    expert: Int[Array, " Y"],
    pair: Int[Array, "Y C"],
    count: Int[Array, " Y"],
    *,
    num_chosen: int,
    activate: Callable[[Array, Array], Array],
    config: Config | None,
    interpret: bool,
) -> Float[Array, "X A D"]:
    """Run `mxfp8_grouped` on checked operands.

    Raises:
      ValueError: interpret mode, activations that are not bfloat16, or widths that are not whole pieces of a program.
    """
    width, hidden_width = gate.codes.shape[2:]
    if interpret:
        raise ValueError(
            "backend = 'mosaic_gpu' has no interpret mode: it is written in a GPU's registers; use 'triton'"
        )
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"x is {x.dtype}: backend = 'mosaic_gpu' takes bfloat16; use 'triton'")
    if width % _UNIT or hidden_width % _UNIT:
        raise ValueError(f"widths {width} and {hidden_width}: need multiples of {_UNIT}")
    config = config or default_config(pair.shape[1], width)
    num_pairs = len(x) * num_chosen
    of_row, first_row = rows_of_tiles(pair, count, num_pairs)
    used = jnp.max(jnp.where(count > 0, jnp.arange(1, len(count) + 1, dtype=jnp.int32), 0), initial=0)
    tiles = _Tiles(layer.reshape(1).astype(jnp.int32), used.reshape(1), expert, first_row, count, pair)
    call = partial(_call, tiles=tiles, config=config)

    def write_hidden(sums, buffer_ref, out_ref, columns, tile: _Tiles):
        values = activate(*registers.exchange(sums, buffer_ref)).astype(out_ref.dtype)
        rows = out_ref.at[pl.ds(tile.first_row, sums.shape[1]), columns]
        registers.write_halves(rows, values, tile.count)

    def write_out(sums, buffer_ref, out_ref, columns, tile: _Tiles):
        registers.write_pairs(out_ref.at[:, columns], sums, tile.count, tile.pair, width // 2)

    hidden = call(
        write_hidden, x[of_row // num_chosen], gate, up, 0, hidden_width // config.columns,
        jax.ShapeDtypeStruct((len(of_row), hidden_width), x.dtype), "mxfp8_grouped_hidden",
    )  # fmt: skip
    out = call(
        write_out, hidden, down, down, width // 2 // config.columns, width // 2 // config.columns,
        jax.ShapeDtypeStruct((num_pairs, width), jnp.float32), "mxfp8_grouped_out",
    )  # fmt: skip
    return out.reshape(len(x), num_chosen, width)


def default_config(tile_rows: int, width: int) -> Config:
    """Return the sizes for tiles of so many tokens, and matrices whose halves are whole pieces.

    Args:
      tile_rows: tokens of a tile, at most.
      width: D.
    """
    # A thread has a sum of 32 columns for two tokens: in pieces of 128 columns as many as there are tokens.
    columns = 128 if tile_rows <= _MOST_SUMS and width % (2 * 128) == 0 else 64
    codes_and_scales = 2 * (DEPTH + DEPTH // BLOCK) * columns
    return Config(columns, _SHARED_MEMORY // (codes_and_scales + 2 * DEPTH * tile_rows))


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
    eights = -(-count // _EIGHT) * _EIGHT
    first_row = jnp.cumsum(eights, dtype=jnp.int32) - eights
    most = num_pairs + (_EIGHT - 1) * min(num_tiles, num_pairs)
    num_rows = -(-most // _EIGHT) * _EIGHT
    place = jnp.arange(tile, dtype=jnp.int32)
    row = jnp.where(place < count[:, None], first_row[:, None] + place, num_rows)  # [Y C]
    return jnp.zeros(num_rows, jnp.int32).at[row].set(pair, mode="drop"), first_row


def _call(
    write: Callable[..., None],
    x: Float[Array, "R I"],
    first: Weights,
    second: Weights,
    apart: int,
    num_pieces: int,
    out_shape: jax.ShapeDtypeStruct,
    name: str,
    *,
    tiles: _Tiles,
    config: Config,
) -> Array:
    """Multiply each tile's rows by pieces of two matrices, and have the sums written.

    Args:
      write: called as (sums, buffer_ref, out_ref, columns, tile).
      x: rows of tiles.
      first: of the stack.
      second: likewise.
      apart: pieces from a piece of the first matrix to that of the second, as columns count.
      num_pieces: of each.
      out_shape: of the output.
      name: of the kernel.
      tiles: of x.
      config: sizes.
    """
    num_steps, tile_rows, columns, stages = x.shape[1] // DEPTH, tiles.pair.shape[1], config.columns, config.num_stages
    parts = columns // (PART * WARPGROUPS)  # of a warpgroup
    heights = [rows for rows in _ROWS if rows <= tile_rows]

    def kernel(tiles, x_ref, first, second, out_ref, x_places, first_places, second_places, buffer, is_full, is_empty):
        warpgroup, layer = jax.lax.axis_index("warpgroup"), tiles.layer[0]

        def for_each_piece(act: Callable[..., None]) -> None:
            """Call `act(tile, piece, steps before it)` for this program's pieces of tiles that have tokens."""

            @plgpu.nd_loop((tiles.used[0] * num_pieces,), collective_axes="program", init_carry=jnp.int32(0))
            def _(loop, carry):
                index, piece = loop.index[0] // num_pieces, loop.index[0] % num_pieces
                expert, first_row, count = (ref[index] for ref in tiles[2:5])
                tile = _Tiles(layer, None, expert, first_row, count, tiles.pair.at[index])
                pl.when(count > 0)(lambda: act(tile, piece, carry))
                return carry + jnp.where(count > 0, num_steps, 0)

        def as_high_as_needed(count, take: Callable[[int], None]) -> None:
            for less, rows in zip([0, *heights], heights, strict=False):
                pl.when((count > less) & (count <= rows))(partial(take, rows))

        def fetch(tile: _Tiles, piece, before) -> None:
            @pl.loop(0, num_steps)
            def _(step):
                place = jax.lax.rem(before + step, stages)
                pl.when(before + step >= stages)(lambda: plgpu.barrier_wait(is_empty.at[place]))
                copy = partial(plgpu.copy_gmem_to_smem, barrier=is_full.at[place])
                channels, blocks = pl.ds(step * DEPTH, DEPTH), pl.ds(step * (DEPTH // BLOCK), DEPTH // BLOCK)
                for weights, places, at in ((first, first_places, piece), (second, second_places, piece + apart)):
                    own = pl.ds(at * columns, columns)
                    copy(weights.codes.at[tile.layer, tile.expert, channels, own], places.codes.at[place])
                    copy(weights.scales.at[tile.layer, tile.expert, blocks, own], places.scales.at[place])

                def copy_rows(rows):
                    copy(x_ref.at[pl.ds(tile.first_row, rows), channels], x_places.at[place, pl.ds(0, rows)])

                as_high_as_needed(tile.count, copy_rows)

        def multiply(tile: _Tiles, piece, before) -> None:
            def take(rows):
                @partial(pl.run_scoped, sums=[plgpu.ACC((2 * PART, rows), jnp.float32)] * parts)
                def _(sums):
                    @pl.loop(0, num_steps)
                    def _(step):
                        place = jax.lax.rem(before + step, stages)
                        plgpu.barrier_wait(is_full.at[place])
                        weights = [Weights(*(ref.at[place] for ref in of)) for of in (first_places, second_places)]
                        for i, sums_of_part in enumerate(sums):
                            numbers = registers.make_numbers(*weights, warpgroup * parts + i, columns)
                            plgpu.wgmma(sums_of_part, numbers, x_places.at[place, pl.ds(0, rows)].transpose((1, 0)))
                        plgpu.wgmma_wait(0)  # before the numbers' registers are written again
                        plgpu.barrier_arrive(is_empty.at[place])

                    for i, sums_of_part in enumerate(sums):
                        own = pl.ds(piece * columns + (warpgroup * parts + i) * PART, PART)
                        write(sums_of_part[...], buffer.at[warpgroup], out_ref, own, tile)

            as_high_as_needed(tile.count, take)

        @pl.when(warpgroup == _FETCHING)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            for_each_piece(fetch)

        @pl.when(warpgroup != _FETCHING)
        def _():
            plgpu.set_max_registers(232, action="increase")
            for_each_piece(multiply)

    matrix = Weights(
        plgpu.SMEM((stages, DEPTH, columns), jnp.uint8, transforms=registers.layout_of_codes(columns)),
        plgpu.SMEM((stages, DEPTH // BLOCK, columns), jnp.uint8),
    )
    return plgpu.kernel(
        kernel,
        out_type=out_shape,
        grid=(getattr(jax.local_devices()[0], "core_count", _MULTIPROCESSORS),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        scratch_types=dict(
            x_places=plgpu.SMEM((stages, tile_rows, DEPTH), x.dtype, transforms=registers.ROWS),
            first_places=matrix,
            second_places=matrix,
            buffer=plgpu.SMEM((WARPGROUPS, registers.EXCHANGED, 128), jnp.float32),
            is_full=plgpu.Barrier(num_arrivals=5, num_barriers=stages),  # a copy each: rows, codes and scales
            is_empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(tiles, x, first, second)
