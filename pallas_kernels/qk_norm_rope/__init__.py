"""Gemma norm and partial rotary embedding of queries and keys, a token at a time."""

from collections.abc import Sequence

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.backends import Interpret, TileConfig, load_backend

__all__ = ["qk_norm_rope"]


def qk_norm_rope(
    heads: Sequence[Float[Array, "X _ _"]],
    norms: Sequence[Float[Array, " _"]],
    cos: Float[Array, "X R"],
    sin: Float[Array, "X R"],
    *,
    eps: float,
    dtype: DTypeLike,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, "X _ _"], ...]:
    """Each head of each token normed, rotated and rounded; what `qk_norm_rope_insert` does where nothing is written.

    A program takes one token, so a token's bits are its own.

    Args:
      heads: of queries, keys, index queries and so on, [X N H] each with its own N and H.
      norms: weights of each one's norm, [H].
      cos: cosines of each token's angles: dims i and R + i of a head rotate into each other, those from 2R on pass.
      sin: sines.
      eps: of the norm.
      dtype: of the result.
      backend: "triton".
      config: this op has no tile sizes.
      interpret: run on the CPU.

    Returns:
      Arrays of the shapes of `heads`.

    Raises:
      ValueError: operands that do not fit together, an unknown backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    for i, (x, norm) in enumerate(zip(heads, norms, strict=True)):
        if len(x) != len(cos) or norm.shape != x.shape[2:] or x.shape[2] < 2 * cos.shape[1]:
            raise ValueError(
                f"heads[{i}] has shape {x.shape}, its norm {norm.shape}, cos {cos.shape}: need [X N H], [H] and [X R] "
                "with 2 R <= H"
            )
    return runner.run(tuple(heads), tuple(norms), cos, sin, eps=eps, dtype=dtype, interpret=interpret)
