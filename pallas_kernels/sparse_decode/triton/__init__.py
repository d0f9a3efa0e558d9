"""Sparse attention of a decode step in Triton: split over the selected blocks (attend.py), and merged (merge.py).

In M3's sizes::

    16 block ids of a token and KV head ── table ── 16 pages, all found before the walk
    q [16 heads, 128] stays;  per block of a split:  K, V ── q K^T ── mask ── P V ── running out [16, 128]
    one split: out;  several: out and LSE of each ── memory ── merge by LSE ── out
"""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.backends import Limits
from pallas_kernels.sparse_decode import Call
from pallas_kernels.sparse_decode.triton.attend import Config, attend, default_config
from pallas_kernels.triton_common import check_pool

__all__ = ["LIMITS", "Config", "run"]

LIMITS = Limits(check_pages=check_pool, config=Config, stored=(jnp.float8_e4m3fn,))


def run(call: Call, config: Config | None) -> tuple[Array, ...]:
    """Run `sparse_decode` on a checked call."""
    batch, length = call.q.shape[:2]
    kv_heads, slots = call.blocks.shape[1], call.blocks.shape[3]
    config = config or default_config(call.k.pool.dtype, batch * kv_heads, length)
    return attend(call, call.blocks, kv_heads=kv_heads, slots=slots, config=config, name="sparse_decode")
