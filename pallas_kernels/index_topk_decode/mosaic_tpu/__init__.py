"""Index scores of a decode step and their top-k, in one Mosaic TPU kernel: that of `index_topk`, folded.

With 1 to 16 queries a row all time goes to reading index keys once. A row of the batch is one step, and while it takes
its best blocks off the list the pages of the next row are on their way. Few queries would leave most lanes of the list
empty, so it is folded: the lanes hold the same queries for 2, 4, ... 128 neighbouring blocks.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, Limits, TileConfig
from pallas_kernels.index_topk.mosaic_tpu.walk import Sizes, walk
from pallas_kernels.mosaic_common import INTERPRETERS, LANES, Chip, check_tiles
from pallas_kernels.numbers import power_of_two
from pallas_kernels.pages import Pages


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step."""

    lanes: int = LANES  # of the list
    pages: int = 32  # pages of a buffer, at least


LIMITS = Limits(check_pages=check_tiles, config=Config, stored=(jnp.float8_e4m3fn,), interpreters=INTERPRETERS)


def run(
    index_q: Float[Array, "B T K H"],
    index_k: Pages,
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    top_k: int,
    local_blocks: int,
    init_blocks: int,
    return_keys: bool,
    config: Config | None,
    interpret: Interpret,
) -> Int[Array, "B K T J"] | tuple[Int[Array, "B K T J"], Float[Array, "B K T J"]]:
    """Run `index_topk_decode` on checked operands."""
    _, length, heads, _ = index_q.shape
    config, chip = config or Config(), Chip.current(interpret)
    fold_lanes = power_of_two(length * heads)
    width = max(config.lanes, fold_lanes)
    folds = width // fold_lanes
    pages = -(-config.pages // folds) * folds
    sizes = Sizes(index_k, length, heads, folds, width, pages, top_k, local_blocks, init_blocks, return_keys)
    return walk(index_q, positions, lengths, sizes=sizes, chip=chip, interpret=interpret, name="index_topk_decode")
