"""Attention's roundings in bfloat16, against an emulation in float64 that rounds where docs/numerics.md says."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import comparisons
from support.msa_runs import run, selected
from support.msa_strategies import GROUPED, SPARSE, Case, prefill

from m3jax.msa.views import Paged, PagedIndex, Pooled
from m3jax.numerics import RunningSoftmax, attend

BF16 = ml_dtypes.bfloat16
F8 = ml_dtypes.float8_e4m3fn
TIE = 1e-6  # relative error that float32's exponential stays below: nearer to a tie than that p may go either way


def operands(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries in float32, so that outputs come unrounded, and keys and values in bfloat16, which decides about p."""
    q, k, v = case.qkv()
    return q.astype(BF16).astype(np.float32), k.astype(BF16), v.astype(BF16)


def rounded(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return p rounded to bfloat16, and how much float32's last bits may change that: 0 but for a few near a tie."""
    low, high = ((p * (1 + x)).astype(BF16).astype(np.float64) for x in (-TIE, TIE))
    return p.astype(BF16).astype(np.float64), high - low


def emulated(case: Case, blocks: np.ndarray | None, by_block: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (out [B T N H], lse [B T N], the most that ties may change of out).

    p is relative to the highest score of the row, or of its block, and rounded for the product with v.
    """
    q, k, v = (x.astype(np.float64) for x in operands(case))
    out, slack, lse = np.zeros(q.shape), np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    block_of, group = np.arange(k.shape[1]) // case.shape.P, q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(*q.shape[:3]):
        if not 0 <= case.positions[b, t] < case.lengths[b]:
            continue
        is_seen = np.arange(k.shape[1]) <= case.positions[b, t]
        if blocks is not None:
            is_seen &= np.isin(block_of, blocks[b, n // group, t])
        scores = k[b, :, n // group] @ q[b, t, n] * q.shape[-1] ** -0.5
        parts = [is_seen & (block_of == m) for m in range(case.shape.M)] if by_block else [is_seen]
        outs, slacks, lses = [], [], []
        for part in parts:
            if part.any():
                p = np.exp(scores[part] - scores[part].max())
                values, (of_product, doubt) = v[b, part, n // group], rounded(p)
                outs.append(of_product @ values / p.sum())  # the sum is of the unrounded ones
                slacks.append(doubt @ np.abs(values) / p.sum())
                lses.append(scores[part].max() + np.log(p.sum()))
        weights = np.exp(np.array(lses) - max(lses))
        out[b, t, n] = weights @ np.array(outs) / weights.sum()
        slack[b, t, n] = weights @ np.array(slacks) / weights.sum()
        lse[b, t, n] = max(lses) + np.log(weights.sum())
    assert (slack > 0).mean() < 0.02
    return out, lse, slack


@pytest.mark.parametrize("schedule", ["dense", "blockwise", *SPARSE])
def test_probabilities_are_rounded_once_and_their_sum_is_not(schedule):
    """T26: without that rounding outputs are off by 1e-3, with one of the sum too by as much; the bound is 2e-6."""
    case = prefill(GROUPED, 1, [40, 31, 0])
    blocks = selected(case) if schedule in SPARSE else None
    out, lse = run(case, schedule, blocks, operands(case))
    expected, expected_lse, slack = emulated(case, blocks, by_block=schedule == "kv_block_major")
    assert out.dtype == lse.dtype == np.float32
    comparisons.assert_close(out, expected, "out", "B T N H", atol=2e-6 + slack)
    comparisons.assert_close(lse, expected_lse, "lse", "B T N", atol=2e-6)


def test_the_emulation_can_fail():
    """Its rounding is far above the bound: the outputs of unrounded probabilities differ by 100 times as much."""
    case = prefill(GROUPED, 1, [40, 31, 0])
    q, k, v = operands(case)
    exact, _ = run(case, "dense", qkv=(q, k.astype(np.float32), v.astype(np.float32)))
    assert np.abs(exact - emulated(case, None, by_block=False)[0]).max() > 2e-4


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.further)])
def test_a_running_softmax_rounds_each_fold(dtype):
    """Two folds, the second with higher scores: what is faded is the sum so far, in float32, and not rounded again."""
    draw = np.random.default_rng(5)
    q, k, v = (draw.normal(size=(n, 8)).astype(dtype) for n in (3, 12, 12))
    k[6:] *= 2
    scores = q.astype(np.float64) @ k.astype(np.float64).T * 8**-0.5
    highest, total, summed = np.full((3, 1), -np.inf), 0.0, 0.0
    softmax = RunningSoftmax.empty((3,), 8, jnp.dtype("float32"))
    for part in (slice(0, 6), slice(6, 12)):
        softmax = jax.jit(RunningSoftmax.fold)(softmax, q, k[part], v[part], np.ones((3, 6), bool))
        new = np.maximum(highest, scores[:, part].max(-1, keepdims=True))
        p, fade = np.exp(scores[:, part] - new), np.exp(highest - new)
        summed = summed * fade + p.astype(dtype).astype(np.float64) @ v[part].astype(np.float64)
        total, highest = total * fade + p.sum(-1, keepdims=True), new
    out, lse = softmax.average()
    comparisons.assert_close(out, summed / total, "out", "R H", atol=2e-6)
    comparisons.assert_close(lse, (highest + np.log(total))[:, 0], "lse", "R", atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attend_rounds_to_the_dtype_of_the_values(dtype):
    draw = np.random.default_rng(3)
    q, k, v = (draw.normal(size=(n, 8)).astype(dtype) for n in (3, 12, 12))
    out, _ = jax.jit(attend)(q, k, v, np.tri(3, 12, 9, dtype=bool))
    scores = np.where(np.tri(3, 12, 9), q.astype(np.float64) @ k.astype(np.float64).T * 8**-0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = p.astype(dtype).astype(np.float64) @ v.astype(np.float64) / p.sum(-1, keepdims=True)
    assert out.dtype == jnp.float32
    comparisons.assert_close(out, expected, "out", "R H", atol=2e-6)


# What float8 pages read as. The scales are no powers of two: one in bfloat16, or a cast before it, would be another.

SCALES = (np.array([0.3, 1.7], np.float32), np.array([0.013, 23.1], np.float32))
K, P, H = 2, 4, 8


def pages(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape, scale=20).astype(F8)


def restored(stored: np.ndarray, scale, dtype) -> np.ndarray:
    """Times the scale in float32, rounded once."""
    return (stored.astype(np.float32) * np.float32(scale)).astype(dtype).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("paged", "float32"), ("pooled", "bfloat16"),
        *(pytest.param(*case, marks=pytest.mark.further) for case in (("paged", "bfloat16"), ("pooled", "float32"))),
    ],
)  # fmt: skip
def test_keys_and_values_of_float8_are_scaled_in_float32_and_rounded_once(kind, dtype):
    """Each head by its own scale, keys and values by theirs, in single blocks and in runs."""
    stored = pages(3, 5, K, P, H), pages(3, 5, K, P, H)[::-1]
    table, scales = np.array([[4, 1, 0], [2, 3, 1]], np.int32), tuple(map(jnp.asarray, SCALES))
    if kind == "paged":
        view = Paged(*map(jnp.asarray, stored), scales, jnp.int32(1), jnp.asarray(table), jnp.dtype(dtype))
    else:
        pool = (jnp.asarray(x.reshape(3, 5 * K, P, H)) for x in stored)
        slots = jnp.arange(5 * K, dtype=jnp.int32)  # virtual page = slot
        view = Pooled(*pool, scales, jnp.int32(1), slots, jnp.asarray(table), K, jnp.dtype(dtype))
    rows, heads, ids = np.array([0, 1, 1]), np.array([1, 0, 1]), np.array([2, 0, 1])
    blocks, runs = view.blocks(*map(jnp.asarray, (rows, heads, ids))), view.run(1, 2)
    for name, memory, scale, block, of_run in zip("kv", stored, SCALES, blocks, runs, strict=True):
        assert block.dtype == of_run.dtype == dtype
        expected = restored(memory[1, table[rows, ids], heads], scale[heads][:, None, None], dtype)
        comparisons.assert_equal(block.astype(np.float32), expected, f"{name} of blocks", "X P H")
        expected = memory[1, table[:, 1:]].swapaxes(1, 2).reshape(2, K, 2 * P, H)
        expected = restored(expected, scale[:, None, None], dtype)
        comparisons.assert_equal(of_run.astype(np.float32), expected, f"{name} of a run", "B K S H")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_index_keys_of_float8_are_scaled_in_float32_and_rounded_once(dtype):
    stored, table = pages(3, 5, P, H), np.array([[4, 1, 0], [2, 3, 1]], np.int32)
    view = PagedIndex(jnp.asarray(stored), jnp.float32(0.37), jnp.int32(2), jnp.asarray(table), jnp.dtype(dtype))
    expected = restored(stored[2, table[:, 1:]].reshape(2, 2 * P, H), 0.37, dtype)
    comparisons.assert_equal(view.run(1, 2).astype(np.float32), expected, "index keys of a run", "B S I")
