"""Gate, up and down projections of routed experts in two Triton kernels that make numbers of MXFP8 in registers.

The tiles and the walk are those of `pallas_kernels.grouped_experts.triton`. Tiles of one token are multiplied without
tensor cores, cut along the input channels too; sums of the parts, and the activation, are XLA's.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.mxfp8 import BLOCK, Weights, check_reach
from pallas_kernels.mxfp8_experts import Call
from pallas_kernels.triton_common import dot
from pallas_kernels.triton_experts import Tiles, run_tiles
from pallas_kernels.triton_mxfp8 import (
    TILE_COLUMNS,
    TILE_ROWS,
    FewConfig,
    FragmentConfig,
    in_fragments,
    in_quarters,
    multiply_tile,
    numbers,
    rows_in_fragments,
    rows_in_quarters,
    sum_rows,
)
from pallas_kernels.triton_project import num_splits


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece, where tensor cores multiply."""

    columns: int = 128  # of the output, a program
    depth: int = 128  # of the input, a step; whole blocks
    num_warps: int = 4
    num_stages: int = 2


LIMITS = Limits(config=TileConfig)


def run(call: Call, config: TileConfig | None) -> Float[Array, "Y C D"]:
    """Run `mxfp8_experts` on a checked call.

    Raises:
      ValueError: widths that are not whole pieces of a program, or codes out of reach.
    """
    check_reach(call.gate, advice="join layers")
    tiles = Tiles.of(call.layer, call.expert, call.valid)
    if config is None:
        config = {1: FewConfig(programs=1536), TILE_ROWS: FragmentConfig()}.get(call.token.shape[1])
    if isinstance(config, FewConfig | FragmentConfig):
        return _run_few(call, tiles, config)
    blocked = lambda w: Weights(w.codes.reshape(*w.scales.shape[:3], BLOCK, -1), w.scales)
    return run_tiles(
        (call.x, blocked(call.gate), blocked(call.up), blocked(call.down)),
        tiles,
        call.token,
        widths=call.gate.codes.shape[2:],
        kernels=(partial(_hidden_kernel, activate=call.activate), _out_kernel),
        config=config or Config(),
        interpret=call.interpret,
        name="mxfp8_experts",
    )


def _run_few(call: Call, tiles: Tiles, config: FewConfig | FragmentConfig) -> Float[Array, "Y C D"]:
    """Tiles of one token, or of 16."""
    x, token = call.x, call.token
    project = partial(_project, tiles=tiles, config=config, interpret=call.interpret)
    gate_and_up = project(x, token, (call.gate, call.up), name="mxfp8_experts_few_hidden")
    hidden = call.activate(*gate_and_up).astype(x.dtype)  # [Y C F]
    places = jnp.arange(token.size, dtype=jnp.int32).reshape(token.shape)
    (out,) = project(hidden.reshape(token.size, -1), places, (call.down,), name="mxfp8_experts_few_out")
    return out


def _project(
    x: Float[Array, "X I"],
    row: Int[Array, "Y C"],
    weights: tuple[Weights, ...],
    *,
    tiles: Tiles,
    config: FewConfig | FragmentConfig,
    interpret: bool,
    name: str,
) -> list[Float[Array, "Y C O"]]:
    """Rows `row[i]` of x times each weight of tile i's expert; tiles of one expert are neighbours in the grid."""
    inputs, outputs = weights[0].codes.shape[2:]
    by_tensor_cores = isinstance(config, FragmentConfig)
    columns, blocks = (TILE_COLUMNS, 1) if by_tensor_cores else (config.columns, config.blocks)
    if inputs % (blocks * BLOCK) or outputs % columns:
        raise ValueError(
            f"{inputs} input channels and {outputs} outputs: need multiples of {blocks * BLOCK} and {columns}"
        )
    num_tiles, pieces = len(row), outputs // columns
    splits = num_splits(num_tiles * len(weights) * pieces, inputs // BLOCK // blocks, config.programs)

    def kernel(tiles, row_ref, x_ref, weights, *out_refs):
        tile, split = pl.program_id(0), pl.program_id(2)
        for which, (some_weights, out_ref) in enumerate(zip(weights, out_refs, strict=True)):
            piece = pl.program_id(1) - which * pieces

            @pl.when((tiles.used[tile] > 0) & (piece >= 0) & (piece < pieces))
            def _(weights=some_weights, out_ref=out_ref, piece=piece):
                where = tiles.layer[0], tiles.expert[tile]
                if by_tensor_cores:
                    out_ref[split, tile, :, piece] = multiply_tile(
                        x_ref, row_ref[tile, :], weights, where, piece, split, splits
                    )
                    return
                place = pl.ds(piece * config.columns, config.columns)
                (out_ref[split, tile, 0, place],) = sum_rows(
                    x_ref, [row_ref[tile, 0]], weights, where, place, split, splits, config
                )

    shape = (splits, *row.shape, *((pieces, 8, 16) if by_tensor_cores else (outputs,)))
    to_rows, to_weights = (rows_in_fragments, in_fragments) if by_tensor_cores else (rows_in_quarters, in_quarters)
    parts = pl.pallas_call(
        kernel,
        grid=(num_tiles, len(weights) * pieces, splits),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for _ in weights],
        compiler_params=plgpu.CompilerParams(num_warps=1 if by_tensor_cores else config.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(tiles, row, to_rows(x), tuple(map(to_weights, weights)))
    return [jnp.sum(part.reshape(splits, *row.shape, outputs), axis=0) for part in parts]


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
            x = x_ref[tokens, pl.ds(i * config.depth, config.depth)]  # [C depth]
            gate_sum = gate_sum + dot(x, _numbers(gate, where, i, columns, config, x.dtype))
            return gate_sum, up_sum + dot(x, _numbers(up, where, i, columns, config, x.dtype))

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
            hidden = hidden_ref[tile, :, pl.ds(i * config.depth, config.depth)]  # [C depth]
            return out + dot(hidden, _numbers(down, where, i, columns, config, hidden.dtype))

        zero = jnp.zeros((hidden_ref.shape[1], config.columns), jnp.float32)
        out_ref[tile, :, columns] = jax.lax.fori_loop(0, hidden_ref.shape[2] // config.depth, take_depth, zero)


def _numbers(
    weights: Weights, where: tuple, step: Any, columns: Any, config: Config, dtype: Any
) -> Float[Array, "_ W"]:
    """Return the weights of one step of input channels and some columns, as numbers."""
    blocks = pl.ds(step * (config.depth // BLOCK), config.depth // BLOCK)
    codes = weights.codes[(*where, blocks, slice(None), columns)]  # [blocks 32 W]
    values = numbers(codes, weights.scales[(*where, blocks, columns)], dtype)
    return values.reshape(config.depth, config.columns)
