"""MiniMax Sparse Attention: the definition, and its schedules in pure JAX (docs/msa.md)."""

from m3jax.msa.checked import block_scores, dense_attention, msa, sees, select_blocks, sparse_attention
from m3jax.msa.schedules import DENSE_SCHEDULES, SCHEDULES, index_walk, walk_scores
from m3jax.msa.schedules.index_walk import index_topk
from m3jax.msa.views import BlockView, Contiguous, IndexView, Paged, PagedIndex, contiguous, contiguous_index
from m3jax.msa.virtual import VirtualPages, virtual_pages
from m3jax.spec.msa import SelectionRules

__all__ = [
    "DENSE_SCHEDULES",
    "SCHEDULES",
    "BlockView",
    "Contiguous",
    "IndexView",
    "Paged",
    "PagedIndex",
    "SelectionRules",
    "VirtualPages",
    "block_scores",
    "contiguous",
    "contiguous_index",
    "dense_attention",
    "index_topk",
    "index_walk",
    "msa",
    "sees",
    "select_blocks",
    "sparse_attention",
    "virtual_pages",
    "walk_scores",
]
