"""Index kernels in interpret mode against the definition, over selections that ties and ragged rows make hard."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparisons import assert_same_sets
from support.kernels_inputs import check_keys, index, run_index
from support.msa_strategies import (
    FOURS,
    GROUPED,
    ONE_SLOT,
    RAGGED,
    ROOMY,
    Case,
    Shape,
    assert_partial,
    cases,
    index_topk,
    prefill,
)

from pallas_kernels.index_topk import index_topk as kernel
from pallas_kernels.index_topk.triton import Config
from pallas_kernels.index_topk_decode import MAX_QUERIES, index_topk_decode
from pallas_kernels.index_topk_decode.triton import Config as DecodeConfig

KERNELS = {
    "prefill": dict(op=kernel, backend="triton", config=Config(rows=8, keys=2, splits=1)),
    "split": dict(op=kernel, backend="triton", config=Config(rows=8, keys=2, splits=4)),
    "decode": dict(op=index_topk_decode, backend="triton"),
}
every_kernel = pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS.keys())
few = settings(max_examples=5)
# Rows of whole blocks in pages, which most tests here share, and rows with a last block that is not whole.
SHAPES = dict(contiguous=RAGGED, paged=GROUPED)


def few_queries(shape):
    return replace(shape, T=min(shape.T, 7))


def fitting(case: Case, options: dict) -> Case:
    """A decode kernel takes the last queries of a case."""
    if options["op"] is kernel or case.shape.T <= MAX_QUERIES:
        return case
    shape = few_queries(case.shape)
    return replace(case, shape=shape, positions=case.positions[:, -shape.T :])


def expected(case: Case, **rules) -> np.ndarray:
    return np.asarray(index_topk(*case.index(), case.positions, case.lengths, **case.rules(**rules)))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for layout in ("paged", "contiguous") for name in ("prefill", "decode")),
        *(pytest.param("split", layout, marks=pytest.mark.further) for layout in ("paged", "contiguous")),
    ],
)
@few
@given(data=st.data())
def test_selection_is_that_of_the_definition(data, name, layout):
    """T9, T10, T11, T13: rows of any length in NaN memory, each query with a valid count of its own."""
    options = KERNELS[name]
    case = fitting(data.draw(cases((SHAPES[layout],))), options)
    got = index(case=case, layout=layout, **options)
    assert_same_sets(got, expected(case))
    assert_partial(case, got)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("prefill", FOURS),
        pytest.param("decode", ONE_SLOT, marks=pytest.mark.further),
        pytest.param("decode", ROOMY, marks=pytest.mark.further),
        pytest.param("split", ROOMY, marks=pytest.mark.further),
    ],
)
@few
@given(data=st.data())
def test_selection_of_odd_shapes(data, name, shape):
    """T7: B, T, N, K, H, P and J all 4; one slot; more slots than blocks."""
    options = KERNELS[name]
    case = fitting(data.draw(cases((shape,))), options)
    assert_same_sets(index(case=case, layout="paged", **options), expected(case))


@pytest.mark.parametrize(
    "options",
    [pytest.param(KERNELS[name], marks=() if name == "decode" else pytest.mark.further, id=name) for name in KERNELS],
)
def test_keys_are_those_of_the_order(options):
    """By them selections of several devices are joined."""
    case = fitting(prefill(GROUPED, 0), options)
    check_keys(case=case, selection=expected(case), **options)


MANY_BLOCKS = Shape(B=2, T=3, S=160, N=2, K=2, H=8, P=4, J=3)
IN_GROUPS = DecodeConfig(programs=20, few_blocks=0)  # ten groups of four blocks a row


@pytest.mark.parametrize(
    "rules",
    [pytest.param({}, marks=pytest.mark.further), dict(local_blocks=2, init_blocks=1)],
    ids=["free", "forced"],
)
@few
@given(case=cases((MANY_BLOCKS,)))
def test_groups_of_blocks_first_change_nothing(case, rules):
    """Ties across groups, queries of one row far apart, and a group that a query's own block cuts."""
    got = index(index_topk_decode, case, "paged", backend="triton", config=IN_GROUPS, **rules)
    assert_same_sets(got, expected(case, **rules))


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        pytest.param("prefill", dict(local_blocks=2), marks=pytest.mark.further),
        ("split", dict(local_blocks=2, init_blocks=1)),
        ("decode", dict(local_blocks=2, init_blocks=1)),
        pytest.param("decode", dict(local_blocks=2), marks=pytest.mark.further),
        pytest.param("decode", dict(init_blocks=1), marks=pytest.mark.further),
    ],
)
@few
@given(case=cases((GROUPED,)))
def test_forced_blocks_use_slots(case, name, rules):
    """T3: forced blocks take slots and add none, and are not listed twice (T4)."""
    options = KERNELS[name]
    case = fitting(case, options)
    got = index(case=case, layout="paged", **options, **rules)
    assert_same_sets(got, expected(case, **rules))


@every_kernel
@few
@given(seed=st.integers(0, 2**16), kind=st.sampled_from(["equal", "infinite", "zeros", "nan queries", "nan blocks"]))
def test_total_order(seed, kind, options):
    """T23, T24: ties, infinities, signed zeros and NaN; always min(J, own + 1) distinct ids, ascending, NaN last."""
    case = fitting(prefill(GROUPED, seed), options)
    q, k = (x.copy() for x in case.index())
    rng, block = np.random.default_rng(seed), np.arange(GROUPED.S) // GROUPED.P
    if kind == "equal":
        k[:] = 1.0
    if kind == "infinite":
        q[:] = np.abs(q) + 1.0
        k[:, np.isin(block, rng.choice(GROUPED.M, 4))] = np.inf
        k[:, np.isin(block, rng.choice(GROUPED.M, 2))] = -np.inf
    if kind == "zeros":
        q[:], k[:] = 1.0, np.where(rng.random(k.shape) < 0.5, 0.0, -0.0)
    if kind == "nan queries":
        q[:, ::3] = np.nan
    if kind == "nan blocks":
        k[:, np.isin(block, rng.choice(GROUPED.M, 5))] = np.nan
    got = index(case=case, layout="paged", arrays=(q, k), **options)
    want = index_topk(q, k, case.positions, case.lengths, **case.rules())
    assert_same_sets(got, want)
    valid = got >= 0
    count = np.minimum(GROUPED.J, case.positions // GROUPED.P + 1)[:, None]
    assert (valid.sum(-1) == count).all()
    assert (np.diff(np.where(valid, got, 2**30 + np.arange(GROUPED.J)), axis=-1) > 0).all()


@every_kernel
def test_lengths_are_data(options):
    """T21: one trace serves growing rows, and gives what each would give alone."""
    shape = fitting(prefill(GROUPED), options).shape
    for length in (1, 5, 23, 40):
        positions = np.broadcast_to(np.maximum(length - shape.T, 0) + np.arange(shape.T), (shape.B, shape.T))
        case = Case(shape, positions.astype(np.int32), np.array([length, 40, 0], np.int32), 3)
        assert_same_sets(index(case=case, layout="paged", **options), expected(case))


def test_rows_do_not_touch_each_other():
    """T40: a row gets what it gets beside others, of other lengths."""
    case, other = prefill(GROUPED, 5, lengths=[40, 17, 29]), prefill(GROUPED, 6, lengths=[12, 40, 0])
    whole = index(case=case, layout="paged", **KERNELS["prefill"])
    for b in range(GROUPED.B):
        is_row = np.arange(GROUPED.B) == b
        arrays = [
            np.where(is_row.reshape(-1, *[1] * (x.ndim - 1)), x, y)
            for x, y in zip(case.index(), other.index(), strict=True)
        ]
        beside = replace(case, lengths=np.where(is_row, case.lengths, other.lengths))
        got = index(case=beside, layout="paged", arrays=tuple(arrays), **KERNELS["prefill"])
        assert_same_sets(got[b], whole[b])


@every_kernel
def test_missing_pages_rank_like_minus_infinity(options):
    """T9: a block whose page is -1 is no reason to read page 0, or the last one, in its place."""
    case = fitting(prefill(GROUPED, 11), options)
    shape, (q, k) = case.shape, case.index()
    k = np.broadcast_to(np.arange(shape.S, dtype=np.float32)[None, :, None], k.shape)  # later blocks score higher,
    pool = np.full((2, shape.B * shape.M + 3, shape.P, shape.H), 100.0, np.float32)  # but the pages of no row highest
    table = 1 + np.random.default_rng(11).permutation(shape.B * shape.M).reshape(shape.B, shape.M).astype(np.int32)
    pool[1, table] = k.reshape(shape.B, shape.M, shape.P, shape.H)
    table[:, 5:9] = -1
    positions = np.broadcast_to(shape.S - 1 - np.arange(shape.T, dtype=np.int32) % shape.P, (shape.B, shape.T))
    args = (options["op"], jnp.ones_like(q), pool, table, positions, case.lengths)
    settings_of_call = tuple((name, value) for name, value in options.items() if name != "op")
    got = np.asarray(run_index(*args, block_size=shape.P, options=(*settings_of_call, ("top_k", 3))))
    assert (got == [3, 4, 9]).all()
