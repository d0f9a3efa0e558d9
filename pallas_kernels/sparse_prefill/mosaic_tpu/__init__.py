"""Sparse attention of a prefill in Mosaic TPU kernels."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.backends import Limits
from pallas_kernels.mosaic_common import INTERPRETERS, check_tiles
from pallas_kernels.sparse_prefill import Call, check_config
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


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `sparse_prefill` on a checked call.

    "auto" is query_union: it moves less until a tile's union holds about six times what one query chose, and no TPU was
    at hand to measure where the other overtakes it.
    """
    check_config(call, config)
    attend = kv_block_major if call.schedule == "kv_block_major" else query_union
    return attend(call, config)
