"""The common part of the Triton kernels of dense projections: one call for several matrices, input channels cut too.

A program takes a piece of the columns of one matrix and a part of the input channels, for a few rows; sums of the parts
are XLA's, in one order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.triton_common import run_own

# What one program computes: (x_ref, row_tile, weights_ref, layer, tile, split, out_ref) -> None.
Multiply = Callable[..., None]


def num_splits(tiles: int, steps: int, programs: int) -> int:
    """Return into how many equal parts a walk of `steps` is cut: the most that need at most `programs` programs."""
    return max(n for n in range(1, steps + 1) if steps % n == 0 and (n == 1 or tiles * n <= programs))


def project_pieces(
    x: Float[Array, "..."],
    weights: Sequence[Any],
    layer: Int[Array, ""],
    *,
    multiply: Multiply,
    tiles: Sequence[int],
    row_tiles: int,
    splits: int,
    parts: Sequence[jax.ShapeDtypeStruct],
    compiler_params: plgpu.CompilerParams,
    interpret: bool,
    name: str,
) -> tuple[Float[Array, "..."], ...]:
    """Compute the parts of the products of all matrices, by one kernel.

    Args:
      x: activations, as `multiply` reads them.
      weights: of each matrix, likewise: arrays, or pytrees of them.
      layer: which layer of their stacks.
      multiply: what one program computes.
      tiles: pieces of the columns of each matrix.
      row_tiles: pieces of the rows.
      splits: parts of the input channels.
      parts: what the programs of each matrix write.
      compiler_params: of the call.
      interpret: run on the CPU.
      name: of the call.
    """
    return pl.pallas_call(
        partial(_kernel, tiles=tiles, multiply=multiply),
        grid=(row_tiles, sum(tiles), splits),
        out_shape=list(parts),
        compiler_params=compiler_params,
        interpret=interpret,
        name=name,
    )(layer.reshape(1).astype(jnp.int32), x, tuple(weights))


def _kernel(layer_ref, x_ref, weights: tuple[Any, ...], *out_refs, tiles: Sequence[int], multiply: Multiply):
    row_tile, split = pl.program_id(0), pl.program_id(2)

    def run(matrix: int, tile: Int[Array, ""]) -> None:
        multiply(x_ref, row_tile, weights[matrix], layer_ref[0], tile, split, out_refs[matrix])

    run_own(pl.program_id(1), tiles, run)
