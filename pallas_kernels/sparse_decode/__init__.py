"""Attention of a few queries a row, as in a decode step, over the blocks that each of them selected."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_attention, check_few_queries, check_selection
from pallas_kernels.numbers import MAX_QUERIES
from pallas_kernels.pages import Pages

__all__ = ["MAX_QUERIES", "sparse_decode"]


@dataclass(frozen=True)
class Call(backends.Call):
    """Attention of at most 16 queries a row, each over the blocks that it selected.

    Args:
      q: queries after norm and RoPE; bfloat16 or float32, and float16 with "triton".
      k: keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn.
      v: values, in the same pages.
      blocks: distinct ids in any order, -1 for none.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      scales: what stored keys and values of each KV head are to be multiplied with.
      return_lse: also return the natural log-sum-exp of the scaled scores, -inf where nothing was seen.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.
    """

    q: Float[Array, "B T N H"]
    k: Pages
    v: Pages
    blocks: Int[Array, "B K T J"]
    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    _: KW_ONLY
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None
    return_lse: bool = False

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        check_few_queries(self.q.shape[1], "sparse_prefill")
        check_attention(self.q, self.k, self.v, limits, self.interpret)
        check_selection(self.q, self.blocks)


sparse_decode = op(Call)
