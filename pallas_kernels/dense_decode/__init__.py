"""Attention of a few queries a row, as in a decode step, over everything that each of them sees."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.checks import check_attention, check_few_queries, check_kv_heads
from pallas_kernels.numbers import MAX_QUERIES
from pallas_kernels.pages import Pages

__all__ = ["MAX_QUERIES", "dense_decode"]


def dense_decode(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    kv_heads: int,
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None = None,
    return_lse: bool = False,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Array, ...]:
    """Attention of at most 16 queries a row, each over all keys up to its own position.

    Args:
      q: queries after norm and RoPE; bfloat16, float16 or float32.
      k: keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn.
      v: values, in the same pages.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      kv_heads: K.
      scales: what stored keys and values of each KV head are to be multiplied with.
      return_lse: also return the natural log-sum-exp of the scaled scores, -inf where nothing was seen.
      backend: "triton".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.

    Raises:
      ValueError: too many queries, operands that do not fit together, pages that the backend cannot reach, an unknown
        backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    check_few_queries(q.shape[1], "dense_causal")
    check_attention(q, k, v, runner.LIMITS, interpret)
    check_kv_heads(q, kv_heads)
    return runner.run(
        q, k, v, positions, lengths,
        kv_heads=kv_heads, scales=scales, return_lse=return_lse, config=config, interpret=interpret,
    )  # fmt: skip
