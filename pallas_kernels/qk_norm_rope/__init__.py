"""Gemma norm and partial rotary embedding of queries and keys, a token at a time."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op

__all__ = ["qk_norm_rope"]


@dataclass(frozen=True)
class Call(backends.Call):
    """Each head of each token normed, rotated and rounded; what `qk_norm_rope_insert` does where nothing is written.

    A program takes one token, so a token's bits are its own.

    Args:
      heads: of queries, keys, index queries and so on, [X N H] each with its own N and H.
      norms: weights of each one's norm, [H].
      cos: cosines of each token's angles: dims i and R + i of a head rotate into each other, those from 2R on pass.
      sin: sines.
      eps: of the norm.
      dtype: of the result.

    Returns:
      Arrays of the shapes of `heads`.
    """

    heads: Sequence[Float[Array, "X _ _"]]
    norms: Sequence[Float[Array, " _"]]
    cos: Float[Array, "X R"]
    sin: Float[Array, "X R"]
    _: KW_ONLY
    eps: float
    dtype: DTypeLike

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        for i, (x, norm) in enumerate(zip(self.heads, self.norms, strict=True)):
            if len(x) != len(self.cos) or norm.shape != x.shape[2:] or x.shape[2] < 2 * self.cos.shape[1]:
                raise ValueError(
                    f"heads[{i}] has shape {x.shape}, its norm {norm.shape}, cos {self.cos.shape}: need [X N H], [H] "
                    "and [X R] with 2 R <= H"
                )


qk_norm_rope = op(Call)
