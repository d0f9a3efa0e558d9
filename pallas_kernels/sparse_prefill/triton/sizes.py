"""Static sizes of the Triton kernels of a prefill: both schedules of sparse attention, and dense attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.backends import TileConfig
from pallas_kernels.numbers import power_of_two
from pallas_kernels.pages import Pages
from pallas_kernels.triton_common import LOG2E, div, rem


@dataclasses.dataclass(frozen=True)
class Config(TileConfig):
    """Sizes of a tile."""

    tokens: int = 8  # neighbouring queries of a program; at most 31 for query_union, which has a bit for each
    keys: int = 64  # keys of one matrix product
    num_warps: int = 4
    num_stages: int = 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call. A tile is some neighbouring tokens with all query heads of one KV head each."""

    k: Pages
    config: Config
    length: int
    heads: int
    kv_heads: int
    slots: int  # J; 0 for dense attention
    width: int
    return_lse: bool
    interpret: bool

    @classmethod
    def of(cls, call: Any, kv_heads: int, slots: int, config: Config) -> "Sizes":
        """Return the sizes of a call of `sparse_prefill` or `dense_causal`."""
        _, length, heads, width = call.q.shape
        return cls(call.k, config, length, heads, kv_heads, slots, width, call.return_lse, call.interpret)

    @property
    def group(self) -> int:
        """G, query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        """G as a power of two: Triton has no other shapes."""
        return power_of_two(self.group)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return self.config.tokens

    @property
    def tile_rows(self) -> int:
        """R, rows of a tile's matrix product: its tokens x query heads."""
        return self.tile_tokens * self.padded_group

    @property
    def out_tokens(self) -> int:
        """T, or a whole tile where there are fewer."""
        return max(self.length, self.tile_tokens)

    @property
    def tiles(self) -> int:
        """Tiles that cover all tokens."""
        return -(-self.out_tokens // self.tile_tokens)

    @property
    def keys(self) -> int:
        """Keys of one matrix product, which lie in one block."""
        return min(self.config.keys, self.k.block_size)

    @property
    def pieces(self) -> int:
        """Matrix products that cover one block."""
        return self.k.block_size // self.keys

    @property
    def scale(self) -> float:
        """H**-0.5 as a factor of base-2 exponents."""
        return self.width**-0.5 * LOG2E

    def first_token(self, tile: Int[Array, ""]) -> Int[Array, ""]:
        """Return the first token of a tile; the last tile ends with the queries, and may repeat tokens of another."""
        return jnp.minimum(tile * self.tile_tokens, self.out_tokens - self.tile_tokens)

    def tile_lanes(self) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
        """(token of the tile, member of the group of query heads) of each row; members from G on repeat the last."""
        lane = jnp.arange(self.tile_rows, dtype=jnp.int32)
        return div(lane, self.padded_group), rem(lane, self.padded_group)

    def out_shape(self, batch: int, dtype: jax.typing.DTypeLike) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """(outputs [B T*N H], log-sum-exps [B T*N] or None where they are not asked for), padding included."""
        rows = self.out_tokens * self.kv_heads * self.padded_group
        out = jax.ShapeDtypeStruct((batch, rows, self.width), dtype)
        return out, jax.ShapeDtypeStruct((batch, rows), jnp.float32) if self.return_lse else None

    def out_row(self, token: Int[Array, "..."], head: Int[Array, ""], member: Int[Array, " R"]) -> Int[Array, " R"]:
        """Return the row of `out_shape` in which a query head of a token lies."""
        return (token * self.kv_heads + head) * self.padded_group + member

    def trim(self, out: Float[Array, "B X H"], lse: Float[Array, "B X"] | None) -> tuple[Array, ...]:
        """Drop the padding: (out [B T N H],), and the LSE [B T N] if it is there."""

        def without_padding(x: Shaped[Array, "B X ..."]) -> Shaped[Array, "B T N ..."]:
            x = x.reshape(x.shape[0], self.out_tokens, self.kv_heads, self.padded_group, *x.shape[2:])
            x = x[:, : self.length, :, : self.group]
            return x.reshape(*x.shape[:2], self.heads, *x.shape[4:])

        return (without_padding(out),) if lse is None else (without_padding(out), without_padding(lse))
