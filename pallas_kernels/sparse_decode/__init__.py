"""Attention of a few queries a row over the blocks that each of them selected, as in a decode step."""

from pallas_kernels.sparse_decode.triton import MAX_QUERIES, Config, sparse_decode

__all__ = ["MAX_QUERIES", "Config", "sparse_decode"]
