"""Gradients of every schedule against those of the definition in float64; T names as in docs/msa.md."""

import itertools
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads
from support import comparisons
from support.lowering import array, lower
from support.msa_strategies import (
    GROUPED,
    RAGGED,
    SPARSE,
    WAYS,
    Case,
    assert_partial,
    attention,
    block_scores,
    blockwise,
    cases,
    dense_attention,
    few,
    index_topk,
    prefill,
)

from m3jax import msa
from m3jax.numerics import einsum

further = pytest.mark.further
LINEAR = ["blockwise", "query_major", "kv_block_major"]
AXES = {"q": "B T N H", "k": "B S K H", "v": "B S K H"}
TOLERANCE = dict(rtol=1e-4, atol=2e-5)  # float32 against float64: a key's gradient sums over all queries


@cache
def gradient(schedule: str, block_size: int, small: bool):
    """The jitted gradient with respect to q, k and v of a loss of a schedule's outputs and LSE."""

    def loss(q, k, v, weights, blocks, positions, lengths):
        if schedule == "dense":
            out, lse = dense_attention(q, k, v, positions, lengths)
        elif schedule == "blockwise":
            out, lse = blockwise(q, k, v, positions, lengths, block_size=block_size, small=small)
        else:
            args = (q, k, v, blocks, positions, lengths)
            out, lse = attention(*args, block_size=block_size, schedule=schedule, small=small)
        return jnp.sum(out * weights) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) * weights[..., 0])

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def operands(case: Case, blocks: np.ndarray, dtype=np.float32) -> tuple:
    weights = np.random.default_rng((case.seed, 9)).normal(
        size=(case.shape.B, case.shape.T, case.shape.N, case.shape.H)
    )
    return (*case.qkv(dtype), weights.astype(np.float32).astype(dtype), blocks, case.positions, case.lengths)


def run(case: Case, schedule: str, blocks=None, dtype=np.float32) -> list[np.ndarray]:
    """Gradients of one case; those of the grouped shape are taken through walks in small pieces."""
    blocks = case.any_blocks() if blocks is None else blocks
    fn = gradient(schedule, case.shape.P, small=case.shape == GROUPED and schedule in LINEAR)
    return [np.asarray(x) for x in fn(*operands(case, blocks, dtype))]


def definition(case: Case, schedule: str, blocks=None) -> list[np.ndarray]:
    with jax.enable_x64(True):
        return run(case, schedule, blocks, np.float64)


def assert_close(got, expected, **tolerance):
    for name, a, b in zip("qkv", got, expected, strict=True):
        comparisons.assert_close(a, b, f"d{name}", AXES[name], **(tolerance or TOLERANCE))


def assert_equal(got, expected):
    for name, a, b in zip("qkv", got, expected, strict=True):
        comparisons.assert_equal(a, b, f"d{name}", AXES[name])


@pytest.mark.parametrize("schedule", ["definition", "dense"])
def test_the_definition_has_the_gradient_of_finite_differences(schedule):
    case = prefill(GROUPED, 1, [40, 17, 0])
    with jax.enable_x64(True):
        q, k, v, weights, blocks, *rest = operands(case, case.any_blocks(), np.float64)

        def loss(q, k, v):
            if schedule == "dense":
                return jnp.sum(dense_attention(q, k, v, *rest)[0] * weights)
            return jnp.sum(attention(q, k, v, blocks, *rest, block_size=4, schedule="definition")[0] * weights)

        check_grads(loss, (q, k, v), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [GROUPED, pytest.param(RAGGED, marks=further)], ids=["grouped", "ragged"])
@pytest.mark.parametrize("schedule", LINEAR)
@given(data=st.data())
def test_schedules_have_the_gradient_of_the_definition(schedule, shape, data):
    """T4, T9: any selection, with -1 slots, padding and empty rows among it; finite everywhere."""
    case = data.draw(cases((shape,)))
    assert_close(run(case, schedule), definition(case, "dense" if schedule == "blockwise" else "definition"))


@pytest.mark.further
@pytest.mark.parametrize("schedule", ["definition", "dense"])
@few
@given(case=cases((GROUPED,)))
def test_float32_definitions(schedule, case):
    assert_close(run(case, schedule), definition(case, schedule))


@pytest.mark.parametrize("schedule", SPARSE)
@few
@given(case=cases((GROUPED,)), block=st.integers(0, 9))
def test_blocks_that_nobody_chose_have_no_gradient(schedule, case, block):
    """T9, T35: exactly zero, block 0 among them though unused slots may be read from it; so is padding."""
    blocks = case.any_blocks()
    blocks = np.where(blocks == block, -1, blocks)
    dq, dk, dv = run(case, schedule, blocks)
    at = np.arange(case.shape.S) // case.shape.P == block
    assert not dk[:, at].any() and not dv[:, at].any()
    beyond = np.arange(case.shape.S) >= case.lengths[:, None]
    assert not dk[beyond].any() and not dv[beyond].any() and not dq[~case.valid].any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("schedule", ["blockwise", "dense", *SPARSE])
def test_garbage_in_padding_has_no_gradient(schedule):
    """T8, T10: what lies beyond the lengths and in padding queries stays out of every gradient."""
    case = prefill(GROUPED, 3, [40, 17, 0])
    q, k, v, *rest = operands(case, case.any_blocks())
    invalid = ~case.valid[..., None, None]
    q2, k2, v2 = (np.where(invalid, np.float32(-1e4), x) for x in (q, k, v))
    fn = gradient(schedule, 4, small=schedule in LINEAR)
    assert_equal(fn(q2, k2, v2, *rest), fn(q, k, v, *rest))


@pytest.mark.parametrize("schedule", ["blockwise", "dense", *SPARSE])
def test_two_runs_have_the_same_bits(schedule):
    """T34: nothing is accumulated in an order that may change."""
    case = prefill(GROUPED, 4)
    assert_equal(run(case, schedule), run(case, schedule))


def test_selection_takes_no_gradient():
    """T30, T33: index weights get exactly zero from attention, with remat as without, and the selection is the same."""
    case = prefill(GROUPED, 5)
    index, rest = case.index(exact=False), (case.positions, case.lengths)

    def loss(index_q, index_k, q, k, v):
        # Not the jitted one: it would be traced once for both gradients.
        blocks = msa.index_topk(index_q, index_k, *map(jnp.asarray, rest), **case.rules())
        return jnp.sum(jnp.sin(attention(q, k, v, blocks, *rest, block_size=4, schedule="query_major")[0]))

    plain, remat = (jax.jit(jax.grad(f, argnums=range(5)))(*index, *case.qkv()) for f in (loss, jax.checkpoint(loss)))
    assert not any(np.asarray(x).any() for x in (*plain[:2], *remat[:2]))
    assert all(np.asarray(x).any() for x in plain[2:])
    assert_close(remat[2:], plain[2:], rtol=1e-6, atol=1e-6)
    assert_partial(case, index_topk(*index, *rest, **case.rules()))


# Block scores: what a loss of the index branch would differentiate.


@cache
def scores_gradient(score: str, way: str):
    def loss(index_q, index_k, positions, lengths):
        static = dict(block_size=4, score=score, way=way)
        scores = block_scores(index_q, index_k, positions, lengths, **static)
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0, jnp.sin(scores)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize("score", ["max", pytest.param("lse", marks=further)])
@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "pieces" else further) for way in WAYS])
@few
@given(case=cases((GROUPED,)))
def test_block_scores_have_a_finite_gradient(score, way, case):
    """T8: padding, empty rows and blocks that nothing sees give zero, not NaN."""
    index, rest = case.index(exact=False), (case.positions, case.lengths)
    dq, dk = scores_gradient(score, way)(*index, *rest)
    with jax.enable_x64(True):
        exact = scores_gradient(score, "definition")(*(x.astype(np.float64) for x in index), *rest)
    for got, expected in zip((dq, dk), exact, strict=True):
        assert np.isfinite(got).all()
        comparisons.assert_close(got, expected, "gradient of the block scores", rtol=1e-4, atol=1e-4)
    assert not np.asarray(dq)[~case.valid].any()
    assert not np.asarray(dk)[np.arange(40) >= case.lengths[:, None]].any()


def test_block_scores_gradient_is_that_of_finite_differences():
    case = prefill(GROUPED, 6, [40, 17, 0])
    with jax.enable_x64(True):
        index = [x.astype(np.float64) for x in case.index(exact=False)]

        @partial(jax.jit, static_argnums=0)
        def loss(score, *index):
            scores = block_scores(*index, case.positions, case.lengths, block_size=4, score=score)
            return jnp.sum(jnp.where(jnp.isneginf(scores), 0, jnp.sin(scores)))

        for score in ("max", "lse"):
            check_grads(partial(loss, score), index, order=1, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-6)


@pytest.mark.parametrize(
    ("spec", "left", "right"),
    [
        ("...d,df->...f", (3, 5, 64), (64, 32)),
        pytest.param("xcf,xfd->xcd", (4, 8, 32), (4, 32, 16), marks=further),
        ("...rc,...ch->...rh", (1, 2, 32, 16), (3, 2, 16, 8)),  # an axis of length 1 is another's length
    ],
)
def test_gradients_of_a_product_in_bfloat16_are_products_in_bfloat16(spec, left, right):
    """Each is the exact product of the rounded gradient, rounded once; on a GPU no factor is made float32 for it.

    Tensor cores do not multiply float32 at highest precision: the backward pass would take ten times the forward's.
    """
    rng = np.random.default_rng(0)
    left, right = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in (left, right))
    product = partial(einsum, spec)
    gradient = jnp.asarray(rng.normal(size=product(left, right).shape), jnp.float32)
    pull_back = lambda left, right, gradient: jax.vjp(product, left, right)[1](gradient)
    on_a_gpu = lower(pull_back, *(array(x.dtype, *x.shape) for x in (left, right, gradient)))
    factors = re.findall(r"dot_general .* : \(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\) ->", on_a_gpu)
    assert len(factors) == 2, "the products of the two gradients were not found"
    assert set(itertools.chain(*factors)) == {"bf16"}, factors
    found = jax.jit(pull_back)(left, right, gradient)
    wide = lambda x: np.asarray(x.astype(jnp.bfloat16), np.float32)
    exact = jax.vjp(partial(jnp.einsum, spec, precision="highest"), wide(left), wide(right))[1](wide(gradient))
    for one, wanted in zip(found, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(wide(one), wanted, rtol=2**-8, atol=1e-5)


def test_gradients_of_a_product_in_float32_are_not_rounded():
    """They are of float32, where the spacing of bfloat16 numbers would be seen."""
    left, right, gradient = (np.random.default_rng(i).normal(size=(16, 16)).astype(np.float32) for i in range(3))
    found = jax.vjp(partial(einsum, "xi,io->xo"), left, right)[1](gradient)
    for one, wanted in zip(found, (gradient @ right.T, left.T @ gradient), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)
