"""A few rows of activations times matrices of one layer, read where they lie in their stack."""

from collections.abc import Sequence

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend

__all__ = ["MOST_ROWS", "stacked_project"]

MOST_ROWS = 64  # of a call


def stacked_project(
    x: Float[Array, "X I"],
    weights: Sequence[Float[Array, "L I _"]],
    layer: Int[Array, ""],
    *,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "X _"], ...]:
    """`x W` for each matrix W of a layer: one pass over x for all of them, and over each weight.

    So few rows are bounded by the memory's rate, at which weights are read; a slice out of the stack would be a copy.

    Args:
      x: activations, 1 to `MOST_ROWS` rows; bfloat16, float16 or float32.
      weights: each of shape [L I O], with its own O, in x's dtype.
      layer: which layer of the stacks.
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      The products in float32, in the order of the weights. Sums have one order for a number of rows.

    Raises:
      ValueError: operands that do not fit together, no row or more than `MOST_ROWS`, widths that are not whole pieces
        of a program, an unknown backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    if not 1 <= len(x) <= MOST_ROWS:
        raise ValueError(f"{len(x)} rows: need 1 to {MOST_ROWS} rows; XLA multiplies more")
    for i, w in enumerate(weights):
        if w.ndim != 3 or w.shape[1] != x.shape[1] or len(w) != len(weights[0]):
            raise ValueError(
                f"x has width {x.shape[1]}, weights[{i}] shape {w.shape}: need [L I O], all of one L, with "
                f"I = {x.shape[1]}"
            )
        if w.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype}, weights[{i}] {w.dtype}: need one dtype")
    return runner.run(x, tuple(weights), layer, config=config, interpret=interpret)
