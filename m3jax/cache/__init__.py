"""The paged key/value and index-key cache: pages on the device, their owners on the host."""

from m3jax.cache.paged import Cache, Places, Scales, StackCache
from m3jax.cache.pages import OutOfPages, PageAllocator
from m3jax.cache.scales import measure_scales

__all__ = ["Cache", "OutOfPages", "PageAllocator", "Places", "Scales", "StackCache", "measure_scales"]
