"""The kernels of the invariant mode, interpreted: what XLA's schedules compute, and one order for each query."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.lowering import array, lower

from m3jax.msa import Paged, PagedIndex, SelectionRules, contiguous, contiguous_index
from m3jax.msa.schedules.lanes import invariant, invariant_all, select_invariant
from m3jax.ops import attend_all, attend_selected, interpret, run_experts, select
from m3jax.ops.experts import ExpertWeights
from m3jax.spec.msa import block_scores, dense_attention, select_blocks, sparse_attention
from m3jax.tiles import by_tiles

BATCH, QUERIES, HEADS, KV_HEADS, WIDTH, SIZE, BLOCKS = 2, 20, 4, 2, 16, 8, 6
RULES = SelectionRules(top_k=3, local_blocks=1, init_blocks=0, score="max")
LENGTHS = jnp.array([48, 29], jnp.int32)
POSITIONS = jnp.asarray(np.array([[48], [29]], np.int32) - QUERIES + np.arange(QUERIES, dtype=np.int32))


@pytest.fixture(scope="module")
def memory():
    """Queries, index queries, and the same keys in pages drawn by lot and in one piece."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    pages, table = BATCH * BLOCKS, rng.permutation(BATCH * BLOCKS).reshape(BATCH, BLOCKS).astype(np.int32)
    k, v = (normal(1, pages, KV_HEADS, SIZE, WIDTH) for _ in range(2))
    index_k = normal(1, pages, SIZE, WIDTH)
    # [B M K P H] -> [B M P K H] -> [B S K H]
    in_order = lambda x: x[0][table].swapaxes(2, 3).reshape(BATCH, BLOCKS * SIZE, KV_HEADS, WIDTH)
    paged = Paged(*map(jnp.asarray, (k, v)), None, 0, jnp.asarray(table), jnp.float32)
    paged = paged, PagedIndex(jnp.asarray(index_k), None, 0, paged.table, jnp.float32)
    index_rows = index_k[0][table].reshape(BATCH, BLOCKS * SIZE, WIDTH)
    in_one_piece = (
        contiguous(*(jnp.asarray(in_order(x)) for x in (k, v)), SIZE),
        contiguous_index(jnp.asarray(index_rows), SIZE),
    )
    queries = (jnp.asarray(normal(BATCH, QUERIES, heads, WIDTH)) for heads in (HEADS, KV_HEADS))
    return *queries, paged, in_one_piece


@partial(jax.jit, static_argnames="backend")
def run(q, index_q, views, positions, backend):
    """(blocks [B T K J], sparse outputs, dense ones [B T N H])."""
    view, index_view = views
    how = dict(schedule="invariant", backend=backend)
    blocks = select(index_q, index_view, positions, LENGTHS, RULES, **how)
    sparse, _ = attend_selected(q, view, blocks, positions, LENGTHS, **how)
    return blocks.swapaxes(1, 2), sparse, attend_all(q, view, positions, LENGTHS, **how)[0]


def test_kernels_compute_what_xla_does_and_a_query_s_bits_are_its_own(memory):
    """More queries than a kernel of a decode step takes, in pages, and the last of them alone, in one piece."""
    q, index_q, paged, in_one_piece = memory
    expected = run(q, index_q, paged, POSITIONS, "xla")
    with interpret():
        whole = run(q, index_q, paged, POSITIONS, "triton")
        np.testing.assert_array_equal(whole[0], expected[0])
        for found, wanted in zip(whole[1:], expected[1:], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
        last = slice(QUERIES - 1, QUERIES)
        alone = run(q[:, last], index_q[:, last], in_one_piece, POSITIONS[:, last], "triton")
        for found, same in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(found, np.asarray(same)[:, last])


@pytest.mark.parametrize("num_blocks", [3, *(pytest.param(count, marks=pytest.mark.further) for count in (4, 9))])
def test_the_invariant_schedules_are_the_definitions_for_every_number_of_blocks(num_blocks):
    """Pieces have 4 blocks here: fewer, as many, and a last piece of one; the rows end anywhere in them."""
    rng, size = np.random.default_rng(num_blocks), 8
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    keys = num_blocks * size
    q, index_q = normal(2, 5, HEADS, WIDTH), normal(2, 5, KV_HEADS, WIDTH)
    k, v, index_k = normal(2, keys, KV_HEADS, WIDTH), normal(2, keys, KV_HEADS, WIDTH), normal(2, keys, WIDTH)
    lengths = jnp.array([keys, keys - 3], jnp.int32)
    at = lengths[:, None] - 5 + jnp.arange(5, dtype=jnp.int32), lengths
    views = contiguous(k, v, size), contiguous_index(index_k, size)

    @jax.jit
    def both(q, index_q, views):
        blocks = select_invariant(index_q, views[1], *at, RULES)
        found = invariant(q, views[0], blocks, *at), invariant_all(q, views[0], *at)
        by_score = select_blocks(block_scores(index_q, index_k, *at, size), *at, RULES, block_size=size)
        sparse = sparse_attention(q, k, v, blocks, *at, block_size=size, return_lse=True)
        return (blocks, *found[0], *found[1]), (by_score, *sparse, *dense_attention(q, k, v, *at, return_lse=True))

    with mock.patch("m3jax.msa.schedules.lanes._PIECE", 4 * size):
        found, expected = both(q, index_q, views)
    np.testing.assert_array_equal(found[0], expected[0])
    for x, y in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("schedule", "backend"),
    [
        ("invariant", "xla"),
        pytest.param("invariant", "triton", marks=pytest.mark.further),
        ("query_major", "xla"),
        pytest.param("auto", "triton", marks=pytest.mark.further),
    ],
)
def test_proposals_behind_a_full_row_change_nothing_before_them(memory, schedule, backend):
    """The last round of a request that fills its row proposes past the end: there is no block, piece or page.

    Against the same queries with padding in place of what lies past the end.
    """
    q, index_q, (view, index_view), _ = memory
    full = BLOCKS * SIZE

    @jax.jit
    def run(q, index_q, positions, lengths):
        how = dict(schedule=schedule, backend=backend)
        blocks = select(index_q, index_view, positions, lengths, RULES, **how)
        # A schedule of sparse attention is none of dense attention.
        dense = how if schedule in ("auto", "invariant") else dict(backend=backend)
        outputs = (
            attend_selected(q, view, blocks, positions, lengths, **how),
            attend_all(q, view, positions, lengths, **dense),
        )
        return blocks.swapaxes(1, 2), outputs[0][0], outputs[1][0]

    with mock.patch("m3jax.msa.schedules.lanes._PIECE", 2 * SIZE), interpret():
        starts = np.array([[full - 3], [full - 2]], np.int32)
        positions = jnp.asarray(starts + np.arange(5, dtype=np.int32))
        found = run(q[:, :5], index_q[:, :5], positions, jnp.asarray(starts[:, 0] + 5))
        padded = jnp.where(jnp.arange(5) < 2, positions, -1)
        expected = run(q[:, :5], index_q[:, :5], padded, jnp.asarray(starts[:, 0] + 2))
    np.testing.assert_array_equal(np.sort(found[0][:, :2]), np.sort(expected[0][:, :2]))
    for x, y in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(x[:, :2], y[:, :2], rtol=0, atol=0 if schedule == "invariant" else 2e-6)


def test_invariant_kernels_read_float8_by_its_scales(memory):
    """A scale for each head, and others for values: what the numbers stand for, in pages of the second layer."""
    q, index_q, (paged, index), _ = memory
    scales = np.float32([[9.0, 9.0], [0.5, 2.0]]), np.float32([[9.0, 9.0], [4.0, 0.25]])
    in_float8 = [np.asarray(x).astype(jnp.float8_e4m3fn) for x in (paged.k, paged.v)]
    stacked = [jnp.asarray(np.concatenate([np.full_like(x, np.nan), x])) for x in in_float8]
    view = Paged(*stacked, tuple(jnp.asarray(scale[1]) for scale in scales), 1, paged.table, jnp.float32)
    exact = (x.astype(np.float32) * scale[1][:, None, None] for x, scale in zip(in_float8, scales, strict=True))
    same = Paged(*map(jnp.asarray, exact), None, 0, paged.table, jnp.float32)
    last = slice(QUERIES - 1, QUERIES)  # float8 is for decode
    blocks = jax.jit(partial(select, schedule="invariant"), static_argnums=4)(index_q, index, POSITIONS, LENGTHS, RULES)

    @partial(jax.jit, static_argnames="backend")
    def attend(view, backend):
        rows = POSITIONS[:, last], LENGTHS
        how = dict(schedule="invariant", backend=backend)
        sparse = attend_selected(q[:, last], view, blocks[:, :, last], *rows, **how)
        return *sparse, *attend_all(q[:, last], view, *rows, **how)

    wanted = attend(same, "xla")
    for backend in ("xla", "triton"):
        with interpret():
            found = attend(view, backend)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5, err_msg=backend)


def test_a_call_of_any_size_cuts_keys_and_experts_alike():
    """Kernels lowered for a GPU cut alike at any size: sums of 4 and 8 pieces; tiles of 64 tokens, or columns."""
    bf16, pool = jnp.bfloat16, array(jnp.bfloat16, 1, 64, 4, 128, 128)

    def call(q, k, v, blocks, positions, lengths, table, x, gate, up, down, ids):
        view = Paged(k, v, None, 0, table, bf16)
        sparse, _ = attend_selected(q, view, blocks, positions, lengths, schedule="invariant")
        dense, _ = attend_all(q, view, positions, lengths, schedule="invariant")
        weights, act = ExpertWeights(gate, up, down), lambda gate, up: (gate * up).astype(bf16)
        return sparse, dense, run_experts(x, weights, ids, jnp.int32(0), act, path="in_fixed_tiles")

    for batch, queries in ((1, 1), (3, 40)):
        rows, tokens = (array(jnp.int32, batch, n) for n in (queries, 16)), batch * queries
        positions, table = rows
        q, blocks = array(bf16, batch, queries, 64, 128), array(jnp.int32, batch, 4, queries, 16)
        up, down = array(bf16, 1, 80, 256, 512), array(bf16, 1, 80, 512, 256)
        text = lower(
            call, q, pool, pool, blocks, positions, array(jnp.int32, batch), table,
            array(bf16, tokens, 256), up, up, down, array(jnp.int32, tokens, 4),
        )  # fmt: skip
        lane = queries if queries <= 16 else 16
        lanes = batch * -(-queries // lane)
        for splits in (4, 8):
            assert f"tensor<{lanes}x{lane}x4x{splits}x16x128xf32>" in text, (batch, queries, splits)
        # A few tokens are multiplied by 64 columns at once, more in tiles of 64, though an expert has 6 of them.
        assert ("few_experts_hidden" in text) == (tokens == 1)
        assert ("x64x512xbf16>" in text) == (tokens > 1)


def test_on_a_gpu_a_tile_stands_between_barriers():
    """One tile has no loop, whose end the host would wait for; results and gradients are those of the CPU's loop."""
    rng = np.random.default_rng(1)
    x, matrix = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((20, 12), (12, 6)))
    total = lambda x, matrix: jnp.sum(by_tiles(lambda x: jnp.tanh(x @ matrix), 8, x) ** 2)
    both = lambda x, matrix: (by_tiles(lambda x: x @ matrix, 8, x), jax.grad(total, (0, 1))(x, matrix))
    expected = jax.jit(both)(x, matrix)
    slopes = jax.grad(lambda x, matrix: jnp.sum(jnp.tanh(x @ matrix) ** 2), (0, 1))(x, matrix)  # of all rows at once
    for found, wanted in zip(expected[1], slopes, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    with mock.patch("m3jax.tiles.platform", lambda: "gpu"):
        for found, wanted in zip(*map(jax.tree.leaves, (jax.jit(both)(x, matrix), expected)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        one_tile = jax.jit(lambda x: by_tiles(lambda x: x @ matrix, 8, x)).lower(x[:8]).as_text()
    assert one_tile.count("optimization_barrier") == 2
    assert "while" not in one_tile
