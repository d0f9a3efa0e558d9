"""From the projections of a layer to its queries, keys and values: per-head norm, rotary embedding, rounding."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from m3jax.cache import OffloadedStack, StackCache
from m3jax.cache.storage import FLOAT8, Places
from m3jax.model.layers import apply_rope, gemma_norm
from m3jax.msa import api


class Tensors(NamedTuple):
    """What a layer's attention takes: the index branch only where it is sparse, keys only until they are written."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"] | None
    v: Float[Array, "B T K H"] | None
    index_q: Float[Array, "B T K I"] | None
    index_k: Float[Array, "B T I"] | None


@struct.dataclass
class Finish:
    """How projections become queries, keys and values.

    Attributes:
      norms: weights for q, k, index_q and index_k.
      cos: cosines of each token's angles.
      sin: sines.
      eps: of the norm.
      dtype: what is computed in the accumulator's dtype is rounded to this, once.
      backend: whose `insert` runs.
    """

    norms: tuple[Array, Array, Array | None, Array | None]
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    eps: float = struct.field(pytree_node=False)
    dtype: DTypeLike = struct.field(pytree_node=False)
    backend: str = struct.field(pytree_node=False, default="xla")

    def __call__(self, x: Tensors) -> Tensors:
        """By XLA."""
        return Tensors(*(self._head(x.q, 0), self._head(x.k, 1), x.v.astype(self.dtype)),
                       *(self._head(x.index_q, 2), self._head(x.index_k, 3)))  # fmt: skip

    def _head(self, x, which):
        if x is None:
            return None
        y = gemma_norm(x, self.norms[which], self.eps)
        single = y.ndim == 3
        y = apply_rope(y[:, :, None] if single else y, self.cos, self.sin).astype(self.dtype)
        return y[:, :, 0] if single else y

    def on(
        self, x: Tensors, cache: StackCache | OffloadedStack, layer: Int[Array, ""], places: Places, backend: str
    ) -> "Finish":
        """With the backend that does it in a call that writes a cache; "xla" has no `insert`."""
        if isinstance(cache, OffloadedStack):
            return self
        rotated = 2 * self.cos.shape[-1]
        case = api.insert_case(x.q, *self._views(cache, layer, places), rotated)
        return self.replace(backend=api.choose(case, backend))

    def insert(
        self,
        x: Tensors,
        cache: StackCache,
        layer: Int[Array, ""],
        places: Places,
        positions: Int[Array, "B T"],
        lengths: Int[Array, " B"],
    ) -> tuple[Tensors, StackCache]:
        """By a kernel that also writes: queries, and the cache with the new tokens."""
        scales = _scales(cache, layer)
        views, at = self._views(cache, layer, places), (positions, lengths)
        static = dict(eps=self.eps, scales=scales, backend=self.backend)
        q, index_q, k, v, index_k = api.insert(x, self.norms, (self.cos, self.sin), *views, *at, **static)
        return Tensors(q, None, None, index_q, None), cache.replace(k=k, v=v, index_k=index_k)

    def _views(self, cache, layer, places):
        index = None if cache.index_k is None else cache.index_view(layer, places, self.dtype)
        return cache.view(layer, places, self.dtype), index


def _scales(cache: StackCache, layer) -> Float[Array, "3 K"]:
    """Of keys, values and index keys; only float8 has scales."""
    of = cache.scales
    k, v = (x[layer] if cache.k.dtype == FLOAT8 else jnp.ones_like(x[layer]) for x in (of.k, of.v))
    small = cache.index_k is not None and cache.index_k.dtype == FLOAT8
    return jnp.stack([k, v, jnp.full_like(k, of.index_k[layer] if small else 1.0)])
