"""Norm, rotary embedding and insertion in interpret mode against the model's own layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_strategies import GROUPED, RAGGED, Shape

from m3jax.model.layers import apply_rope, gemma_norm, rope_table
from pallas_kernels.common import paged
from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert

EPS = 1e-6
SCALES = np.array([[0.5, 2.0], [0.25, 4.0], [8.0, 1.0]], np.float32)


def draw(s: Shape, seed: int):
    """(projections, norm weights, positions, lengths, table, pools); slots are distinct inside a row."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    heads = [(s.B, s.T, n, s.H) for n in (s.N, s.K, s.K, s.K)]
    x = Projected(*(normal(*shape) for shape in heads), normal(s.B, s.T, s.H))
    norms = Projected(normal(s.H), normal(s.H), None, normal(s.H), normal(s.H))
    positions = np.argsort(rng.random((s.B, s.M * s.P)), axis=1)[:, : s.T].astype(np.int32)
    positions[:, 0] = -1
    pages = s.B * s.M + 3
    table = rng.permutation(pages)[: s.B * s.M].reshape(s.B, s.M).astype(np.int32)
    pools = [normal(2, pages, s.K, s.P, s.H), normal(2, pages, s.K, s.P, s.H), normal(2, pages, s.P, s.H)]
    return x, norms, positions, rng.integers(0, s.S + 1, s.B).astype(np.int32), table, pools


def expected(x, norms, cos, sin, positions, lengths, table, pools):
    rope = lambda x, w: np.asarray(apply_rope(gemma_norm(x, w, EPS), cos, sin))
    k, index_k = rope(x.k, norms.k), rope(x.index_k[:, :, None], norms.index_k)[:, :, 0]
    out = [np.array(pool) for pool in pools]
    size = pools[0].shape[3]
    for b, t in zip(*np.nonzero((positions >= 0) & (positions < lengths[:, None])), strict=True):
        page, slot = table[b, positions[b, t] // size], positions[b, t] % size
        out[0][1, page, :, slot], out[1][1, page, :, slot], out[2][1, page, slot] = k[b, t], x.v[b, t], index_k[b, t]
    return rope(x.q, norms.q), rope(x.index_q, norms.index_q), *out


@pytest.mark.parametrize("shape", [GROUPED, RAGGED], ids=["grouped", "ragged"])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**16))
def test_insert_is_that_of_the_model(shape, seed):
    """T14, T16: keys, values and index keys land together, at their own slots, and nothing else is touched."""
    x, norms, positions, lengths, table, pools = draw(shape, seed)
    cos, sin = rope_table(jnp.asarray(positions), shape.H // 2, 1e4, jnp.dtype("float32"))

    @jax.jit
    def run(x, norms, positions, lengths, table, pools):
        pages = (paged(pool, table, layer=1) for pool in pools)
        return qk_norm_rope_insert(
            x, norms, cos, sin, positions, lengths, *pages, eps=EPS, dtype=jnp.float32, interpret=True
        )

    got = run(x, norms, positions, lengths, table, pools)
    for name, want in zip(
        ("q", "index_q", "k", "v", "index_k"),
        expected(x, norms, cos, sin, positions, lengths, table, pools),
        strict=True,
    ):
        np.testing.assert_allclose(getattr(got, name).reshape(want.shape), want, rtol=0, atol=2e-6, err_msg=name)


def test_one_byte_pages_hold_what_is_divided_by_the_scale():
    """e4m3 has no infinity: what is too large is cut, and does not become a NaN."""
    x, norms, positions, lengths, table, pools = draw(GROUPED, 3)
    lengths[:] = GROUPED.S
    x = x._replace(v=x.v.at[0].multiply(1e4))
    cos, sin = rope_table(jnp.asarray(positions), GROUPED.H // 2, 1e4, jnp.dtype("float32"))
    stored = [pool.astype(jnp.float8_e4m3fn) for pool in pools]
    pages = (paged(pool, jnp.asarray(table), layer=1) for pool in stored)
    at = jnp.asarray(positions), jnp.asarray(lengths)
    options = dict(eps=EPS, dtype=jnp.float32, scales=jnp.asarray(SCALES), interpret=True)
    got = qk_norm_rope_insert(x, norms, cos, sin, *at, *pages, **options)
    scale = [SCALES[0][:, None, None], SCALES[1][:, None, None], SCALES[2, 0]]
    want = expected(x, norms, cos, sin, positions, lengths, table, [np.asarray(p, np.float32) * 0 for p in pools])[2:]
    for have, exact, factor in zip((got.k, got.v, got.index_k), want, scale, strict=True):
        have = np.asarray(have, np.float32).reshape(exact.shape)
        written = exact != 0
        cut = np.clip(exact / factor, -448, 448)
        assert np.isfinite(have).all()
        np.testing.assert_allclose(have[written], cut[written], rtol=0.07, atol=2e-3)


def test_projections_and_pages_come_together(unchecked):
    x, norms, positions, lengths, table, pools = draw(GROUPED, 0)
    k, v, _ = (paged(pool, jnp.asarray(table), layer=1) for pool in pools)
    angles = jnp.zeros((GROUPED.B, GROUPED.T, 2))
    with pytest.raises(ValueError, match="come together"):
        qk_norm_rope_insert(x, norms, angles, angles, positions, lengths, k, v, eps=EPS, dtype=jnp.float32)
