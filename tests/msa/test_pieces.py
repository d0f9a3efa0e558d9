"""The pieces of MSA by themselves, with few numbers: views and their rows, walks, shares inside a schedule, checks."""

import itertools
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import msa_reference as reference
from support.pytrees import assert_settings_are_static
from support.shares import AXIS, BLOCKS, KV_HEADS, QUICK, SIZE, WIDTH, devices_map, normal, shared_memory

import m3jax
from m3jax import msa, numerics
from m3jax.msa import SelectionRules, chunks, inversion, views
from m3jax.msa.candidates import Candidates, join_over_devices
from m3jax.msa.definition import block_scores, dense_attention, select_blocks, sparse_attention
from m3jax.msa.definition import msa as msa_of_all
from m3jax.msa.rules import check_chosen, check_lengths, check_numbers, check_rows, check_score_shape, checked
from m3jax.msa.schedules import lanes, layout
from m3jax.msa.schedules.blockwise import _attend_chunk as attend_chunk
from m3jax.msa.schedules.blockwise import blockwise
from m3jax.msa.schedules.index_walk import index_walk, walk_scores
from m3jax.msa.schedules.lanes import invariant, invariant_all, select_invariant
from m3jax.msa.schedules.query_major import query_major
from m3jax.msa.share import Share
from m3jax.msa.virtual import virtual_pages
from m3jax.numerics import dot_scores, merge_over_devices, sum_over_devices

RULES = SelectionRules(top_k=3)
index_walk_module = import_module("m3jax.msa.schedules.index_walk")  # whose name in its package is the function's


def ints(*values: object) -> jax.Array:
    return jnp.array(values, jnp.int32)


def test_settings_of_views_are_no_arrays():
    assert_settings_are_static(msa)


# Views


def tokens_of(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Pages [X K P H] as the tokens of rows [B K S H]."""
    return np.moveaxis(x[table], 2, 1).reshape(len(table), x.shape[1], -1, x.shape[-1])


def test_a_row_of_a_view_is_that_row_and_what_is_behind_it_is_not_its():
    """Zeros, or entries of the table that name no page, up to a multiple of some blocks."""
    k, v, index_k = normal(2, KV_HEADS, 12, WIDTH), normal(2, KV_HEADS, 12, WIDTH, seed=1), normal(2, 12, WIDTH)
    row = views.Contiguous(*map(jnp.asarray, (k, v)), SIZE).of_row(jnp.int32(1), 2)
    behind = ((0, 0), (0, 0), (0, 4), (0, 0))
    np.testing.assert_array_equal(row.k, np.pad(k[1:], behind))
    np.testing.assert_array_equal(row.v, np.pad(v[1:], behind))
    row = views.ContiguousIndex(jnp.asarray(index_k), SIZE).of_row(jnp.int32(1), 2)
    np.testing.assert_array_equal(row.k, np.pad(index_k[1:], behind[1:]))
    table = ints([5, 2, 1], [0, 3, 4])
    share = Share(ints(1, 0), SIZE, 2, ("context",))
    pages = jnp.zeros((1, 6, KV_HEADS, SIZE, WIDTH))
    for view in (
        views.Paged(pages, pages, None, 0, table, jnp.float32, share),
        views.PagedIndex(pages[:, :, 0], None, 0, table, jnp.float32, share),
        views.Pooled(pages[:, :, 0], pages[:, :, 0], None, 0, jnp.zeros(12, jnp.int32), table, KV_HEADS, jnp.float32),
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
    view = views.Pooled(*memory[:2], None, jnp.int32(1), *memory[2:], KV_HEADS, jnp.float32)
    assert isinstance(view, views.BlockView)
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
    view = views.Paged(pages, pages, None, 0, table, jnp.float32)
    blocks = ints([[[0, 1, 2, -1]]], [[[0, 1, 2, -1]]])
    assert views.only_held(blocks, view).tolist() == [[[[0, -1, 2, -1]]], [[[0, 1, -1, -1]]]]


def test_virtual_pages_are_the_pages_of_single_heads():
    """Of each (row, KV head): the pages selected, in order, and the tokens up to the query's own in the last."""
    pages = normal(2, 6, KV_HEADS, SIZE, WIDTH)  # [L X K P H]
    table = ints([5, 2, 1], [0, 3, 4], [1, 5, 0], [2, 0, 0], [3, 0, 0])
    view = views.Paged(*map(jnp.asarray, (pages, pages + 1)), None, jnp.int32(1), table, jnp.float32)
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


# Shares: devices as an axis that is mapped over


def test_devices_that_share_rows_select_and_attend_as_one():
    """T28, T51: each schedule on the blocks that a device holds, then the exchange, is the definition of whole rows."""
    (q, index_q, positions, lengths), (k, v, index_k), of_devices = shared_memory()
    q, index_q, k, v, index_k, positions, lengths = map(jnp.asarray, (q, index_q, k, v, index_k, positions, lengths))

    def on_device(k, v, index_k, table, first):
        share = Share(first, SIZE, 2, ("context",))
        view = views.Paged(k, v, None, 0, table, jnp.float32, share)
        index = views.PagedIndex(index_k, None, 0, table, jnp.float32, share)
        blocks = index_walk(index_q, index, positions, lengths, RULES)
        in_lanes = select_invariant(index_q, index, positions, lengths, RULES)
        seen, held_lengths = share.positions(positions, lengths), share.lengths(lengths)
        held = share.held(blocks)
        parts = blockwise(q, view, seen, held_lengths), query_major(q, view, held, seen, held_lengths)
        merged = [merge_over_devices(*part, ("context",)) for part in parts]
        joined = view.joined()
        together = invariant_all(q, joined, positions, lengths), invariant(q, joined, blocks, positions, lengths)
        return (blocks, in_lanes), (merged[0], together[0]), (*merged[1:], together[1])

    (blocks, in_lanes), dense, sparse = devices_map(on_device, *of_devices)

    @jax.jit
    def by_definition(*rows):
        chosen = select_blocks(block_scores(index_q, index_k, *rows, SIZE), *rows, RULES, block_size=SIZE)
        of_chosen = sparse_attention(q, k, v, chosen, *rows, block_size=SIZE, return_lse=True)
        return chosen, of_chosen, dense_attention(q, k, v, *rows, return_lse=True)

    expected, sparse_expected, dense_expected = by_definition(positions, lengths)
    for device in range(2):
        np.testing.assert_array_equal(blocks[device], expected)
        np.testing.assert_array_equal(in_lanes[device], expected)
        for found, wanted in [(x, dense_expected) for x in dense] + [(x, sparse_expected) for x in sparse]:
            for x, y in zip(found, wanted, strict=True):
                np.testing.assert_allclose(x[device], y, atol=1e-6)


def test_msa_is_its_three_steps_in_numpy():
    """Scores, the best blocks, attention to these: also of padding, and of rows that end inside a block."""
    (q, index_q, positions, lengths), (k, v, index_k), _ = shared_memory()
    of_arrays = jax.jit(partial(msa_of_all, rules=RULES, block_size=SIZE), compiler_options=QUICK)
    out, blocks = of_arrays(q, k, v, index_q, index_k, positions, lengths)
    scores = reference.block_scores(index_q, index_k, positions, lengths, SIZE)
    expected = reference.select_blocks(scores, positions, lengths, block_size=SIZE, top_k=RULES.top_k)
    np.testing.assert_array_equal(blocks, expected)
    np.testing.assert_allclose(out, reference.attention(q, k, v, positions, lengths, expected, SIZE)[0], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_candidates_are_joined_over_devices_in_one_exchange_and_in_two(dtype):
    """Keys of 32 bits go with the ids, others by themselves; equal ones go to the lower id, -inf is no candidate."""
    blocks = np.array([[[4, 2, 0]], [[1, 3, 5]]], np.int32)  # [devices X C]
    keys = np.array([[[3.0, 1, -np.inf]], [[2.0, 1, np.inf]]], np.float32)
    join = lambda blocks, keys: join_over_devices(Candidates(blocks, keys), 4, (AXIS,))
    assert devices_map(join, blocks, jnp.asarray(keys, dtype)).tolist() == [[[1, 2, 4, 5]]] * 2


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


@pytest.mark.parametrize("devices", [2, 4])
def test_few_parts_of_devices_are_gathered_and_many_are_reduced(devices):
    """Up to 4 MiB of all devices' outputs, in float32 whatever their dtype; where devices divide them, neither."""
    exchanges = ("all_gather", "pmax", "psum", "all_to_all")
    most = (1 << 20) // devices**2
    for width, is_few in ((most, True), (most + 1, False)):
        part = jax.ShapeDtypeStruct((devices, width), jnp.bfloat16), jax.ShapeDtypeStruct((devices,), jnp.float32)
        of_whole = ["all_gather"] if is_few else ["pmax", "psum", "psum"]
        for divided, expected in ((None, of_whole), (0, ["all_to_all"] * 2)):
            merge = partial(merge_over_devices, mesh_axes=(AXIS,), divided=divided)
            trace = jax.make_jaxpr(merge, axis_env=[(AXIS, devices)])
            found = [x.primitive.name for x in trace(*part).eqns if x.primitive.name in exchanges]
            assert found == expected, (width, divided)


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


def test_joined_blocks_are_those_of_whole_rows():
    _, (k, v, _), of_devices = shared_memory()

    def on_device(k, v, index_k, table, first):
        view = views.Paged(k, v, None, 0, table.at[0, 2].set(-1), jnp.float32, Share(first, SIZE, 2, ("context",)))
        joined = view.joined()
        assert isinstance(joined, views.BlockView)
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


# Walks and products


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_products_of_few_and_many_queries_are_einsum_s_on_every_platform(platform, monkeypatch):
    """The three ways differ in what is padded and which side comes first, never in what is computed."""
    specs, einsum = [], numerics.einsum
    monkeypatch.setattr(numerics, "einsum", lambda spec, *factors: specs.append(spec) or einsum(spec, *factors))
    monkeypatch.setattr(numerics, "platform", lambda: platform)
    for leading, rows in (((), 1), ((2,), 7), ((2, 3), 8), ((3,), 16), ((2,), 17)):
        queries, keys = normal(*leading, rows, 6), normal(*leading, 5, 6, seed=1)
        specs.clear()
        found = dot_scores(jnp.asarray(queries), jnp.asarray(keys))
        is_left = rows > 16 or (platform == "tpu" and rows < 8)
        assert specs == ["...rh,...ch->...rc" if is_left else "...ch,...rh->...cr"], rows
        np.testing.assert_allclose(found, np.einsum("...rh,...ch->...rc", queries, keys), rtol=1e-5, atol=1e-6)
        assert found.shape == (*leading, rows, 5)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_values_from_some_token_on_are_zero_on_every_platform(platform, monkeypatch):
    monkeypatch.setattr(layout, "platform", lambda: platform)
    values = normal(2, 6, SIZE, 3)
    values[:, :, 1] = np.nan
    first = np.array([[0, 1, 2, 3, 4, 5], [1, 4, 0, 2, 3, 1]], np.int32)
    expected = np.where(np.arange(SIZE)[:, None] < first[..., None, None], values, 0)
    np.testing.assert_array_equal(layout.zero_from(jnp.asarray(values), jnp.asarray(first)), expected)


def test_a_lane_walks_the_pieces_that_hold_a_key_which_it_sees():
    """Up to that of its last token's own key, and none behind the row; what is padding asks for nothing."""
    row = views.ContiguousIndex(jnp.zeros((1, 24, 2)), SIZE)  # six blocks, three pieces of two
    for positions, length, pieces in (
        ([-1, -1], 24, 0), ([0, -1], 24, 1), ([7, 3], 24, 1), ([3, 8], 24, 2), ([16, 0], 24, 3), ([23, 0], 24, 3),
        ([8, 7], 8, 1), ([8, 9], 8, 0), ([16, 15], 16, 2), ([30, 2], 32, 3),
    ):  # fmt: skip
        assert lanes._pieces_seen(ints(positions), ints(length), row, 2) == pieces, (positions, length)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_few_pairs_are_inverted_by_comparison_and_many_by_sorting(platform, monkeypatch):
    """As many comparisons as a platform's sort takes: of bins or places, whichever are more, with bins or pairs."""
    taken, nowhere = [], inversion.Tiles(*[jnp.zeros(0)] * 7)
    for way in ("by_comparison", "by_sorting"):
        monkeypatch.setattr(inversion, way, lambda blocks, *sizes, way=way: taken.append(way) or nowhere)
    monkeypatch.setattr(inversion, "platform", lambda: platform)
    limit, bins = (1 << 14, 128) if platform == "cpu" else (1 << 19, 724)  # bins^2 is the limit, or just below it
    for heads, num_blocks, pairs, tile, is_few in (
        (1, bins, 2, 1, True), (1, bins + 1, 2, 1, False), (4, bins // 4, 1, 1, True), (4, bins // 4 + 1, 1, 1, False),
        (1, 1, bins - 1, 1, True), (1, 1, bins, 1, False),
        (1, 1, 8, limit // 8, True), (1, 1, 8, limit // 8 + 1, False),
    ):  # fmt: skip
        inversion.invert(jnp.zeros((1, heads, pairs, 1), jnp.int32), num_blocks, tile)
        assert taken.pop() == ("by_comparison" if is_few else "by_sorting"), (heads, num_blocks, pairs, tile)


@pytest.mark.parametrize("axis", [pytest.param(0, marks=pytest.mark.further), 1])
def test_pieces_of_a_walk_join_to_the_whole(axis):
    """Pieces that divide the axis and pieces that do not, and one piece that is all of it."""
    x, y = (np.moveaxis(normal(5, 2, 3, seed=seed), 0, axis) for seed in (0, 1))
    for chunk in (1, 2, 3, 5, 8):
        seen = []

        def double_and_sum(x, y, seen=seen):
            seen.append(x.shape[axis])
            return 2 * x, (x + y).sum(-1)

        doubled, summed = chunks.map_chunks(double_and_sum, chunk, axis, jnp.asarray(x), jnp.asarray(y))
        np.testing.assert_array_equal(doubled, 2 * x)
        np.testing.assert_allclose(summed, (x + y).sum(-1), rtol=1e-6)
        assert set(seen) == {min(chunk, 5)}


def test_what_is_one_piece_is_handed_on_as_it_is():
    x = jnp.ones((3, 2))
    for chunk in (3, 8):
        assert chunks.map_chunks(lambda piece: piece, chunk, 0, x) is x


@pytest.mark.parametrize(("platform", "times"), [("cpu", 1), ("gpu", 64), ("tpu", 64)])
def test_pieces_of_keys_are_as_long_as_the_platform_and_few_queries_allow(platform, times, monkeypatch):
    """In blocks of 1,024 keys: of up to 32 rows of queries in attention, and of up to 128 in scores, more at once."""
    monkeypatch.setattr(chunks, "platform", lambda: platform)
    taken = []
    for view in (views.Contiguous, views.ContiguousIndex):
        run = view.run
        counted = lambda self, first, count, run=run: taken.append(count) or run(self, first, count)
        monkeypatch.setattr(view, "run", counted)
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    attend = lambda q, k, *at: blockwise(q, msa.contiguous(k, k, 1024), *at)
    score = lambda q, k, *at: walk_scores(q, msa.contiguous_index(k[:, :, 0], 1024), *at)
    for fn, few, most in ((attend, 32, times), (score, 128, 4 * times)):
        for rows, blocks in ((few, most), (few + 1, 1)):
            at = of(rows, 1, dtype=jnp.int32), of(rows, dtype=jnp.int32)
            jax.eval_shape(fn, of(rows, 1, 1, 1), of(rows, 300 * 1024, 1, 1), *at)
            assert {*taken} == {blocks}, (fn, rows)
            taken.clear()


def test_chunks_of_queries_are_the_longest_whose_scores_are_held():
    """Of few keys all scores, of many those of a piece; blocks' scores of many more keys are an eighth of them."""
    taken, query_chunk = [], index_walk_module._query_chunk
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    for blocks, held in ((2, 2 * 128), (8, 1024), (9, 1024), (64, 1024), (65, 65 * 16), (512, 512 * 16)):
        sizes = lambda index_q, index_k: taken.append(query_chunk(index_q, views.ContiguousIndex(index_k, 128)))
        jax.eval_shape(sizes, of(2, 1 << 20, 3, 4), of(2, blocks * 128, 4))
        chunk = taken.pop()
        assert chunk * 2 * 3 * held <= 1 << 19 < 2 * chunk * 2 * 3 * held, blocks


@pytest.mark.parametrize(("platform", "by_halves"), [("cpu", "scan"), ("gpu", "scan_unrolled"), ("tpu", "scan")])
def test_many_values_are_searched_by_halves_and_few_by_comparing_all(platform, by_halves, monkeypatch):
    for module in (chunks, inversion):
        monkeypatch.setattr(module, "platform", lambda: platform)
    methods = []
    take = lambda x, values, side, method: methods.append(method) or jnp.zeros(values.shape, jnp.int32)
    monkeypatch.setattr(jnp, "searchsorted", take)
    most = 1 << 19 if platform == "cpu" else 1 << 25
    for size in (most // 2, most // 2 + 1):
        ascending, values = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (size, 2))
        jax.eval_shape(lambda x, y: inversion._search(x, y, "left"), ascending, values)
    assert methods == ["compare_all", by_halves]


def test_a_piece_is_read_from_its_first_key_on(monkeypatch):
    """By a query at the last key of a piece, and at the first one of the next: pieces are single blocks here."""
    q, k, v = normal(1, 1, 2, 4), normal(1, 12, 1, 4, seed=1), normal(1, 12, 1, 4, seed=2)
    monkeypatch.setattr(index_walk_module, "_KEY_CHUNK", 1)  # times four, of few queries
    attend = jax.jit(lambda *at: attend_chunk(jnp.asarray(q), msa.contiguous(*map(jnp.asarray, (k, v)), SIZE), *at, 1))
    index_q, index_k = jnp.asarray(q[:, :, :1]), jnp.asarray(k[:, :, 0])
    scores = jax.jit(lambda *at: walk_scores(index_q, msa.contiguous_index(index_k, SIZE), *at))
    for position in (0, SIZE - 1, SIZE, 2 * SIZE - 1, 2 * SIZE):
        at, seen = (ints([position]), ints(position + 1)), np.arange(12) <= position
        out, lse = attend(*at)
        products = np.where(seen, q[0, 0] @ k[0, :, 0].T, -np.inf)  # [N S]
        weights = np.exp(products / 2)
        np.testing.assert_allclose(
            out[0, 0], weights @ v[0, :, 0] / weights.sum(1, keepdims=True), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(lse[0, 0], np.log(weights.sum(1)), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(scores(*at)[0, 0, 0], products[0].reshape(3, SIZE).max(1), rtol=1e-5, atol=1e-6)


def test_pieces_are_powers_of_two_within_the_budget():
    for elements, per_row, num_rows in np.ndindex(40, 9, 12):
        rows = chunks.rows_within(elements, per_row, num_rows)
        allowed = [n for n in (1, 2, 4, 8, 16, 32, 64) if n * max(1, per_row) <= elements] or [1]
        assert rows == min(max(allowed), max(1, num_rows)), (elements, per_row, num_rows)


# Checks of values


def found_by(check, *arguments) -> str:
    """What a check of values says under `checks()`; nothing where it passes."""
    try:
        with m3jax.checks():
            check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def test_numbers_are_looked_at_under_checks_alone():
    """Elsewhere a look would fetch them from the device at every call."""
    check_lengths(ints(8), 7)
    check_rows(ints([5, 6]), ints(5))
    check_numbers(dict(positions=ints([0]), lengths=ints(1), q=jnp.full((1, 1, 1, 1), jnp.nan)))
    check_chosen(ints([[[9]]]), ints([0]), ints(1), 4, SIZE)


def test_lengths_from_none_to_all_keys_pass():
    assert not found_by(check_lengths, ints(0, 7), 7)
    assert "lengths[1] = 8: a row has 0 to 7 keys here" in found_by(check_lengths, ints(0, 8), 7)
    assert "lengths[0] = -1: a row has 0 to 7 keys here" in found_by(check_lengths, ints(-1, 8), 7)


@pytest.mark.parametrize("devices", [1, 3])
def test_a_view_has_the_keys_of_all_devices_that_share_its_rows(devices):
    share = None if devices == 1 else Share(ints(0, 0), SIZE, devices, ("context",))
    pages = jnp.zeros((1, 2, 1, SIZE, 2))
    view = views.Paged(pages, pages, None, 0, ints([0, 1], [1, 0]), jnp.float32, share)
    call = checked(lambda view, lengths: None)
    most = devices * 2 * SIZE
    assert not found_by(call, view, ints(most, 0))
    assert f"lengths[0] = {most + 1}: a row has 0 to {most} keys here" in found_by(call, view, ints(most + 1, 0))


def test_each_call_looks_at_the_lengths_of_its_rows():
    """Of keys in rows, and of the scores of their blocks, in which the last block may be cut off."""
    at, floats = ints([6], [6]), lambda *shape: jnp.zeros((2, *shape))
    call = partial(select_blocks, floats(1, 1, 2), at, rules=RULES, block_size=SIZE)
    assert not found_by(call, ints(7, 8))
    assert "lengths[1] = 9: a row has 0 to 8 keys here" in found_by(call, ints(7, 9))
    q, k = floats(1, 1, 2), floats(7, 1, 2)
    for call in (
        partial(block_scores, q, k[:, :, 0], at, block_size=SIZE),
        partial(dense_attention, q, k, k, at),
        partial(sparse_attention, q, k, k, ints([[[0, 1]]], [[[0, 1]]]), at, block_size=SIZE),
        partial(msa_of_all, q, k, k, q, k[:, :, 0], at, rules=RULES, block_size=SIZE),
    ):
        assert "lengths[1] = 8: a row has 0 to 7 keys here" in found_by(
            lambda n, call=call: call(lengths=n), ints(7, 8)
        )


@pytest.mark.usefixtures("unchecked")
def test_scores_are_checked_where_they_are_made():
    with pytest.raises(ValueError, match="score = 'mean': allowed are 'max', 'lse', and a function"):
        block_scores(jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 4, 2)), ints([0]), ints(4), SIZE, "mean")


def test_a_call_without_a_token_is_refused_where_a_row_has_keys():
    refused = found_by(check_rows, ints([5, 6], [-1, -1]), ints(5, 4))
    assert "positions[0, 0] = 5 of a row with 5 keys: all queries are padding" in refused
    assert "positions[1, 1] = 1 of a row with 1 keys" in found_by(check_rows, ints([-1, 4], [-1, 1]), ints(0, 1))
    for positions, lengths in (
        ([[5, 4]], [5]),  # one of them is a token
        ([[0, -1]], [1]),  # position 0 is one
        ([[-1, -1]], [5]),  # padding that says so
        ([[3, 4]], [0]),  # a row without keys
    ):
        assert not found_by(check_rows, ints(*positions), ints(*lengths))


def test_only_nan_that_is_read_is_refused():
    """The last key of a row is read, the slot behind it is not; a query at that slot is padding."""
    rows = dict(positions=ints([2, 3, -1], [0, -1, 1]), lengths=ints(3, 0))

    def found(name, index):
        arrays = {"q": np.zeros((2, 3, 1, 1), np.float32), "k": np.zeros((2, 5, 1, 1), np.float32)}
        arrays[name][index] = np.nan
        return found_by(check_numbers, rows | {name: jnp.asarray(x) for name, x in arrays.items()})

    assert "k[0, 2, 0, 0] is NaN, one of 1 in k" in found("k", (0, 2))
    assert "q[0, 0, 0, 0] is NaN, one of 1 in q" in found("q", (0, 0))
    for name, index in (("k", (0, 3)), ("k", (1, 0)), ("q", (0, 1)), ("q", (0, 2)), ("q", (1, 0))):
        assert not found(name, index), (name, index)


def test_the_smallest_and_largest_id_of_a_selection():
    """10 keys in blocks of 4: ids 0 to 2, of a query at position 9 the last must be there."""
    at = ints([9, 10, 3]), ints(10)

    def found(*chosen, num_keys=10):
        nothing = [-1] * (len(chosen) - 1)
        blocks = ints([[chosen, [-1, *nothing], [0, *nothing]]])
        return found_by(check_chosen, blocks, *at, num_keys, SIZE)

    assert not found(0, 2, -1) and not found(2, 0, 1) and not found(2, -1, -1)
    assert "ids are -1 to 2 for 10 keys in blocks of 4" in found(0, 2, 3)
    assert "ids are -1 to 2 for 12 keys" in found(0, 2, 3, num_keys=12)
    assert "ids are -1 to 2" in found(-2, 0, 2)
    assert "names a block twice" in found(0, 0, 2)
    later = ints([[[0, 1, -1], [0, 1, -1]]]), ints([3, 4]), ints(10)  # the second query's own block is block 1
    assert "blocks[0, 0, 0] = [0, 1, -1]" in (message := found_by(check_chosen, *later, 10, SIZE))
    assert "names a block behind the query's own, in blocks of 4" in message
    message = found(0, 1, -1)
    assert "blocks[0, 0, 0] = [0, 1, -1], of a query at position 9 of 10, lacks the query's own block" in message


def test_a_score_gives_one_number_for_the_tokens_of_a_block():
    check_score_shape(lambda scores: scores.max(-1), 4)
    with pytest.raises(ValueError, match=r"of shape \(2, 3, 4\) it returned shape \(2, 3, 4\)"):
        check_score_shape(lambda scores: scores, 4)
    with pytest.raises(ValueError, match="it returned no array"):
        check_score_shape(lambda scores: None, 4)
    with pytest.raises(ValueError, match=r"it returned shape \(3,\)"):
        check_score_shape(lambda scores: scores.max(-1)[0], 4)
