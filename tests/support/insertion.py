"""Operands and the expected result of norm, rotary embedding and insertion."""

import jax
import jax.numpy as jnp
import numpy as np
from support.msa_strategies import Shape

from m3jax.model.layers import apply_rope, gemma_norm
from pallas_kernels.qk_norm_rope_insert import Projected

EPS = 1e-6


def draw(s: Shape, seed: int):
    """(projections, norm weights, positions, lengths, table, pools); slots are distinct inside a row."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
    heads = [(s.B, s.T, n, s.H) for n in (s.N, s.K, s.K, s.K)]
    x = Projected(*(normal(*shape) for shape in heads), normal(s.B, s.T, s.H))
    norms = Projected(normal(s.H), normal(s.H), None, normal(s.H), normal(s.H))
    positions = np.argsort(rng.random((s.B, s.M * s.P)), axis=1)[:, : s.T].astype(np.int32)
    positions[:, 0] = -1
    pages = s.B * s.M + 3
    table = rng.permutation(pages)[: s.B * s.M].reshape(s.B, s.M).astype(np.int32)
    pools = [normal(2, pages, s.K, s.P, s.H), normal(2, pages, s.K, s.P, s.H), normal(2, pages, s.P, s.H)]
    return x, norms, positions, rng.integers(0, s.S + 1, s.B).astype(np.int32), table, pools


@jax.jit
def _rotated(x, norms, cos, sin):
    rope = lambda x, w: apply_rope(gemma_norm(x, w, EPS), cos, sin)
    index_k = rope(x.index_k[:, :, None], norms.index_k)[:, :, 0]
    return rope(x.q, norms.q), rope(x.index_q, norms.index_q), rope(x.k, norms.k), index_k


def expected(x, norms, cos, sin, positions, lengths, table, pools):
    q, index_q, k, index_k = map(np.asarray, _rotated(x, norms, cos, sin))
    v, out = np.asarray(x.v), [np.array(pool) for pool in pools]
    size = pools[0].shape[3]
    for b, t in zip(*np.nonzero((positions >= 0) & (positions < lengths[:, None])), strict=True):
        page, slot = table[b, positions[b, t] // size], positions[b, t] % size
        out[0][1, page, :, slot], out[1][1, page, :, slot], out[2][1, page, slot] = k[b, t], v[b, t], index_k[b, t]
    return q, index_q, *out
