"""Index scores of a decode step and their top-k, in one Mosaic TPU kernel: that of `index_topk`, folded.

With 1 to 16 queries a row all time goes to reading index keys once. A row of the batch is one step, and while it takes
its best blocks off the list the pages of the next row are on their way. Few queries would leave most lanes of the list
empty, so it is folded: the lanes hold the same queries for 2, 4, ... 128 neighbouring blocks.
"""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.backends import Limits, TileConfig
from pallas_kernels.index_topk import Selected
from pallas_kernels.index_topk.mosaic_tpu.walk import Sizes, walk
from pallas_kernels.index_topk_decode import Call
from pallas_kernels.mosaic_common import INTERPRETERS, LANES, Chip, check_tiles
from pallas_kernels.numbers import power_of_two


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step."""

    lanes: int = LANES  # of the list
    pages: int = 32  # pages of a buffer, at least


LIMITS = Limits(check_pages=check_tiles, config=Config, stored=(jnp.float8_e4m3fn,), interpreters=INTERPRETERS)


def run(call: Call, config: Config | None) -> Selected:
    """Run `index_topk_decode` on a checked call."""
    _, length, heads, _ = call.index_q.shape
    config, chip = config or Config(), Chip.current(call.interpret)
    fold_lanes = power_of_two(length * heads)
    width = max(config.lanes, fold_lanes)
    folds = width // fold_lanes
    pages = -(-config.pages // folds) * folds
    sizes = Sizes(call.index_k, length, heads, folds, width, pages, *call.counts, call.return_keys)
    return walk(call, sizes=sizes, chip=chip, name="index_topk_decode")
