"""Dense projections of up to some 50 rows in Triton, with MXFP8 weights that become numbers in registers.

One or two rows are multiplied in float32 without tensor cores, more of them 16 at a time with those: each
thread multiplies what it has read itself, 16 bytes eight times before it begins (`pallas_kernels.triton_mxfp8`).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.mxfp8 import BLOCK, Weights, check_reach
from pallas_kernels.mxfp8_project import Call
from pallas_kernels.triton_mxfp8 import (
    TILE_COLUMNS,
    TILE_ROWS,
    FewConfig,
    FragmentConfig,
    in_fragments,
    in_quarters,
    multiply_tile,
    rows_in_fragments,
    rows_in_quarters,
    sum_rows,
)
from pallas_kernels.triton_project import num_splits, project_pieces

_FEW_ROWS = 2

LIMITS = Limits(config=TileConfig)


def run(call: Call, config: TileConfig | None) -> tuple[Float[Array, "X _"], ...]:
    """Run `mxfp8_project` on a checked call: a `FragmentConfig` is for tensor cores.

    Raises:
      ValueError: widths that are not whole pieces of a program, or codes out of reach.
    """
    config = _fitting_config(call.x, tuple(call.weights)) if config is None else config
    check_reach(*call.weights)
    by_tensor_cores = isinstance(config, FragmentConfig)
    columns, blocks = (TILE_COLUMNS, 1) if by_tensor_cores else (config.columns, config.blocks)
    widths = [w.codes.shape[2] for w in call.weights]
    if call.x.shape[1] % (blocks * BLOCK) or any(width % columns for width in widths):
        raise ValueError(
            f"{call.x.shape[1]} input channels and {', '.join(map(str, widths))} outputs: need multiples of "
            f"{blocks * BLOCK} and {columns}"
        )
    tiles = [width // columns for width in widths]
    rows_of_tile = TILE_ROWS if by_tensor_cores else min(config.rows, len(call.x))
    row_tiles = pl.cdiv(len(call.x), rows_of_tile)
    splits = num_splits(sum(tiles) * row_tiles, call.x.shape[1] // BLOCK // blocks, config.programs)
    multiply = (
        partial(_multiply_tile, splits=splits)
        if by_tensor_cores
        else partial(_sum_rows, splits=splits, config=config, num_rows=rows_of_tile)
    )
    to_rows, to_weights = (rows_in_fragments, in_fragments) if by_tensor_cores else (rows_in_quarters, in_quarters)

    def shape_of_parts(width: int) -> jax.ShapeDtypeStruct:
        outputs = (width // columns, 8, 16) if by_tensor_cores else (width,)
        return jax.ShapeDtypeStruct((splits, row_tiles * rows_of_tile, *outputs), jnp.float32)

    parts = project_pieces(
        to_rows(call.x),
        tuple(map(to_weights, call.weights)),
        call.layer,
        multiply=multiply,
        tiles=tiles,
        row_tiles=row_tiles,
        splits=splits,
        parts=[shape_of_parts(width) for width in widths],
        compiler_params=plgpu.CompilerParams(num_warps=1 if by_tensor_cores else config.num_warps, num_stages=1),
        interpret=call.interpret,
        name="mxfp8_project_tiles" if by_tensor_cores else "mxfp8_project_few",
    )
    merged = (part.reshape(*part.shape[:2], -1)[:, : len(call.x)] for part in parts)
    return tuple(jnp.sum(part, axis=0) for part in merged)


def _fitting_config(x: Float[Array, "X I"], weights: tuple[Weights, ...]) -> FewConfig | FragmentConfig:
    """Tensor cores for more than two rows, where the widths are whole tiles of theirs; sizes that divide the widths."""
    divides = lambda width, most: min(width & -width, most)
    columns = min(divides(w.codes.shape[2], FewConfig.columns) for w in weights)
    if len(x) > _FEW_ROWS and columns >= TILE_COLUMNS:
        return FragmentConfig()
    return FewConfig(columns, divides(x.shape[1] // BLOCK, FewConfig.blocks))


def _sum_rows(x_ref, row_tile, weights, layer, tile, split, out_ref, *, splits: int, config: FewConfig, num_rows: int):
    columns = pl.ds(tile * config.columns, config.columns)
    places = [row_tile * num_rows + i for i in range(num_rows)]
    rows = [jnp.minimum(place, x_ref.shape[0] - 1) for place in places]
    sums = sum_rows(x_ref, rows, weights, (layer,), columns, split, splits, config)
    for place, total in zip(places, sums, strict=True):
        out_ref[split, place, columns] = total


def _multiply_tile(x_ref, row_tile, weights, layer, tile, split, out_ref, *, splits: int):
    rows = jnp.minimum(row_tile * TILE_ROWS + jnp.arange(TILE_ROWS), x_ref.shape[0] - 1)
    out = multiply_tile(x_ref, rows, weights, (layer,), tile, split, splits)
    out_ref[split, pl.ds(row_tile * TILE_ROWS, TILE_ROWS), tile] = out
