"""Activations times matrices of one layer, with weights in MXFP8."""

from collections.abc import Sequence

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.mxfp8 import Weights, check_weights

__all__ = ["Weights", "mxfp8_project"]


def mxfp8_project(
    x: Float[Array, "X I"],
    weights: Sequence[Weights],
    layer: Int[Array, ""],
    *,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "X _"], ...]:
    """`x W` for each matrix W of a layer, of weights in x's dtype: one pass over x for all of them.

    Codes and scales become numbers in registers: of memory a byte a weight is read, and a thirty-second, where they lie
    in the stack of layers.

    Args:
      x: activations; bfloat16 or float16.
      weights: each of shape [L I O], with its own O.
      layer: which layer of the stacks; it is not copied.
      backend: "triton"; or "mosaic_gpu" on a Hopper GPU, in bfloat16.
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      The products in float32, in the order of the weights.

    Raises:
      ValueError: operands that do not fit together, widths that are not whole tiles of the backend, an unknown backend,
        or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    for i, w in enumerate(weights):
        check_weights(f"weights[{i}]", w)
        if w.codes.ndim != 3 or w.codes.shape[1] != x.shape[1] or len(w.codes) != len(weights[0].codes):
            raise ValueError(
                f"x has width {x.shape[1]}, weights[{i}] shape {w.codes.shape}: need [L I O], all of one L, with "
                f"I = {x.shape[1]}"
            )
    if x.dtype.itemsize != 2:
        raise ValueError(f"x is {x.dtype}: need bfloat16 or float16")
    return runner.run(x, tuple(weights), layer, config=config, interpret=interpret)
