"""The functions of `m3jax.spec.msa`, with checks of their arguments."""

from m3jax import spec
from m3jax.msa.checks import checked
from m3jax.spec.msa import sees as _sees

block_scores = checked(spec.block_scores)
dense_attention = checked(spec.dense_attention)
msa = checked(spec.msa)
sees = checked(_sees)
select_blocks = checked(spec.select_blocks)
sparse_attention = checked(spec.sparse_attention)
