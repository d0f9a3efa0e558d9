"""The paged key/value and index-key cache: pages on the device or in host memory, their owners on the host."""

from m3jax.cache.allocator import OutOfPages, PageAllocator
from m3jax.cache.device import Cache
from m3jax.cache.device_pages import StackCache
from m3jax.cache.layer_pages import CallPages, LayerCall, LayerPages
from m3jax.cache.offload.host import HostMemory
from m3jax.cache.offload.pool import OffloadedStack
from m3jax.cache.prefix import PageEvent
from m3jax.cache.scales import measure_scales
from m3jax.cache.storage import Places, Scales

__all__ = [
    "Cache",
    "CallPages",
    "HostMemory",
    "LayerCall",
    "LayerPages",
    "OffloadedStack",
    "OutOfPages",
    "PageAllocator",
    "PageEvent",
    "Places",
    "Scales",
    "StackCache",
    "measure_scales",
]
