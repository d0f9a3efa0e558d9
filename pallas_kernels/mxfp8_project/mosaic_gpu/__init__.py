"""Dense projections of up to some hundred rows by a Mosaic kernel for Hopper, which makes numbers in registers.

A work (`pallas_kernels.hopper_mxfp8`) is two pieces of 128 columns of one matrix, half of its columns apart, for up to
128 rows and a part of the input channels: the channels are divided, so that all multiprocessors have works. The parts'
sums are added up by XLA. In M3's sizes, q, k, v and both of the index branch for 32 rows::

    x [32 rows, 2,048 of 6,144] ── times ── one of 39 pieces twice [2,048, 128] ── sums of a part [32, 256], memory
    3 parts ── added up ── 5 products
"""

from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper_registers as registers
from pallas_kernels.backends import Limits
from pallas_kernels.hopper_mxfp8 import (
    EIGHT,
    MOST_WIDE_ROWS,
    Config,
    Pair,
    Work,
    check_operands,
    multiply_pieces,
    num_programs,
)
from pallas_kernels.hopper_registers import DEPTH
from pallas_kernels.mxfp8_project import Call

_COLUMNS = 128  # of a piece
_MOST_PARTS = 12  # of the input channels: their sums are written, and read again
_FULL = 0.88  # share of the programs that are to have works until the last one ends

LIMITS = Limits(config=Config)


class _Data(NamedTuple):
    """Arrays that the works of a call read; inside the kernel, references."""

    layer: Any  # [1]
    row: Any  # [rows of a tile] 0, 1, 2 and so on


def run(call: Call, config: Config | None) -> tuple[Float[Array, "X _"], ...]:
    """Run `mxfp8_project` on a checked call.

    Raises:
      ValueError: interpret mode, activations that are not bfloat16, or widths that are not whole pieces of a program.
    """
    check_operands(call.x, call.interpret)
    (num_rows, inputs), widths = call.x.shape, [w.codes.shape[2] for w in call.weights]
    if inputs % DEPTH or any(width % (2 * _COLUMNS) and width != _COLUMNS for width in widths):
        raise ValueError(
            f"{inputs} input channels and {', '.join(map(str, widths))} outputs: need multiples of {DEPTH} and of "
            f"{2 * _COLUMNS}, or {_COLUMNS} outputs"
        )
    tiles = -(-num_rows // MOST_WIDE_ROWS)
    height = -(-num_rows // (tiles * EIGHT)) * EIGHT  # of a tile; rows of zeros fill up the last one
    config = config or Config.of(_COLUMNS, height)
    num_pieces = [max(width // (2 * config.columns), 1) for width in widths]
    num_steps = inputs // DEPTH
    parts = num_parts(tiles * sum(num_pieces), num_steps, num_programs())
    # A matrix of a single piece is read as both of a pair, and both write the same sums.
    apart = [width // 2 // config.columns for width in widths]

    def work(data: _Data, index: Int[Array, ""]) -> Work:
        # Tiles come first: those of the same weights run at the same time, and find them in the cache.
        tile, index = index % tiles, index // tiles
        part, index = index % parts, index // parts
        pair, piece = jnp.int32(0), index
        for number, before in enumerate(accumulate(num_pieces[:-1], initial=0)):
            pair = jnp.where(index >= before, number, pair)
            piece = jnp.where(index >= before, index - before, piece)
        first = part * num_steps // parts
        return Work(
            pair=pair, place=(data.layer[0],), piece=piece, first_step=first,
            num_steps=(part + 1) * num_steps // parts - first, first_row=tile * height, count=jnp.int32(height),
            target=part * tiles + tile,
        )  # fmt: skip

    def write(pair: int, sums, buffer, outs, columns, work: Work, data: _Data) -> None:
        rows = outs[pair].at[work.target, :, columns]
        registers.write_pairs(rows, sums, work.count, data.row, apart[pair] * config.columns)

    padded = jnp.pad(call.x, ((0, tiles * height - num_rows), (0, 0)))
    sums_of_parts = multiply_pieces(
        padded, [Pair(w, w) for w in call.weights], apart,
        _Data(call.layer.reshape(1).astype(jnp.int32), jnp.asarray(np.arange(height, dtype=np.int32))),
        num_works=lambda data: tiles * parts * sum(num_pieces), work=work, write=write,
        outs=[jax.ShapeDtypeStruct((parts * tiles, height, width), jnp.float32) for width in widths],
        heights=[height], config=config, name="mxfp8_project",
    )  # fmt: skip
    merged = (y.reshape(parts, tiles * height, -1)[:, :num_rows] for y in sums_of_parts)
    return tuple(jnp.sum(y, axis=0) for y in merged)


def num_parts(works: int, steps: int, programs: int) -> int:
    """Return into how many parts the channels of so many works are divided: the fewest that keep programs busy.

    Args:
      works: of undivided channels.
      steps: of the channels.
      programs: that run at once.
    """

    def busy(parts: int) -> float:
        """The share of the time in which programs have works, if each takes as long."""
        return works * parts / programs / -(-works * parts // programs)

    most = min(steps, _MOST_PARTS)
    return next((n for n in range(1, most + 1) if busy(n) >= _FULL), max(range(1, most + 1), key=busy))
