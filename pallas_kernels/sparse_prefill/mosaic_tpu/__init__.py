"""Sparse attention of a prefill in Mosaic TPU kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Interpret, Limits
from pallas_kernels.mosaic_common import INTERPRETERS, check_tiles
from pallas_kernels.pages import Pages
from pallas_kernels.sparse_prefill.mosaic_tpu.kv_block_major import kv_block_major
from pallas_kernels.sparse_prefill.mosaic_tpu.query_union import query_union
from pallas_kernels.sparse_prefill.mosaic_tpu.sizes import Config

__all__ = ["LIMITS", "Config", "kv_block_major", "query_union", "run"]

LIMITS = Limits(
    check_pages=check_tiles,
    config=Config,
    stored=(jnp.float8_e4m3fn,),
    schedules=("auto", "query_union", "kv_block_major"),
    interpreters=INTERPRETERS,
)


def run(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    schedule: str,
    return_lse: bool,
    config: Config | None,
    interpret: Interpret,
) -> tuple[Array, ...]:
    """Run `sparse_prefill` on checked operands.

    "auto" is query_union: it moves less until a tile's union holds about six times what one query chose, and no TPU was
    at hand to measure where the other overtakes it.
    """
    attend = kv_block_major if schedule == "kv_block_major" else query_union
    return attend(q, k, v, blocks, positions, lengths, return_lse=return_lse, config=config, interpret=interpret)
