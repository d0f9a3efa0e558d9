"""Dense causal attention: for layers without a selection, and for queries that keep every block that they see."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_attention
from pallas_kernels.pages import Pages

__all__ = ["dense_causal"]


@dataclass(frozen=True)
class Call(backends.Call):
    """Grouped-query causal attention of many queries over everything that each of them sees.

    On Hopper also by "cudnn" or "cudnn_prefix", for rows of which that backend's `in_order` is true.

    Args:
      q: queries after norm and RoPE; bfloat16, float16 or float32.
      k: keys, `contiguous` or `paged`, in the same dtype; finite wherever a query of the row can see them.
      v: values, in the same pages.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      kv_heads: K.
      return_lse: also return the natural log-sum-exp of the scaled scores, -inf where nothing was seen.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.
    """

    q: Float[Array, "B T N H"]
    k: Pages
    v: Pages
    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    _: KW_ONLY
    kv_heads: int
    return_lse: bool = False

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        check_attention(self.q, self.k, self.v, limits, self.interpret)
        if self.kv_heads < 1 or self.q.shape[2] % self.kv_heads:
            raise ValueError(
                f"{self.q.shape[2]} query heads and kv_heads = {self.kv_heads}: need a divisor of the query heads"
            )


dense_causal = op(Call)
