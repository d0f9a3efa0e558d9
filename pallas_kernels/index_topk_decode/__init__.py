"""Index scores and the best blocks of a few queries a row, as in a decode step."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, TileConfig, load_backend
from pallas_kernels.checks import check_few_queries, check_index
from pallas_kernels.numbers import MAX_QUERIES
from pallas_kernels.pages import Pages

__all__ = ["MAX_QUERIES", "index_topk_decode"]


def index_topk_decode(
    index_q: Float[Array, "B T K H"],
    index_k: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    top_k: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
    return_keys: bool = False,
    backend: str,
    config: TileConfig | None = None,
    interpret: Interpret = False,
) -> Int[Array, "B K T J"] | tuple[Int[Array, "B K T J"], Float[Array, "B K T J"]]:
    """The blocks that each of at most 16 queries a row keeps: `index_topk` for a decode step.

    Args:
      index_q: index queries after norm and RoPE; bfloat16 or float32, and float16 with "triton".
      index_k: index keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn. A scale of the latter
        would change no order, so none is taken; "triton" then multiplies bfloat16 queries as float16.
      positions: absolute position of each query; < 0 or >= lengths marks padding. Each query has its own.
      lengths: valid keys of each row.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one.
      init_blocks: forced blocks at the start.
      return_keys: also return by which keys the blocks are ordered, so that several selections can be joined.
      backend: "triton" or "mosaic_tpu".
      config: tile sizes, a `Config` of the backend.
      interpret: run on the CPU; on "mosaic_tpu" also `pltpu.InterpretParams`.

    Returns:
      Ascending ids, then -1: score descending, then id ascending; a block of nothing but NaN ranks last. With
      `return_keys` the ids come in any order, with their keys in float32: the score, finite; +inf for a forced block,
      which the own one is; the lowest number for NaN; -inf for an unused slot.

    Raises:
      ValueError: too many queries or blocks, counts that contradict each other, keys of another dtype or width, pages
        that the backend cannot reach, an unknown backend, or an option of another one.
    """
    runner = load_backend(__name__, backend, config, interpret)
    check_few_queries(index_q.shape[1], "index_topk")
    rules = dict(top_k=top_k, local_blocks=local_blocks, init_blocks=init_blocks)
    check_index(index_q, index_k, **rules, limits=runner.LIMITS, interpret=interpret)
    options = dict(return_keys=return_keys, config=config, interpret=interpret)
    return runner.run(index_q, index_k, positions, lengths, **rules, **options)
