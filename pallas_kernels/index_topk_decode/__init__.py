"""Index scores and the best blocks of a few queries a row, as in a decode step."""

from pallas_kernels.index_topk_decode.triton import MAX_QUERIES, Config, index_topk_decode

__all__ = ["MAX_QUERIES", "Config", "index_topk_decode"]
