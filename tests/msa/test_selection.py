"""Block scores and selection, against a NumPy oracle; each T names a bug that another engine shipped (docs/msa.md)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import msa_reference as reference
from support.comparisons import assert_close, assert_equal, assert_same_sets
from support.msa_strategies import (
    CUT,
    FOURS,
    GROUPED,
    PARTIAL,
    WAYS,
    Case,
    Shape,
    assert_partial,
    block_scores,
    cases,
    few,
    index_topk,
    prefill,
    select_blocks,
)

import m3jax
from m3jax import msa

RULES = {
    "M3": {},
    "two local": dict(local_blocks=2),
    "one init": dict(init_blocks=1),
    "all forced": dict(local_blocks=2, init_blocks=1),
}
pytestmark = pytest.mark.usefixtures("under_checks")
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
further = pytest.mark.further


@pytest.fixture
def under_checks() -> Iterator[None]:
    """A test that looks into all arrays."""
    with m3jax.checks():
        yield


def select(case: Case, index=None, way="walk", **changes) -> np.ndarray:
    args = (*(index or case.index()), case.positions, case.lengths)
    return np.asarray(index_topk(*args, way=way, **case.rules(**changes)))


# Against the oracle.


@EVERY_WAY
@pytest.mark.parametrize("score", ["max", "lse"])
@few
@given(case=cases(CUT))
def test_scores_are_those_of_the_oracle(score, way, case):
    args = (*case.index(), case.positions, case.lengths)
    got = block_scores(*args, block_size=case.shape.P, score=score, way=way)
    expected = reference.block_scores(*args, case.shape.P, score)
    tolerance = 0 if score == "max" else 1e-6
    assert_close(got, expected, f"{score} scores by {way}", "B K T M", rtol=tolerance, atol=tolerance)


@EVERY_WAY
@pytest.mark.parametrize(  # the last has both kinds of forced blocks
    "rules",
    [pytest.param(RULES[name], marks=further if name in ("two local", "one init") else (), id=name) for name in RULES],
)
@few
@given(case=cases((GROUPED,)))
def test_selection_is_that_of_the_oracle(rules, way, case):
    got = select(case, way=way, **rules)
    scores = reference.block_scores(*case.index(), case.positions, case.lengths, case.shape.P)
    expected = reference.select_blocks(scores, case.positions, case.lengths, **case.rules(**rules))
    assert_same_sets(got, expected)
    assert_partial(case, got)


@given(case=cases(PARTIAL))
def test_selection_is_that_of_the_oracle_in_every_shape(case):
    """T7: in one of the shapes B, T, N, K, H, P and J are all 4, and heads pick differently."""
    got = select(case)
    scores = reference.block_scores(*case.index(), case.positions, case.lengths, case.shape.P)
    expected = reference.select_blocks(scores, case.positions, case.lengths, **case.rules())
    assert_same_sets(got, expected)
    assert_partial(case, got)


@pytest.mark.parametrize("way", ["walk", *(pytest.param(way, marks=further) for way in ("definition", "pieces"))])
@few
@given(case=cases(CUT))
def test_lse_selection_beats_what_it_drops(way, case):
    """T26: floating-point scores are compared by their gaps, not by the ids that they lead to."""
    index = case.index(exact=False)
    got = select(case, index, way=way, score="lse")
    scores = reference.block_scores(*index, case.positions, case.lengths, case.shape.P, "lse")
    ids = np.arange(case.shape.M)
    kept = (got[..., None] == ids).any(-2)
    own = (case.positions // case.shape.P)[:, None, :, None]
    seen = case.valid[:, None, :, None] & (ids <= own)
    worst = np.where(kept & (ids != own), scores, np.inf).min(-1)
    best = np.where(seen & ~kept, scores, -np.inf).max(-1)
    assert (worst >= best - 1e-5).all()
    assert_partial(case, got)


# Rules: any scores at all.

ODD = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, 0.5, 2.0])
FLAT = Shape(B=1, T=2, S=40, N=2, K=2, H=4, P=4, J=4)


def odd_scores(draw_from=ODD):
    return st.lists(draw_from, min_size=40, max_size=40).map(lambda x: np.array(x, np.float32).reshape(1, 2, 2, 10))


def check_rules(scores, positions, lengths, **rules):
    got = np.asarray(select_blocks(scores, positions, lengths, **rules))
    assert_same_sets(got, reference.select_blocks(scores, positions, lengths, **rules))
    count = np.minimum(rules["top_k"], positions // rules["block_size"] + 1)[:, None]
    assert ((got >= 0).sum(-1) == count).all()
    for ids in got.reshape(-1, got.shape[-1]):
        ids = ids[ids >= 0]
        assert (np.diff(ids) > 0).all()
    assert (got == (positions // rules["block_size"])[:, None, :, None]).any(-1).all()
    return got


@pytest.mark.parametrize(
    "rules",
    [{}, dict(local_blocks=3), dict(init_blocks=2), dict(local_blocks=2, init_blocks=2), dict(local_blocks=4)],
    ids=lambda rules: "-".join(f"{k}{v}" for k, v in rules.items()) or "M3",
)
@few
@given(scores=odd_scores(), positions=st.tuples(st.integers(0, 39), st.just(39)))
def test_forced_blocks_use_slots(rules, scores, positions):
    """T3, T4, T23, T24: exactly min(J, own block + 1) distinct ids, the own one in, whatever the scores are.

    Infinities, ties, both zeros and NaN (which ranks last) neither push out a forced block nor double one; where the
    forced runs overlap, they count once.
    """
    positions = np.array([positions], np.int32)
    got = check_rules(scores, positions, np.array([40], np.int32), block_size=4, top_k=4, **rules)
    forced = set(range(10 - rules.get("local_blocks", 1), 10)) | set(range(rules.get("init_blocks", 0)))
    assert all(forced <= set(ids) for ids in got[0, :, 1].tolist())
    assert_partial(Case(FLAT, positions, np.array([40]), 0), got)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan])
def test_all_scores_equal(value):
    """T23: ties go to the lower id."""
    scores = np.full((1, 2, 2, 10), value, np.float32)
    got = check_rules(scores, np.array([[39, 20]], np.int32), np.array([40], np.int32), block_size=4, top_k=4)
    assert got[0, 0].tolist() == [[0, 1, 2, 9], [0, 1, 2, 5]]


def test_both_zeros_tie():
    """T23: -0 and +0 are one score, so the lower id is first."""
    scores = np.array([-0.0, 0.0, -0.0, 0.0, -1.0], np.float32).reshape(1, 1, 1, 5)
    got = select_blocks(scores, np.array([[19]], np.int32), np.array([20], np.int32), block_size=4, top_k=3)
    assert got.tolist() == [[[[0, 1, 4]]]]


def test_nan_ranks_below_minus_infinity():
    """T24: and the own block stays in, though its score is NaN."""
    scores = np.array([np.nan, -np.inf, np.nan, 3.0, np.nan], np.float32).reshape(1, 1, 1, 5)
    got = select_blocks(scores, np.array([[19]], np.int32), np.array([20], np.int32), block_size=4, top_k=3)
    assert got.tolist() == [[[[1, 3, 4]]]]


@few
@given(
    scores=odd_scores(),
    positions=st.tuples(st.integers(0, 39), st.just(27)),
    poison=st.sampled_from([np.nan, np.inf, 3e38]),
)
def test_scores_beyond_the_own_block_are_never_read(poison, scores, positions):
    """T12: columns of a score buffer that this query never wrote."""
    positions, lengths = np.array([positions], np.int32), np.array([40], np.int32)
    unseen = np.arange(10) > (positions // 4)[:, None, :, None]
    rules = dict(block_size=4, top_k=4)
    got = select_blocks(np.where(unseen, poison, scores).astype(np.float32), positions, lengths, **rules)
    assert_same_sets(got, reference.select_blocks(scores, positions, lengths, **rules))
    assert_partial(Case(FLAT, positions, lengths, 0), got)


# What a query's selection may depend on.


@few
@given(case=cases(PARTIAL), head=st.integers(0, 3))
def test_a_group_selects_by_its_own_index_head(case, head):
    """T1: another index query in one group changes that group alone, and groups differ."""
    s, (index_q, index_k) = case.shape, case.index()
    head %= s.K
    before = select(case, (index_q, index_k))
    other = index_q.copy()
    other[:, :, head] = -other[:, :, head]
    after = select(case, (other, index_k))
    assert_same_sets(np.delete(before, head, 1), np.delete(after, head, 1))
    assert_partial(case, before)


def test_groups_pick_blocks_of_their_own():
    """T1: 2 groups with a budget of 3 keep more than 3 blocks between them."""
    case = prefill(GROUPED)
    got = select(case)
    assert (got[:, 0] != got[:, 1]).any(-1).mean() > 0.5
    swapped = select(case, (case.index()[0][:, :, ::-1], case.index()[1]))
    assert_same_sets(swapped, got[:, ::-1])
    assert_partial(case, got)


@EVERY_WAY
@pytest.mark.parametrize("score", ["max", pytest.param("lse", marks=further)])
@few
@given(case=cases(CUT), data=st.data())
def test_no_query_sees_a_later_key(score, way, case, data):
    """T2: causality holds per token, before pooling, so later tokens of the own block do not leak either."""
    i = data.draw(st.integers(0, case.shape.S - 1))
    index_q, index_k = case.index(exact=False)
    other = index_k.copy()
    other[:, i + 1 :] = np.random.default_rng(case.seed).normal(size=other[:, i + 1 :].shape) * 100
    rows = case.valid & (case.positions <= i)
    static = dict(score=score, way=way)
    before, after = (select(case, (index_q, k), **static) for k in (index_k, other))
    assert_same_sets(before.swapaxes(1, 2)[rows], after.swapaxes(1, 2)[rows])
    args, static = (case.positions, case.lengths), static | dict(block_size=case.shape.P)
    before, after = (np.asarray(block_scores(index_q, k, *args, **static)) for k in (index_k, other))
    assert_equal(
        after.swapaxes(1, 2)[rows], before.swapaxes(1, 2)[rows], "block scores before the changed key", "T K M"
    )


@pytest.mark.parametrize("way", [pytest.param("definition", marks=further), "walk", "pieces"])
@few
@given(case=cases(CUT), poison=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_keys_beyond_a_length_are_never_read(poison, way, case):
    """T10: the tail of the last page is arbitrary memory."""
    index_q, index_k = case.index()
    other = np.where((np.arange(case.shape.S) < case.lengths[:, None])[..., None], index_k, np.float32(poison))
    got = select(case, (index_q, other), way=way)
    assert_same_sets(got, select(case, (index_q, index_k), way=way))
    assert_partial(case, got)
    static = dict(block_size=case.shape.P, way=way)
    scores = [block_scores(index_q, k, case.positions, case.lengths, **static) for k in (other, index_k)]
    assert_equal(*scores, "block scores", "B K T M")


@few
@given(case=cases((GROUPED,)), row=st.integers(0, 2))
def test_a_row_is_selected_alone(case, row):
    """T5, T13, T40: its positions, its lengths and its counts are its own, whatever its companions are."""
    index_q, index_k = case.index()
    others = np.arange(case.shape.B) != row
    expected = select(case)[row]
    alone = (x[row : row + 1] for x in (index_q, index_k, case.positions, case.lengths))
    assert_same_sets(index_topk(*alone, **case.rules())[0], expected)
    index_k = np.where(others[:, None, None], np.float32(np.nan), index_k)
    positions = np.where(others[:, None], case.positions[:, ::-1] // 2, case.positions)
    lengths = np.where(others, case.shape.S - case.lengths, case.lengths)
    got = index_topk(index_q, index_k, positions, lengths, **case.rules())
    assert_same_sets(got[row], expected)
    assert_partial(case, select(case))


@few
@given(case=cases(PARTIAL))
def test_each_query_has_its_own_count(case):
    """T3, T8, T13: min(J, own block + 1) ids per token of a ragged batch; padding has none."""
    got = select(case)
    count = np.where(case.valid, np.minimum(case.positions // case.shape.P + 1, case.shape.J), 0)
    assert ((got >= 0).sum(-1) == count[:, None]).all()
    assert_partial(case, got)


@few
@given(case=cases(CUT))
def test_right_padding_changes_nothing(case):
    """T6: blocks start at the document's token 0; more queries and more slots after the end are not seen."""
    s = case.shape
    index_q, index_k = case.index()
    pad = lambda x, size, value: np.pad(x, [(0, 0), (0, size)] + [(0, 0)] * (x.ndim - 2), constant_values=value)
    args = (pad(index_q, 3, np.nan), pad(index_k, 2 * s.P + 1, np.nan), pad(case.positions, 3, s.S), case.lengths)
    got = np.asarray(index_topk(*args, **case.rules()))
    assert_same_sets(got[:, :, : s.T], select(case))
    assert (got[:, :, s.T :] == -1).all()
    assert_partial(case, got[:, :, : s.T])


# Any way of cutting a document into calls selects the same blocks.


@few
@given(seed=st.integers(0, 99), pick=st.lists(st.integers(0, 39), min_size=40, max_size=40))
def test_any_queries_with_global_positions(seed, pick):
    """T28: some queries, in any order, select what they select among all."""
    case = prefill(GROUPED, seed, [40, 33, 7])
    full, (index_q, index_k) = select(case), case.index()
    pick = np.array(pick)
    got = index_topk(index_q[:, pick], index_k, case.positions[:, pick], case.lengths, **case.rules())
    assert_same_sets(got, full[:, :, pick])
    assert_partial(case, full)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=further), 5])
@few
@given(seed=st.integers(0, 99), ends=st.tuples(*[st.integers(1, 40)] * 2))
def test_chunked_prefill_is_one_shot(chunk, seed, ends):
    """T14, T15, T18: chunks that end within a block, down to single tokens, over keys that arrive with them."""
    case = prefill(GROUPED, seed, [40, *ends])
    full, (index_q, index_k) = select(case), case.index()
    for start in range(0, 40, chunk):
        part = np.minimum(np.arange(start, start + chunk), 39)
        positions = np.where(np.arange(start, start + chunk) < 40, part, 40)[None].repeat(3, 0).astype(np.int32)
        lengths = np.minimum(case.lengths, start + chunk)
        arrived = np.where((np.arange(40) < lengths[:, None])[..., None], index_k, np.float32(np.nan))
        got = np.asarray(index_topk(index_q[:, part], arrived, positions, lengths, **case.rules()))
        size = min(chunk, 40 - start)
        assert_same_sets(got[:, :, :size], full[:, :, start : start + size])
    assert_partial(case, full)


@pytest.mark.parametrize("prefix", [pytest.param(4, marks=further), 15])
@few
@given(seed=st.integers(0, 99))
def test_prefix_and_suffix_are_the_whole(prefix, seed):
    """T15: a suffix over a cached prefix, whole blocks or not, and a prefix in a smaller cache."""
    case = prefill(GROUPED, seed)
    full, (index_q, index_k) = select(case), case.index()
    args = (index_q[:, prefix:], index_k, case.positions[:, prefix:], case.lengths)
    assert_same_sets(index_topk(*args, **case.rules()), full[:, :, prefix:])
    args = (index_q[:, :prefix], index_k[:, :prefix], case.positions[:, :prefix], np.full(3, prefix, np.int32))
    assert_same_sets(index_topk(*args, **case.rules()), full[:, :, :prefix])
    assert_partial(case, full)


@few
@given(seed=st.integers(0, 99), size=st.integers(1, 16), starts=st.tuples(*[st.integers(0, 40)] * 3))
def test_draft_rows_over_a_block_border(seed, size, starts):
    """T19, T20: 1 to 16 queries of a step, each with its own length, own block and own set."""
    case = prefill(GROUPED, seed)
    full, (index_q, index_k) = select(case), case.index()
    lengths = np.minimum(np.array(starts) + size, 40).astype(np.int32)
    positions = np.array(starts, np.int32)[:, None] + np.arange(40, dtype=np.int32)
    rows = np.arange(3)[:, None]
    got = index_topk(index_q[rows, np.minimum(positions, 39)], index_k, positions, lengths, **case.rules())
    for b, start in enumerate(starts):
        taken = lengths[b] - start
        assert_same_sets(got[b][:, :taken], full[b][:, start : lengths[b]])
        assert (np.asarray(got[b])[:, taken:] == -1).all()
    assert_partial(case, full)


def test_a_step_straddles_a_border_with_two_own_blocks():
    """T20: the rule goes by the query's position, not by the step's first or last."""
    case = prefill(GROUPED)
    at = np.arange(14, 18)
    index_q, index_k = case.index()
    args = (index_q[:, at], index_k, case.positions[:, at], np.full(3, 18, np.int32))
    got = np.asarray(index_topk(*args, **case.rules()))
    assert (got.max(-1) == at // 4).all()
    assert_partial(replace(case, positions=case.positions[:, at]), got)


@pytest.mark.parametrize("lengths", [pytest.param((39, 35), marks=further), (57, 25)])
def test_packed_documents_are_rows(lengths):
    """T29: documents are packed as rows, each with blocks from its own token 0 and ids of its own.

    There is no packing along the sequence: two documents put end to end in one row share a block and see each other,
    and the second one selects differently, as the last lines show.
    """
    shape = Shape(B=2, T=64, S=64, N=2, K=1, H=8, P=8, J=2)
    case = prefill(shape, 1, lengths)
    index_q, index_k = case.index()
    packed = select(case)
    for b, size in enumerate(lengths):
        args = (index_q[b : b + 1, :size], index_k[b : b + 1, :size], case.positions[:1, :size])
        alone = index_topk(*args, np.array([size], np.int32), **case.rules())
        assert_same_sets(packed[b : b + 1, :, :size], alone)
    assert_partial(case, packed)

    joined = [np.concatenate([x[0, : lengths[0]], x[1, : lengths[1]]])[None] for x in (index_q, index_k)]
    size = sum(lengths)
    both = index_topk(*joined, np.arange(size, dtype=np.int32)[None], np.array([size], np.int32), **case.rules())
    assert (np.asarray(both)[0, :, lengths[0] :] != packed[1, :, : lengths[1]]).any()


# Compilation, layouts.


def test_lengths_are_data():
    """T11, T21: one program for a document that grows, with the right answer at every length."""
    case = prefill(GROUPED)
    index_q, index_k = case.index()
    scores = reference.block_scores(index_q, index_k, case.positions, case.lengths, 4)
    full = reference.select_blocks(scores, case.positions, case.lengths, **case.rules())
    step = jax.jit(partial(msa.index_topk, **case.rules()))
    for at in range(40):
        lengths = np.full(3, at + 1, np.int32)
        got = step(index_q[:, at : at + 1], index_k, case.positions[:, at : at + 1], lengths)
        assert_same_sets(got, full[:, :, at : at + 1])
    assert step._cache_size() == 1
    assert_partial(case, full)


@few
@given(case=cases((FOURS, GROUPED)))
def test_layouts_do_not_matter(case):
    """T22: operands that are views of something wider, transposed, or donated."""
    index_q, index_k = case.index()
    wide = np.full((*index_k.shape[:2], 2 * index_k.shape[2]), np.nan, np.float32)
    wide[..., ::2] = index_k
    head_major = np.ascontiguousarray(index_q.transpose(0, 2, 1, 3))
    args = (jnp.asarray(head_major), jnp.asarray(wide), case.positions, case.lengths)
    got, _ = _from_views(*args, **case.rules())
    assert_same_sets(got, select(case))
    assert_partial(case, got)


@partial(jax.jit, static_argnames=("block_size", "top_k"), donate_argnums=1)
def _from_views(head_major, wide, *args, **rules):
    blocks = msa.index_topk(head_major.transpose(0, 2, 1, 3), wide[..., ::2], *args, **rules)
    return blocks, jnp.zeros_like(wide)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=further) for dtype in ("float16", "float32"))]
)
def test_half_precision_is_scored_in_float32(dtype):
    """T26: products of half-precision index keys are summed in float32: not even a near-tie is rounded away."""
    case = prefill(GROUPED, 3)
    index_q, index_k = (jnp.asarray(x, dtype) for x in case.index(exact=False))
    got = block_scores(index_q, index_k, case.positions, case.lengths, block_size=4)
    exact = (np.asarray(x, np.float32) for x in (index_q, index_k))
    expected = reference.block_scores(*exact, case.positions, case.lengths, 4)
    assert got.dtype == jnp.float32
    assert_close(got, expected, "block scores", "B K T M", rtol=2e-6, atol=2e-6)


def test_vmap_is_a_loop():
    stack = [prefill(GROUPED, seed) for seed in range(3)]
    args = [np.stack(x) for x in zip(*((*c.index(), c.positions, c.lengths) for c in stack), strict=True)]
    got = jax.jit(jax.vmap(partial(msa.index_topk, **stack[0].rules())))(*args)
    assert_same_sets(got, np.stack([select(c) for c in stack]))


@EVERY_WAY
@pytest.mark.parametrize("score", ["max", pytest.param("lse", marks=further)])
def test_a_large_key_right_after_the_query_is_not_in_its_blocks_score(score, way):
    """T2: the key at P - 1 is far above all others; the query at P - 2 does not see it, the one at P - 1 does."""
    shape = Shape(B=1, T=32, S=32, N=1, K=1, H=4, P=8, J=2)
    index_q, index_k = np.ones((1, 32, 1, 4), np.float32), np.full((1, 32, 4), 0.25, np.float32)
    index_k[0, 7::8] = 100 * np.arange(1, 5)[:, None]
    case = prefill(shape)
    scores = np.asarray(
        block_scores(index_q, index_k, case.positions, case.lengths, block_size=8, score=score, way=way)
    )
    expected = reference.block_scores(index_q, index_k, case.positions, case.lengths, 8, score)
    assert_close(scores, expected, f"{score} scores by {way}", "B K T M", rtol=1e-6)
    edge = scores[0, 0, 6::8]  # of the queries at P - 2 of each block
    low = 1.0 if score == "max" else 0.5 + np.log(7)
    assert_close(np.diagonal(edge), np.full(4, low), "score of the own block at P - 2", "block", rtol=1e-6)
    decode = np.array([[6, 14, 22, 30]], np.int32)  # a call of few queries, at these places alone
    few = block_scores(index_q[:, decode[0]], index_k, decode, case.lengths, block_size=8, score=score, way=way)
    assert_close(few[0, 0], edge, f"{score} scores of few queries by {way}", "T M", rtol=1e-6)
