"""MXFP8 to numbers in Triton: a program reads a block of 32 input channels of some columns, and writes them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.mxfp8 import BLOCK, check_reach
from pallas_kernels.mxfp8_numbers import Call
from pallas_kernels.triton_mxfp8 import numbers


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a program's piece."""

    columns: int = 512
    num_warps: int = 4


LIMITS = Limits(config=Config)


def run(call: Call, config: Config | None) -> Float[Array, "I O"]:
    """Run `mxfp8_numbers` on a checked call.

    Raises:
      ValueError: a width that is not whole pieces of a program, or codes out of reach.
    """
    weights = call.weights
    num_layers, inputs, outputs = weights.codes.shape
    config = Config(min(outputs & -outputs, Config.columns)) if config is None else config
    check_reach(weights)
    if outputs % config.columns:
        raise ValueError(f"{outputs} outputs: need a multiple of {config.columns}")

    def kernel(layer_ref, weights, out_ref):
        columns, block = pl.ds(pl.program_id(0) * config.columns, config.columns), pl.program_id(1)
        codes = weights.codes[layer_ref[0], block, :, columns]  # [32 W]
        out_ref[block, :, columns] = numbers(codes, weights.scales[layer_ref[0], block, columns], call.dtype)

    out = pl.pallas_call(
        kernel,
        grid=(outputs // config.columns, inputs // BLOCK),
        out_shape=jax.ShapeDtypeStruct((inputs // BLOCK, BLOCK, outputs), call.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=call.interpret,
        name="mxfp8_numbers",
    )(
        call.layer.reshape(1).astype(jnp.int32),
        weights._replace(codes=weights.codes.reshape(num_layers, -1, BLOCK, outputs)),
    )
    return out.reshape(inputs, outputs)
