"""Scales for a float8 cache, measured on text."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from m3jax.cache.storage import FLOAT8, Scales

_LARGEST = float(jnp.finfo(FLOAT8).max)


@runtime_checkable
class ProbedModel(Protocol):
    """A model that shows what its layers compute (`M3`)."""

    def run(self, tokens: Int[Array, "B T"], *, probe: Callable[..., PyTree[Array]], logits: bool) -> Any:
        """Return an object whose attribute `probed` has the probe's results for each stack of layers (`M3.run`)."""
        ...


def measure_scales(model: ProbedModel, tokens: Int[Array, "B T"], headroom: float = 2.0) -> tuple[Scales, ...]:
    """Return scales under which the largest key, value and index key of some text fit float8_e4m3fn.

    Float8 keeps three bits of a number wherever it lies between 2**-6 and 448, so a scale serves the range alone:
    numbers that overflow are clipped. Scales are fixed before use: if they were measured while serving, a row would
    depend on the rows before it.

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
    fit = lambda largest: jnp.where(largest == 0, 1.0, headroom * largest / _LARGEST)  # NaN stays NaN
    scales = []
    for largest_k, largest_v, largest_index_k in _largest_values(model, tokens):
        scales.append(Scales(fit(largest_k), fit(largest_v), fit(largest_index_k)))
    if not all(bool(jnp.isfinite(scale).all()) for scale in jax.tree.leaves(scales)):
        raise ValueError("the model's keys or values are not finite on these tokens: check the checkpoint")
    return tuple(scales)


@jax.jit
def _largest_values(
    model: ProbedModel, tokens: Int[Array, "B T"]
) -> list[tuple[Float[Array, "_ K"], Float[Array, "_ K"], Float[Array, "_"]]]:
    """Return, per stack, the largest |k| and |v| of each layer and head [L K], and |index_k| of each layer [L]."""

    def probe(values, context):
        def largest(name, axes):
            x = jnp.abs(values[name].astype(jnp.float32))
            # On a CPU a maximum alone leaves NaN out (`m3jax.decoding.sampling.has_distribution`).
            return jnp.where(jnp.any(jnp.isnan(x), axis=axes), jnp.nan, jnp.max(x, axis=axes))

        k, v = largest("k", (0, 1, 3)), largest("v", (0, 1, 3))  # [B T K H] -> [K]
        index_k = largest("index_k", (0, 1, 2)) if "index_k" in values else jnp.float32(0)  # [B T I] -> []
        return k, v, index_k

    return model.run(tokens, probe=probe, logits=False).probed
