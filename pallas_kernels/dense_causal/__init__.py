"""Dense causal attention: for layers without a selection, and for queries that keep every block that they see."""

from pallas_kernels.dense_causal.cudnn import cudnn_causal
from pallas_kernels.dense_causal.triton import dense_causal

__all__ = ["cudnn_causal", "dense_causal"]
