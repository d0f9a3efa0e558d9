"""Norm and rotary embedding of queries and keys, and the write of keys and values into their pages."""

from pallas_kernels.qk_norm_rope_insert.triton import Projected, Written, qk_norm_rope_insert

__all__ = ["Projected", "Written", "qk_norm_rope_insert"]
