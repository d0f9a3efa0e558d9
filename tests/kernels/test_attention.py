"""Attention kernels in interpret mode against the definition, in memory that holds NaN wherever nothing may look."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import comparisons
from support.kernels_inputs import NanKey, attention, check, in_chunks, lay_out, of_definition, run_attention, view
from support.msa_strategies import FOURS, RAGGED, Case, cases, dense_attention, prefill
from support.msa_strategies import GROUPED as TWO_TIMES_TWO
from support.msa_strategies import attention as definition

from pallas_kernels.cudnn_causal import cudnn_causal
from pallas_kernels.dense_causal import cudnn, cudnn_prefix, dense_causal
from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.pages import contiguous
from pallas_kernels.sparse_decode import MAX_QUERIES, sparse_decode
from pallas_kernels.sparse_decode.triton import Config as DecodeConfig
from pallas_kernels.sparse_prefill import Call, sparse_prefill
from pallas_kernels.sparse_prefill.triton import Config, kv_block_major, union

by_block = import_module("pallas_kernels.sparse_prefill.triton.kv_block_major")  # its function has its name
further = pytest.mark.further
# Two groups of three heads, which kernels fill up to four: an axis of groups cannot be taken for one of their heads.
GROUPED = replace(TWO_TIMES_TWO, N=6)
TILE = Config(tokens=4, keys=4)
KERNELS = {
    "query_union": dict(op=sparse_prefill, backend="triton", schedule="query_union", config=TILE),
    "kv_block_major": dict(op=sparse_prefill, backend="triton", schedule="kv_block_major", config=TILE),
    "chunks": dict(op=partial(in_chunks, kv_block_major, Call, 16), config=Config(tokens=2, keys=4)),
    "decode": dict(op=sparse_decode, backend="triton", config=DecodeConfig(keys=4, programs=1)),
    "split decode": dict(op=sparse_decode, backend="triton", config=DecodeConfig(keys=2, programs=1000)),
}
PARTS = ("chunks", "decode")  # each is a part of how another one of these computes
every_kernel = pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=further if name in PARTS else ()) for name, options in KERNELS.items()],
    ids=KERNELS.keys(),
)
few = settings(max_examples=4)
# Rows of whole blocks in pages, which most tests here share, and rows with a last block that is not whole.
SHAPES = dict(contiguous=RAGGED, paged=GROUPED)


@pytest.fixture(autouse=True)
def small_works(monkeypatch):
    """Two tiles of queries share one load of a block, so that most blocks are loaded by several programs.

    The entries of a tile, 16 of four tokens here, are compared with all of them in two steps.
    """
    monkeypatch.setattr(by_block, "_WORK_TILES", 2)
    monkeypatch.setattr(union, "_COLUMNS", 8)


def fitting(case: Case, options: dict) -> Case:
    """A decode kernel takes the last queries of a case."""
    if options["op"] is not sparse_decode or case.shape.T <= MAX_QUERIES:
        return case
    shape = replace(case.shape, T=7)
    return replace(case, shape=shape, positions=case.positions[:, -7:])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(pytest.param(name, "paged", marks=further if name in PARTS else ()) for name in KERNELS),
        *(pytest.param(name, "contiguous", marks=further) for name in KERNELS),
    ],
)
@few
@given(data=st.data())
def test_attention_is_that_of_the_definition(data, name, layout):
    """T8, T9, T10, T13, T20: any selection, unused slots anywhere, unseen blocks, padding, NaN behind every row."""
    options = KERNELS[name]
    case = fitting(data.draw(cases((SHAPES[layout],))), options)
    blocks = case.any_blocks()
    check(attention(case=case, layout=layout, blocks=blocks, **options), of_definition(case, blocks))


@pytest.mark.further
@pytest.mark.parametrize("name", ["query_union", "kv_block_major", "split decode"])  # the others are parts of these
@few
@given(case=cases((FOURS,)))
def test_attention_of_odd_shapes(case, name):
    """T7: B, T, N, K, H, P and J all 4, and each KV head with picks of its own; T19: so has each query."""
    options = KERNELS[name]
    blocks = case.any_blocks()
    check(attention(case=case, layout="paged", blocks=blocks, **options), of_definition(case, blocks))


@every_kernel
def test_empty_rows_and_empty_selections(options):
    """T8, T38: no key, no block, no split that saw anything: zeros, and an LSE of -inf."""
    case = fitting(prefill(GROUPED, 1, lengths=[0, 40, 13]), options)
    blocks = np.full((3, GROUPED.K, case.shape.T, GROUPED.J), -1, np.int32)
    out, lse = attention(case=case, layout="paged", blocks=blocks, **options)
    assert not out.any()
    assert np.isneginf(lse).all()
    blocks[1] = case.any_blocks()[1]
    check(attention(case=case, layout="paged", blocks=blocks, **options), of_definition(case, blocks))


@every_kernel
def test_a_nan_that_a_query_reads_is_in_its_output(options):
    """A sum that is NaN is not above 0, and must not pass for that of a query that saw no key."""
    case = NanKey(**vars(fitting(prefill(GROUPED, 2), options)))
    blocks = case.any_blocks()
    out, lse = attention(case=case, layout="paged", blocks=blocks, **options)
    reads = (blocks == 0).any(-1).swapaxes(1, 2).repeat(GROUPED.N // GROUPED.K, axis=2)  # [B T N]
    assert reads.any()
    assert np.isnan(out[reads]).all(), f"{np.isfinite(out[reads]).sum()} numbers of {out[reads].size} hide the NaN key"
    assert np.isnan(lse[reads]).all()


@every_kernel
def test_order_of_the_slots_is_free(options):
    """Selections arrive ascending from us, and in other orders from others."""
    case = fitting(prefill(GROUPED, 2), options)
    case = replace(case, positions=case.positions + (GROUPED.S - 1 - case.positions.max()))
    blocks = case.any_blocks()
    one, other = (attention(case=case, layout="paged", blocks=x, **options) for x in (blocks, blocks[..., ::-1].copy()))
    check(one, other)


@every_kernel
def test_two_runs_are_bitwise_equal(options):
    """T34: nothing is added in an order that could change."""
    case = fitting(prefill(GROUPED, 3), options)
    runs = [attention(case=case, layout="paged", blocks=case.any_blocks(), **options) for _ in range(2)]
    np.testing.assert_array_equal(*(np.asarray(x[0]) for x in runs))


@pytest.mark.parametrize(
    "name", ["query_union", *(pytest.param(name, marks=further) for name in ("kv_block_major", "split decode"))]
)
def test_bfloat16_is_rounded_where_the_definition_rounds(name):
    """Probabilities and outputs are rounded, sums and exponents are not."""
    options = KERNELS[name]
    case = fitting(prefill(GROUPED, 4), options)
    blocks = case.any_blocks()
    out, lse = attention(case=case, layout="contiguous", blocks=blocks, dtype=jnp.bfloat16, **options)
    q, k, v = (np.asarray(x, np.float32) for x in case.qkv(jnp.bfloat16))
    want, want_lse = definition(
        q, k, v, blocks, case.positions, case.lengths, block_size=case.shape.P, schedule="definition"
    )
    assert np.linalg.norm(out - want) < 5e-3 * np.linalg.norm(want)
    seen = ~np.isneginf(want_lse)
    comparisons.assert_close(lse[seen], np.asarray(want_lse)[seen], "lse where any key is seen", atol=1e-3)


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=further), "paged"])
@few
@given(data=st.data())
def test_dense_is_that_of_the_definition(data, layout):
    """T8, T10: every block up to the diagonal, padding inside a tile of queries, NaN behind every row."""
    case = data.draw(cases((SHAPES[layout],)))
    got = attention(dense_causal, case, layout, backend="triton", config=TILE, kv_heads=case.shape.K)
    check(got, dense_attention(*case.qkv(), case.positions, case.lengths))


def running(case: Case) -> Case:
    """The case with queries that stand one behind the other in each row."""
    return replace(case, positions=np.maximum(case.positions[:, :1], 0) + np.arange(case.shape.T, dtype=np.int32))


@pytest.mark.parametrize("layout", ["contiguous", pytest.param("paged", marks=further)])
@few
@given(data=st.data())
def test_dense_in_parts_is_that_of_the_definition(data, layout):
    """T8, T9, T10: rows that begin anywhere; each part is XLA's here, where a GPU has cuDNN's."""
    case = running(data.draw(cases((SHAPES[layout],))))
    config = cudnn.Config(piece=2)
    got = attention(dense_causal, case, layout, backend="cudnn", config=config, kv_heads=case.shape.K)
    check(got, dense_attention(*case.qkv(), case.positions, case.lengths))


@few
@given(case=cases((GROUPED,)), runs=st.booleans(), lost=st.integers(0, GROUPED.B * GROUPED.M))
def test_parts_are_for_queries_in_order_over_pages_that_are_held(case, runs, lost):
    """T9, T13: a chunk's rows run on and have all their pages; any other call is left to the walk."""
    case, s = running(case) if runs else case, case.shape
    memory, table = lay_out("paged", case.qkv()[1], case)
    table = np.append(table, 0).astype(np.int32)
    table[lost] = -1
    table = table[:-1].reshape(s.B, s.M)
    expected = True
    for valid, positions, pages in zip(case.valid, case.positions, table, strict=True):
        seen = positions[valid].tolist()
        expected &= valid[: len(seen)].all() and seen == list(range(min(seen, default=0), max(seen, default=-1) + 1))
        expected &= not seen or bool((pages[: max(seen) // s.P + 1] >= 0).all())
    found = cudnn.in_order(
        view(jnp.asarray(memory), jnp.asarray(table), s.P), *map(jnp.asarray, (case.positions, case.lengths))
    )
    assert bool(found) == expected


@st.composite
def climbing(draw: st.DrawFn) -> Case:
    """A case whose queries see as much as the one before them, or some keys more: as on a device with some blocks."""
    case = draw(cases((SHAPES["paged"],)))
    steps = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 3, (case.shape.B, case.shape.T))
    first = np.array(draw(st.lists(st.integers(-1, case.shape.S), min_size=case.shape.B, max_size=case.shape.B)))
    return replace(case, positions=(first[:, None] + np.cumsum(steps, 1) - steps[:, :1]).astype(np.int32))


@few
@given(case=climbing())
def test_dense_behind_a_prefix_is_that_of_the_definition(case):
    """T8, T28: rows of which the first query sees nothing, or a part of a block; the prefix is XLA's here."""
    at = jnp.asarray(case.positions), jnp.asarray(case.lengths)
    memory, table = lay_out("paged", case.qkv()[1], case)
    assume(cudnn_prefix.in_order(view(jnp.asarray(memory), jnp.asarray(table), case.shape.P), *at))
    options = dict(backend="cudnn_prefix", config=cudnn.Config(piece=2), kv_heads=case.shape.K)
    got = attention(dense_causal, case, "paged", **options)
    check(got, dense_attention(*case.qkv(), case.positions, case.lengths))


@few
@given(case=st.one_of(climbing(), cases((GROUPED,))), lost=st.integers(0, GROUPED.B * GROUPED.M))
def test_a_prefix_is_what_every_query_of_a_row_sees_and_the_device_holds(case, lost):
    """The rest of its row may lack pages, and is at most as many blocks as hold the queries, and one more."""
    s = case.shape
    memory, table = lay_out("paged", case.qkv()[1], case)
    table = np.append(table, 0).astype(np.int32)
    table[lost % len(table)] = -1
    table = table[:-1].reshape(s.B, s.M)
    expected = True
    for valid, positions, pages in zip(case.valid, case.positions, table, strict=True):
        first_block = (positions[0] + 1) // s.P if valid[0] else 0
        expected &= bool((pages[:first_block] >= 0).all())
        seen_blocks = (positions[valid] + s.P) // s.P  # of which the last may be seen in part
        expected &= bool((positions[valid] + 1 >= first_block * s.P).all())
        expected &= bool((seen_blocks - first_block <= min(s.M, -(-s.T // s.P) + 1)).all())
    at = jnp.asarray(case.positions), jnp.asarray(case.lengths)
    assert bool(cudnn_prefix.in_order(view(jnp.asarray(memory), jnp.asarray(table), s.P), *at)) == expected
    assert not cudnn_prefix.in_order(contiguous(jnp.zeros((s.B, 1, s.S, 4)), s.P), *at)


@few
@given(case=cases((GROUPED,)))
def test_dense_decode_is_that_of_the_definition(case):
    """T13, T38: a query has as many pieces as it sees keys, and some splits see none."""
    case = fitting(case, dict(op=sparse_decode))
    config = DecodeConfig(keys=4, programs=130)
    got = attention(dense_decode, case, "paged", backend="triton", config=config, kv_heads=case.shape.K)
    check(got, dense_attention(*case.qkv(), case.positions, case.lengths))


@pytest.mark.parametrize("near", [pytest.param(True, marks=further), False])  # near: the walk of query_union
def test_auto_takes_the_schedule_that_the_overlap_calls_for(near):
    """Both branches give the definition's result, and one of them the very bits of kv_block_major."""
    shape = replace(GROUPED, B=1, T=40, S=160, P=4, J=3)
    case = prefill(shape, 5)
    case = replace(case, positions=case.positions + 120)
    blocks = case.any_blocks()
    if near:
        blocks = np.broadcast_to(blocks[:, :, :1], blocks.shape)
    args = dict(op=sparse_prefill, case=case, layout="paged", blocks=blocks, backend="triton")
    check(attention(**args), of_definition(case, blocks))
    spread = attention(**args, schedule="kv_block_major")[0].tobytes() == attention(**args)[0].tobytes()
    assert spread != near


@every_kernel
def test_missing_pages_have_no_weight(options):
    """T9: a selected block whose page is -1 adds nothing, and no other page is read in its place."""
    case = fitting(prefill(GROUPED, 6), options)
    q, k, v = case.qkv()
    memory, table = lay_out("paged", k, case)
    values = lay_out("paged", v, case)[0]
    blocks = np.broadcast_to(np.array([0, 3, 7], np.int32), case.any_blocks().shape)
    table[:, 3] = -1
    args = (options["op"], q, memory, values, table, blocks, case.positions, case.lengths)
    options = tuple((name, value) for name, value in options.items() if name != "op")
    got = run_attention(*args, block_size=GROUPED.P, options=options)
    check([np.asarray(x) for x in got], of_definition(case, np.where(blocks == 3, -1, blocks)))


def test_e4m3_keys_and_values_are_those_that_they_stand_for():
    """Stored in one byte with a scale a head: the result is that of the numbers read back."""
    case = fitting(prefill(GROUPED, 8), KERNELS["decode"])
    q, k, v = case.qkv()
    scales = (jnp.array([0.5, 2.0]), jnp.array([0.25, 4.0]))
    store = lambda x, scale: jnp.asarray(x / np.asarray(scale)[:, None]).astype(jnp.float8_e4m3fn)
    stored = [store(k, scales[0]), store(v, scales[1])]
    back = [np.asarray(x.astype(jnp.float32) * s[:, None]) for x, s in zip(stored, scales, strict=True)]
    blocks = case.any_blocks()
    want = definition(q, *back, blocks, case.positions, case.lengths, block_size=GROUPED.P, schedule="definition")
    pages = (view(jnp.stack([x.swapaxes(1, 2)] * 2), None, GROUPED.P) for x in stored)
    args = (jnp.asarray(q), *pages, *(jnp.asarray(x) for x in (blocks, case.positions, case.lengths)))
    options = dict(KERNELS["decode"], scales=scales, return_lse=True, interpret=True)
    got = jax.jit(partial(options.pop("op"), **options))(*args)
    check([np.asarray(x) for x in got], want)


def test_cudnn_attends_to_whole_rows(monkeypatch, unchecked):
    """Its output behind a row is 0, whatever it gives there; other dtypes, and keys of other tokens, are refused."""
    given = {}

    def attend(q, k, v, **options):
        given.update(options)
        return jnp.full(q.shape, 3, q.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    of = lambda *shape, dtype="bfloat16": jnp.zeros(shape, dtype)
    q, keys, lengths = of(2, 3, 4, 8), of(2, 3, 2, 8), jnp.array([3, 1], jnp.int32)
    out = cudnn_causal(q, keys, keys, lengths)
    assert out[:, :, 0, 0].tolist() == [[3, 3, 3], [3, 0, 0]] and given.pop("implementation") == "cudnn"
    assert given.pop("is_causal") and all(x.tolist() == [3, 1] for x in given.values())
    assert cudnn_causal(q.astype("float16"), keys, keys, lengths).dtype == jnp.float16
    for wrong, k in ((of(2, 3, 4, 8, dtype="float32"), keys), (q, of(2, 4, 2, 8)), (q, of(1, 3, 2, 8))):
        with pytest.raises(ValueError, match="cuDNN takes bfloat16 and float16, and this path as many keys as queries"):
            cudnn_causal(wrong, k, k, lengths)
