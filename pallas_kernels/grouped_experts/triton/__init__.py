"""Gate, up and down projections of routed experts in two Triton kernels, over tiles of tokens that share an expert.

A program takes one tile and a piece of the output's width, and walks the input's width.
Weights are read where they lie in the stack of layers. Tiles of one expert are neighbours in the grid, so that what one
of them reads the others find in the cache.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.triton_common import dot
from pallas_kernels.triton_experts import Tiles, run_tiles


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece."""

    columns: int = 256  # of the output, a program
    depth: int = 64  # of the input, a step
    num_warps: int = 8
    num_stages: int = 3


LIMITS = Limits(config=Config)


def run(
    x: Float[Array, "X D"],
    gate: Float[Array, "L E D F"],
    up: Float[Array, "L E D F"],
    down: Float[Array, "L E F D"],
    layer: Int[Array, ""],
    expert: Int[Array, " Y"],
    token: Int[Array, "Y C"],
    valid: Bool[Array, "Y C"],
    *,
    activate: Callable[[Array, Array], Array],
    config: Config | None,
    interpret: bool,
) -> Float[Array, "Y C D"]:
    """The op, of checked operands.

    Raises:
      ValueError: widths that are not whole pieces of a program.
    """
    return run_tiles(
        (x, gate, up, down),
        Tiles.of(layer, expert, valid),
        token,
        widths=gate.shape[2:],
        kernels=(partial(_hidden_kernel, activate=activate), _out_kernel),
        config=_fitting_config(gate) if config is None else config,
        interpret=interpret,
        name="experts",
    )


def _fitting_config(gate: Float[Array, "L E D F"]) -> Config:
    """What fits in shared memory and divides the widths."""
    if gate.dtype.itemsize == 4:
        return Config(columns=128, num_warps=4, num_stages=2)
    is_narrow = any(width % Config.columns for width in gate.shape[2:])
    return Config(columns=128, num_warps=4) if is_narrow else Config()


def _hidden_kernel(
    tiles: Tiles,
    token_ref,
    x_ref,
    gate_ref,
    up_ref,
    hidden_ref,
    *,
    activate: Callable[[Array, Array], Array],
    config: Config,
):
    tile, piece = pl.program_id(0), pl.program_id(1)

    @pl.when(tiles.used[tile] > 0)
    def _():
        layer, expert = tiles.layer[0], tiles.expert[tile]
        tokens = token_ref[tile, :]
        columns = pl.ds(piece * config.columns, config.columns)

        def take_depth(i, sums):
            gate_sum, up_sum = sums
            depth = pl.ds(i * config.depth, config.depth)
            x = x_ref[tokens, depth]  # [C depth]
            gate_sum = gate_sum + dot(x, gate_ref[layer, expert, depth, columns])
            return gate_sum, up_sum + dot(x, up_ref[layer, expert, depth, columns])

        zero = jnp.zeros((token_ref.shape[1], config.columns), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // config.depth, take_depth, (zero, zero))
        hidden_ref[tile, :, columns] = activate(gate, up).astype(hidden_ref.dtype)


def _out_kernel(tiles: Tiles, hidden_ref, down_ref, out_ref, *, config: Config):
    tile, piece = pl.program_id(0), pl.program_id(1)

    @pl.when(tiles.used[tile] > 0)
    def _():
        layer, expert = tiles.layer[0], tiles.expert[tile]
        columns = pl.ds(piece * config.columns, config.columns)

        def take_depth(i, out):
            depth = pl.ds(i * config.depth, config.depth)
            return out + dot(hidden_ref[tile, :, depth], down_ref[layer, expert, depth, columns])

        zero = jnp.zeros((hidden_ref.shape[1], config.columns), jnp.float32)
        out_ref[tile, :, columns] = jax.lax.fori_loop(0, hidden_ref.shape[2] // config.depth, take_depth, zero)
