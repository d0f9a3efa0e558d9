"""Dense projections on a TPU, with MXFP8 weights that become numbers in VMEM."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, Limits
from pallas_kernels.mosaic_common import INTERPRETERS
from pallas_kernels.mosaic_mxfp8 import Config, check_widths, project_tiles
from pallas_kernels.mxfp8 import Weights

LIMITS = Limits(config=Config, interpreters=INTERPRETERS)


def run(
    x: Float[Array, "X I"],
    weights: tuple[Weights, ...],
    layer: Int[Array, ""],
    *,
    config: Config | None,
    interpret: Interpret,
) -> tuple[Float[Array, "X _"], ...]:
    """Run `mxfp8_project` on checked operands: tiles of rows, all with the one matrix of a layer.

    Raises:
      ValueError: widths that are not whole pieces.
    """
    config = config or Config()
    check_widths(weights, config, interpret)
    num_rows, width = x.shape
    tile = min(config.rows, num_rows)
    num_tiles = pl.cdiv(num_rows, tile)
    tiles = jnp.pad(x, ((0, num_tiles * tile - num_rows), (0, 0))).reshape(num_tiles, tile, width)
    first, is_used = jnp.zeros(num_tiles, jnp.int32), jnp.ones(num_tiles, jnp.int32)

    def project(w):
        w = Weights(w.codes[:, None], w.scales[:, None])  # [L 1 I O]
        out = project_tiles(
            tiles, w, layer, first, is_used, config=config, interpret=interpret, name="mxfp8_project"
        )  # [tiles C O]
        return out.reshape(-1, out.shape[2])[:num_rows]

    return tuple(map(project, weights))
