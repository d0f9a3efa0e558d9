"""The definitions: what MiniMax-M3 computes, in plain `jax.numpy`, short enough to check against the paper by eye.

Everything else in m3jax is a schedule of these functions: another way to compute the same numbers.
"""

from m3jax.spec.model import forward, intermediates
from m3jax.spec.msa import SelectionRules, block_scores, dense_attention, msa, select_blocks, sparse_attention

__all__ = [
    "SelectionRules",
    "block_scores",
    "dense_attention",
    "forward",
    "intermediates",
    "msa",
    "select_blocks",
    "sparse_attention",
]
