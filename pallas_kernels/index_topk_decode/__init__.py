"""Index scores and the best blocks of a few queries a row, as in a decode step."""

from dataclasses import dataclass

from pallas_kernels import index_topk
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_few_queries
from pallas_kernels.numbers import MAX_QUERIES

__all__ = ["MAX_QUERIES", "index_topk_decode"]


@dataclass(frozen=True)
class Call(index_topk.Call):
    """The blocks that each of at most 16 queries a row keeps: `index_topk` for a decode step.

    Its fields and results are those of `index_topk`, but that both backends take index keys in float8_e4m3fn. A scale
    of these would change no order, so none is taken; "triton" then multiplies bfloat16 queries as float16.
    """

    def check(self, limits: Limits) -> None:
        """Raise ValueError for more queries than a decode step has, and as `index_topk` does."""
        check_few_queries(self.index_q.shape[1], "index_topk")
        super().check(limits)


index_topk_decode = op(Call)
