"""Index scores of a decode step and their top-k, in one Mosaic TPU kernel: that of `index_topk`, folded.

With 1 to 16 queries a row all time goes to reading index keys once. A row of the batch is one step, and while it takes
its best blocks off the list the pages of the next row are on their way. Few queries would leave most lanes of the list
empty, so it is folded: the lanes hold the same queries for 2, 4, ... 128 neighbouring blocks.
"""

import dataclasses

from jaxtyping import Array, Float, Int

from pallas_kernels.common import Pages, power_of_two
from pallas_kernels.index_topk.mosaic_tpu_walk import Sizes, walk
from pallas_kernels.index_topk_decode.triton import MAX_QUERIES
from pallas_kernels.mosaic_common import LANES, Chip, Interpret


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    lanes: int = LANES  # of the list
    pages: int = 32  # pages of a buffer, at least


def index_topk_decode(
    index_q: Float[Array, "B T K H"],
    index_k: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    top_k: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
    config: TpuConfig | None = None,
    interpret: Interpret = False,
) -> Int[Array, "B K T J"]:
    """`index_topk` for at most 16 queries a row.

    Args:
      index_q: index queries after norm and RoPE; bfloat16 or float32.
      index_k: index keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn. A scale of the latter
        would change no order, so none is taken.
      positions: absolute position of each query; < 0 or >= lengths marks padding. Each query has its own.
      lengths: valid keys of each row.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one.
      init_blocks: forced blocks at the start.
      config: tile sizes.
      interpret: run on the CPU, with these parameters if they are given.

    Returns:
      Ascending ids, then -1: score descending, then id ascending.

    Raises:
      ValueError: too many queries, counts that contradict each other, or keys of another dtype, width or page.
    """
    _, length, heads, _ = index_q.shape
    if not 1 <= length <= MAX_QUERIES:
        raise ValueError(f"{length} queries a row: need 1 to {MAX_QUERIES} (index_topk takes more)")
    config = config or TpuConfig()
    fold = power_of_two(length * heads)
    width = max(config.lanes, fold)
    folds = width // fold
    pages = -(-config.pages // folds) * folds
    sizes = Sizes(index_k, length, heads, folds, width, pages, top_k, local_blocks, init_blocks)
    return walk(index_q, index_k, positions, lengths, sizes, Chip.here(interpret), interpret, "index_topk_decode")
