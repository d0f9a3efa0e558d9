"""Attention of a few queries a row, as in a decode step: over the blocks that each of them selected, or over all."""

from pallas_kernels.sparse_decode.triton import MAX_QUERIES, Config, dense_decode, sparse_decode

__all__ = ["MAX_QUERIES", "Config", "dense_decode", "sparse_decode"]
