"""Attention of packed rows by parts and pieces of queries, against one softmax over the whole row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3jax.execution.layers import SAVED
from m3jax.train import packing
from m3jax.train.packing import attend_by_chunks


def test_parts_and_pieces_of_a_row_are_one_attention(monkeypatch):
    """T29, T35: documents, rows of padding and queries that see nothing; outputs, and gradients of q, k and v.

    40 queries are three parts of a row, and pieces of 4 that the backward pass computes again.
    """
    monkeypatch.setattr(packing, "_LEAST_PART", 16)
    monkeypatch.setattr(packing, "_SCORES_AT_ONCE", 2 * 4 * 40 * 4)
    draw = np.random.default_rng(0)
    batch, length, heads, kv_heads, width = 2, 40, 4, 2, 8
    q, k, v, wanted = (
        jnp.asarray(draw.normal(size=(batch, length, n, width)), jnp.float32)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    slots = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
    first = slots // 13 * 13  # documents of 13 tokens
    slots[1, 30:] = -1  # padding
    drops = draw.integers(0, 3, (batch, length)).astype(np.int32)  # by query and KV head, keys that are not selected

    def visible(slots, first, drops, num_keys):
        keys = jnp.arange(num_keys, dtype=jnp.int32)
        of_document = (keys >= first[..., None]) & (keys <= slots[..., None])  # [B T S]
        dropped = (keys + drops[..., None])[:, None] % 3 == jnp.arange(kv_heads)[:, None, None]  # [B K T S]
        return of_document[:, None] & ~dropped

    def by_chunks(q, k, v):
        return attend_by_chunks(q, k, v, visible, *map(jnp.asarray, (slots, first, drops)))

    def at_once(q, k, v):
        mask = jnp.repeat(visible(slots, first, drops, length), heads // kv_heads, axis=1)  # [B N T S]
        keys, values = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        scores = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, keys, precision="highest") * width**-0.5, -1e30)
        weights = jnp.where(mask, jax.nn.softmax(scores), 0)
        return jnp.einsum("bnts,bsnh->btnh", weights, values, precision="highest")

    @jax.jit
    def outputs_and_gradients(*x):
        ways = [jax.vjp(attend, *x) for attend in (by_chunks, at_once)]
        return [(out, pull(wanted)) for out, pull in ways]

    (out, found), (whole, expected) = outputs_and_gradients(q, k, v)
    np.testing.assert_allclose(out, whole, atol=1e-5)
    assert not np.asarray(out)[1, 30:].any()
    for name, one, other in zip("qkv", found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, err_msg=f"gradient of {name}")


@pytest.mark.parametrize(("remat", "count"), [(True, 2), ("products", 1)])
def test_kept_products_have_cudnns_attention_too(monkeypatch, remat, count):
    """Traced as where cuDNN is there: with its gradient's own residuals kept, it does not run again."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91400)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda *_: True)
    x, mask = jnp.zeros((1, 256, 4, 128), jnp.bfloat16), jnp.ones((1, 1, 256, 256), bool)
    attention = lambda x: jax.nn.dot_product_attention(x, x, x, mask=mask, implementation="cudnn")
    layer = jax.checkpoint(lambda x: jnp.sin(attention(jnp.sin(x))), policy=SAVED[remat])
    traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(layer(x), dtype=jnp.float32)))(x)
    assert str(traced).count("dot_product_attention_fwd") == count


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_computes_rows_of_16_bits_by_cudnn(monkeypatch, unchecked, dtype):
    """The same attention; a query that sees nothing gets 0. Float32 is computed as elsewhere."""
    seen, attend = [], jax.nn.dot_product_attention

    def noted(*rows, mask, implementation):
        seen.append(implementation)
        return attend(*rows, mask=mask, implementation="xla")

    monkeypatch.setattr(packing.jax.nn, "dot_product_attention", noted)
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(2, n, heads, 8)).astype(jnp.dtype(dtype)) for n, heads in ((4, 4), (6, 2), (6, 2)))
    drops = draw.integers(0, 2, (2, 4, 1, 6)) == 1
    drops[1, 2] = True

    def visible(drops, count):
        return ~drops.swapaxes(1, 2)[..., :count] & (jnp.arange(count) <= jnp.arange(2, 6)[:, None])[None, None]

    found = {}
    for name in ("cpu", "gpu"):
        monkeypatch.setattr(packing, "platform", lambda name=name: name)
        attend_all = jax.jit(lambda *given: packing.attend_by_chunks(*given[:3], visible, given[3]))
        found[name] = np.asarray(attend_all(q, k, v, drops), np.float32)
    np.testing.assert_allclose(found["gpu"], found["cpu"], atol=3e-2 if dtype == "bfloat16" else 1e-6)
    assert not found["gpu"][1, 2].any() and found["gpu"][1, 1].any()
    assert seen == (["cudnn"] if dtype == "bfloat16" else [])


def test_a_token_s_slot_is_its_place_in_the_row():
    """Of queries at the row's end too; what is no token has none."""
    positions = jnp.array([[0, 1, 2, 0], [0, -1, -1, 3]])
    assert packing.slots_of(positions).tolist() == [[0, 1, 2, 3], [0, -1, -1, 3]]
    assert packing.slots_of(positions, 9).tolist() == [[5, 6, 7, 8], [5, -1, -1, 8]]
    blocks = jnp.array([[[[0, -1], [0, 1], [1, 0], [-1, 0]]]])  # [B K T J]
    # Documents of 8 and 4 tokens: the queries are at positions 6, 7, 0 and 1, in slots 6 to 9, and blocks are of 4.
    found = packing.in_row(blocks, jnp.array([[6, 7, 0, 1]]), 10, 4)
    assert found.tolist() == [[[[0, -1], [0, 1], [3, 2], [-1, 2]]]]
