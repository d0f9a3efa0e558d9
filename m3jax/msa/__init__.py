"""MiniMax Sparse Attention: the definition and its schedules, in pure JAX (docs/msa.md)."""

from m3jax.msa.backends import BACKENDS
from m3jax.msa.dense import blockwise_attention, dense_attention
from m3jax.msa.select import block_scores, index_topk, select_blocks, view_topk
from m3jax.msa.sparse import SCHEDULES, sparse_attention
from m3jax.msa.views import BlockView, Contiguous, IndexView, Paged, PagedIndex, contiguous, contiguous_index
from m3jax.msa.virtual import VirtualPages, paged_attention, virtual_pages

__all__ = [
    "BACKENDS",
    "SCHEDULES",
    "BlockView",
    "Contiguous",
    "IndexView",
    "Paged",
    "PagedIndex",
    "VirtualPages",
    "block_scores",
    "blockwise_attention",
    "contiguous",
    "contiguous_index",
    "dense_attention",
    "index_topk",
    "paged_attention",
    "select_blocks",
    "sparse_attention",
    "view_topk",
    "virtual_pages",
]
