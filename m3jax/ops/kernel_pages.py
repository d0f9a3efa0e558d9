"""A view's memory as kernels read it."""

from typing import Any

from jaxtyping import Array, Num

from m3jax.msa import Contiguous, Paged, PagedIndex
from m3jax.msa.views import ContiguousIndex


def kernel_pages(view: Contiguous | ContiguousIndex | Paged | PagedIndex, memory: Num[Array, "..."]) -> Any:
    """Return one of a view's arrays (keys, values or index keys) as `pallas_kernels.pages.Pages`; nothing is copied."""
    from pallas_kernels.pages import contiguous, paged

    if isinstance(view, Contiguous | ContiguousIndex):
        return contiguous(memory, view.block_size)
    num_devices = 1 if view.share is None else view.share.num_devices
    return paged(memory, view.table, view.layer, num_devices)
