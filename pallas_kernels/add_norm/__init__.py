"""A residual addition and the norm of its result."""

from jaxtyping import Array, Float

from pallas_kernels.backends import Interpret, TileConfig, load_backend

__all__ = ["add_norm"]


def add_norm(
    x: Float[Array, "X D"],
    update: Float[Array, "X D"] | None,
    weight: Float[Array, " D"],
    *,
    eps: float,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "X D"], Float[Array, "X D"]]:
    """(sum, its root-mean-square norm times (1 + weight)), each rounded once to x's dtype.

    Args:
      x: the residual stream.
      update: what is added to it, in float32; None adds nothing.
      weight: of the norm.
      eps: of the norm.
      backend: "triton".
      config: None: there are no sizes to choose.
      interpret: run on the CPU.

    Returns:
      Sum and norm, in x's dtype; the norm is that of the rounded sum.

    Raises:
      ValueError: operands that do not fit together, an unknown backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    if weight.shape != x.shape[1:] or (update is not None and update.shape != x.shape):
        of_update = "" if update is None else f", the update {update.shape}"
        raise ValueError(f"x has shape {x.shape}{of_update}, the weight {weight.shape}: need [X D] and [D]")
    return runner.run(x, update, weight, eps=eps, interpret=interpret)
