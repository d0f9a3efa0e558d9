"""Conversions between a token's heads side by side and the query rows of one KV head, in which schedules compute."""

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from m3jax.platform import platform


def group_rows(q: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K R H"]:
    """Return the queries of each KV head as rows: R = T x G, a token's heads side by side."""
    return rearrange(q, "b t (k g) h -> b k (t g) h", k=num_kv_heads)


def ungroup_rows(
    out: Float[Array, "B K R H"], lse: Float[Array, "B K R"], num_queries: int, dtype: jnp.dtype
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return outputs and log-sum-exps by token again; outputs are rounded once, to the queries' dtype."""
    out = rearrange(out, "b k (t g) h -> b t (k g) h", t=num_queries)
    return out.astype(dtype), rearrange(lse, "b k (t g) -> b t (k g)", t=num_queries)


def zero_behind_row(
    values: Float[Array, "B K S H"], key_positions: Int[Array, " S"], lengths: Int[Array, " B"]
) -> Float[Array, "B K S H"]:
    """Put zeros in place of whatever lies beyond a row's length: a weight of 0 times NaN would be NaN."""
    is_key: Bool[Array, "B S"] = key_positions < lengths[:, None]
    return jnp.where(is_key[:, None, :, None], values, 0)


def zero_from(values: Float[Array, "*X P H"], first: Int[Array, "*X"]) -> Float[Array, "*X P H"]:
    """Put zeros in place of the values of each block from token `first` on, whatever they hold."""
    block_size, width = values.shape[-2:]
    if platform() != "cpu":
        return jnp.where(jnp.arange(block_size, dtype=first.dtype)[:, None] < first[..., None, None], values, 0)
    # Over whole blocks, as `m3jax.msa.views` reads them, so that reading and clearing are one loop; a block that is
    # kept whole is told apart, so that most blocks are read without a mask.
    by_block = values.reshape(*values.shape[:-2], -1)  # [*X P*H]
    is_whole = (first >= block_size)[..., None]
    is_kept = jnp.arange(block_size * width, dtype=first.dtype) < (first * width)[..., None]
    return jnp.where(is_whole, by_block, jnp.where(is_kept, by_block, 0)).reshape(values.shape)
