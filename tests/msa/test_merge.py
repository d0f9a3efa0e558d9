"""Sums, products and the merge of partial attention, on one device and over several; T names as in docs/msa.md."""

import itertools
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.msa_runs import assert_close, assert_equal
from support.shares import AXIS, devices_map, normal

from m3jax import numerics
from m3jax.numerics import attend, dot_scores, merge_over_devices, merge_parts, sum_over_devices


@given(seed=st.integers(0, 2**16), cuts=st.lists(st.integers(0, 12), min_size=5, max_size=5), hidden=st.integers(0, 12))
def test_merge_of_any_split(seed, cuts, hidden):
    """T38: parts of attention over a split of the keys merge to the whole, more parts than keys and empty ones too."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(n, 4)).astype(np.float32) for n in (3, 12, 12))
    seen = np.broadcast_to(np.arange(12) >= hidden, (3, 12))
    edges = [0, *sorted(cuts), 12]
    inside = [seen & (np.arange(12) >= a) & (np.arange(12) < b) for a, b in pairwise(edges)]
    parts = [_attend(q, k, v, x) for x in inside]
    got = _merge(jnp.stack([x[0] for x in parts]), jnp.stack([x[1] for x in parts]))
    assert_close(got, _attend(q, k, v, seen))


_attend = jax.jit(attend)


@jax.jit
def _merge(outs, lses):
    return merge_parts(lambda j: outs[j], lses)


def test_merge_of_parts_that_saw_nothing():
    """T8, T38: weight 0 whatever stands in the part; nothing at all is (0, -inf); no NaN in the gradient either."""
    outs = jnp.array([[[1.0, 2.0], [np.nan, np.inf]], [[np.nan, 5.0], [7.0, np.nan]]])
    lses = jnp.array([[0.5, -np.inf], [-np.inf, -np.inf]])
    outs, lses = jnp.swapaxes(outs, 0, 1), lses.T
    out, lse = _merge(outs, lses)
    assert_equal((out, lse), (np.array([[1, 2], [0, 0]]), np.array([0.5, -np.inf])))
    grads = jax.grad(lambda *x: _merge(*x)[0].sum() + _merge(*x)[1][0], argnums=(0, 1))(outs, lses)
    assert_equal(
        grads, (np.array([[[1, 1], [0, 0]], [[0, 0], [0, 0]]]), np.array([[1, 0], [0, 0]])), ("d out", "d lse")
    )


def test_large_scores_do_not_overflow():
    q, k, v = (jnp.full((1, 4), x) for x in (1e4, 1e4, 2.0))
    out, lse = _attend(q, k, v, jnp.ones((1, 1), bool))
    assert_equal((out, lse), (np.full((1, 4), 2.0), np.full(1, 2e8)))
    assert_equal(_merge(out[None], lse[None]), (np.full((1, 4), 2.0), np.full(1, 2e8)))


@pytest.mark.parametrize(("gathered_bytes", "divided"), [(1 << 22, None), (0, None), (1 << 22, 0)])
def test_parts_of_devices_are_merged_in_one_exchange_and_in_three(gathered_bytes, divided, monkeypatch):
    """T38: as `merge_parts` does; a part that saw no key may hold NaN, and outputs keep their dtype.

    Devices that divide the queries get the outputs of their own, two each.
    """
    monkeypatch.setattr(numerics, "GATHERED_BYTES", gathered_bytes)
    outs, lses = normal(3, 6, 2), normal(3, 6, seed=1)
    lses[0, 1], outs[0, 1], lses[:, 2] = -np.inf, np.nan, -np.inf
    merge = partial(merge_over_devices, mesh_axes=("context",), divided=divided)
    out, lse = devices_map(merge, outs.astype(jnp.bfloat16), lses)
    weights = np.exp(lses.astype(np.float64))
    total = weights.sum(0)
    rounded = np.nan_to_num(outs.astype(jnp.bfloat16).astype(np.float64))
    expected = (weights[..., None] * rounded).sum(0) / np.where(total, total, 1)[:, None]
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    for device in range(3):
        own = slice(None) if divided is None else slice(2 * device, 2 * device + 2)
        np.testing.assert_allclose(out[device].astype(np.float32), expected[own], rtol=0.01, atol=0.004)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[device], np.log(total[own]), rtol=1e-5, atol=1e-6)


def test_parts_of_devices_are_added_in_the_order_of_the_devices():
    """Whatever an element's place is: of these parts every other order gives another sum."""
    parts = np.tile(np.array([3e8, 1.0, -3e8, 0.25], np.float32)[:, None, None], (1, 3, 7))
    parts *= 2.0 ** np.arange(21, dtype=np.float32).reshape(3, 7)
    found = devices_map(partial(sum_over_devices, mesh_axes=(AXIS,)), parts)
    in_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    others = {tuple(np.ravel(sum(parts[np.array(order)]))) for order in itertools.permutations(range(4))}
    assert len(others) > 2
    np.testing.assert_array_equal(found, np.tile(in_order, (4, 1, 1)))


@pytest.mark.usefixtures("eight_devices")
def test_a_gradient_passes_a_sum_over_devices():
    """As it passes an all-reduce: a mesh is trained in the invariant mode too."""
    parts, factors = normal(4, 3), normal(3, seed=1)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    add = lambda part: sum_over_devices(part[0] ** 2, ("a", "b"))
    on_mesh = jax.shard_map(add, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(), check_vma=False)
    found = jax.jit(jax.grad(lambda parts: jnp.sum(factors * on_mesh(parts))))(parts)
    np.testing.assert_allclose(found, 2 * parts * factors, rtol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_products_of_few_and_many_queries_are_einsum_s_on_every_platform(platform, monkeypatch):
    """The ways differ in what is padded and which side comes first, never in what is computed."""
    monkeypatch.setattr(numerics, "platform", lambda: platform)
    for leading, rows in (((), 1), ((2,), 7), ((2, 3), 8), ((3,), 16), ((2,), 17)):
        queries, keys = normal(*leading, rows, 6), normal(*leading, 5, 6, seed=1)
        found = dot_scores(jnp.asarray(queries), jnp.asarray(keys))
        np.testing.assert_allclose(found, np.einsum("...rh,...ch->...rc", queries, keys), rtol=1e-5, atol=1e-6)
        assert found.shape == (*leading, rows, 5)
