"""The sum of products of rows, group by group: the gradient of the matrices of `grouped_product`."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend

__all__ = ["grouped_outer"]


def grouped_outer(
    left: Float[Array, "Y C K"],
    right: Float[Array, "Y C N"],
    first_tile: Int[Array, " E"],
    num_tiles: Int[Array, " E"],
    *,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Float[Array, "E K N"]:
    """Sum, over the tiles of each group, the products of the tile's left rows, transposed, with its right rows.

    Args:
      left: rows by tile. A row that does not count must be 0 here or in `right`.
      right: likewise, in the same dtype.
      first_tile: of each group; a group's tiles stand next to each other.
      num_tiles: of each group; the sum of a group without tiles is 0.
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      Sums in float32, rounded once to the rows' dtype.

    Raises:
      ValueError: operands that do not fit together, sizes that are not whole pieces of a program, an unknown backend,
        or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    if left.shape[:2] != right.shape[:2] or left.dtype != right.dtype:
        raise ValueError(
            f"{left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}: need the same tiles and dtype"
        )
    return runner.run(left, right, first_tile, num_tiles, config=config, interpret=interpret)
