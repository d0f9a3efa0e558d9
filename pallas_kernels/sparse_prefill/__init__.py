"""Attention of many queries over the blocks that each of them selected."""

from pallas_kernels.sparse_prefill.auto import SCHEDULES, sparse_prefill
from pallas_kernels.sparse_prefill.operands import Config
from pallas_kernels.sparse_prefill.triton import query_union
from pallas_kernels.sparse_prefill.triton_block_major import kv_block_major

__all__ = ["SCHEDULES", "Config", "kv_block_major", "query_union", "sparse_prefill"]
