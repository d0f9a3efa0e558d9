"""TPU kernels in TPU interpret mode against the definition.

The interpreter raises on a read outside of a buffer, fills fresh memory with NaN, carries out a copy only when it is
waited for, and looks for races between copies and computation. Memory that nothing may look at holds NaN as well.
"""

import math
from dataclasses import replace
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params
from support import msa_reference as reference
from support.comparisons import assert_close, assert_same_sets
from support.insertion import EPS, draw
from support.insertion import expected as inserted
from support.kernels_inputs import NanKey, check, in_chunks, lay_out, of_definition, view
from support.msa_strategies import (
    GROUPED,
    ONE_SLOT,
    RAGGED,
    ROOMY,
    Case,
    Shape,
    assert_partial,
    cases,
    dense_attention,
    index_topk,
    prefill,
)
from support.msa_strategies import attention as definition
from support.tpu_interpreter import STRICT

from m3jax.model.layers import rope_table
from pallas_kernels.dense_causal import dense_causal
from pallas_kernels.dense_causal.mosaic_tpu import Config as DenseConfig
from pallas_kernels.index_topk import index_topk as index_kernel
from pallas_kernels.index_topk.mosaic_tpu import Config as IndexConfig
from pallas_kernels.index_topk_decode import index_topk_decode
from pallas_kernels.index_topk_decode.mosaic_tpu import Config as IndexDecodeConfig
from pallas_kernels.mosaic_common import Chip
from pallas_kernels.pages import paged
from pallas_kernels.qk_norm_rope_insert import qk_norm_rope_insert
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_decode.mosaic_tpu import Config as DecodeConfig
from pallas_kernels.sparse_prefill import Call, sparse_prefill
from pallas_kernels.sparse_prefill.mosaic_tpu import Config, kv_block_major

further = pytest.mark.further
FEW = 3  # queries that a decode kernel is given
# Of 40 keys, so that few steps of the interpreter drop many blocks; three heads to each of two groups.
SMALL = replace(GROUPED, B=2, T=6, N=6)
INDEX = {
    # Tiles of four queries, of which the last one of a row is not full.
    "prefill": dict(op=index_kernel, backend="mosaic_tpu", config=IndexConfig(lanes=8, pages=4)),
    "decode": dict(op=index_topk_decode, backend="mosaic_tpu", config=IndexDecodeConfig(lanes=16, pages=2)),
}
ATTENTION = {
    "query_union": dict(op=sparse_prefill, backend="mosaic_tpu", schedule="query_union", config=Config(tokens=4)),
    "kv_block_major": dict(op=partial(in_chunks, kv_block_major, Call, 16), config=Config(tokens=4)),
    "decode": dict(op=sparse_decode, backend="mosaic_tpu"),
    "decode in pieces": dict(op=sparse_decode, backend="mosaic_tpu", config=DecodeConfig(slots=2)),
}
DENSE = dict(op=dense_causal, backend="mosaic_tpu", config=DenseConfig(tokens=4))
DECODE = (index_topk_decode, sparse_decode)
every_index = pytest.mark.parametrize("options", INDEX.values(), ids=INDEX.keys())
# Of the two forms of a step, the one that adds up parts stands for both.
of_attention = lambda *marked: pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=further if name in marked else ()) for name, options in ATTENTION.items()],
    ids=ATTENTION.keys(),
)
few = settings(max_examples=2)


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """After an exception the interpreter's memory would be that of the failed kernel."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def fitting(case: Case, options: dict) -> Case:
    """A decode kernel takes the last queries of a case."""
    if options["op"] not in DECODE or case.shape.T <= FEW:
        return case
    return replace(case, shape=replace(case.shape, T=FEW), positions=case.positions[:, -FEW:])


def at_the_end(shape, seed: int) -> Case:
    """The last queries of full rows: they see every block."""
    case = prefill(shape, seed)
    return replace(case, positions=case.positions + (shape.S - shape.T))


@partial(jax.jit, static_argnames=("op", "block_size", "options"))
def _index(op, q, k, table, *at, block_size, options):
    return op(q, view(k, table, block_size), *at, interpret=STRICT, **dict(options))


@partial(jax.jit, static_argnames=("op", "block_size", "options"))
def _attention(op, q, k, v, table, *rest, block_size, options):
    pages = (view(x, table, block_size) for x in (k, v))
    rest = (x for x in rest if x is not None)
    return op(q, *pages, *rest, return_lse=True, interpret=STRICT, **dict(options))


def raced(result):
    """The result, once it is there and nothing raced."""
    out = jax.tree.map(lambda x: np.asarray(x, np.float32) if x.dtype != jnp.int32 else np.asarray(x), result)
    assert not interpreter.races.races_found
    return out


def index(case: Case, layout: str, op, arrays=None, **options) -> np.ndarray:
    q, k = arrays or case.index()
    memory, table = lay_out(layout, k, case)
    options = tuple((dict(top_k=case.shape.J) | options).items())
    args = (jnp.asarray(q), memory, table, case.positions, case.lengths)
    return raced(_index(op, *args, block_size=case.shape.P, options=options))


def attention(case: Case, layout: str, blocks, op, dtype=np.float32, **options):
    q, k, v = case.qkv(dtype)
    memory, table = lay_out(layout, k, case)
    args = (q, memory, lay_out(layout, v, case)[0], table, blocks, case.positions, case.lengths)
    return raced(_attention(op, *args, block_size=case.shape.P, options=tuple(options.items())))


def chosen(case: Case, **rules) -> np.ndarray:
    return np.asarray(index_topk(*case.index(), case.positions, case.lengths, **case.rules(**rules)))


# A program takes a second or two. All kernels read whole blocks in pages, which other tests here share; rows with a
# last block that is not whole are for one kernel of each kind, and in one byte for the others. All draw ragged rows.
SHAPES = dict(contiguous=RAGGED, paged=SMALL)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("prefill", "paged"), ("decode", "paged"), pytest.param("decode", "contiguous", marks=further)],
)
@few
@given(data=st.data())
def test_selection_is_that_of_the_definition(data, name, layout):
    """T9, T10, T11, T12, T13, T19, T20, T21: ragged rows in NaN memory, each query with an own block of its own."""
    options = INDEX[name]
    case = fitting(data.draw(cases((SHAPES[layout],))), options)
    got = index(case, layout, **options)
    assert_same_sets(got, chosen(case))
    assert_partial(case, got)


@pytest.mark.further
@pytest.mark.parametrize(("name", "shape"), [("prefill", ROOMY), ("decode", ONE_SLOT)])
@few
@given(data=st.data())
def test_selection_of_odd_shapes(data, name, shape):
    """More slots than blocks; one slot, for which nothing is read. The two kernels have one walk, which knows both."""
    options = INDEX[name]
    case = fitting(data.draw(cases((shape,))), options)
    assert_same_sets(index(case, "paged", **options), chosen(case))


def test_keys_are_those_of_the_order():
    """By them selections of several devices are joined: of a row's first block, of its second, and of padding."""
    shape = Shape(B=2, T=3, S=16, N=1, K=1, H=8, P=4, J=2)
    case = Case(shape, np.tile(np.arange(3, 6, dtype=np.int32), (2, 1)), np.array([5, 16], np.int32), 0)
    blocks, keys = index(case, "paged", **INDEX["decode"], return_keys=True)
    at = case.positions, case.lengths
    scores = reference.block_scores(*case.index(), *at, shape.P)
    by_id = np.sort(np.where(blocks < 0, shape.M, blocks), axis=-1)
    assert_same_sets(np.where(by_id < shape.M, by_id, -1), reference.select_blocks(scores, *at, block_size=4, top_k=2))
    expected = np.where(blocks < 0, -np.inf, np.take_along_axis(scores, np.maximum(blocks, 0), axis=-1))
    expected[blocks == (case.positions // shape.P)[:, None, :, None]] = np.inf
    assert_close(keys, expected, "keys", "B K T J", atol=1e-5)


@further
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_forced_blocks_use_slots(name):
    """Forced blocks take slots and add none."""
    rules, options = dict(local_blocks=2, init_blocks=1), INDEX[name]
    case = fitting(at_the_end(SMALL, 1), options)
    assert_same_sets(index(case, "paged", **options, **rules), chosen(case, **rules))


@every_index
@few
@given(seed=st.integers(0, 2**16), kind=st.sampled_from(["equal", "infinite", "nan queries", "nan blocks"]))
def test_total_order(seed, kind, options):
    """T23, T24: ties go to the lower id, infinities are numbers, NaN ranks last."""
    case = fitting(at_the_end(SMALL, seed), options)
    q, k = (x.copy() for x in case.index())
    rng, block = np.random.default_rng(seed), np.arange(GROUPED.S) // GROUPED.P
    if kind == "equal":
        k[:] = 1.0
    if kind == "infinite":
        q[:] = np.abs(q) + 1.0
        k[:, np.isin(block, rng.choice(GROUPED.M, 4))] = np.inf
        k[:, np.isin(block, rng.choice(GROUPED.M, 2))] = -np.inf
    if kind == "nan queries":
        q[:, ::3] = np.nan
    if kind == "nan blocks":
        k[:, np.isin(block, rng.choice(GROUPED.M, 5))] = np.nan
    got = index(case, "paged", arrays=(q, k), **options)
    assert_same_sets(got, index_topk(q, k, case.positions, case.lengths, **case.rules()))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "paged") for name in ("query_union", "decode")),
        *(pytest.param(name, "paged", marks=further) for name in ("kv_block_major", "decode in pieces")),
        *(pytest.param(name, "contiguous", marks=further) for name in ("query_union", "decode")),
    ],
)
@few
@given(data=st.data())
def test_attention_is_that_of_the_definition(data, name, layout):
    """T8, T9, T10, T13, T19, T20: any selection, unused slots, unseen blocks, padding, NaN behind every row."""
    options = ATTENTION[name]
    case = fitting(data.draw(cases((SHAPES[layout],))), options)
    blocks = case.any_blocks()
    check(attention(case, layout, blocks, **options), of_definition(case, blocks))


def test_a_tile_starts_the_copies_of_the_next_one():
    """Of its first three blocks: a tile that walks fewer starts some before its first one, one that walks none all."""
    case = at_the_end(SMALL, 4)  # two tiles of each row and KV head, one after the other
    blocks = np.full((2, SMALL.K, SMALL.T, SMALL.J), -1, np.int32)
    walked = (1, 3, 0, 3, 2, 2, 0, 1)
    for step, count in enumerate(walked):
        row, head, tile = step // 4, step // 2 % 2, step % 2
        blocks[row, head, 4 * tile, :count] = np.random.default_rng(step).permutation(SMALL.M)[:count]
    check(attention(case, "paged", blocks, **ATTENTION["query_union"]), of_definition(case, blocks))


@pytest.mark.parametrize(
    ("name", "listed"), [("query_union", 0), ("decode", FEW * 2 * 3), pytest.param("dense", 0, marks=further)]
)
def test_rows_are_taken_as_many_at_a_time_as_scalar_memory_holds(name, listed, monkeypatch):
    """Three rows, in groups of two by their lists, are attended to as all at once."""
    modules = dict(decode="sparse_decode.mosaic_tpu", dense="dense_causal.mosaic_tpu")
    module = import_module(f"pallas_kernels.{modules.get(name, 'sparse_prefill.mosaic_tpu.query_union')}")
    options = dict(DENSE, kv_heads=SMALL.K) if name == "dense" else ATTENTION[name]
    case = fitting(prefill(replace(SMALL, B=3, S=24), 3), options)  # a shape of its own: it is traced here
    monkeypatch.setattr(module, "PREFETCHED", 2 * (case.shape.M + listed) + 1)
    if name == "dense":
        blocks, expected = None, dense_attention(*case.qkv(), case.positions, case.lengths)
    else:
        blocks = case.any_blocks()
        expected = of_definition(case, blocks)
    check(attention(case, "paged", blocks, **options), expected)


@pytest.mark.parametrize("layout", ["paged", pytest.param("contiguous", marks=further)])
@few
@given(data=st.data())
def test_dense_is_that_of_the_definition(data, layout):
    """T8, T10, T38: every block up to the diagonal, padding inside a tile of queries, NaN behind every row."""
    case = data.draw(cases((SHAPES[layout],)))
    got = attention(case, layout, None, **DENSE, kv_heads=case.shape.K)
    check(got, dense_attention(*case.qkv(), case.positions, case.lengths))


@of_attention("decode", "kv_block_major")
def test_empty_rows_and_empty_selections(options):
    """T8, T38: no key, no block, no piece that saw anything: zeros, and an LSE of -inf."""
    case = fitting(prefill(SMALL, 1, lengths=[0, 13]), options)
    blocks = np.full((2, SMALL.K, case.shape.T, GROUPED.J), -1, np.int32)
    out, lse = attention(case, "paged", blocks, **options)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_a_decode_copies_the_pages_of_which_it_reads_a_key(monkeypatch):
    """Keys and values once for each token and KV head; nothing for an empty slot, and for a block behind the token."""
    copied, read = [], interpreter.DMA.execute_read
    monkeypatch.setattr(interpreter.DMA, "execute_read", lambda dma: read(dma) or copied.append(dma.data_size))
    case = fitting(prefill(SMALL, 1), ATTENTION["decode"])
    blocks = case.any_blocks()
    reads = (blocks >= 0) & (blocks * SMALL.P <= case.positions[:, None, :, None])
    assert 0 < reads.sum() < reads.size
    check(attention(case, "paged", blocks, **ATTENTION["decode"]), of_definition(case, blocks))
    assert sum(copied) == 2 * reads.sum() * SMALL.P * SMALL.H * 4  # in float32


@of_attention("decode", "decode in pieces")
def test_a_nan_that_a_query_reads_is_in_its_output(options):
    """A sum that is NaN is not above 0, and must not pass for that of a query that saw no key."""
    case = NanKey(**vars(fitting(prefill(SMALL, 2), options)))
    blocks = case.any_blocks()
    out, lse = attention(case, "paged", blocks, **options)
    reads = (blocks == 0).any(-1).swapaxes(1, 2).repeat(SMALL.N // SMALL.K, axis=2)  # [B T N]
    assert reads.any()
    assert np.isnan(out[reads]).all(), f"{np.isfinite(out[reads]).sum()} numbers of {out[reads].size} hide the NaN key"
    assert np.isnan(lse[reads]).all()


@of_attention("decode")
def test_missing_pages_have_no_weight(options):
    """T9: a selected block whose page is -1 adds nothing, and no other page is read in its place."""
    case = fitting(at_the_end(SMALL, 6), options)
    q, k, v = case.qkv()
    memory, table = lay_out("paged", k, case)
    values = lay_out("paged", v, case)[0]
    blocks = np.broadcast_to(np.array([0, 3, 7], np.int32), (2, SMALL.K, case.shape.T, 3))
    table = table.copy()
    table[:, 3] = -1
    args = (q, memory, values, table, blocks, case.positions, case.lengths)
    options = dict(options)
    got = raced(_attention(options.pop("op"), *args, block_size=GROUPED.P, options=tuple(options.items())))
    check(got, of_definition(case, np.where(blocks == 3, -1, blocks)))


@pytest.mark.further  # that of a step is next
@pytest.mark.parametrize("name", ["query_union", "kv_block_major", "decode in pieces"])
def test_one_byte_keys_and_values(name):
    """e4m3 pages under queries in bfloat16: the result is that of the numbers they stand for."""
    options = ATTENTION[name]
    case = fitting(prefill(RAGGED, 8), options)
    q, k, v = case.qkv(jnp.bfloat16)
    stored = [jnp.asarray(x).astype(jnp.float8_e4m3fn) for x in (k, v)]
    blocks = case.any_blocks()
    exact = (np.asarray(x, np.float32) for x in (q, *stored))
    want, _ = definition(*exact, blocks, case.positions, case.lengths, block_size=RAGGED.P, schedule="definition")
    memory = [jnp.stack([x.swapaxes(1, 2)] * 2) for x in stored]
    args = (q, *memory, None, blocks, case.positions, case.lengths)
    options = dict(options)
    out, _ = raced(_attention(options.pop("op"), *args, block_size=RAGGED.P, options=tuple(options.items())))
    assert np.linalg.norm(out - want) < 5e-3 * np.linalg.norm(want)


def test_decode_reads_one_byte_keys_and_values_by_scales_of_heads():
    """Another scale for each head, and others for values than for keys."""
    case = fitting(prefill(SMALL, 8), dict(op=sparse_decode))
    q, k, v = case.qkv()
    scales = jnp.array([0.03, 0.17], jnp.float32), jnp.array([0.05, 0.011], jnp.float32)
    stored = [(x / scale[:, None]).astype(jnp.float8_e4m3fn) for x, scale in zip((k, v), scales, strict=True)]
    exact = [np.asarray(x, np.float32) * np.asarray(scale)[:, None] for x, scale in zip(stored, scales, strict=True)]
    blocks, at = case.any_blocks(), (case.positions, case.lengths)
    want, _ = definition(q, *exact, blocks, *at, block_size=GROUPED.P, schedule="definition")
    pages = [
        view(jnp.stack([jnp.full_like(x.swapaxes(1, 2), jnp.nan), x.swapaxes(1, 2)]), None, GROUPED.P) for x in stored
    ]
    decode = jax.jit(partial(sparse_decode, scales=scales, return_lse=True, backend="mosaic_tpu", interpret=STRICT))
    out, _ = raced(decode(q, *pages, blocks, *at))
    assert np.linalg.norm(out - want) < 1e-5 * np.linalg.norm(want)


def test_insert_is_that_of_the_model():
    """T14, T16, T20: tokens anywhere, each at its own slot of pages that others share; nothing else is touched."""
    shape = replace(SMALL, S=37)
    x, norms, positions, lengths, table, pools = draw(shape, 1)
    lengths[0] = shape.S
    cos, sin = jax.jit(rope_table, static_argnums=(1, 2, 3))(positions, shape.H // 2, 1e4, jnp.dtype("float32"))

    @jax.jit
    def run(x, norms, positions, lengths, table, pools):
        pages = (paged(pool, table, layer=1) for pool in pools)
        return qk_norm_rope_insert(
            x, norms, cos, sin, positions, lengths, *pages,
            eps=EPS, dtype=jnp.float32, backend="mosaic_tpu", interpret=STRICT,
        )  # fmt: skip

    got = raced(run(x, norms, positions, lengths, table, pools))
    names = ("q", "index_q", "k", "v", "index_k")
    for name, want in zip(names, inserted(x, norms, cos, sin, positions, lengths, table, pools), strict=True):
        assert_close(getattr(got, name).reshape(want.shape), want, name, atol=2e-6)


def fetched_by_index_maps(call) -> int:
    """Bytes that a kernel's blocks move: a block is fetched, or written, when its index changes from step to step."""
    mapping, total = call.params["grid_mapping"], 0
    for block in mapping.block_mappings:
        if block.block_aval.memory_space == pl.ANY:
            continue
        index_map, seen = block.index_map_jaxpr, []
        unread = [0] * (len(index_map.in_avals) - len(mapping.grid))  # lists that drive copies by hand alone
        for step in np.ndindex(mapping.grid):
            index = jax.core.eval_jaxpr(index_map.jaxpr, index_map.consts, *map(np.int32, step), *unread)
            seen.append(tuple(map(int, index)))
        fetches = sum(one != other for one, other in zip(seen, [None, *seen], strict=False))
        total += fetches * math.prod(block.block_aval.inner_aval.shape) * block.block_aval.inner_aval.dtype.itemsize
    return total


def copies_and_estimate(monkeypatch, fn, *args) -> tuple[int, int]:
    """(bytes that a program's kernel moves, those of its estimate), with a dense selection of whatever it can read."""
    copied, read = [], interpreter.DMA.execute_read

    def execute_read(dma):
        read(dma)
        copied.append(dma.data_size)

    monkeypatch.setattr(interpreter.DMA, "execute_read", execute_read)
    traced = jax.jit(fn).trace(*args)
    (call,) = (eqn for eqn in all_equations(traced.jaxpr.jaxpr) if eqn.primitive.name == "pallas_call")
    jax.block_until_ready(jax.jit(fn)(*args))
    mapping = call.params["grid_mapping"]
    in_scalar_memory = sum(x.aval.size * x.aval.dtype.itemsize for x in call.invars[: mapping.num_index_operands])
    moved = sum(copied) + fetched_by_index_maps(call) + in_scalar_memory
    return moved, call.params["cost_estimate"].bytes_accessed


def all_equations(jaxpr):
    """Yield the equations of a program, and of those that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(eqn.params):
                yield from all_equations(inner)


def call_that_reads_all(name: str) -> tuple:
    """A kernel's call, in which a query sees all blocks, and those of a tile choose as differently as they can."""
    shape = replace(GROUPED, B=1, T=4, J=4)
    tokens = 2
    case = at_the_end(replace(shape, S=tokens * 4 * shape.P), 1)
    (q, k, v), (index_q, index_k), size = case.qkv(), case.index(), shape.P
    in_pages = lambda x: view(*map(jnp.asarray, lay_out("paged", x, case)), size)
    pages = [in_pages(x) for x in (k, v)]
    num_blocks = pages[0].num_blocks
    lengths, last = case.lengths, jnp.full_like(case.positions, case.shape.S - 1)
    # The queries of a tile choose all blocks, each its own.
    blocks = np.arange(num_blocks, dtype=np.int32).reshape(tokens, 4)[np.arange(case.shape.T) % tokens]
    blocks = jnp.broadcast_to(blocks, (1, case.shape.K, case.shape.T, 4))
    if name == "dense":
        op = partial(dense_causal, kv_heads=case.shape.K, config=DenseConfig(tokens=4))
        args = q, *pages, last, lengths
    elif name == "query_union":
        op = partial(sparse_prefill, schedule="query_union", config=Config(tokens=tokens))
        args = q, *pages, blocks, last, lengths
    elif name == "decode":
        op, args = sparse_decode, (q, *pages, blocks, last, lengths)
    else:
        op = partial(INDEX["decode" if "step" in name else "prefill"]["op"], top_k=3)
        config = INDEX["decode" if "step" in name else "prefill"]["config"]
        # Behind its last key a query scores them all.
        behind = last + 1
        op, args = partial(op, config=config), (
            jnp.asarray(index_q), in_pages(index_k), behind, lengths + 1,
        )  # fmt: skip
    return lambda *args: op(*args, backend="mosaic_tpu", interpret=STRICT), *args


@pytest.mark.parametrize(
    "name",
    ["dense", *(pytest.param(name, marks=further) for name in ("query_union", "decode", "index")), "index of a step"],
)
def test_a_kernel_s_estimate_is_what_it_moves(name, monkeypatch):
    """Where queries choose as differently as they can, and see all; then its copies are as many as there can be.

    A step of query_union reads the next one's list too, but for the last.
    """
    moved, estimate = copies_and_estimate(monkeypatch, *call_that_reads_all(name))
    assert moved == pytest.approx(estimate, rel=0.02), f"{moved} bytes, and {estimate} by the estimate"


@pytest.mark.parametrize(("name", "count"), [("dense", 2), ("query_union", 4), ("index", 1)])
def test_each_step_of_several_cores_has_blocks_of_its_own(name, count, monkeypatch):
    """Three cores share the steps, and some only fill up their shares: all blocks are whole ones of their arrays."""
    monkeypatch.setattr(Chip, "current", lambda interpret: Chip(3, 32 << 20))
    fn, *args = call_that_reads_all(name)
    (call,) = (
        eqn for eqn in all_equations(jax.jit(fn).trace(*args).jaxpr.jaxpr) if eqn.primitive.name == "pallas_call"
    )
    mapping = call.params["grid_mapping"]
    cores, per_core = mapping.grid
    assert (cores, per_core) == (3, -(-count // 3))
    # In the order in which steps are numbered.
    steps = [(np.int32(core), np.int32(i)) for i in range(per_core) for core in range(cores)]
    for number, block in enumerate(mapping.block_mappings):
        if block.block_aval.memory_space == pl.ANY:
            continue
        shape, size, of_step = block.array_aval.shape, block.block_aval.inner_aval.shape, block.index_map_jaxpr
        unread = [0] * (len(of_step.in_avals) - 2)  # lists that drive copies by hand alone
        places = [tuple(map(int, jax.core.eval_jaxpr(of_step.jaxpr, of_step.consts, *step, *unread))) for step in steps]
        assert not any(np.remainder(shape, size)), (number, shape, size)
        starts = np.array(places) * size
        assert ((starts >= 0) & (starts < shape)).all(), (number, places)
        if number >= mapping.num_inputs:
            own = places[:count]
            assert len({*own}) == count and not {*own} & {*places[count:]}, (number, places)


def test_wrong_operands_are_refused(unchecked):
    """What a TPU's kernels alone refuse; tests/kernels/test_refusals.py has what every op does."""
    case = prefill(replace(GROUPED, B=1, T=17), 0)
    q, k, v = (jnp.asarray(x) for x in case.qkv())
    views = [view(jnp.stack([x.swapaxes(1, 2)] * 2), None, 4) for x in (k, v)]
    at = jnp.asarray(case.any_blocks()), jnp.asarray(case.positions), jnp.asarray(case.lengths)
    with pytest.raises(ValueError, match="needs a width"):
        sparse_prefill(q, *views, *at, backend="mosaic_tpu")
    with pytest.raises(ValueError, match="allowed are 'auto'"):
        sparse_prefill(q, *views, *at, schedule="dense", backend="mosaic_tpu", interpret=STRICT)
