"""Index scores and the best blocks of each query, in one kernel."""

from pallas_kernels.index_topk.triton import Config, index_topk

__all__ = ["Config", "index_topk"]
