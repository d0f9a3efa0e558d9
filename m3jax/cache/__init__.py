"""Key/value and index-key caches."""

from m3jax.cache.contiguous import Cache, StackCache

__all__ = ["Cache", "StackCache"]
