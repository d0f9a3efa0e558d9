"""The common part of the Mosaic kernels of MXFP8 weights for Hopper: rows times pieces of matrices.

As in the Triton kernels, products are turned: weights^T times rows^T, because the left operand of Hopper's tensor cores
may lie in registers, where numbers are made of codes and scales. Each multiprocessor runs one program, whose
warpgroups have a part each: one fetches what the next steps need, two make numbers and multiply. A program takes one
work after the other: a piece of the columns of each of two matrices, for some rows::

    codes, scales of both [64 channels, 128 columns] ──┐
                                                       ├── one of some places in shared memory
    x [8 to 128 rows, 64 channels] ────────────────────┘

    a warpgroup: 32 columns of both ── turned ── numbers in registers [64, 64] ── times x^T ── sums [64, rows]
                 32 more columns of both ── ...

Memory is read in lines of 128 bytes, which is a row of such a piece: half as wide, it gives 70% of its rate and not
95%. For 256 rows the sums of 32 columns are all that a warpgroup has room for, and pieces have 64 columns.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper_registers as registers
from pallas_kernels.backends import TileConfig
from pallas_kernels.hopper_registers import DEPTH, PART, WARPGROUPS
from pallas_kernels.mxfp8 import BLOCK, Weights

EIGHT = 8  # rows that a fetch counts in
MOST_WIDE_ROWS = 128  # whose sums of 128 columns of both matrices fit: so many registers of a thread
_FETCHING = WARPGROUPS  # the warpgroup that fetches is behind those that multiply
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

    @classmethod
    def of(cls, columns: int, most_rows: int) -> "Config":
        """Return the sizes for pieces of so many columns, and so many rows at most: as many stages as find room."""
        codes_and_scales = 2 * (DEPTH + DEPTH // BLOCK) * columns
        return cls(columns, _SHARED_MEMORY // (codes_and_scales + 2 * DEPTH * most_rows))


class Pair(NamedTuple):
    """Two matrices of the same place in their stacks, or two parts of one; inside a kernel, references.

    Attributes:
      first: [... I O].
      second: likewise.
    """

    first: Weights
    second: Weights


class Work(NamedTuple):
    """The part of the products that a program computes at a time.

    Attributes:
      pair: which of the call's pairs of matrices.
      place: of its matrices in their stacks.
      piece: of the first matrix, in pieces of `Config.columns`.
      first_step: of the input channels, in steps of `DEPTH`.
      num_steps: from there; 0 where there is nothing to compute.
      first_row: of x, a multiple of 8.
      count: rows that count.
      target: what else `write` asks to know where the sums belong.
    """

    pair: Int[Array, ""]
    place: tuple[Int[Array, ""], ...]
    piece: Int[Array, ""]
    first_step: Int[Array, ""]
    num_steps: Int[Array, ""]
    first_row: Int[Array, ""]
    count: Int[Array, ""]
    target: Int[Array, ""]


def check_operands(x: Float[Array, "X I"], interpret: bool) -> None:
    """Raise ValueError for interpret mode, and for activations that are not bfloat16."""
    if interpret:
        raise ValueError(
            "backend = 'mosaic_gpu' has no interpret mode: it is written in a GPU's registers; use 'triton'"
        )
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"x is {x.dtype}: backend = 'mosaic_gpu' takes bfloat16; use 'triton'")


def num_programs() -> int:
    """Return how many programs run at once: one on each multiprocessor."""
    return getattr(jax.local_devices()[0], "core_count", _MULTIPROCESSORS)


def multiply_pieces(
    x: Float[Array, "R I"],
    pairs: Sequence[Pair],
    apart: Sequence[int],
    data: Any,
    *,
    num_works: Callable[[Any], Int[Array, ""] | int],
    work: Callable[[Any, Int[Array, ""]], Work],
    write: Callable[..., None],
    outs: Sequence[jax.ShapeDtypeStruct],
    heights: Sequence[int],
    config: Config,
    name: str,
) -> list[Array]:
    """Multiply rows by pieces of matrices, and have the sums written.

    Args:
      x: rows; reading up to the highest of `heights` from any first row on may pass their end.
      pairs: of matrices.
      apart: of each pair, pieces from the first matrix's to the second's, as columns count.
      data: arrays that say which works there are; inside the kernel, references to them.
      num_works: of `data`.
      work: the work of a number, given `data`.
      write: called as (pair, sums, buffer, outs, columns, work, data) with the sums [64 R] of 32 columns of both
        matrices (`pallas_kernels.hopper_registers`), `pair` being a number that is known.
      outs: what is written to.
      heights: rows that a product may have, rising, multiples of 8; a work takes the fewest that are enough.
      config: sizes.
      name: of the kernel.
    """
    columns, stages = config.columns, config.num_stages
    parts = columns // (PART * WARPGROUPS)  # of a warpgroup

    def kernel(data, x_ref, pairs, *outs_and_scratch):
        *outs, x_places, first_places, second_places, buffer, is_full, is_empty = outs_and_scratch
        warpgroup = jax.lax.axis_index("warpgroup")

        def for_each_work(act: Callable[..., None]) -> None:
            """Call `act(work, steps before it)` for this program's works in which there is something to compute."""

            @plgpu.nd_loop((num_works(data),), collective_axes="program", init_carry=jnp.int32(0))
            def _(loop, carry):
                own = work(data, loop.index[0])
                pl.when(own.num_steps > 0)(lambda: act(own, carry))
                return carry + own.num_steps

        def as_high_as_needed(count, take: Callable[[int], None]) -> None:
            for less, rows in zip([0, *heights], heights, strict=False):
                pl.when((count > less) & (count <= rows))(partial(take, rows))

        def for_its_pair(own: Work, act: Callable[[int], None]) -> None:
            for number in range(len(pairs)):
                pl.when(own.pair == number)(partial(act, number)) if len(pairs) > 1 else act(number)

        def fetch(own: Work, before) -> None:
            @pl.loop(0, own.num_steps)
            def _(step):
                place = jax.lax.rem(before + step, stages)
                pl.when(before + step >= stages)(lambda: plgpu.barrier_wait(is_empty.at[place]))
                copy = partial(plgpu.copy_gmem_to_smem, barrier=is_full.at[place])
                channel_step = own.first_step + step
                channels, blocks = (pl.ds(channel_step * n, n) for n in (DEPTH, DEPTH // BLOCK))

                def copy_weights(number):
                    pieces = own.piece, own.piece + apart[number]
                    places = first_places, second_places
                    for weights, at, into in zip(pairs[number], pieces, places, strict=True):
                        piece = pl.ds(at * columns, columns)
                        copy(weights.codes.at[*own.place, channels, piece], into.codes.at[place])
                        copy(weights.scales.at[*own.place, blocks, piece], into.scales.at[place])

                def copy_rows(rows):
                    copy(x_ref.at[pl.ds(own.first_row, rows), channels], x_places.at[place, pl.ds(0, rows)])

                for_its_pair(own, copy_weights)
                as_high_as_needed(own.count, copy_rows)

        def multiply(own: Work, before) -> None:
            def take(rows):
                @partial(pl.run_scoped, sums=[plgpu.ACC((2 * PART, rows), jnp.float32)] * parts)
                def _(sums):
                    @pl.loop(0, own.num_steps)
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
                        part = pl.ds(own.piece * columns + (warpgroup * parts + i) * PART, PART)
                        written = sums_of_part[...], buffer.at[warpgroup], outs, part, own, data
                        for_its_pair(own, lambda number, written=written: write(number, *written))

            as_high_as_needed(own.count, take)

        @pl.when(warpgroup == _FETCHING)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            for_each_work(fetch)

        @pl.when(warpgroup != _FETCHING)
        def _():
            plgpu.set_max_registers(232, action="increase")
            for_each_work(multiply)

    places = Weights(
        plgpu.SMEM((stages, DEPTH, columns), jnp.uint8, transforms=registers.layout_of_codes(columns)),
        plgpu.SMEM((stages, DEPTH // BLOCK, columns), jnp.uint8),
    )
    return plgpu.kernel(
        kernel,
        out_type=list(outs),
        grid=(num_programs(),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        scratch_types=[
            plgpu.SMEM((stages, heights[-1], DEPTH), x.dtype, transforms=registers.ROWS),
            places,
            places,
            plgpu.SMEM((WARPGROUPS, registers.EXCHANGED, 128), jnp.float32),
            plgpu.Barrier(num_arrivals=5, num_barriers=stages),  # a copy each: rows, codes and scales of both
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(data, x, list(pairs))
