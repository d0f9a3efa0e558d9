"""The merge of the splits of a decode step by log-sum-exp: a Triton kernel for few splits, another for many."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.numbers import UNSEEN, power_of_two
from pallas_kernels.triton_common import div, divisor, exp2, natural_lse, rem

_FEW_SPLITS = 4


def merge(
    parts: Float[Array, "B T K Z R H"],
    part_lses: Float[Array, "B T K Z R"],
    dtype: jax.typing.DTypeLike,
    *,
    group: int,
    interpret: bool,
) -> tuple[Float[Array, "B T K _ H"], Float[Array, "B T K _"]]:
    """Output and natural log-sum-exp of all splits together.

    Args:
      parts: output of each split, in float32.
      part_lses: log-sum-exp of each split in powers of two; a split that saw no key has -inf, and weight 0.
      dtype: of the output.
      group: G, how many of the R rows are query heads; of the results at least so many are.
      interpret: run on the CPU.
    """
    batch, length, kv_heads, splits, tile_rows, width = parts.shape
    is_few = splits <= _FEW_SPLITS
    shape = (batch, length, kv_heads, tile_rows if is_few else group)
    queries = batch * length
    return pl.pallas_call(
        partial(_few_kernel if is_few else _many_kernel, interpret=interpret),
        grid=(kv_heads, queries) if is_few else (group, kv_heads, queries),
        out_shape=(jax.ShapeDtypeStruct((*shape, width), dtype), jax.ShapeDtypeStruct(shape, jnp.float32)),
        compiler_params=plgpu.CompilerParams(num_warps=4 if is_few else 2, num_stages=1),
        interpret=interpret,
        name="sparse_decode_merge",
    )(parts, part_lses)


def _many_kernel(parts_ref, part_lses_ref, out_ref, lse_ref, *, interpret: bool):
    """A program takes one query head, and all of its splits at once."""
    length, splits = parts_ref.shape[1], parts_ref.shape[3]
    member, head, query = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, token = div(query, length), rem(query, length)
    split = jnp.arange(power_of_two(splits), dtype=jnp.int32)
    source = jnp.minimum(split, splits - 1)
    lses = jnp.where(split < splits, part_lses_ref[row, token, head, source, member], -jnp.inf)  # [Z]
    top = jnp.maximum(jnp.max(lses), UNSEEN)
    weights = exp2(lses - top, interpret)
    total = jnp.sum(weights)
    values = jnp.sum(parts_ref[row, token, head, source, member, :] * weights[:, None], axis=0)  # [H]
    is_seen, total = divisor(total)
    out_ref[row, token, head, member, :] = (values / total).astype(out_ref.dtype)
    lse_ref[row, token, head, member] = natural_lse(top, is_seen, total)


def _few_kernel(parts_ref, part_lses_ref, out_ref, lse_ref, *, interpret: bool):
    """A program takes all query heads of a KV head, and one split after the other."""
    _, length, _, splits, tile_rows, width = parts_ref.shape
    head, query = pl.program_id(0), pl.program_id(1)
    row, token = div(query, length), rem(query, length)
    lane = jnp.arange(tile_rows, dtype=jnp.int32)
    lses = [part_lses_ref[row, token, head, split, lane] for split in range(splits)]
    top = jnp.full((tile_rows,), UNSEEN, jnp.float32)
    for lse in lses:
        top = jnp.maximum(top, lse)
    total, values = jnp.zeros_like(top), jnp.zeros((tile_rows, width), jnp.float32)
    for split, lse in enumerate(lses):
        weight = exp2(lse - top, interpret)
        total += weight
        values += parts_ref[row, token, head, split, lane, :] * weight[:, None]
    is_seen, total = divisor(total)
    out_ref[row, token, head, lane, :] = (values / total[:, None]).astype(out_ref.dtype)
    lse_ref[row, token, head, lane] = natural_lse(top, is_seen, total)
