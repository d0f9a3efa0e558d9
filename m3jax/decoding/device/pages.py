"""Whole pages of the cache: copied, read, and written back, all layers at once."""

from functools import partial

import jax
from jaxtyping import Int32

from m3jax.decoding.device.state import Layout, pin, readable
from m3jax.decoding.protocols import PageContents, PagedCache
from m3jax.decoding.sampling import HostOrDevice


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("layout",))
def copy_pages(
    cache: PagedCache,
    source: Int32[HostOrDevice, "C"],
    target: Int32[HostOrDevice, "C"],
    layout: Layout | None = None,
) -> PagedCache:
    """Copy pages of a donated cache; a target of -1 is dropped."""
    return pin(cache.copy_pages(source, target), layout)


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("layout",))
def write_pages(
    cache: PagedCache, pages: Int32[HostOrDevice, "C"], contents: PageContents, layout: Layout | None = None
) -> PagedCache:
    """Overwrite pages of a donated cache; a page of -1 is dropped."""
    return pin(cache.write_pages(pages, contents), layout)


@partial(jax.jit, static_argnames=("layout",))
def read_pages(cache: PagedCache, pages: Int32[HostOrDevice, "C"], layout: Layout | None = None) -> PageContents:
    """Return the contents of pages, which every process can read."""
    return readable(cache.read_pages(pages), layout)
