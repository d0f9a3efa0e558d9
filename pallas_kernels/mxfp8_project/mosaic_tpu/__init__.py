"""Dense projections on a TPU, with MXFP8 weights that become numbers in VMEM."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits
from pallas_kernels.mosaic_common import INTERPRETERS
from pallas_kernels.mosaic_mxfp8 import Config, check_widths, project_tiles
from pallas_kernels.mxfp8 import Weights
from pallas_kernels.mxfp8_project import Call

LIMITS = Limits(config=Config, interpreters=INTERPRETERS)


def run(call: Call, config: Config | None) -> tuple[Float[Array, "X _"], ...]:
    """Run `mxfp8_project` on a checked call: tiles of rows, all with the one matrix of a layer.

    Raises:
      ValueError: widths that are not whole pieces.
    """
    config = config or Config()
    check_widths(tuple(call.weights), config, call.interpret)
    num_rows, width = call.x.shape
    tile = min(config.rows, num_rows)
    num_tiles = pl.cdiv(num_rows, tile)
    tiles = jnp.pad(call.x, ((0, num_tiles * tile - num_rows), (0, 0))).reshape(num_tiles, tile, width)
    first, is_used = jnp.zeros(num_tiles, jnp.int32), jnp.ones(num_tiles, jnp.int32)

    def project(w):
        w = Weights(w.codes[:, None], w.scales[:, None])  # [L 1 I O]
        out = project_tiles(
            tiles, w, call.layer, first, is_used, config=config, interpret=call.interpret, name="mxfp8_project"
        )  # [tiles C O]
        return out.reshape(-1, out.shape[2])[:num_rows]

    return tuple(map(project, call.weights))
