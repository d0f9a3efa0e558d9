"""Attention of many queries over the blocks that each of them selected."""

from dataclasses import KW_ONLY, dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.backends import Limits, TileConfig, op
from pallas_kernels.checks import check_attention, check_selection
from pallas_kernels.pages import Pages

__all__ = ["sparse_prefill"]


@dataclass(frozen=True)
class Call(backends.Call):
    """Attention of each query over the blocks that it selected.

    Args:
      q: queries after norm and RoPE; bfloat16 or float32, and float16 with "triton".
      k: keys, `contiguous` or `paged`, in the same dtype, and with "mosaic_tpu" also in float8_e4m3fn; finite wherever
        a query of the row can see them.
      v: values, in the same pages.
      blocks: distinct ids in any order, -1 for none.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      schedule: "query_union", where neighbouring queries walk the union of their blocks; "kv_block_major", where each
        block meets the queries that chose it; or "auto", by which the backend takes the one that suits.
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
    schedule: str = "auto"
    return_lse: bool = False

    def check(self, limits: Limits) -> None:
        """Raise ValueError where operands do not fit together."""
        if self.schedule not in limits.schedules:
            allowed = ", ".join(map(repr, limits.schedules))
            raise ValueError(f"schedule = {self.schedule!r}: allowed are {allowed}")
        check_attention(self.q, self.k, self.v, limits, self.interpret)
        check_selection(self.q, self.blocks)


def check_config(call: Call, config: TileConfig | None) -> None:
    """Raise ValueError for sizes of tiles of a schedule that is not named."""
    if call.schedule == "auto" and config is not None:
        raise ValueError(f"config = {config} with schedule = 'auto': name the schedule whose tiles these are")


sparse_prefill = op(Call)
