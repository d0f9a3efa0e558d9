"""Index scores and the best blocks of each query, in one kernel."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_index
from pallas_kernels.pages import Pages

__all__ = ["index_topk"]

# Block ids, and with `return_keys` what they are ordered by.
Selected = Int[Array, "B K T J"] | tuple[Int[Array, "B K T J"], Float[Array, "B K T J"]]


@dataclass(frozen=True)
class Call(backends.Call):
    """The blocks that each query keeps, by the highest score of their keys: no score is ever written.

    Attributes:
      index_q: index queries after norm and RoPE; bfloat16 or float32, and float16 with "triton".
      index_k: index keys, `contiguous` or `paged`, in the same dtype, and with "mosaic_tpu" also in float8_e4m3fn.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one.
      init_blocks: forced blocks at the start.
      return_keys: also return by which keys the blocks are ordered, so that several selections can be joined.

    Returns:
      Ascending ids, then -1: score descending, then id ascending; a block of nothing but NaN ranks last. With
      `return_keys` the ids come in any order, with their keys in float32: the score, finite; +inf for a forced block,
      which the own one is; the lowest number for NaN; -inf for an unused slot.

    Source: paper section 3; MiniMax-AI/MSA reference top-k.
    """

    index_q: Float[Array, "B T K H"]
    index_k: Pages
    positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    _: KW_ONLY
    top_k: int
    local_blocks: int = 1
    init_blocks: int = 0
    return_keys: bool = False

    @property
    def counts(self) -> tuple[int, int, int]:
        """(top_k, local_blocks, init_blocks)."""
        return self.top_k, self.local_blocks, self.init_blocks

    def check(self, limits: Limits) -> None:
        """Raise ValueError for counts that contradict each other, and keys or pages that a backend does not take."""
        check_index(self.index_q, self.index_k, *self.counts, limits=limits, interpret=self.interpret)


index_topk = op(Call)
