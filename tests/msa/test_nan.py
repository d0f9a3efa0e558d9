"""A NaN that a query reads is in what it gets, in small arrays and in those whose maximum XLA takes without NaN.

On a CPU that is from 4,096 numbers on (jaxlib 0.10.2). Sums, elementwise maxima and top-k keep NaN at every size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.msa_strategies import SPARSE, WAYS, attention, block_scores, blockwise, dense_attention, index_topk

from m3jax.cache.storage import FLOAT8, stored
from m3jax.model.layers import swiglu_oai
from m3jax.model.moe import route
from m3jax.msa.schedules.layout import zero_from
from m3jax.numerics import attend, merge_parts, merge_two

P = 8
further = pytest.mark.further
# Of 2 x 2 x 2 x 4 queries: scores below 4,096 and far above.
SIZES = pytest.mark.parametrize("num_keys", [pytest.param(32, marks=further), 512])


def operands(num_keys: int):
    """q [2 4 4 16], k and v [2 S 2 16], positions and lengths: the last queries of two rows."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    positions = np.broadcast_to(np.arange(num_keys - 4, num_keys, dtype=np.int32), (2, 4))
    lengths = np.full(2, num_keys, np.int32)
    return normal(2, 4, 4, 16), normal(2, num_keys, 2, 16), normal(2, num_keys, 2, 16), positions, lengths


def assert_nan_in_row_one(out, lse):
    for name, x in (("output", out), ("LSE", lse)):
        found = np.isnan(np.asarray(x))
        assert found[1].all(), f"{name}: {(~found[1]).sum()} of {found[1].size} numbers hide the NaN key"
        assert not found[0].any(), f"{name}: the other row has {found[0].sum()} NaN"


@pytest.mark.parametrize(
    ("schedule", "num_keys"),
    [
        *((schedule, 512) for schedule in (*SPARSE, "dense", "blockwise")), ("kv_block_major", 32),
        *(pytest.param(name, 32, marks=further) for name in ("definition", "query_major", "dense", "blockwise")),
    ],
)  # fmt: skip
def test_a_nan_key_is_in_the_attention_of_who_sees_it(schedule, num_keys):
    q, k, v, positions, lengths = operands(num_keys)
    k[1, P + 3] = np.nan
    blocks = np.broadcast_to(np.array([0, 1, num_keys // P - 1], np.int32), (2, 2, 4, 3))
    if schedule == "dense":
        assert_nan_in_row_one(*dense_attention(q, k, v, positions, lengths))
    elif schedule == "blockwise":
        assert_nan_in_row_one(*blockwise(q, k, v, positions, lengths, block_size=P))
    else:
        assert_nan_in_row_one(*attention(q, k, v, blocks, positions, lengths, block_size=P, schedule=schedule))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_a_query_does_not_see_of_a_block_is_zero_whatever_it_holds(platform, monkeypatch):
    """T10, at every place that the end of a row can have in a block: 0 x NaN would be NaN."""
    monkeypatch.setattr("m3jax.msa.schedules.layout.platform", lambda: platform)
    values = np.full((P + 1, P, 4), np.nan, np.float32)
    seen = np.arange(P + 1, dtype=np.int32)  # block n has n tokens to be seen
    is_seen = np.arange(P) < seen[:, None]
    values[is_seen] = 1.0
    found = jax.jit(lambda values, seen: zero_from(values, seen))(values, seen)
    np.testing.assert_array_equal(found, np.broadcast_to(is_seen[..., None], values.shape).astype(np.float32))


@SIZES
def test_a_nan_score_or_part_is_in_the_softmax_and_in_the_merge(num_keys):
    q, k, v, *_ = operands(num_keys)
    q, k, v = (x.swapaxes(1, 2)[:, :2] for x in (q, k, v))  # [2 2 R H], [2 2 C H]
    visible = jnp.ones((1, 1, 1, num_keys), bool)
    other = out, lse = jax.jit(attend)(q, k, v, visible)
    k[1, :, 5] = np.nan
    broken = jax.jit(attend)(q, k, v, visible)
    assert_nan_in_row_one(*broken)
    assert_nan_in_row_one(*jax.jit(merge_two)(*other, *broken))
    parts = 1 + 4096 // lse.size  # of which the last one is broken
    outs = jnp.stack([out] * parts + [broken[0]])
    merged = jax.jit(lambda outs, lses: merge_parts(lambda j: outs[j], lses))
    assert_nan_in_row_one(*merged(outs, jnp.stack([lse] * parts + [broken[1]])))


@SIZES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("score", ["max", pytest.param("lse", marks=further)])
def test_a_block_with_a_nan_score_ranks_last(score, way, num_keys):
    """T24: it was ranked by its other tokens in large arrays. Its score is NaN, and what is finite goes before it."""
    rng = np.random.default_rng(1)
    index_q, index_k = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 4, 2, 16), (1, num_keys, 16)))
    positions, lengths = np.arange(num_keys - 4, num_keys, dtype=np.int32)[None], np.array([num_keys], np.int32)
    index_k[0, 2 * P] = 10 * index_q[0, 2, 1]  # else block 2 would be the best of that query
    index_k[0, 2 * P + 1] = np.nan
    scores = np.asarray(block_scores(index_q, index_k, positions, lengths, block_size=P, score=score, way=way))
    is_nan = np.broadcast_to(np.arange(num_keys // P) == 2, scores.shape)
    np.testing.assert_array_equal(np.isnan(scores), is_nan, err_msg="which scores are NaN")
    if score == "max":
        rules = dict(block_size=P, top_k=3)
        assert 2 not in np.asarray(index_topk(index_q, index_k, positions, lengths, way=way, **rules))


@pytest.mark.parametrize("tokens", [8, 512])
def test_a_nan_token_or_router_is_in_the_weights_of_its_experts(tokens):
    rng = np.random.default_rng(2)
    x, gate = (rng.normal(size=shape).astype(np.float32) for shape in ((tokens, 12), (12, 16)))
    bias = np.zeros(16, np.float32)
    x[5, 3] = np.nan
    weights = np.asarray(jax.jit(route, static_argnums=3)(x, gate, bias, 2)[1])
    assert np.isnan(weights).any(1).nonzero()[0].tolist() == [5]
    x[5, 3] = 0
    for broken in (gate[:, 7], bias[7:8]):  # one expert has no score: top-k passed over it
        kept, broken[:] = broken.copy(), np.nan
        weights = np.asarray(jax.jit(route, static_argnums=3)(x, gate, bias, 2)[1])
        assert np.isnan(weights).all(), f"{np.isfinite(weights).all(1).sum()} of {tokens} tokens have finite weights"
        broken[:] = kept


@pytest.mark.parametrize("count", [64, 8192])
def test_clamps_keep_nan(count):
    """SwiGLU's, and those of float8, where a number cut off at the largest one would be one."""
    x = np.zeros(count, np.float32)
    x[count // 2] = np.nan
    one = np.ones(count, np.float32)
    for gate, up in ((x, one), (one, x)):
        out = jax.jit(swiglu_oai, static_argnums=(2, 3))(gate, up, 1.702, 7.0)
        assert np.isnan(out).nonzero()[0].tolist() == [count // 2]
    out = jax.jit(stored, static_argnums=1)(x, FLOAT8, jnp.float32(0.3))
    assert np.isnan(np.asarray(out, np.float32)).nonzero()[0].tolist() == [count // 2]
