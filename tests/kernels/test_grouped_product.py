"""Products of tiles with their experts' matrices, and the sums that are their gradients: interpreted, and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from support import comparisons
from support.lowering import array, lower, refuse

from m3jax.ops import interpret, measured, run_experts
from m3jax.ops.experts import EXPERT_PATHS, ExpertCall, ExpertWeights
from pallas_kernels.grouped_outer import grouped_outer
from pallas_kernels.grouped_outer import triton as outer
from pallas_kernels.grouped_product import grouped_product
from pallas_kernels.grouped_product import triton as product
from pallas_kernels.triton_experts import Piece

PRODUCT, OUTER = product.Config(8, Piece(16, 16, 4, 2), group=2), outer.Config(16, 32, 8, 4, 2, group=2)


@pytest.mark.parametrize("transposed", [False, True], ids=["as they are", "transposed"])
def test_tiles_meet_their_own_group_s_matrix(transposed):
    """Groups of 3, 0, 1 and 2 tiles of 16 rows; NaN in a tile that is not used, and in the group without tiles."""
    draw = np.random.default_rng(0)
    rows, weight = draw.normal(size=(7, 16, 48)).astype(np.float32), draw.normal(size=(4, 48, 32)).astype(np.float32)
    rows[6], weight[1] = np.nan, np.nan
    group = np.array([0, 0, 0, 2, 3, 3, 3], np.int32)
    options = dict(transposed=transposed, backend="triton", config=PRODUCT, interpret=True)
    given = weight.swapaxes(1, 2) if transposed else weight
    found = jax.jit(partial(grouped_product, **options))(rows, given, group, jnp.int32(6))
    expected = np.stack([rows[i].astype(np.float64) @ weight[group[i]] for i in range(6)])
    comparisons.assert_close(found[:6], expected, "products", "YCN", atol=2e-5)


def test_sums_are_of_a_group_s_own_tiles():
    """The same groups: the sum of the one without tiles is 0, and the tile that is not used is in no sum."""
    draw = np.random.default_rng(1)
    left, right = (draw.normal(size=(7, 16, width)).astype(np.float32) for width in (32, 64))
    left[6] = np.nan
    first, count = np.array([0, 3, 3, 4], np.int32), np.array([3, 0, 1, 2], np.int32)
    options = dict(backend="triton", config=OUTER, interpret=True)
    found = jax.jit(partial(grouped_outer, **options))(left, right, first, count)
    of_tiles = np.einsum("yck,ycn->ykn", left.astype(np.float64), right)
    expected = np.stack(
        [of_tiles[start : start + number].sum(axis=0) for start, number in zip(first, count, strict=True)]
    )
    comparisons.assert_close(found, expected, "sums", "EKN", atol=5e-5)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 pairs, and programs for widths of 32."""
    monkeypatch.setattr(measured, "PRODUCT_TILE", 16)
    monkeypatch.setattr(measured, "COPIED_TILE", 16)
    monkeypatch.setattr(product, "default_config", lambda dtype: PRODUCT)
    monkeypatch.setattr(outer, "default_config", lambda dtype: OUTER)


def experts(dtype):
    """Tokens, experts of two layers, two choices of each token (one held elsewhere, the last expert not chosen)."""
    draw = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape) * 0.3, dtype)
    weights = ExpertWeights(normal(2, 5, 32, 64), normal(2, 5, 32, 64), normal(2, 5, 64, 32))
    ids = np.stack([draw.permutation(4)[:2] for _ in range(57)]).astype(np.int32)
    ids[3, 0] = -1
    return normal(57, 32), weights, jnp.asarray(ids), jnp.asarray(draw.normal(size=(57, 2, 32)), jnp.float32)


def loss_by(path, ids, factors, dtype):
    activate = lambda gate, up: (jax.nn.silu(gate) * up).astype(dtype)

    def loss(x, weights):
        out = EXPERT_PATHS[path](ExpertCall(x, weights, ids, jnp.int32(1), activate))
        return jnp.sum(factors * jnp.where(ids[..., None] < 0, 0, out))

    return loss


@pytest.mark.parametrize(
    "dtype", [pytest.param(jnp.float32, marks=pytest.mark.further), jnp.bfloat16], ids=["float32", "bfloat16"]
)
def test_experts_by_products_and_their_gradients_are_those_of_copied_experts(small_tiles, dtype):
    x, weights, ids, factors = experts(dtype)
    with interpret():
        found = jax.jit(jax.value_and_grad(loss_by("products", ids, factors, dtype), (0, 1)))(x, weights)
    expected = jax.jit(jax.value_and_grad(loss_by("copied", ids, factors, dtype), (0, 1)))(x, weights)
    exact = dtype == jnp.float32
    # The loss is one number, whose parts cancel: 1.4e-6 apart on a CPU with AMX.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5 if exact else 5e-3)
    for mine, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        # Copied experts round the gradient of each tile to bfloat16, and add the rounded ones up.
        assert np.linalg.norm(mine - theirs) <= (1e-6 if exact else 5e-3) * np.linalg.norm(theirs)
    assert not np.asarray(found[1][1].gate, np.float32)[1, 4].any()


def test_the_backward_pass_makes_no_product_of_experts_again(small_tiles):
    """Two gradients of each of three products in bfloat16, and the sums over the copies of three matrices."""
    x, weights, ids, factors = experts(jnp.bfloat16)
    loss = loss_by("copied", ids, factors, jnp.bfloat16)
    backward = jax.eval_shape(lambda *given: jax.vjp(loss, *given)[1], x, weights)
    traced = jax.make_jaxpr(lambda backward, slope: backward(slope))(backward, jnp.float32(1)).jaxpr
    needed, _ = dce_jaxpr(traced, [True] * len(traced.outvars))
    assert str(needed).count("dot_general[") == 3 * 2 + 3


M3 = array(jnp.bfloat16, 264, 128, 6144), array(jnp.bfloat16, 264, 128, 3072)
GROUPS = array(jnp.int32, 264), array(jnp.int32)
EACH = array(jnp.int32, 8), array(jnp.int32, 8)


def test_both_kernels_lower_at_m3_s_widths():
    weight = array(jnp.bfloat16, 8, 6144, 3072)
    assert "grouped_product" in lower(partial(grouped_product, backend="triton"), M3[0], weight, *GROUPS)
    back = partial(grouped_product, transposed=True, backend="triton")
    assert "grouped_product" in lower(back, M3[1], weight, *GROUPS)
    assert "grouped_outer" in lower(partial(grouped_outer, backend="triton"), *M3, *EACH)


def test_wrong_operands_are_refused(unchecked):
    multiply, add = partial(grouped_product, backend="triton"), partial(grouped_outer, backend="triton")
    refuse("rows of 6144 channels in bfloat16 and matrices that take 3072", multiply, M3[0],
           array(jnp.bfloat16, 8, 3072, 6144), *GROUPS)  # fmt: skip
    refuse("need multiples of 64 and 256", multiply, M3[0], array(jnp.bfloat16, 8, 6144, 1000), *GROUPS)
    refuse("tiles of 64 rows: need a multiple of 128", multiply, array(jnp.bfloat16, 9, 64, 6144),
           array(jnp.bfloat16, 8, 6144, 3072), *GROUPS)  # fmt: skip
    refuse("need the same tiles and dtype", add, M3[0], array(jnp.float32, 264, 128, 3072), *EACH)
    refuse("need multiples of 64, 128 and 256", add, M3[0], array(jnp.bfloat16, 264, 128, 1000), *EACH)


def test_training_runs_the_kernels_on_a_gpu_in_16_bits_and_copies_experts_elsewhere(small_tiles):
    def kernels(dtype, width):
        x, gate = jnp.zeros((4, width), dtype), jnp.zeros((1, 2, width, 256), dtype)
        weights, ids = ExpertWeights(gate, gate, gate.swapaxes(2, 3)), jnp.zeros((4, 1), jnp.int32)
        run = partial(run_experts, path="trained", layer=jnp.int32(0), activate=lambda gate, up: gate * up)
        return str(jax.make_jaxpr(run)(x, weights, ids)).count("pallas_call")

    assert kernels(jnp.bfloat16, 512) == 0
    with interpret():
        assert kernels(jnp.bfloat16, 512) == 3  # gate, up and down
        assert kernels(jnp.bfloat16, 384) == kernels(jnp.float32, 512) == 0
