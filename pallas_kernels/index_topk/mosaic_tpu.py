"""Index scores and the best blocks of each query, in one Mosaic TPU kernel (mosaic_tpu_walk.py)."""

import dataclasses

from jaxtyping import Array, Float, Int

from pallas_kernels.common import Pages
from pallas_kernels.index_topk.mosaic_tpu_walk import Sizes, walk
from pallas_kernels.mosaic_common import LANES, Chip, Interpret


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    lanes: int = 512  # (query, head) pairs of a step, where VMEM holds their lists
    pages: int = 16  # pages of a buffer


def index_topk(
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
    """Keep the `top_k` best blocks of each query.

    Args:
      index_q: index queries after norm and RoPE; bfloat16 or float32.
      index_k: index keys, `contiguous` or `paged`, in the queries' dtype or in float8_e4m3fn.
      positions: absolute position of each query; < 0 or >= lengths marks padding.
      lengths: valid keys of each row.
      top_k: J, slots.
      local_blocks: forced blocks ending with the own one.
      init_blocks: forced blocks at the start.
      config: tile sizes.
      interpret: run on the CPU, with these parameters if they are given.

    Returns:
      Ascending ids, then -1: score descending, then id ascending.

    Raises:
      ValueError: counts that contradict each other, keys of another dtype or width, or pages of no whole tiles.
    """
    _, length, heads, _ = index_q.shape
    config, chip = config or TpuConfig(), Chip.here(interpret)
    lanes = config.lanes
    while lanes > LANES and 4 * lanes * index_k.num_blocks > chip.vmem // 2:
        lanes //= 2
    tokens = max(1, min(lanes // heads, length))
    width = -(-tokens * heads // LANES) * LANES if not interpret else tokens * heads
    sizes = Sizes(index_k, tokens, heads, 1, width, config.pages, top_k, local_blocks, init_blocks)
    return walk(index_q, index_k, positions, lengths, sizes, chip, interpret, "index_topk")
