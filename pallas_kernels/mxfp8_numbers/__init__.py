"""A matrix of a stack in MXFP8 as numbers in memory, for a product of many rows."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.mxfp8 import Weights, check_weights

__all__ = ["Weights", "mxfp8_numbers"]


def mxfp8_numbers(
    weights: Weights,
    layer: Int[Array, ""],
    dtype: jax.typing.DTypeLike,
    *,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Float[Array, "I O"]:
    """The numbers of one layer: `e4m3(code) * 2^(scale - 127)` in float32, which holds it, then `dtype`.

    Args:
      weights: of shape [L I O].
      layer: which layer of the stack; it is not copied.
      dtype: bfloat16 or float16.
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Raises:
      ValueError: scales that do not fit the codes, a width that is not whole tiles of the backend, an unknown backend,
        or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    check_weights("weights", weights)
    return runner.run(weights, layer, dtype, config=config, interpret=interpret)
