"""Views of keys and values: contiguous, in pages, in a pool, and divided over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.msa_runs import assert_close, assert_equal, run, selected
from support.msa_strategies import GROUPED, assert_partial, prefill
from support.shares import BLOCKS, KV_HEADS, SIZE, WIDTH, devices_map, normal, shared_memory

from m3jax.msa import virtual_pages
from m3jax.msa.share import Share
from m3jax.msa.views import (
    BlockView,
    Contiguous,
    ContiguousIndex,
    IndexView,
    Paged,
    PagedIndex,
    Pooled,
    contiguous,
    only_held,
)
from m3jax.ops import attend_all, attend_selected

further = pytest.mark.further
TABLE = [[5, 0, 7, 2], [1, 6, 3, 4]]


def ints(*values: object) -> jax.Array:
    return jnp.array(values, jnp.int32)


def tokens_of(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Pages [X K P H] as the tokens of rows [B K S H]."""
    return np.moveaxis(x[table], 2, 1).reshape(len(table), x.shape[1], -1, x.shape[-1])


def paged(k, v, table, layer=1, layers=3):
    """Pages [L X K P H] whose other layers, and pages in no table, are NaN."""
    rows, heads, _, width = k.shape
    at = np.asarray(table)

    def pages(x):
        out = np.full((layers, at.max() + 2, heads, 4, width), np.nan, np.float32)
        out[layer, at] = np.asarray(x).reshape(rows, heads, -1, 4, width).swapaxes(1, 2)
        return jnp.asarray(out)

    return Paged(pages(k), pages(v), None, jnp.int32(layer), jnp.asarray(table, jnp.int32), jnp.float32)


@pytest.mark.parametrize("kind", [pytest.param("contiguous", marks=further), "paged"])
def test_views_read_blocks_and_runs(kind):
    k, v = jnp.asarray(normal(2, 2, 16, 4)), jnp.asarray(normal(2, 2, 16, 4, seed=1))
    view = Contiguous(k, v, 4) if kind == "contiguous" else paged(k, v, TABLE)
    assert isinstance(view, BlockView)
    assert (view.num_blocks, view.num_heads, view.block_size) == (4, 2, 4)
    rows, heads, ids = jnp.array([0, 1]), jnp.array([1, 0]), jnp.array([3, 2])
    assert_equal(view.blocks(rows, heads, ids), [jnp.stack([x[0, 1, 12:], x[1, 0, 8:12]]) for x in (k, v)], "kv")
    assert_equal(view.run(jnp.int32(1), 2), [x[:, :, 4:12] for x in (k, v)], "kv")
    assert np.all(view.present(1, 2))


@pytest.mark.parametrize("kind", [pytest.param("contiguous", marks=further), "paged"])
def test_index_views_read_runs(kind):
    k = jnp.asarray(normal(2, 16, 4))
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


def test_a_row_of_a_view_is_that_row_and_what_is_behind_it_is_not_its():
    """Zeros, or entries of the table that name no page, up to a multiple of some blocks."""
    k, v, index_k = normal(2, KV_HEADS, 12, WIDTH), normal(2, KV_HEADS, 12, WIDTH, seed=1), normal(2, 12, WIDTH)
    row = Contiguous(*map(jnp.asarray, (k, v)), SIZE).of_row(jnp.int32(1), 2)
    behind = ((0, 0), (0, 0), (0, 4), (0, 0))
    np.testing.assert_array_equal(row.k, np.pad(k[1:], behind))
    np.testing.assert_array_equal(row.v, np.pad(v[1:], behind))
    row = ContiguousIndex(jnp.asarray(index_k), SIZE).of_row(jnp.int32(1), 2)
    np.testing.assert_array_equal(row.k, np.pad(index_k[1:], behind[1:]))
    table = ints([5, 2, 1], [0, 3, 4])
    share = Share(ints(1, 0), SIZE, 2, ("context",))
    pages = jnp.zeros((1, 6, KV_HEADS, SIZE, WIDTH))
    for view in (
        Paged(pages, pages, None, 0, table, jnp.float32, share),
        PagedIndex(pages[:, :, 0], None, 0, table, jnp.float32, share),
        Pooled(pages[:, :, 0], pages[:, :, 0], None, 0, jnp.zeros(12, jnp.int32), table, KV_HEADS, jnp.float32),
    ):
        assert view.of_row(jnp.int32(1)).table.tolist() == [[0, 3, 4]]
        row = view.of_row(jnp.int32(1), 2)
        assert row.table.tolist() == [[0, 3, 4, -1]] and row.num_blocks == 4
        assert row.share is None or row.share.first.tolist() == [0]


def test_a_pool_is_read_by_its_slots():
    """Pages of single heads wherever they lie, of one layer; a page outside the table's range is told apart."""
    num_pages, width = 3, 5
    of_pages = normal(2, num_pages, KV_HEADS, SIZE, width)  # keys and values [2 X K P H]
    slot_of = np.array([4, 0, 6, 3, 1, 5], np.int32)  # of virtual pages X*K
    pool = np.full((2, 2, 7, SIZE, width), np.nan, np.float32)  # [2 L D P H]
    pool[:, 1, slot_of] = of_pages.reshape(2, -1, SIZE, width)
    table = np.array([[2, 0], [1, 2]], np.int32)
    memory = [jnp.asarray(x) for x in (*pool, slot_of, table)]
    view = Pooled(*memory[:2], None, jnp.int32(1), *memory[2:], KV_HEADS, jnp.float32)
    assert isinstance(view, BlockView)
    assert (view.block_size, view.num_blocks, view.num_heads, view.width) == (SIZE, 2, KV_HEADS, width)
    for found, x in zip(view.run(1, 1), of_pages, strict=True):
        np.testing.assert_array_equal(found, tokens_of(x, table[:, 1:]))
    for found, x in zip(view.blocks(ints(0, 1), ints(1, 0), ints(1, 0)), of_pages, strict=True):
        np.testing.assert_array_equal(found, [x[0, 1], x[1, 0]])
    assert view.present(0, 2).tolist() == [[True, True]]
    row, head, block = ints(0, 0, 1, 1), ints(0, 1, 0, 1), ints(0, 1, 0, 1)
    page, is_page = view.replace(table=ints([3, 0], [-1, 2])).virtual_page(row, head, block)
    assert is_page.tolist() == [False, True, False, True] and page.tolist()[1::2] == [1, 5]


def test_only_held_blocks_stay_in_a_selection():
    table = ints([0, -1, 2], [3, 1, 9])
    pages = jnp.zeros((1, 4, 1, SIZE, WIDTH))
    view = Paged(pages, pages, None, 0, table, jnp.float32)
    blocks = ints([[[0, 1, 2, -1]]], [[[0, 1, 2, -1]]])
    assert only_held(blocks, view).tolist() == [[[[0, -1, 2, -1]]], [[[0, 1, -1, -1]]]]


def test_virtual_pages_are_the_pages_of_single_heads():
    """Of each (row, KV head): the pages selected, in order, and the tokens up to the query's own in the last."""
    pages = normal(2, 6, KV_HEADS, SIZE, WIDTH)  # [L X K P H]
    table = ints([5, 2, 1], [0, 3, 4], [1, 5, 0], [2, 0, 0], [3, 0, 0])
    view = Paged(*map(jnp.asarray, (pages, pages + 1)), None, jnp.int32(1), table, jnp.float32)
    blocks = ints([[0, 2], [1, 2]], [[0, -1], [0, -1]], [[0, 1], [0, 1]], *[[[0, -1], [0, -1]]] * 2)
    found = virtual_pages(view, blocks, ints(9, 3, 7, 0, -1), ints(10, 4, 7, 1, 1))
    of_heads = lambda x: x[1].reshape(-1, SIZE, WIDTH)
    np.testing.assert_array_equal(found.k, of_heads(pages))
    np.testing.assert_array_equal(found.v, of_heads(pages + 1))
    own = [[5, 1], [2, 1], [0, 0], [0, 0], [1, 5], [1, 5], [2, 0], [2, 0], [3, 0], [3, 0]]
    expected = [[page * KV_HEADS + row % KV_HEADS for page in pages] for row, pages in enumerate(own)]
    for row in (2, 3, 6, 7, 8, 9):  # an unused slot names page 0
        expected[row][1] = 0
    assert found.table.tolist() == expected
    # The third row's query is behind its keys, the fourth's is the first token, and the last row's is padding.
    assert found.lengths.tolist() == [6, 6, 4, 4, 0, 0, 1, 1, 0, 0]


def test_joined_blocks_are_those_of_whole_rows():
    _, (k, v, _), of_devices = shared_memory()

    def on_device(k, v, index_k, table, first):
        view = Paged(k, v, None, 0, table.at[0, 2].set(-1), jnp.float32, Share(first, SIZE, 2, ("context",)))
        joined = view.joined()
        assert isinstance(joined, BlockView)
        sizes = joined.block_size, joined.num_blocks, joined.num_heads, joined.width
        assert sizes == (SIZE, BLOCKS + 1, KV_HEADS, WIDTH)
        row = joined.of_row(jnp.int32(1))
        blocks = joined.blocks(ints(0, 1), ints(1, 0), ints(3, 2))
        return joined.run(1, 3), row.run(0, 2), joined.present(2, 4), row.present(0, 6), blocks

    run, of_row, present, row_present, blocks = devices_map(on_device, *of_devices)
    for x, found, found_row, found_blocks in zip((k, v), run, of_row, blocks, strict=True):
        by_head = x.swapaxes(1, 2)  # [B K S H]
        for device in range(2):
            np.testing.assert_array_equal(found[device], by_head[:, :, SIZE : 4 * SIZE])
            np.testing.assert_array_equal(found_row[device], by_head[1:, :, : 2 * SIZE])
            expected = [by_head[0, 1, 3 * SIZE : 4 * SIZE], by_head[1, 0, 2 * SIZE : 3 * SIZE]]
            np.testing.assert_array_equal(found_blocks[device], expected)
    assert present.tolist() == [[[True, True, False, False], [True] * 4]] * 2  # of row 0 each device lacks its last
    assert row_present.tolist() == [[[True] * 6]] * 2


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
