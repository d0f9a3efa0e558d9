"""Attention of a few queries a row, as in a decode step, over everything that each of them sees."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float

from pallas_kernels import dense_causal
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_few_queries
from pallas_kernels.numbers import MAX_QUERIES

__all__ = ["MAX_QUERIES", "dense_decode"]


@dataclass(frozen=True)
class Call(dense_causal.Call):
    """Attention of at most 16 queries a row, each over all keys up to its own position.

    Its other fields and results are those of `dense_causal`, but that keys and values may be in float8_e4m3fn too.

    Args:
      scales: what stored keys and values of each KV head are to be multiplied with.
    """

    _: KW_ONLY
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None

    def check(self, limits: Limits) -> None:
        """Raise ValueError for more queries than a decode step has, and as `dense_causal` does."""
        check_few_queries(self.q.shape[1], "dense_causal")
        super().check(limits)


dense_decode = op(Call)
