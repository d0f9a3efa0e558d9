"""Gate, up and down projections of routed experts on a TPU, with MXFP8 weights that become numbers in VMEM."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits
from pallas_kernels.mosaic_common import INTERPRETERS
from pallas_kernels.mosaic_mxfp8 import Config, check_widths, project_tiles
from pallas_kernels.mxfp8_experts import Call

LIMITS = Limits(config=Config, interpreters=INTERPRETERS)


def run(call: Call, config: Config | None) -> Float[Array, "Y C D"]:
    """Run `mxfp8_experts` on a checked call; XLA gathers the tokens and applies the activation.

    Raises:
      ValueError: widths that are not whole pieces.
    """
    config = config or Config()
    check_widths((call.gate, call.up, call.down), config, call.interpret)
    is_used = jnp.any(call.valid, axis=1).astype(jnp.int32)
    project = partial(
        project_tiles, layer=call.layer, matrix=call.expert, is_used=is_used, config=config, interpret=call.interpret
    )
    tokens = call.x[call.token]  # [Y C D]
    gate_and_up = (project(tokens, w, name="mxfp8_experts_hidden") for w in (call.gate, call.up))
    return project(call.activate(*gate_and_up).astype(call.x.dtype), call.down, name="mxfp8_experts_out")
