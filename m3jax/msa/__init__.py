"""MiniMax Sparse Attention: the definition and its schedules, in pure JAX (docs/msa.md)."""

from m3jax.msa.dense import blockwise_attention, dense_attention
from m3jax.msa.select import block_scores, index_topk, select_blocks
from m3jax.msa.sparse import SCHEDULES, sparse_attention
from m3jax.msa.views import BlockView, Contiguous, contiguous

__all__ = [
    "SCHEDULES",
    "BlockView",
    "Contiguous",
    "block_scores",
    "blockwise_attention",
    "contiguous",
    "dense_attention",
    "index_topk",
    "select_blocks",
    "sparse_attention",
]
