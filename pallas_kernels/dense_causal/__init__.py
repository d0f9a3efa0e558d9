"""Dense causal attention: for layers without a selection, and for queries that keep every block that they see."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.checks import check_attention, check_kv_heads
from pallas_kernels.pages import Pages

__all__ = ["dense_causal"]


def dense_causal(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    kv_heads: int,
    return_lse: bool = False,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> tuple[Array, ...]:
    """Grouped-query causal attention of many queries over everything that each of them sees.

    Args:
      q: queries after norm and RoPE; bfloat16, float16 or float32.
      k: keys, `contiguous` or `paged`, in the same dtype; finite wherever a query of the row can see them.
      v: values, in the same pages.
      positions: absolute position of each query; < 0 or >= lengths marks padding, whose output is 0.
      lengths: valid keys of each row.
      kv_heads: K.
      return_lse: also return the natural log-sum-exp of the scaled scores, -inf where nothing was seen.
      backend: "triton"; or "cudnn" or "cudnn_prefix", for rows of which its `in_order` is true.
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU.

    Returns:
      (out [B T N H] in q's dtype,), and the LSE [B T N] in float32 if asked for.

    Raises:
      ValueError: operands that do not fit together, pages that the backend cannot reach, an unknown backend, or an
        option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    check_attention(q, k, v, runner.LIMITS, interpret)
    check_kv_heads(q, kv_heads)
    return runner.run(
        q, k, v, positions, lengths, kv_heads=kv_heads, return_lse=return_lse, config=config, interpret=interpret
    )
