"""Activations times matrices of one layer, with one order for the sum of a row, however many rows there are."""

from collections.abc import Sequence

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.mxfp8 import Weights, check_weights

__all__ = ["Weights", "ordered_project"]


def ordered_project(
    x: Float[Array, "X I"],
    weights: Sequence[Float[Array, "_ _ _"] | Weights],
    layer: Int[Array, ""],
    *,
    by_output: bool = False,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "X _"], ...]:
    """`x W` for each matrix W of a layer, where a row's bits are its own.

    Every element is a sum over the input channels in their order, from the first to the last: neither the number of
    rows, nor a row's place among them, nor the tile sizes that follow from both change it.

    Args:
      x: activations; bfloat16, float16 or float32.
      weights: each of shape [L I O], with its own O, in x's dtype; or in MXFP8, whose numbers are rounded to x's dtype.
      layer: which layer of the stacks; it is not copied.
      by_output: weights are of shape [L O I] instead, as an unembedding is stored; none of them in MXFP8.
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      The products in float32, in the order of the weights.

    Raises:
      ValueError: operands that do not fit together, widths that are not whole pieces of the backend, an unknown
        backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    for i, w in enumerate(weights):
        is_mxfp8 = isinstance(w, Weights)
        if is_mxfp8:
            check_weights(f"weights[{i}]", w)
        shape = w.codes.shape if is_mxfp8 else w.shape
        inputs = shape[2 if by_output else 1] if len(shape) == 3 else None
        first = weights[0].codes if isinstance(weights[0], Weights) else weights[0]
        if inputs != x.shape[1] or shape[0] != len(first) or (by_output and is_mxfp8):
            raise ValueError(
                f"x has width {x.shape[1]}, weights[{i}] shape {shape}{' in MXFP8' if is_mxfp8 else ''}: need "
                f"{'[L O I], not in MXFP8,' if by_output else '[L I O]'}, all of one L, with I = {x.shape[1]}"
            )
        if (not is_mxfp8 and w.dtype != x.dtype) or (is_mxfp8 and x.dtype.itemsize != 2):
            raise ValueError(f"x is {x.dtype}, weights[{i}] {'MXFP8' if is_mxfp8 else w.dtype}: need one dtype")
    return runner.run(x, tuple(weights), layer, by_output=by_output, config=config, interpret=interpret)
