"""Index scores and the best blocks of each query, in one Mosaic TPU kernel (walk.py)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, Limits, TileConfig
from pallas_kernels.index_topk.mosaic_tpu.walk import Sizes, walk
from pallas_kernels.mosaic_common import INTERPRETERS, LANES, Chip, check_tiles
from pallas_kernels.pages import Pages


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a step."""

    lanes: int = 512  # (query, head) pairs of a step, where VMEM holds their lists
    pages: int = 16  # pages of a buffer


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
    """Run `index_topk` on checked operands."""
    _, length, heads, _ = index_q.shape
    config, chip = config or Config(), Chip.current(interpret)
    lanes = config.lanes
    while lanes > LANES and 4 * lanes * index_k.num_blocks > chip.vmem // 2:
        lanes //= 2
    tokens = max(1, min(lanes // heads, length))
    width = -(-tokens * heads // LANES) * LANES if not interpret else tokens * heads
    sizes = Sizes(index_k, tokens, heads, 1, width, config.pages, top_k, local_blocks, init_blocks, return_keys)
    return walk(index_q, positions, lengths, sizes=sizes, chip=chip, interpret=interpret, name="index_topk")
