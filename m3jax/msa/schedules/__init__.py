"""Schedules: ways to compute the functions of `m3jax.spec.msa` in less memory, each tested against it.

`SCHEDULES` are those of `sparse_attention` and `DENSE_SCHEDULES` those of `dense_attention`, by name and of one
signature: (q, view, blocks, positions, lengths) -> (out, lse), without `blocks` where attention is dense.
"""

from m3jax.msa.schedules.blockwise import blockwise
from m3jax.msa.schedules.index_walk import index_walk, walk_scores
from m3jax.msa.schedules.kv_block_major import kv_block_major
from m3jax.msa.schedules.lanes import invariant, invariant_all, invariant_reading, select_invariant
from m3jax.msa.schedules.mask import mask, mask_all
from m3jax.msa.schedules.query_major import gather, query_major

SCHEDULES = {"mask": mask, "query_major": query_major, "kv_block_major": kv_block_major, "invariant": invariant}
DENSE_SCHEDULES = {"mask": mask_all, "blockwise": blockwise, "invariant": invariant_all}

__all__ = [
    "DENSE_SCHEDULES",
    "SCHEDULES",
    "blockwise",
    "gather",
    "index_walk",
    "invariant_reading",
    "kv_block_major",
    "query_major",
    "select_invariant",
    "walk_scores",
]
