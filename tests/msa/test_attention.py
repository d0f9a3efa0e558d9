"""Dense and sparse attention and their schedules, against a NumPy oracle and each other; T names as in docs/msa.md."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import comparisons
from support import msa_reference as reference
from support.msa_runs import assert_close, assert_equal, run, selected
from support.msa_strategies import (
    CUT,
    GROUPED,
    ROOMY,
    SPARSE,
    Case,
    Shape,
    assert_partial,
    attention,
    block_scores,
    cases,
    dense_attention,
    few,
    prefill,
)

from m3jax import msa

further = pytest.mark.further
SCHEDULE = pytest.mark.parametrize("schedule", SPARSE)
PIECES = ["query_major in pieces", "kv_block_major in pieces"]
GATHERING = pytest.mark.parametrize("schedule", ["query_major", "kv_block_major", *PIECES])
EVERY = pytest.mark.parametrize("schedule", ["dense", "blockwise", "blockwise in pieces", *SPARSE, *PIECES])


# Against the oracle.


@pytest.mark.parametrize("schedule", ["dense", pytest.param("blockwise", marks=further)])
@given(case=cases())
def test_dense_is_the_oracle(schedule, case):
    assert_close(run(case, schedule), reference.attention(*case.qkv(), case.positions, case.lengths))


@pytest.mark.parametrize(
    "schedule", ["query_major", *(pytest.param(name, marks=further) for name in ("definition", "kv_block_major"))]
)
@given(case=cases())
def test_any_selection_is_the_oracle(schedule, case):
    """T4, T7, T8, T9: a selection that no rule made, -1 anywhere in it, under each schedule."""
    expected = reference.attention(*case.qkv(), case.positions, case.lengths, case.any_blocks(), case.shape.P)
    assert_close(run(case, schedule), expected)


@pytest.mark.parametrize(
    "schedule",
    ["blockwise in pieces", pytest.param("query_major in pieces", marks=further), "kv_block_major in pieces"],
)
@given(case=cases(CUT))
def test_walks_in_pieces_are_the_oracle(schedule, case):
    """Through several chunks of queries, several pieces of keys and several steps of tiles, none of which divides."""
    blocks = None if schedule.startswith("blockwise") else case.any_blocks()
    expected = reference.attention(*case.qkv(), case.positions, case.lengths, blocks, case.shape.P)
    assert_close(run(case, schedule), expected)


@pytest.mark.parametrize(
    ("schedule", "rules"),
    [
        *((name, {}) for name in SPARSE),
        *(
            pytest.param("definition", rules, marks=further)
            for rules in (dict(local_blocks=2), dict(init_blocks=1), dict(score="lse"))
        ),
    ],
    ids=str,
)
@few
@given(case=cases((GROUPED,)))
def test_selected_blocks_are_the_oracle(schedule, rules, case):
    """T17, T18: under M3's rules and others, selection then attention, with something dropped."""
    blocks = selected(case, **rules)
    expected = reference.attention(*case.qkv(), case.positions, case.lengths, blocks, case.shape.P)
    assert_close(run(case, schedule, blocks), expected)
    assert_partial(case, blocks)


@SCHEDULE
@few
@given(case=cases((ROOMY,)))
def test_all_blocks_selected_is_dense(schedule, case):
    """T4: with a slot for every block each token is attended once, own and first block too."""
    dense = run(case, "dense")
    for rules in ({}, dict(local_blocks=3, init_blocks=3)):
        assert_close(run(case, schedule, selected(case, **rules)), dense)


@pytest.mark.parametrize(
    "schedule",
    ["dense", "blockwise", "definition", *(pytest.param(name, marks=further) for name in SPARSE if "major" in name)],
)
@few
@given(case=cases((GROUPED,)))
def test_float64_is_the_oracle(schedule, case):
    """The definition in float64, which the float32 schedules are measured by; and every formula to float64's eye."""
    blocks = None if schedule.startswith(("dense", "blockwise")) else case.any_blocks()
    qkv, args = case.qkv(np.float64), (case.positions, case.lengths)
    with jax.enable_x64(True):
        got = run(case, schedule, blocks, qkv)
    assert got[0].dtype == got[1].dtype == np.float64
    assert_close(got, reference.attention(*qkv, *args, blocks, case.shape.P), rtol=1e-12, atol=1e-12)


@pytest.mark.further
@pytest.mark.parametrize("schedule", ["dense", "blockwise", *SPARSE])
@few
@given(seed=st.integers(0, 99))
def test_bfloat16_is_within_the_published_bound(schedule, seed):
    """Outputs within 3e-2 and LSE within 1e-3 of float64 on the rounded inputs, as MiniMax-AI/MSA tests its kernels."""
    case = prefill(GROUPED, seed, [40, 31, 0])
    qkv = [jnp.asarray(x, jnp.bfloat16) for x in case.qkv()]
    blocks = selected(case) if schedule in SPARSE else None
    out, lse = run(case, schedule, blocks, qkv)
    assert out.dtype == jnp.bfloat16 and lse.dtype == np.float32
    exact = [np.asarray(x, np.float64) for x in qkv]
    expected = reference.attention(*exact, case.positions, case.lengths, blocks, case.shape.P)
    comparisons.assert_close(out, expected[0], "out", "B T N H", rtol=3e-2, atol=3e-2)
    comparisons.assert_close(lse, expected[1], "lse", "B T N", rtol=1e-3, atol=1e-3)


def test_msa_is_its_three_steps():
    """Scores, the best blocks, attention to these: also of padding, and of rows that end inside a block."""
    case = replace(prefill(GROUPED), lengths=np.array([40, 27, 0], np.int32))
    rules, rows = msa.SelectionRules(GROUPED.J), (case.positions, case.lengths)
    out, blocks = jax.jit(partial(msa.msa, rules=rules, block_size=GROUPED.P))(*case.qkv(), *case.index(), *rows)
    scores = reference.block_scores(*case.index(), *rows, GROUPED.P)
    expected = reference.select_blocks(scores, *rows, block_size=GROUPED.P, top_k=GROUPED.J)
    np.testing.assert_array_equal(blocks, expected)
    assert_close([out], reference.attention(*case.qkv(), *rows, expected, GROUPED.P)[:1], ["out"])


@pytest.mark.parametrize("position", [11, 12, 15, 16, 31, 32])
def test_a_piece_is_read_from_its_first_key_on(position):
    """By a query at the last key of a piece, and at the first one of the next: pieces of 16 keys, of 12 in scores."""
    case = Case(Shape(B=1, T=1, S=40, N=2, K=1, H=4, P=4, J=1), np.int32([[position]]), np.int32([position + 1]), 0)
    assert_close(run(case, "blockwise in pieces"), reference.attention(*case.qkv(), case.positions, case.lengths))
    rows = *case.index(), case.positions, case.lengths
    scores = block_scores(*rows, block_size=4, way="pieces")
    comparisons.assert_equal(scores, reference.block_scores(*rows, 4), "scores", "B K T M")


# What must not matter.


@SCHEDULE
@few
@given(case=cases(CUT), data=st.data())
def test_order_of_slots(schedule, case, data):
    """T4: ids are a set; -1 may stand anywhere among them."""
    blocks = case.any_blocks()
    order = data.draw(st.permutations(range(case.shape.J)))
    assert_close(run(case, schedule, blocks[..., order]), run(case, schedule, blocks))


@pytest.mark.parametrize("schedule", ["dense", "blockwise", *SPARSE])
@few
@given(case=cases(CUT), poison=st.sampled_from([np.nan, np.inf, 1e38]))
def test_slots_beyond_a_length_are_never_read(schedule, case, poison):
    """T10: the tail of the last page is arbitrary memory, and changes not one bit."""
    q, k, v = case.qkv()
    beyond = (np.arange(case.shape.S) >= case.lengths[:, None])[..., None, None]
    k, v = (np.where(beyond, np.float32(poison), x) for x in (k, v))
    assert_equal(run(case, schedule, qkv=(q, k, v)), run(case, schedule))


@GATHERING
@few
@given(case=cases(CUT), block=st.sampled_from([0, -1]), poison=st.sampled_from([np.nan, np.inf]))
def test_unselected_blocks_are_never_read(schedule, case, block, poison):
    """T9: -1 leads neither to block 0 nor to the last one, though both hold garbage."""
    q, k, v = case.qkv()
    blocks, block = case.any_blocks(), block % case.shape.M
    blocks = np.where(blocks == block, -1, blocks)
    at = np.arange(case.shape.S) // case.shape.P == block
    bad = [np.where(at[:, None, None], np.float32(poison), x) for x in (k, v)]
    got = run(case, schedule, blocks, (q, *bad))
    assert_equal(got, run(case, schedule, blocks, (q, k, v)))
    assert np.isfinite(got[0]).all()


@GATHERING
@few
@given(case=cases(CUT), head=st.integers(0, 3))
def test_a_group_may_leave_a_block_that_another_takes(schedule, case, head):
    """T1, T9: what one head left stays unread though another head reads the same page of its own."""
    head %= case.shape.K
    q, k, v = case.qkv()
    blocks = case.any_blocks()
    blocks[:, head] = np.where(blocks[:, head] == 0, -1, blocks[:, head])
    bad = [x.copy() for x in (k, v)]
    for x in bad:
        x[:, : case.shape.P, head] = np.nan
    assert_equal(run(case, schedule, blocks, (q, *bad)), run(case, schedule, blocks, (q, k, v)))


@EVERY
@few
@given(case=cases(CUT), data=st.data())
def test_no_query_sees_a_later_token(schedule, case, data):
    """T2: other keys and values after position i leave all rows up to i as they were, bit by bit."""
    i = data.draw(st.integers(0, case.shape.S - 1))
    q, k, v = case.qkv()
    later = (np.arange(case.shape.S) > i)[:, None, None]
    k2, v2 = (np.where(later, 50 - 100 * x, x) for x in (k, v))
    rows = case.positions <= i
    before, after = (run(case, schedule, qkv=x) for x in ((q, k, v), (q, k2, v2)))
    assert_equal([x[rows] for x in before], [x[rows] for x in after])


@SCHEDULE
@few
@given(case=cases(CUT), head=st.integers(0, 3))
def test_a_group_attends_by_its_own_blocks(schedule, case, head):
    """T1, T7: another selection, key or value in one group changes that group's query heads alone."""
    s = case.shape
    head %= s.K
    (q, k, v), blocks = case.qkv(), case.any_blocks()
    others = np.arange(s.N) * s.K // s.N != head
    before = run(case, schedule, blocks)
    blocks[:, head] = replace(case, seed=case.seed + 1).any_blocks()[:, head]
    k[:, :, head] += 1
    v[:, :, head] *= -2
    after = run(case, schedule, blocks, (q, k, v))
    assert_equal([x[:, :, others] for x in after], [x[:, :, others] for x in before])


@EVERY
@few
@given(case=cases(CUT), row=st.integers(0, 3))
def test_a_row_is_attended_alone(schedule, case, row):
    """T5, T13, T40: companions with other positions and lengths, NaN in all they hold, change not one bit of a row."""
    row %= case.shape.B
    others = np.arange(case.shape.B) != row
    qkv, blocks = case.qkv(), case.any_blocks()
    expected = [x[row] for x in run(case, schedule, blocks, qkv)]
    qkv = [np.where(others[:, None, None, None], np.float32(np.nan), x) for x in qkv]
    blocks = np.where(others[:, None, None, None], blocks[..., ::-1, :], blocks)
    positions = np.where(others[:, None], case.positions[:, ::-1] // 2, case.positions)
    other = replace(case, positions=positions, lengths=np.where(others, case.shape.S - case.lengths, case.lengths))
    assert_equal([x[row] for x in run(other, schedule, blocks, qkv)], expected)


@EVERY
@few
@given(case=cases(CUT))
def test_padding_is_zero(schedule, case):
    """T8: exact zeros and an LSE of -inf for padding, for empty rows, for queries whose slots are all -1; never NaN."""
    q, k, v = case.qkv()
    q = np.where(case.valid[..., None, None], q, np.float32(np.nan))  # padding may be garbage itself
    blocks = case.any_blocks()
    blocks[:, :, ::3] = -1
    out, lse = run(case, schedule, blocks, (q, k, v))
    empty = ~case.valid
    if schedule not in ("dense", "blockwise", "blockwise in pieces"):
        empty[:, ::3] = True
    assert (out[empty] == 0).all() and (lse[empty] == -np.inf).all()
    assert np.isfinite(out).all() and not np.isnan(lse).any()


@pytest.mark.further
@SCHEDULE
@few
@given(case=cases((GROUPED,)))
def test_right_padding_changes_nothing(schedule, case):
    """Padding on the right changes no output and has output 0, with NaN behind the rows' keys (T6, T10)."""
    s = case.shape
    pad = lambda x, size, value: np.pad(x, [(0, 0), (0, size)] + [(0, 0)] * (x.ndim - 2), constant_values=value)
    q, k, v = case.qkv()
    qkv = (pad(q, 3, np.nan), pad(k, 2 * s.P + 1, np.nan), pad(v, 2 * s.P + 1, np.nan))
    blocks = np.pad(case.any_blocks(), [(0, 0), (0, 0), (0, 3), (0, 0)])
    wide = replace(case, positions=pad(case.positions, 3, s.S))
    out, lse = run(wide, schedule, blocks, qkv)
    assert_close((out[:, : s.T], lse[:, : s.T]), run(case, schedule))
    assert (out[:, s.T :] == 0).all()


@pytest.mark.further
@SCHEDULE
def test_layouts_do_not_matter(schedule):
    """T22: operands that are views of something wider, transposed, or donated."""
    case = prefill(GROUPED, 5)
    q, k, v = case.qkv()
    blocks = selected(case)
    pair = np.stack([k, v], -1)  # keys and values interleaved in one buffer, as an engine may keep them

    @partial(jax.jit, donate_argnums=1)
    def views(q, pair, blocks, *args):
        k, v = (pair[..., i].transpose(1, 0, 2, 3).swapaxes(0, 1) for i in range(2))
        static = dict(block_size=4, schedule=schedule)
        out = attention.__wrapped__(q.transpose(0, 2, 1, 3), k, v, blocks.swapaxes(1, 2), *args, **static)
        return out, jnp.zeros_like(pair)

    args = (q.transpose(0, 2, 1, 3), jnp.asarray(pair), blocks.swapaxes(1, 2), case.positions, case.lengths)
    got, _ = views(*args)
    assert_close(got, run(case, schedule, blocks))
    assert_partial(case, blocks)


# Any way of cutting a document into calls gives the same rows.


@pytest.mark.parametrize("schedule", ["dense", "blockwise", *SPARSE])
@few
@given(seed=st.integers(0, 99), pick=st.lists(st.integers(0, 39), min_size=40, max_size=40))
def test_any_queries_with_global_positions(schedule, seed, pick):
    """T15, T28: some queries, in any order, get the rows that they get among all."""
    case = prefill(GROUPED, seed, [40, 33, 7])
    blocks, (q, k, v) = selected(case), case.qkv()
    full = run(case, schedule, blocks)
    some = replace(case, positions=case.positions[:, pick])
    got = run(some, schedule, blocks[:, :, pick], (q[:, pick], k, v))
    assert_close(got, [x[:, pick] for x in full])
    assert_partial(case, blocks)


@SCHEDULE
@few
@given(seed=st.integers(0, 99), size=st.integers(1, 16), starts=st.tuples(*[st.integers(0, 40)] * 3))
def test_draft_rows_over_a_block_border(schedule, seed, size, starts):
    """T18, T19, T20: 1 to 16 queries of a decode step, each with its own blocks, over slots not written yet."""
    case = prefill(GROUPED, seed)
    blocks, (q, k, v) = selected(case), case.qkv()
    full = run(case, "definition", blocks)
    lengths = np.minimum(np.array(starts) + size, 40).astype(np.int32)
    positions = np.array(starts, np.int32)[:, None] + np.arange(40, dtype=np.int32)
    written = (np.arange(40) < lengths[:, None])[..., None, None]
    k, v = (np.where(written, x, np.float32(np.nan)) for x in (k, v))
    rows, at = np.arange(3)[:, None], np.minimum(positions, 39)
    step = replace(case, positions=positions, lengths=lengths)
    own = blocks.swapaxes(1, 2)[rows, at].swapaxes(1, 2)
    got = run(step, schedule, own, (q[rows, at], k, v))
    assert_close([x[step.valid] for x in got], [x[rows, at][step.valid] for x in full])
    assert (got[0][~step.valid] == 0).all()
    assert_partial(case, blocks)


@pytest.mark.parametrize(
    "schedule",
    ["blockwise", "query_major", *(pytest.param(name, marks=further) for name in ("definition", "kv_block_major"))],
)
def test_lengths_are_data(schedule):
    """T11, T21: one program for a document that grows token by token, right at every length."""
    case = prefill(GROUPED)
    blocks, (q, k, v) = selected(case), case.qkv()
    is_dense = schedule == "blockwise"
    full = reference.attention(q, k, v, case.positions, case.lengths, None if is_dense else blocks, 4)

    @jax.jit
    def step(q, k, v, blocks, positions, lengths):
        if is_dense:
            return msa.DENSE_SCHEDULES["blockwise"](q, msa.contiguous(k, v, 4), positions, lengths)
        return attention.__wrapped__(q, k, v, blocks, positions, lengths, block_size=4, schedule=schedule)

    for t in range(40):
        at = slice(t, t + 1)
        got = step(q[:, at], k, v, blocks[:, :, at], case.positions[:, at], np.full(3, t + 1, np.int32))
        assert_close(got, [x[:, at] for x in full])
    assert step._cache_size() == 1
    assert_partial(case, blocks)


@pytest.mark.parametrize(
    "schedule",
    ["query_major", *(pytest.param(name, marks=further) for name in ("definition", "kv_block_major"))],
)
@pytest.mark.parametrize("lengths", [(39, 35), (57, 25)])
def test_packed_documents_are_rows(schedule, lengths):
    """T29: documents are packed as rows with positions, lengths and ids of their own; each is as it is alone."""
    shape = replace(GROUPED, B=2, T=64, S=64, P=8)
    case = prefill(shape, 1, lengths)
    blocks, qkv = selected(case), case.qkv()
    out, lse = run(case, schedule, blocks)
    for b, size in enumerate(lengths):
        expected = reference.attention(
            *(x[b : b + 1, :size] for x in qkv), case.positions[:1, :size], [size], blocks[b : b + 1], 8
        )
        assert_close((out[b : b + 1, :size], lse[b : b + 1, :size]), expected)
    assert_partial(case, blocks)


@pytest.mark.further
@pytest.mark.parametrize("schedule", ["dense", "kv_block_major"])
def test_vmap_is_a_loop(schedule):
    stack = [prefill(GROUPED, seed, [40, 17, 0]) for seed in range(2)]
    fn = dense_attention if schedule == "dense" else partial(attention, block_size=4, schedule=schedule)
    blocks = [(selected(c),) if schedule in SPARSE else () for c in stack]
    args = [(*c.qkv(), *b, c.positions, c.lengths) for c, b in zip(stack, blocks, strict=True)]
    got = jax.vmap(fn)(*(np.stack(x) for x in zip(*args, strict=True)))
    assert_close(got, [np.stack(x) for x in zip(*(fn(*a) for a in args), strict=True)])


# The parts.
