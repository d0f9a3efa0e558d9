"""Gate, up and down projections of routed experts on a TPU, with MXFP8 weights that become numbers in VMEM."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.backends import Interpret, Limits
from pallas_kernels.mosaic_common import INTERPRETERS
from pallas_kernels.mosaic_mxfp8 import Config, check_widths, project_tiles
from pallas_kernels.mxfp8 import Weights

LIMITS = Limits(config=Config, interpreters=INTERPRETERS)


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
    interpret: Interpret,
) -> Float[Array, "Y C D"]:
    """Run `mxfp8_experts` on checked operands; XLA gathers the tokens and applies the activation.

    Raises:
      ValueError: widths that are not whole pieces.
    """
    config = config or Config()
    check_widths((gate, up, down), config, interpret)
    is_used = jnp.any(valid, axis=1).astype(jnp.int32)
    project = partial(project_tiles, layer=layer, matrix=expert, is_used=is_used, config=config, interpret=interpret)
    tokens = x[token]  # [Y C D]
    gate_and_up = (project(tokens, w, name="mxfp8_experts_hidden") for w in (gate, up))
    return project(activate(*gate_and_up).astype(x.dtype), down, name="mxfp8_experts_out")
