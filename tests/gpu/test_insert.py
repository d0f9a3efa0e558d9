"""The kernel that normalises, rotates and inserts, on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
from support.gpu_pages import PREFILL, Inputs
from support.on_gpu import shapes_and_dtypes, twice

from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert


@shapes_and_dtypes(PREFILL)
def test_insertion_is_that_of_float32_and_changes_no_other_slot(shape, dtype, backend, seed):
    x = Inputs(shape, dtype, seed)
    f32 = lambda *shape: jax.random.normal(jax.random.key(int(x.rng.integers(2**31))), shape, jnp.float32)
    new = Projected(f32(x.B, x.T, x.N, x.H), f32(x.B, x.T, x.K, x.H), f32(x.B, x.T, x.K, x.H),
                    f32(x.B, x.T, x.K, x.H), f32(x.B, x.T, x.H))  # fmt: skip
    norms = Projected(f32(x.H), f32(x.H), None, f32(x.H), f32(x.H))
    angle = f32(x.B, x.T, 32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def rotate(y, weight):
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * (1.0 + weight)
        c, s = (z.reshape(x.B, x.T, *[1] * (y.ndim - 3), 32) for z in (cos, sin))
        a, b = y[..., :32], y[..., 32:64]
        return jnp.concatenate([a * c - b * s, b * c + a * s, y[..., 64:]], -1).astype(x.dtype)

    def insert(new, k, v, index_k, *at):
        pages = (x.pages(pool) for pool in (k, v, index_k))
        return qk_norm_rope_insert(new, norms, cos, sin, *at, *pages, eps=1e-6, dtype=x.dtype, backend=backend)

    got = twice(jax.jit(insert), new, x.k, x.v, x.index_k, *x.at)
    b, t = np.nonzero(x.positions < x.lengths[:, None])
    page, slot = x.table[b, x.positions[b, t] // x.P], x.positions[b, t] % x.P
    put = lambda pool, y: pool.at[page, :, slot].set(y[b, t].astype(x.dtype))
    want = {
        "q": rotate(new.q, norms.q),
        "index_q": rotate(new.index_q, norms.index_q),
        "k": put(x.k, rotate(new.k, norms.k)),
        "v": put(x.v, new.v),
        "index_k": x.index_k.at[page, slot].set(rotate(new.index_k, norms.index_k)[b, t]),
    }
    bound = 1e-6 if x.dtype == jnp.float32 else 1e-3
    for found, (name, expected) in zip(got, want.items(), strict=True):
        found, expected = np.asarray(found, np.float32).ravel(), np.asarray(expected.astype(jnp.float32)).ravel()
        assert (np.isnan(found) == np.isnan(expected)).all(), f"{name}: other slots are written than those of the call"
        error = np.linalg.norm(np.nan_to_num(found - expected)) / np.linalg.norm(np.nan_to_num(expected))
        assert error < bound, f"{name}: error {error:.1e}"
