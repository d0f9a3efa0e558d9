"""Scales for a float8 cache, measured on text."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from m3jax.cache.storage import Scales

_TOP = float(jnp.finfo(jnp.float8_e4m3fn).max)


def measure_scales(model: Any, tokens: Int[Array, "B T"], headroom: float = 2.0) -> tuple[Scales, ...]:
    """Scales under which the largest key, value and index key of some text fit float8_e4m3fn.

    Float8 keeps three bits of a number wherever it lies between 2**-6 and 448, so what a scale is for is the range:
    what overflows is cut off. Scales are fixed before use: were they found while serving, a row would depend on
    the rows before it.

    Args:
      model: from `m3jax.load`.
      tokens: text like what will be served, without padding.
      headroom: how much larger other text may be.

    Returns:
      One per stack of layers, for `Cache.pool` or `Engine`.

    Raises:
      ValueError: a headroom below 1, or values that are not finite.
    """
    if headroom < 1:
        raise ValueError(f"headroom = {headroom}: must be at least 1")
    found = [_stack_scales(*peaks, headroom) for peaks in _peaks(model, tokens)]
    if not all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found)):
        raise ValueError("the model's keys or values are not finite on these tokens: check the checkpoint")
    return tuple(found)


@jax.jit
def _peaks(model, tokens):
    """Per stack: the largest |k| and |v| of each layer and head [L K], and |index_k| of each layer [L]."""

    def probe(values, context):
        peak = lambda name, axes: jnp.max(jnp.abs(values[name].astype(jnp.float32)), axis=axes)
        index = peak("index_k", (0, 1, 2)) if "index_k" in values else jnp.float32(0)
        return peak("k", (0, 1, 3)), peak("v", (0, 1, 3)), index

    return model.trunk(tokens, probe=probe)[2]


def _stack_scales(k, v, index_k, headroom):
    scale = lambda peak: jnp.where(peak > 0, headroom * peak / _TOP, 1.0)
    return Scales(scale(k), scale(v), scale(index_k))
