"""Sparse attention of a decode step in Triton: split over the selected blocks (attend.py), and merged (merge.py).

In M3's sizes::

    16 block ids of a token and KV head ── table ── 16 pages, all found before the walk
    q [16 heads, 128] stays;  per block of a split:  K, V ── q K^T ── mask ── P V ── running out [16, 128]
    one split: out;  several: out and LSE of each ── memory ── merge by LSE ── out
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Limits
from pallas_kernels.pages import Pages
from pallas_kernels.sparse_decode.triton.attend import Config, attend, default_config
from pallas_kernels.triton_common import check_pool

__all__ = ["LIMITS", "Config", "run"]

LIMITS = Limits(check_pages=check_pool, config=Config, stored=(jnp.float8_e4m3fn,))


def run(
    q: Float[Array, "B T N H"],
    k: Pages,
    v: Pages,
    blocks: Int[Array, "B K T J"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    scales: tuple[Float[Array, " K"], Float[Array, " K"]] | None,
    return_lse: bool,
    config: Config | None,
    interpret: bool,
) -> tuple[Array, ...]:
    """Run `sparse_decode` on checked operands."""
    batch, length = q.shape[:2]
    kv_heads, slots = blocks.shape[1], blocks.shape[3]
    return attend(
        q, k, v, blocks, positions, lengths, kv_heads=kv_heads, slots=slots, scales=scales, return_lse=return_lse,
        config=config or default_config(k.pool.dtype, batch * kv_heads, length), interpret=interpret,
        name="sparse_decode",
    )  # fmt: skip
