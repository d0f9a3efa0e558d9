"""The numbers that the cache stores: small types and their scales, and virtual pages."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import tiny

from m3jax.cache import Cache, measure_scales
from m3jax.cache.storage import stored
from m3jax.decoding import Engine, Params, Sampling
from m3jax.msa import Paged, index_topk, sparse_attention, virtual_pages
from m3jax.msa.schedules.blockwise import blockwise

CONFIG = tiny.config("dMM")  # two layers in one stack
F8 = "float8_e4m3fn"
LENGTH = 45


@cache
def model(config=CONFIG):
    return tiny.model(config)


@cache
def scales(config=CONFIG):
    return measure_scales(model(config), jnp.asarray(tiny.tokens(config, 2, LENGTH)))


@jax.jit
def fill(model, tokens, cache):
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    call = dict(positions=positions, lengths=jnp.full(rows, length, jnp.int32))
    probe = lambda values, context: {k: values[k] for k in ("k", "v", "index_k") if k in values}
    out = model.run(tokens, cache=cache, probe=probe, logits=False, **call)
    return model.unembed(out.hidden), out.cache, out.probed


def filled(config=CONFIG, tokens=None, **types):
    """(logits, cache, what was written [L B T ...]) of two rows."""
    tokens = tiny.tokens(config, 2, LENGTH) if tokens is None else tokens
    return fill(model(config), jnp.asarray(tokens), Cache.init(config, 2, LENGTH, "float32", **types))


@pytest.mark.parametrize("name", ["k", "v", "index_k"])
def test_float8_is_off_by_half_a_step(name):
    """Three bits of mantissa: 2**-4 of a number, or of the smallest normal one. Each layer has scales of its own."""
    growing = lambda x: x * (1 + jnp.arange(len(x), dtype=x.dtype) / 2).reshape(-1, *[1] * (x.ndim - 1))  # [L ...]
    chosen = jax.tree.map(growing, scales())
    _, cache, kept = filled(kv_dtype=F8, index_dtype=F8, scales=chosen)
    assert max(len(values[name]) for values in kept if name in values) == 2
    for i, (stack, values) in enumerate(zip(cache.stacks, kept, strict=True)):
        if name not in values:
            continue
        assert getattr(stack, name).dtype == F8
        for layer in range(len(values[name])):
            places = cache.places(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32))
            view = stack.view(layer, places, np.dtype("float32")) if name != "index_k" else None
            index = stack.index_view(layer, places, np.dtype("float32")) if view is None else None
            got = index.run(0, index.num_blocks) if view is None else view.run(0, view.num_blocks)["kv".index(name)]
            got = np.asarray(got if view is None else got.swapaxes(1, 2))[:, :LENGTH]
            scale = np.asarray(getattr(chosen[i], name))[layer]
            scale = scale if view is None else scale[:, None]
            wrote = np.asarray(values[name][layer])
            steps = np.abs(got - wrote) / (np.maximum(np.abs(wrote), scale * 2.0**-6) * 2.0**-4)
            worst = np.unravel_index(steps.argmax(), steps.shape)
            assert steps[worst] <= 1.0001, (
                f"{name}{list(map(int, worst))} of layer {layer} of stack {i}: "
                f"wrote {wrote[worst]:.5g}, read {got[worst]:.5g}, {steps[worst]:.1f} half steps apart"
            )
            assert np.abs(got - wrote).max() > 0


def test_float8_overflow_is_cut_off():
    """Not NaN, which the cast alone would give."""
    tight = jax.tree.map(lambda x: x / 16, scales())
    logits, cache, _ = filled(kv_dtype=F8, index_dtype=F8, scales=tight)
    assert np.isfinite(logits).all()
    values = np.asarray(cache.stacks[0].v.astype(jnp.float32))
    assert np.abs(values).max() == 448


def test_what_is_stored_in_float8_is_scaled_and_cut_off():
    x = jnp.array([1.0, -3.0, 1000.0, -1000.0, jnp.nan])
    found = stored(x, jnp.dtype("float8_e4m3fn"), jnp.float32(2.0)).astype(jnp.float32)
    np.testing.assert_array_equal(found, [0.5, -1.5, 448, -448, np.nan])
    assert stored(x, jnp.bfloat16, jnp.float32(2.0)).tolist()[:2] == [1, -3]


def test_scales_fit_the_largest_number_and_no_smaller_headroom():
    class Probed(nnx.Module):
        def run(self, tokens, *, probe, logits):
            # [B T K H]; a layer without an index branch, and one that has one
            values = {"k": jnp.array([[[[1.0], [0.0]], [[-4.0], [0.0]]]]), "v": jnp.full((1, 2, 2, 1), -2.0)}
            sparse = values | {"index_k": jnp.array([[[1.0, 0.0, -6.0], [5.0, 0.0, 0.0]]]) + 0.0 / (tokens[0, 0] - 9)}
            stacks = [jax.tree.map(lambda x: x[None], probe(of_stack, None)) for of_stack in (values, sparse)]
            return SimpleNamespace(probed=stacks)

    model = Probed()
    scales, sparse = measure_scales(model, jnp.array([[1, 2]], jnp.int32), headroom=1.0)
    np.testing.assert_allclose(sparse.index_k, [6 / 448])
    np.testing.assert_array_equal(sparse.k, scales.k)
    with pytest.raises(ValueError, match="keys or values are not finite on these tokens: check the checkpoint"):
        measure_scales(model, jnp.array([[9, 2]], jnp.int32))
    np.testing.assert_allclose(scales.k, [[4 / 448, 1]])
    np.testing.assert_allclose(scales.v, [[2 / 448, 2 / 448]])
    assert scales.index_k.tolist() == [1]
    wide, _ = measure_scales(model, jnp.array([[1, 2]], jnp.int32))
    np.testing.assert_allclose(wide.v, 2 * scales.v)
    with pytest.raises(ValueError, match=r"headroom = 0.99: must be at least 1"):
        measure_scales(model, jnp.array([[1, 2]], jnp.int32), headroom=0.99)


@pytest.mark.parametrize(("kv", "index"), [(F8, None), (None, F8), (F8, F8)])
def test_types_are_chosen_separately(kv, index):
    stack = Cache.init(CONFIG, 1, 8, "float32", kv_dtype=kv, index_dtype=index, scales=scales()).stacks[1]
    assert (str(stack.k.dtype), str(stack.v.dtype)) == (kv or "float32",) * 2
    assert str(stack.index_k.dtype) == (index or "float32")


@pytest.mark.further
@pytest.mark.parametrize(("kv", "index"), [(F8, None), (None, F8), (F8, F8)])
def test_small_types_cost_little(kv, index):
    plain = np.asarray(filled()[0])
    logits, *_ = filled(kv_dtype=kv, index_dtype=index, scales=scales())
    error = np.linalg.norm(logits - plain) / np.linalg.norm(plain)
    assert 1e-6 < error < 0.3


@pytest.mark.further
def test_an_engine_serves_float8():
    """Its tokens do not depend on chunks: what is stored is rounded once, when it is written."""
    types = dict(kv_dtype=F8, index_dtype=F8, scales=scales())
    rows = tiny.tokens(CONFIG, 2, LENGTH)
    engine = Engine(model(), pages=8, max_batch=1, prefill_chunk=16, steps_per_call=4, **types)
    engine.add(rows[0, :33].tolist(), Params(max_new_tokens=6, sampling=Sampling.greedy()))
    tokens = engine.run()[0].tokens
    rows[0, 33:39] = tokens
    assert tokens == np.asarray(filled(tokens=rows, **types)[0])[0, 32:38].argmax(-1).tolist()  # all in one call


@pytest.mark.parametrize("types", [dict(kv_dtype="int8"), dict(index_dtype="float8_e5m2")])
def test_other_types_are_refused(types):
    """T44: a cache is in e4m3fn or in no float8."""
    with pytest.raises(ValueError, match=r"a cache cannot hold .*: choose one of"):
        Cache.init(CONFIG, 1, 8, **types)


# Virtual pages

P, K, G, H, J = 16, 2, 2, 16, 4


@cache
def paged_case():
    """Rows at several positions, one of padding, over shuffled pages of a stack whose rest is garbage."""
    draw = np.random.default_rng(0)
    positions = np.array([100, 37, 5, 0, 127, -1], np.int32)
    lengths = np.maximum(positions + 1, 0).astype(np.int32)
    batch, blocks = len(positions), 8
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    k, v, q = normal(batch, blocks * P, K, H), normal(batch, blocks * P, K, H), normal(batch, 1, K * G, H)
    index_q, index_k = normal(batch, 1, K, H), normal(batch, blocks * P, H)
    rows = jnp.asarray(positions)[:, None], jnp.asarray(lengths)
    q, k, v, index_q, index_k = map(jnp.asarray, (q, k, v, index_q, index_k))
    chosen = index_topk(index_q, index_k, *rows, block_size=P, top_k=J)
    table = draw.permutation(batch * blocks + 3)[: batch * blocks].reshape(batch, blocks).astype(np.int32)
    pages = []
    for x in (k, v):
        held = np.full((2, batch * blocks + 3, K, P, H), 1e4, np.float32)  # finite: JAX's kernel does not mask values
        held[1, table] = np.asarray(x).reshape(batch, blocks, P, K, H).swapaxes(2, 3)
        pages.append(jnp.asarray(held))
    expected = sparse_attention(q, k, v, chosen, *rows, block_size=P)
    view = Paged(*pages, None, 1, jnp.asarray(table), np.dtype("float32"))
    assert (np.asarray(chosen)[0] >= 0).all() and len(set(map(tuple, np.asarray(chosen)[0, :, 0]))) == K
    return q, virtual_pages(view, chosen[:, :, 0], jnp.asarray(positions), jnp.asarray(lengths)), expected


def paged_attention(q, k, v, table, lengths):
    """Plain paged attention of one query a row [R G H] over one KV head: all tokens of its pages, up to its length."""
    view = Paged(k[None, :, None], v[None, :, None], None, 0, table, q.dtype)
    return blockwise(q[:, None], view, (lengths - 1)[:, None], lengths)[0][:, 0]


def test_plain_paged_attention_runs_virtual_pages():
    """T13: the KV-head axis is folded into the batch; no kernel needs to know of it."""
    q, virtual, expected = paged_case()
    got = jax.jit(paged_attention)(jnp.asarray(q).reshape(-1, G, H), *virtual)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.further
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Triton.*")
def test_jax_s_paged_attention_runs_virtual_pages():
    """The same through `jax.experimental.pallas.ops`, unmodified; its rows of padding are left out."""
    from jax.experimental.pallas.ops.gpu import paged_attention as jax_paged_attention  # warns when it is imported

    q, virtual, expected = paged_case()
    got = jax_paged_attention.paged_attention(
        jnp.asarray(q).reshape(-1, G, H) * H**-0.5, virtual.k[None], virtual.v[None], virtual.table, virtual.lengths,
        k_splits=2, pages_per_compute_block=2, interpret=True,
    )  # fmt: skip
    real = np.asarray(virtual.lengths) > 0
    np.testing.assert_allclose(got[real], expected.reshape(-1, G, H)[real], rtol=1e-5, atol=1e-6)
