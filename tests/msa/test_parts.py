"""The parts that schedules are made of: merging, inverting, views, the door to them; T names as in docs/msa.md."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import comparisons
from support.msa_runs import assert_close, assert_equal, run, selected
from support.msa_strategies import (
    FOURS,
    GROUPED,
    SPARSE,
    assert_partial,
    cases,
    prefill,
)

from m3jax import msa
from m3jax.msa import inversion
from m3jax.msa.views import BlockView, Contiguous, ContiguousIndex, IndexView, Paged, PagedIndex, contiguous
from m3jax.numerics import attend, merge_parts, merge_weights
from m3jax.ops import attend_all, attend_selected

further = pytest.mark.further
SCHEDULE = pytest.mark.parametrize("schedule", SPARSE)


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


def test_weights_of_parts_are_exponentials_over_the_largest():
    """Of a union of parts that saw nothing they are 0, and what is divided by is 1."""
    lses = jnp.array([[0.5, -np.inf, 700.0, -np.inf], [1.5, -2.0, 700.0, -np.inf], [-np.inf, -1.0, 699.0, -np.inf]])
    highest, total = (lambda x: x.max(axis=0)), (lambda x: x.sum(axis=0))
    weights, sums, merged = merge_weights(lses, highest, total)
    exact = np.asarray(lses, np.float64)
    expected = np.exp(exact - np.where(np.isneginf(exact.max(axis=0)), 0, exact.max(axis=0)))
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    np.testing.assert_allclose(sums, [*expected.sum(axis=0)[:3], 1.0], rtol=1e-6)
    np.testing.assert_allclose(
        merged, [*np.log(np.exp(exact[:, :2]).sum(axis=0)), 700 + np.log(2 + np.exp(-1)), -np.inf]
    )


def test_large_scores_do_not_overflow():
    q, k, v = (jnp.full((1, 4), x) for x in (1e4, 1e4, 2.0))
    out, lse = _attend(q, k, v, jnp.ones((1, 1), bool))
    assert_equal((out, lse), (np.full((1, 4), 2.0), np.full(1, 2e8)))
    assert_equal(_merge(out[None], lse[None]), (np.full((1, 4), 2.0), np.full(1, 2e8)))


@pytest.mark.parametrize(("way", "tile"), [("by_sorting", 1), ("by_sorting", 8), ("by_comparison", 8)])
@given(case=cases((GROUPED, FOURS)))
def test_inversion_is_exact(way, tile, case):
    """T9: each chosen (query, block) pair stands in one lane, its own, of a tile of that block; -1 stands nowhere."""
    s, blocks = case.shape, case.any_blocks()
    tiles = _INVERT[way](blocks, num_blocks=s.M, tile=tile)
    row, head, block, query, pair, valid, place_of = (np.asarray(x) for x in tiles)
    lanes = {(row[x], head[x], query[x, c], block[x]): x * tile + c for x, c in zip(*np.nonzero(valid), strict=True)}
    pairs = [(b, k, t, blocks[b, k, t, j]) for b, k, t, j in np.argwhere(blocks >= 0)]
    assert len(lanes) == valid.sum() == len(pairs) == len(set(pairs))
    assert [lanes[x] for x in pairs] == place_of[blocks >= 0].tolist()
    assert (blocks.reshape(-1)[pair] == block[:, None])[valid].all()
    assert (pair.reshape(-1)[place_of[blocks >= 0]] == np.flatnonzero(blocks >= 0)).all()
    used = valid.any(-1)
    order = (row * s.K + head) * s.M + block
    assert (np.diff(order[used]) >= 0).all() and not used[used.sum() :].any()
    bins = [(b * s.K + k) * s.M + m for b, k, _, m in pairs]
    by_bin = place_of[blocks >= 0][np.argsort(bins, kind="stable")]
    assert (np.diff(by_bin) > 0).all(), "the queries of a bin do not ascend"


_INVERT = {
    way.__name__: jax.jit(way, static_argnames=("num_blocks", "tile"))
    for way in (inversion.invert, inversion.by_sorting, inversion.by_comparison)
}


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def paged(k, v, table, layer=1, layers=3):
    """Pages [L X K P H] whose other layers, and pages in no table, are NaN."""
    rows, heads, _, width = k.shape
    at = np.asarray(table)

    def pages(x):
        out = np.full((layers, at.max() + 2, heads, 4, width), np.nan, np.float32)
        out[layer, at] = np.asarray(x).reshape(rows, heads, -1, 4, width).swapaxes(1, 2)
        return jnp.asarray(out)

    return Paged(pages(k), pages(v), None, jnp.int32(layer), jnp.asarray(table, jnp.int32), jnp.float32)


TABLE = [[5, 0, 7, 2], [1, 6, 3, 4]]


@pytest.mark.parametrize("kind", [pytest.param("contiguous", marks=further), "paged"])
def test_views_read_blocks_and_runs(kind):
    k, v = normal(2, 2, 16, 4), normal(2, 2, 16, 4) + 1
    view = Contiguous(k, v, 4) if kind == "contiguous" else paged(k, v, TABLE)
    assert isinstance(view, BlockView)
    assert (view.num_blocks, view.num_heads, view.block_size) == (4, 2, 4)
    rows, heads, ids = jnp.array([0, 1]), jnp.array([1, 0]), jnp.array([3, 2])
    assert_equal(view.blocks(rows, heads, ids), [jnp.stack([x[0, 1, 12:], x[1, 0, 8:12]]) for x in (k, v)], "kv")
    assert_equal(view.run(jnp.int32(1), 2), [x[:, :, 4:12] for x in (k, v)], "kv")
    assert np.all(view.present(1, 2))


@pytest.mark.parametrize("kind", [pytest.param("contiguous", marks=further), "paged"])
def test_index_views_read_runs(kind):
    k = normal(2, 16, 4)
    pages = jnp.full((3, 9, 4, 4), jnp.nan).at[2, jnp.array(TABLE)].set(k.reshape(2, 4, 4, 4))
    view = PagedIndex(pages, None, jnp.int32(2), jnp.array(TABLE), jnp.float32)
    view = ContiguousIndex(k, 4) if kind == "contiguous" else view
    assert isinstance(view, IndexView)
    assert (view.num_blocks, view.block_size) == (4, 4)
    np.testing.assert_array_equal(view.run(jnp.int32(1), 3), k[:, 4:])


def test_pages_outside_the_pool_are_not_held():
    """As on a mesh, where a table also names the pages of other devices."""
    view = paged(normal(2, 2, 16, 4), normal(2, 2, 16, 4), TABLE).replace(
        table=jnp.array([[-1, 0, 99, 2], [8, 9, -7, 1]])
    )
    np.testing.assert_array_equal(view.present(0, 4), [[False, True, False, True], [True, False, False, True]])


# The door.


@pytest.mark.parametrize(
    ("queries", "schedule"),
    [(8, "auto"), pytest.param(9, "auto", marks=further), (9, "mask"), (9, "dense mask"), (9, None)],
)
def test_ops_read_views(queries, schedule):
    """Shuffled pages of a stack whose other layers are garbage; "auto" for few queries and many; dense too."""
    case = prefill(GROUPED, 2)
    blocks, (q, k, v) = selected(case), case.qkv()
    at = slice(30 - queries, 30)
    view = contiguous(*map(jnp.asarray, (k, v)), 4)
    table = np.random.default_rng(0).permutation(3 * view.num_blocks + 5)[: 3 * view.num_blocks].reshape(3, -1)
    view = paged(view.k, view.v, table)
    is_dense = schedule in ("dense mask", None)
    rows = case.positions[:, at], np.full(3, 30, np.int32)
    if is_dense:
        got = jax.jit(partial(attend_all, schedule="mask" if schedule else "auto"))(q[:, at], view, *rows)
    else:
        got = jax.jit(partial(attend_selected, schedule=schedule))(q[:, at], view, blocks[:, :, at], *rows)
    assert_close(got, [x[:, at] for x in run(case, "dense" if is_dense else "definition", blocks)])
    assert_partial(case, blocks)


def test_unknown_schedules():
    """An unknown schedule is refused, and the error names those that there are (T31)."""
    case = prefill(GROUPED)
    q, k, v = map(jnp.asarray, case.qkv())
    args = [jnp.asarray(x) for x in (case.any_blocks(), case.positions, case.lengths)]
    view = msa.contiguous(k, v, 4)
    with pytest.raises(ValueError, match="schedule = 'flash': allowed are 'auto', 'mask', 'query_major', 'kv_block_"):
        attend_selected(q, view, *args, schedule="flash")
    with pytest.raises(ValueError, match="schedule = 'kv_block_major': allowed are 'auto', 'mask', 'blockwise'"):
        attend_all(q, view, *args[1:], schedule="kv_block_major")


@pytest.mark.usefixtures("unchecked")
@SCHEDULE
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q=(3, 40, 3, 8)), "q has 3 heads of 8 and k 2 of 8"),
        (dict(q=(3, 40, 4, 4)), "q has 4 heads of 4 and k 2 of 8|k has shape .* with H = 4, as q has"),
        (
            dict(blocks=(3, 1, 40, 3)),
            r"blocks has shape .3, 1, 40, 3..*: must be .*(\[3 2 40 J\]|with K = 2, as k has)",
        ),
        (
            dict(blocks=(3, 40, 2, 3)),
            r"blocks has shape .3, 40, 2, 3..*: must be .*with (K = 2, as k|T = 40, as q) has",
        ),
        (dict(block_size=0), "block_size = 0: must be at least 1"),
    ],
)
def test_operands_that_do_not_fit(schedule, changes, message):
    """T7, T31: not broadcast in silence."""
    shapes = dict(q=(3, 40, 4, 8), k=(3, 40, 2, 8), v=(3, 40, 2, 8), blocks=(3, 2, 40, 3))
    shapes |= {name: x for name, x in changes.items() if name in shapes}
    arrays = {name: jnp.zeros(x, jnp.int32 if name == "blocks" else jnp.float32) for name, x in shapes.items()}
    case = prefill(GROUPED)
    q, k, v, blocks = arrays.values()
    rows, block_size = (jnp.asarray(case.positions), jnp.asarray(case.lengths)), changes.get("block_size", 4)
    with pytest.raises(ValueError, match=message):
        if schedule == "definition":
            msa.sparse_attention(q, k, v, blocks, *rows, block_size=block_size)
        else:
            attend_selected(q, msa.contiguous(k, v, block_size), blocks, *rows, schedule=schedule)


@pytest.mark.usefixtures("unchecked")
def test_dense_operands_that_do_not_fit():
    """Dense attention refuses operands whose heads or widths do not fit together (T31)."""
    case = prefill(GROUPED)
    q, k, v = map(jnp.asarray, case.qkv())
    args = (jnp.asarray(case.positions), jnp.asarray(case.lengths))
    with pytest.raises(ValueError, match="q has 3 heads of 8 and k 2 of 8"):
        msa.dense_attention(q[:, :, :3], k, v, *args)
    with pytest.raises(ValueError, match="q has 3 heads of 8 and k 2 of 8"):
        msa.blockwise_attention(q[:, :, :3], msa.contiguous(k, v, 4), *args)


# Where a key and a place no longer fit one 32-bit number.


@pytest.mark.parametrize(
    ("queries", "num_blocks"),
    [(1025, 1_047_552), (1025, 1_047_553), pytest.param(1025, 1_048_600, marks=further)],
    ids=["below", "the last pair above", "several above"],
)
def test_inversion_where_keys_and_places_fill_32_bits(queries, num_blocks):
    """T37: blocks x pairs on both sides of 2**31, where the last query chose the last block."""
    draw = np.random.default_rng(queries + num_blocks)
    blocks = draw.integers(0, num_blocks, (1, 1, queries, 2)).astype(np.int32)
    blocks[0, 0, :, 1] = np.where(draw.random(queries) < 0.5, num_blocks - 1, -1)
    blocks[0, 0, ::7, 0] = -1
    blocks[0, 0, -1] = -1, num_blocks - 1
    tiles = _INVERT["invert"](blocks, num_blocks=num_blocks, tile=8)
    block, query, valid, place_of = (np.asarray(x) for x in (tiles.block, tiles.query, tiles.valid, tiles.place_of))
    pairs = np.argwhere(blocks[0, 0] >= 0)
    assert valid.sum() == len(pairs), f"{valid.sum()} places are used, expected {len(pairs)}"
    place = place_of[0, 0][tuple(pairs.T)]
    comparisons.assert_equal(query.reshape(-1)[place], pairs[:, 0], "query in the place of a pair", "pair")
    comparisons.assert_equal(block[place // 8], blocks[0, 0][tuple(pairs.T)], "block of a pair's tile", "pair")
    assert valid.reshape(-1)[place].all()
