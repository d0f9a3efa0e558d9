"""Index scores and the best blocks of each query, in one Mosaic TPU kernel (walk.py)."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.index_topk import Call, Selected
from pallas_kernels.index_topk.mosaic_tpu.walk import Sizes, walk
from pallas_kernels.mosaic_common import INTERPRETERS, LANES, Chip, check_tiles


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step."""

    lanes: int = 512  # (query, head) pairs of a step, where VMEM holds their lists
    pages: int = 16  # pages of a buffer


LIMITS = Limits(check_pages=check_tiles, config=Config, stored=(jnp.float8_e4m3fn,), interpreters=INTERPRETERS)


def run(call: Call, config: Config | None) -> Selected:
    """Run `index_topk` on a checked call."""
    _, length, heads, _ = call.index_q.shape
    config, chip = config or Config(), Chip.current(call.interpret)
    lanes = config.lanes
    while lanes > LANES and 4 * lanes * call.index_k.num_blocks > chip.vmem // 2:
        lanes //= 2
    tokens = max(1, min(lanes // heads, length))
    width = -(-tokens * heads // LANES) * LANES if not call.interpret else tokens * heads
    sizes = Sizes(call.index_k, tokens, heads, 1, width, config.pages, *call.counts, call.return_keys)
    return walk(call, sizes=sizes, chip=chip, name="index_topk")
