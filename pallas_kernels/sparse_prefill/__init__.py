"""Attention of many queries over the blocks that each of them selected."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.checks import check_attention, check_selection
from pallas_kernels.pages import Pages

__all__ = ["sparse_prefill"]


def sparse_prefill(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    schedule: str = "auto",
    return_lse: bool = False,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Array, ...]:
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
      backend: "triton" or "mosaic_tpu".
      config: tile sizes of the schedule that is named, a `Config` of the backend.
      interpret: run on the CPU; on "mosaic_tpu" also `pltpu.InterpretParams`.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.

    Raises:
      ValueError: operands that do not fit together, an unknown schedule or backend, tile sizes for "auto", pages that
        the backend cannot reach, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    if schedule not in runner.LIMITS.schedules:
        allowed = ", ".join(map(repr, runner.LIMITS.schedules))
        raise ValueError(f"schedule = {schedule!r}: allowed are {allowed}")
    if schedule == "auto" and config is not None:
        raise ValueError(f"config = {config} with schedule = 'auto': name the schedule whose tiles these are")
    check_attention(q, k, v, runner.LIMITS, interpret)
    check_selection(q, blocks)
    return runner.run(
        q, k, v, blocks, positions, lengths,
        schedule=schedule, return_lse=return_lse, config=config, interpret=interpret,
    )  # fmt: skip
