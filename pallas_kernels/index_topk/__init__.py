"""Index scores and the best blocks of each query, in one kernel."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, op
from pallas_kernels.checks import check_pages, need_dtypes
from pallas_kernels.pages import Pages

__all__ = ["index_topk"]

# Block ids, and with `return_keys` what they are ordered by.
Selected = Int[Array, "B K T J"] | tuple[Int[Array, "B K T J"], Float[Array, "B K T J"]]


@dataclass(frozen=True)
class Call(backends.Call):
    """The blocks that each query keeps, by the highest score of their keys: no score is ever written.

    Args:
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
        index_q, index_k = self.index_q, self.index_k
        check_pages("index_k", index_k, index_q.shape[0], limits, self.interpret)
        if limits.max_blocks is not None and index_k.num_blocks > limits.max_blocks:
            raise ValueError(f"{index_k.num_blocks} blocks a row: need at most {limits.max_blocks} blocks")
        top_k, local_blocks, init_blocks = self.counts
        if local_blocks < 1 or init_blocks < 0 or local_blocks + init_blocks > top_k:
            raise ValueError(
                f"local_blocks = {local_blocks}, init_blocks = {init_blocks}, top_k = {top_k}: need local_blocks >= 1, "
                "init_blocks >= 0, and both together at most top_k"
            )
        stored = index_k.pool.dtype
        if stored not in (index_q.dtype, *limits.stored) or index_q.shape[-1] != index_k.width:
            raise ValueError(
                f"index_q is {index_q.dtype} of width {index_q.shape[-1]} and index_k {stored} of {index_k.width}: "
                f"{need_dtypes('index keys', limits)}"
            )


index_topk = op(Call)
