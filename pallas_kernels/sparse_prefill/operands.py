"""Checks and static sizes that both schedules of sparse prefill share."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common import LOG2E, Pages, check_pages, power_of_two


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes that change the speed and not the result (but for the order of float32 sums)."""

    tokens: int = 8  # neighbouring queries of a program
    keys: int = 64  # keys of one matrix product
    num_warps: int = 4
    num_stages: int = 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call."""

    k: Pages
    config: Config
    length: int
    heads: int
    kv_heads: int
    slots: int
    width: int
    interpret: bool
    return_lse: bool

    @property
    def group(self) -> int:
        """G, query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        """G as a power of two: Triton has no other shapes."""
        return power_of_two(self.group)

    @property
    def tokens(self) -> int:
        return self.config.tokens

    @property
    def rows(self) -> int:
        return self.tokens * self.padded_group

    @property
    def out_tokens(self) -> int:
        return max(self.length, self.tokens)

    @property
    def tiles(self) -> int:
        return -(-self.out_tokens // self.tokens)

    @property
    def keys(self) -> int:
        return min(self.config.keys, self.k.block_size)

    @property
    def scale(self) -> float:
        """H**-0.5 as a factor of base-2 exponents."""
        return self.width**-0.5 * LOG2E

    def first(self, tile):
        """The last tile starts early enough to end with the queries; what it repeats is the same twice."""
        return jnp.minimum(tile * self.tokens, self.out_tokens - self.tokens)

    def out_shape(self, batch: int, dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Outputs `[B T*N H]`, and their log-sum-exps where they are asked for; padding included."""
        rows = self.out_tokens * self.kv_heads * self.padded_group
        out = jax.ShapeDtypeStruct((batch, rows, self.width), dtype)
        return (out, jax.ShapeDtypeStruct((batch, rows), jnp.float32)) if self.return_lse else (out,)

    def trim(self, out: Sequence[Array]) -> tuple[Array, ...]:
        """Without the padding: `[B T N H]` and `[B T N]`."""

        def cut(x):
            x = x.reshape(x.shape[0], self.out_tokens, self.kv_heads, self.padded_group, *x.shape[2:])
            x = x[:, : self.length, :, : self.group]
            return x.reshape(*x.shape[:2], self.heads, *x.shape[4:])

        return tuple(cut(x) for x in out)


def check(q: Float[Array, "B T N H"], k: Pages, v: Pages, blocks: Int[Array, "B K T J"]) -> None:
    """Raise ValueError where the operands of sparse attention do not fit together."""
    check_pages("k", k, q.shape[0])
    check_pages("v", v, q.shape[0])
    batch, length, heads, width = q.shape
    if blocks.shape[:1] + blocks.shape[2:3] != (batch, length) or heads % blocks.shape[1]:
        raise ValueError(f"blocks has shape {blocks.shape}: must be [{batch} K {length} J], K a divisor of {heads}")
    if not (q.dtype == k.pool.dtype == v.pool.dtype and width == k.width == v.width):
        raise ValueError(
            f"q is {q.dtype} of width {width}, k {k.pool.dtype} of {k.width}, v {v.pool.dtype} of {v.width}: "
            "they must be the same"
        )
    if k.pool.shape != v.pool.shape:
        raise ValueError(f"k has pages {k.pool.shape} and v {v.pool.shape}: they must lie in the same way")
