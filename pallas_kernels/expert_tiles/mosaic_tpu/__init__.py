"""Routed experts on a TPU: a tile of tokens meets its expert's three matrices in one kernel, piece by piece.

A step takes some hidden channels of a tile: their columns of gate and up, the activation, and their rows of down, whose
product is added to the tile's outputs in VMEM. Matrices are read where they lie in the stack of all layers, those of a
tile once; a tile that is not used reads and writes nothing.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.expert_tiles import Call
from pallas_kernels.mosaic_common import INTERPRETERS, Chip, dot_nn, kernel_cost

__all__ = ["LIMITS", "Config", "run"]


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step."""

    hidden: int = 128  # channels of an expert's hidden layer


LIMITS = Limits(config=Config, interpreters=INTERPRETERS)


class Lists(NamedTuple):
    """The arrays that are prefetched into scalar memory; inside the kernel and its index maps, references to them."""

    layer: Any  # [1]
    used: Any  # [1]
    expert: Any  # [Y]


def run(call: Call, config: Config | None) -> Float[Array, "Y C D"]:
    """Run `expert_tiles` on a checked call.

    Raises:
      ValueError: hidden channels that are not whole pieces.
    """
    (tiles, rows, width), (_, experts, _, hidden) = call.tokens.shape, call.gate.shape
    piece, chip = min((config or Config()).hidden, hidden), Chip.current(call.interpret)
    if hidden % piece:
        raise ValueError(f"experts of {hidden} hidden channels: need a multiple of {piece}")
    pieces, per_core = hidden // piece, chip.steps_per_core(tiles)
    padding = per_core * chip.cores - tiles
    tokens = jnp.pad(call.tokens, ((0, padding), (0, 0), (0, 0)))
    row_weights = jnp.pad(call.row_weights.astype(jnp.float32), ((0, padding), (0, 0)))[..., None]  # [Y C 1]
    lists = Lists(call.layer.reshape(1), call.used.reshape(1).astype(jnp.int32), jnp.pad(call.expert, (0, padding)))

    def tile_of(core, i, lists):
        """Return a core's tile; behind its last used one it stays there, and moves nothing."""
        last = jnp.maximum(pl.cdiv(lists.used[0] - core, chip.cores) - 1, 0)
        return jnp.minimum(i, last) * chip.cores + core

    def piece_of(core, i, step, lists):
        return jnp.where(i * chip.cores + core < lists.used[0], step, pieces - 1)

    at_tile = lambda core, i, step, lists: (tile_of(core, i, lists), 0, 0)
    expert_of = lambda core, i, lists: (lists.layer[0], lists.expert[tile_of(core, i, lists)])
    at_columns = lambda core, i, step, lists: (*expert_of(core, i, lists), 0, piece_of(core, i, step, lists))
    at_rows = lambda core, i, step, lists: (*expert_of(core, i, lists), piece_of(core, i, step, lists), 0)
    of_tile = pl.BlockSpec((1, rows, width), at_tile)
    # Where every expert has as many pairs as the others.
    even = min(tiles, experts * max(1, -(-(tiles - experts) // experts)))
    of_experts = 3 * width * hidden * call.gate.dtype.itemsize
    moved = even * (of_experts + rows * width * (tokens.dtype.itemsize + 4))
    out = pl.pallas_call(
        partial(_kernel, activate=call.activate, cores=chip.cores, pieces=pieces),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chip.cores, per_core, pieces),
            in_specs=[
                of_tile,
                pl.BlockSpec((1, rows, 1), at_tile),
                pl.BlockSpec((1, 1, width, piece), at_columns),
                pl.BlockSpec((1, 1, width, piece), at_columns),
                pl.BlockSpec((1, 1, piece, width), at_rows),
            ],
            out_specs=of_tile,
        ),
        out_shape=jax.ShapeDtypeStruct(tokens.shape, jnp.float32),
        compiler_params=chip.compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=kernel_cost((lists, row_weights), [], copied=moved, products=6 * even * rows * width * hidden),
        interpret=call.interpret,
        name="expert_tiles",
    )(lists, tokens, row_weights, call.gate, call.up, call.down)
    return out[:tiles]


def _kernel(
    lists: Lists, x_ref, weights_ref, gate_ref, up_ref, down_ref, out_ref, *, activate, cores: int, pieces: int
):
    tile, step = pl.program_id(1) * cores + pl.program_id(0), pl.program_id(2)

    @pl.when(tile < lists.used[0])
    def _():
        x = x_ref[0]
        hidden = activate(dot_nn(x, gate_ref[0, 0]), dot_nn(x, up_ref[0, 0])).astype(x.dtype)  # [C piece]
        part = dot_nn(hidden, down_ref[0, 0])  # [C D]
        total = jnp.where(step == 0, part, out_ref[0] + part)
        out_ref[0] = jnp.where(step == pieces - 1, weights_ref[0] * total, total)
