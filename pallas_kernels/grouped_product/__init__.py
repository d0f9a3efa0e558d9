"""The product of each tile of rows with the matrix of its group, such as a tile of tokens with its expert's."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend

__all__ = ["grouped_product"]


def grouped_product(
    rows: Float[Array, "Y C K"],
    weight: Float[Array, "E ..."],
    group: Int[Array, " Y"],
    used: Int[Array, ""],
    *,
    transposed: bool = False,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Float[Array, "Y C N"]:
    """Multiply each tile's rows by its group's matrix.

    Args:
      rows: by tile; C a multiple of 16 (of a program's rows, where those are more).
      weight: a matrix of each group, `[E K N]`, in the rows' dtype.
      group: of each tile.
      used: how many tiles, the first ones, are multiplied; the products of the others are undefined.
      transposed: whether the matrices are `[E N K]`.
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      Products in float32.

    Raises:
      ValueError: operands that do not fit together, sizes that are not whole pieces of a program, an unknown backend,
        or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    inputs = weight.shape[2 if transposed else 1]
    if rows.shape[-1] != inputs or rows.dtype != weight.dtype:
        raise ValueError(
            f"rows of {rows.shape[-1]} channels in {rows.dtype} and matrices that take {inputs} in {weight.dtype}: "
            "both must be the same"
        )
    return runner.run(rows, weight, group, used, transposed=transposed, config=config, interpret=interpret)
