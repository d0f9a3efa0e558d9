"""Gate, up and down projections of routed experts in two Triton kernels that make numbers of MXFP8 in registers.

The tiles and the walk are those of `pallas_kernels.grouped_experts.triton`. A step takes blocks of 32 input channels
one after the other: each has one scale a column, which then needs no other layout than the column's.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.mxfp8_experts import BLOCK, Weights
from pallas_kernels.numbers import can_reach
from pallas_kernels.triton_common import dot
from pallas_kernels.triton_experts import Tiles, run_tiles

_NAN_SCALE = 255
_FEW_TILES = 32  # up to which narrow pieces keep more of a GPU's processors busy


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece."""

    columns: int = 128  # of the output, a program
    depth: int = 64  # of the input, a step; whole blocks
    num_warps: int = 4
    num_stages: int = 4


LIMITS = Limits(config=Config)


def run(
    x: Float[Array, "X D"],
    gate: Weights,
    up: Weights,
    down: Weights,
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
      ValueError: widths that are not whole pieces of a program, or codes out of reach.
    """
    if config is None:
        config = Config(columns=64) if len(token) <= _FEW_TILES else Config()
    if not can_reach(gate.codes.size):
        raise ValueError(f"{gate.codes.size} codes: need below 2**31 or above 2**32; join layers, or use XLA")
    return run_tiles(
        (x, gate, up, down),
        Tiles.of(layer, expert, valid),
        token,
        widths=gate.codes.shape[2:],
        kernels=(partial(_hidden_kernel, activate=activate), _out_kernel),
        config=config,
        interpret=interpret,
        name="mxfp8_experts",
    )


def _hidden_kernel(
    tiles: Tiles,
    token_ref,
    x_ref,
    gate: Weights,
    up: Weights,
    hidden_ref,
    *,
    activate: Callable[[Array, Array], Array],
    config: Config,
):
    tile, piece = pl.program_id(0), pl.program_id(1)

    @pl.when(tiles.used[tile] > 0)
    def _():
        where = tiles.layer[0], tiles.expert[tile]
        tokens = token_ref[tile, :]
        columns = pl.ds(piece * config.columns, config.columns)

        def take_depth(i, sums):
            gate_sum, up_sum = sums
            for block in _blocks(i, config):
                x = x_ref[tokens, pl.ds(block * BLOCK, BLOCK)]  # [C 32]
                gate_sum = gate_sum + dot(x, _numbers(gate, where, block, columns, x.dtype))
                up_sum = up_sum + dot(x, _numbers(up, where, block, columns, x.dtype))
            return gate_sum, up_sum

        zero = jnp.zeros((token_ref.shape[1], config.columns), jnp.float32)
        gate_sum, up_sum = jax.lax.fori_loop(0, x_ref.shape[1] // config.depth, take_depth, (zero, zero))
        hidden_ref[tile, :, columns] = activate(gate_sum, up_sum).astype(hidden_ref.dtype)


def _out_kernel(tiles: Tiles, hidden_ref, down: Weights, out_ref, *, config: Config):
    tile, piece = pl.program_id(0), pl.program_id(1)

    @pl.when(tiles.used[tile] > 0)
    def _():
        where = tiles.layer[0], tiles.expert[tile]
        columns = pl.ds(piece * config.columns, config.columns)

        def take_depth(i, out):
            for block in _blocks(i, config):
                hidden = hidden_ref[tile, :, pl.ds(block * BLOCK, BLOCK)]  # [C 32]
                out = out + dot(hidden, _numbers(down, where, block, columns, hidden.dtype))
            return out

        zero = jnp.zeros((hidden_ref.shape[1], config.columns), jnp.float32)
        out_ref[tile, :, columns] = jax.lax.fori_loop(0, hidden_ref.shape[2] // config.depth, take_depth, zero)


def _blocks(step: Int[Array, ""], config: Config) -> list[Int[Array, ""]]:
    """The blocks of input channels that a step takes."""
    per_step = config.depth // BLOCK
    return [step * per_step + i for i in range(per_step)]


def _numbers(weights: Weights, where: tuple, block: Int[Array, ""], columns: Any, dtype: Any) -> Float[Array, "32 W"]:
    """A block of 32 input channels of some columns: product in float32, which holds it, then x's dtype."""
    codes = weights.codes[(*where, pl.ds(block * BLOCK, BLOCK), columns)]  # [32 W]
    scales = weights.scales[(*where, block, columns)].astype(jnp.int32)  # [W]
    # The power of two by its bits; 2^-127 has no leading one.
    bits = jnp.where(scales == 0, 1 << 22, jnp.where(scales == _NAN_SCALE, 0x7FC00000, scales << 23))
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return (values * power[None, :]).astype(dtype)
