"""What every kind of cache shares: where tokens go, scales, storage types."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from m3jax.config import M3Config

FLOAT8 = "float8_e4m3fn"
DTYPES = ("bfloat16", "float16", "float32", "float64", FLOAT8)


class Places(NamedTuple):
    """Where a call's tokens go and where their rows' past lies; pages outside [0, pages) are not held."""

    table: Int[Array, "B M"]
    page: Int[Array, "B T"]
    offset: Int[Array, "B T"]


@struct.dataclass
class Scales:
    """What stored float8 numbers are multiplied by: one per layer and head, one per layer for index keys."""

    k: Float[Array, "L K"]
    v: Float[Array, "L K"]
    index_k: Float[Array, " L"]


def stored(x: Float[Array, "..."], dtype: DTypeLike, scale: Float[Array, "..."]) -> Num[Array, "..."]:
    """New numbers as they are stored; float8 is scaled and kept from overflowing into NaN."""
    if dtype != FLOAT8:
        return x.astype(dtype)
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(scale.dtype) / scale, -top, top).astype(dtype)


def unit_scales(config: M3Config) -> list[Scales]:
    """Scales that change nothing."""
    heads = config.num_key_value_heads
    ones = lambda *shape: jnp.ones(shape, jnp.float32)
    return [Scales(ones(s.num_layers, heads), ones(s.num_layers, heads), ones(s.num_layers)) for s in config.stacks]
