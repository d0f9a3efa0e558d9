"""Attention of a few queries a row, as in a decode step, over the blocks that each of them selected."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.checks import check_attention, check_few_queries, check_selection
from pallas_kernels.numbers import MAX_QUERIES
from pallas_kernels.pages import Pages

__all__ = ["MAX_QUERIES", "sparse_decode"]


def sparse_decode(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None,
    return_lse: bool = False,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Array, ...]:
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
      backend: "triton" or "mosaic_tpu".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU; on "mosaic_tpu" also `pltpu.InterpretParams`.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.

    Raises:
      ValueError: too many queries, operands that do not fit together, pages that the backend cannot reach, an unknown
        backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    check_few_queries(q.shape[1], "sparse_prefill")
    check_attention(q, k, v, runner.LIMITS, interpret)
    check_selection(q, blocks)
    return runner.run(
        q, k, v, blocks, positions, lengths, scales=scales, return_lse=return_lse, config=config, interpret=interpret
    )
