"""Checks and static sizes that both TPU schedules of sparse prefill share."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.common import Pages
from pallas_kernels.mosaic_common import Interpret, check_view


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    tokens: int = 16  # queries of a step


@dataclasses.dataclass(frozen=True)
class TpuSizes:
    """Static sizes of a call."""

    k: Pages
    tokens: int
    length: int
    heads: int
    kv_heads: int
    slots: int
    width: int

    @classmethod
    def of(cls, q: Float[Array, "B T N H"], k: Pages, blocks: Int[Array, "B K T J"], config: TpuConfig) -> "TpuSizes":
        """Of these operands."""
        return cls(k, config.tokens, q.shape[1], q.shape[2], blocks.shape[1], blocks.shape[3], q.shape[3])

    @property
    def group(self) -> int:
        """G, query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Lanes of a step: its tokens x G."""
        return self.tokens * self.group

    @property
    def tiles(self) -> int:
        return -(-self.length // self.tokens)

    @property
    def block_size(self) -> int:
        return self.k.block_size


def clean(v_ref, seen) -> None:
    """Zero what lies behind the first `seen` tokens of a block: it may hold anything, and 0 x NaN is NaN."""
    size = v_ref.shape[0]

    @pl.when(seen < size)
    def _():
        row = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        v_ref[...] = jnp.where(row < seen, v_ref[...].astype(jnp.float32), 0.0).astype(v_ref.dtype)


def check(q, k: Pages, v: Pages, blocks, interpret: Interpret) -> None:
    """Raise ValueError where the operands of sparse attention do not fit together."""
    for name, pages in (("k", k), ("v", v)):
        check_view(name, pages, q.shape[0], interpret)
    batch, length, heads, width = q.shape
    if blocks.shape[:1] + blocks.shape[2:3] != (batch, length) or heads % blocks.shape[1]:
        raise ValueError(f"blocks has shape {blocks.shape}: must be [{batch} K {length} J], K a divisor of {heads}")
    stored = k.pool.dtype
    if stored not in (q.dtype, jnp.float8_e4m3fn) or stored != v.pool.dtype or {k.width, v.width} != {width}:
        raise ValueError(
            f"q is {q.dtype} of width {width}, k {stored} of {k.width}, v {v.pool.dtype} of {v.width}: need the same "
            "width, and keys and values in the queries' dtype or float8_e4m3fn"
        )
    if k.pool.shape != v.pool.shape:
        raise ValueError(f"k has pages {k.pool.shape} and v {v.pool.shape}: they must lie in the same way")
