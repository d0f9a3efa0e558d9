"""The paged key/value and index-key cache: pages on the device or in host memory, their owners on the host."""

from m3jax.cache.host import HostMemory
from m3jax.cache.offload import OffloadedStack
from m3jax.cache.paged import Cache, StackCache
from m3jax.cache.pages import OutOfPages, PageAllocator
from m3jax.cache.parts import Places, Scales
from m3jax.cache.scales import measure_scales

__all__ = [
    "Cache",
    "HostMemory",
    "OffloadedStack",
    "OutOfPages",
    "PageAllocator",
    "Places",
    "Scales",
    "StackCache",
    "measure_scales",
]
