"""Norm, rotary embedding and insertion in interpret mode against the model's own layers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import comparisons, tiny
from support.insertion import EPS, draw, expected
from support.msa_strategies import GROUPED, RAGGED
from support.tpu_interpreter import STRICT

from m3jax.cache import Cache, LayerCall
from m3jax.cache.storage import unit_scales
from m3jax.execution import Projections
from m3jax.model.layers import rope_table
from m3jax.ops import Heads, interpret
from pallas_kernels.pages import paged
from pallas_kernels.qk_norm_rope_insert import Projected, qk_norm_rope_insert

CONFIG = tiny.config("dD")
angles = jax.jit(rope_table, static_argnums=(1, 2, 3))
# Three query heads of a KV head, four with the padding, and two KV heads: no two of these numbers are the same.
THREES = replace(GROUPED, N=6)
SCALES = np.array([[0.5, 2.0], [0.25, 4.0], [8.0, 1.0]], np.float32)


@jax.jit
def insert(x, norms, cos, sin, positions, lengths, table, pools):
    pages = (paged(pool, table, layer=1) for pool in pools)
    return qk_norm_rope_insert(
        x, norms, cos, sin, positions, lengths, *pages, eps=EPS, dtype=jnp.float32, backend="triton", interpret=True
    )


@pytest.mark.parametrize("shape", [THREES, pytest.param(RAGGED, marks=pytest.mark.further)], ids=["threes", "ragged"])
@settings(max_examples=4)
@given(seed=st.integers(0, 2**16))
def test_insert_is_that_of_the_model(shape, seed):
    """T14, T16: keys, values and index keys land together, at their own slots, and nothing else is touched."""
    x, norms, positions, lengths, table, pools = draw(shape, seed)
    cos, sin = angles(positions, shape.H // 2, 1e4, jnp.dtype("float32"))
    got = insert(x, norms, cos, sin, positions, lengths, table, pools)
    for name, want in zip(
        ("q", "index_q", "k", "v", "index_k"),
        expected(x, norms, cos, sin, positions, lengths, table, pools),
        strict=True,
    ):
        comparisons.assert_close(getattr(got, name).reshape(want.shape), want, name, atol=2e-6)


def test_one_byte_pages_hold_what_is_divided_by_the_scale():
    """e4m3 has no infinity: what is too large is cut, and does not become a NaN."""
    x, norms, positions, lengths, table, pools = draw(GROUPED, 3)
    lengths[:] = GROUPED.S
    x = x._replace(v=x.v.at[0].multiply(1e4))
    cos, sin = angles(positions, GROUPED.H // 2, 1e4, jnp.dtype("float32"))
    stored = [jnp.asarray(np.asarray(pool).astype(jnp.float8_e4m3fn)) for pool in pools]
    pages = (paged(pool, jnp.asarray(table), layer=1) for pool in stored)
    options = dict(eps=EPS, dtype=jnp.float32, scales=jnp.asarray(SCALES), backend="triton", interpret=True)
    got = jax.jit(partial(qk_norm_rope_insert, **options))(x, norms, cos, sin, positions, lengths, *pages)
    scale = [SCALES[0][:, None, None], SCALES[1][:, None, None], SCALES[2, 0]]
    want = expected(x, norms, cos, sin, positions, lengths, table, [np.asarray(p, np.float32) * 0 for p in pools])[2:]
    for have, exact, factor in zip((got.k, got.v, got.index_k), want, scale, strict=True):
        have = np.asarray(have, np.float32).reshape(exact.shape)
        written = exact != 0
        cut = np.clip(exact / factor, -448, 448)
        assert np.isfinite(have).all()
        np.testing.assert_allclose(have[written], cut[written], rtol=0.07, atol=2e-3)


TYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float8_e4m3fn", "bfloat16"), ("bfloat16", "float8_e4m3fn")]


@pytest.mark.parametrize(
    ("backend", "kv_dtype", "index_dtype", "kind", "are_finished"),
    [
        pytest.param("triton", *TYPES[0], "sparse", False, marks=pytest.mark.further),
        pytest.param("triton", *TYPES[1], "dense", False, marks=pytest.mark.further),
        ("triton", *TYPES[2], "sparse", False),
        ("triton", *TYPES[1], "sparse", True),
        pytest.param("triton", *TYPES[3], "dense", True, marks=pytest.mark.further),
        pytest.param("mosaic_tpu", *TYPES[2], "sparse", True, marks=pytest.mark.further),
    ],
)
def test_a_layer_writes_by_a_kernel_what_it_writes_by_xla(backend, kv_dtype, index_dtype, kind, are_finished):
    """T14, T16: the same queries and the same pages, scales of float8 included; rounding may fall on the other side.

    A kernel may get queries that are finished already, as on a mesh (`test_tpu.py` has the others of a TPU's).
    """
    dtype = jnp.dtype("float32" if kv_dtype == "float32" else "bfloat16")
    x, cache, positions, lengths = layer(kind, dtype, kv_dtype, index_dtype)
    call = LayerCall(jnp.int32(0), cache.places(positions, lengths), positions, lengths, backend=backend)
    stack, rotated = cache.stacks[kind == "sparse"], 2 * x.cos.shape[-1]
    with interpret():
        assert stack.insert_backend(call, x.raw.q, rotated, dtype) == backend
    options = dict(eps=EPS, dtype=dtype, backend=backend)
    with interpret(True if backend == "triton" else STRICT):
        run = jax.jit(lambda x, s: s.insert(call, x.raw, x.norms, x.cos, x.sin, **options))
        given = x.finish_queries() if are_finished else x
        queries, pages = run(given, stack)

    @jax.jit
    def by_xla(x, stack):
        ready = x.finish()
        return ready, stack.write(call, ready.k, ready.v, ready.index_k)

    ready, want = by_xla(x, stack)
    for mine, theirs in zip(jax.jit(Projections.finish)(given), ready, strict=True):
        close(mine, theirs)
    for mine, theirs in zip((queries.q, queries.index_q), (ready.q, ready.index_q), strict=True):
        close(mine, theirs)
    for name in ("k", "v", "index_k"):
        close(getattr(pages, name), getattr(want, name))


def layer(kind: str, dtype, kv_dtype: str, index_dtype: str):
    """(projections, a cache full of numbers, positions, lengths): ragged rows, tokens over two pages."""
    rng = np.random.default_rng(5)
    normal = lambda *shape, dtype="float32": jnp.asarray(rng.normal(size=shape).astype(dtype))
    config, B, T = CONFIG, 3, 5
    width, index_width, heads, kv_heads = config.head_dim, config.index_head_dim, 8, 4
    index = (normal(B, T, kv_heads, index_width), normal(B, T, index_width)) if kind == "sparse" else (None, None)
    heads = Heads(*(normal(B, T, n, width) for n in (heads, kv_heads, kv_heads)), *index)
    norms = [normal(n, dtype=dtype) for n in (width, width, index_width, index_width)]
    scales = tuple(jax.tree.map(lambda y: y * 0.5 ** (1 + jnp.arange(y.size).reshape(y.shape)), s)
                   for s in unit_scales(config))  # fmt: skip
    types = dict(kv_dtype=kv_dtype, index_dtype=index_dtype, scales=scales)
    cache = Cache.pool(config, 12, B, 3, str(dtype), **types)
    fill = lambda y: normal(*y.shape, dtype=y.dtype)
    stacks = tuple(s.replace(k=fill(s.k), v=fill(s.v), index_k=None if s.index_k is None else fill(s.index_k))
                   for s in cache.stacks)  # fmt: skip
    cache = cache.replace(stacks=stacks, table=jnp.asarray(rng.permutation(12)[:9].reshape(B, 3), jnp.int32))
    size = config.index_block_size
    positions = jnp.asarray(np.array([[size - 2], [0], [2 * size]], np.int32) + np.arange(T, dtype=np.int32))
    lengths = jnp.asarray([size + 3, 2, 3 * size], jnp.int32)  # the second row has padding
    cos, sin = angles(positions, config.rotary_dim, 1e4, jnp.dtype("float32"))
    norms = Heads(*norms[:2], None, *(norms[2:] if kind == "sparse" else (None, None)))
    return Projections(heads, norms, cos, sin, EPS, dtype), cache, positions, lengths


def close(mine, theirs):
    """Equal up to float32, but for a few numbers that were rounded to their neighbour."""
    if theirs is None:
        assert mine is None
        return
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    step = {"float32": 1e-6, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3}[str(mine.dtype)]
    mine, theirs = (np.asarray(y).astype(np.float32) for y in (mine, theirs))
    comparisons.assert_close(mine, theirs, "what is written", rtol=step, atol=2e-3 if step > 0.1 else 2e-6)
    assert step == 1e-6 or np.mean(mine != theirs) < 0.02


@pytest.mark.parametrize("backend", ["triton", "mosaic_tpu"])
def test_a_layer_without_an_index_writes_keys_and_values_alone(backend):
    """As a dense layer is: traced."""
    array = lambda *shape: jnp.zeros(shape)
    x = Projected(array(2, 3, 4, 8), array(2, 3, 2, 8), array(2, 3, 2, 8), None, None)
    norms = Projected(array(8), array(8), None, None, None)
    table, rows = jnp.zeros((2, 3), jnp.int32), (jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))

    def insert(pool, angle):
        places = paged(pool, table), paged(pool, table), None
        how = dict(eps=1e-6, dtype=jnp.bfloat16, backend=backend, interpret=True)
        return qk_norm_rope_insert(x, norms, angle, angle, *rows, *places, **how)

    written = jax.eval_shape(insert, array(6, 2, 4, 8), array(2, 3, 4))
    assert (written.q.shape, written.q.dtype) == (x.q.shape, jnp.bfloat16)
    assert written.k.shape == written.v.shape == (6 * 2, 4, 8) and written.index_q is written.index_k is None
