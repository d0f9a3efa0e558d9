"""The pieces between a model and its kernels by themselves: where a call runs, named values, what is kept of layers."""

import ast
import gc
import math
import re
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support import tiny
from support.lowering import equations
from support.pytrees import assert_settings_are_static
from support.shares import AXIS, SIZE, devices_map, shared_memory

import m3jax
from m3jax import M3Config, execution, mxfp8, ops
from m3jax.decoding.device.step import for_steps
from m3jax.execution import Projections, plain
from m3jax.execution.compute import TOKEN_TILE, Compute
from m3jax.execution.divided import Divided
from m3jax.execution.exchange import EXCHANGES
from m3jax.execution.experts import dispatch_capacity, ids_on_device, sums_by_dispatch, sums_by_gathering
from m3jax.execution.fast import Fast
from m3jax.execution.keep import KeepBoth, KeepNamed, KeepNothing, KeepOfEach, KeepResidual
from m3jax.execution.named import EditedValues, Inside, Values, apply_edit
from m3jax.execution.ordered import kernels_order
from m3jax.execution.tiled_over_mesh import with_even_columns
from m3jax.model import abstract
from m3jax.msa import Paged, PagedIndex, SelectionRules, contiguous
from m3jax.msa.definition import block_scores, dense_attention, select_blocks, sparse_attention
from m3jax.msa.share import Share
from m3jax.msa.views import Pooled
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import Heads, attend_all, attend_selected, backends, measured, project, project_each, select
from m3jax.ops.attend import attend_case
from m3jax.ops.backends import choose, interpret
from m3jax.ops.cases import ExpertsCase, OrderedCase, PagesCase, ProductCase, Stored, TokenwiseCase
from m3jax.ops.ordered import products_in_order
from m3jax.parallel import make_mesh
from m3jax.parallel.mesh import AXES
from m3jax.weights import StackedLayer, merge_inputs

BF16, F16, F32, E4M3 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn"))


def test_settings_of_calls_are_no_arrays():
    assert_settings_are_static(execution)
    assert_settings_are_static(m3jax.mxfp8)


# Where a call runs

MXFP8 = Stored(None, 1 << 20)
SIZES = dict(queries=2048, dtype=BF16, stored=BF16, width=128, block_size=128, num_blocks=512)
SPARSE, DENSE = PagesCase(op="sparse", **SIZES, slots=16), PagesCase(op="dense", **SIZES)
SELECT, INSERT = PagesCase(op="select", **SIZES, slots=16), PagesCase(op="insert", **SIZES, rotated=64)
PRODUCT = ProductCase(rows=16, dtype=BF16, inputs=6144, outputs=8192, stored=Stored(BF16, 1))
MXFP8_PRODUCT = replace(PRODUCT, stored=MXFP8)
EXPERTS = ExpertsCase(path="grouped", tokens=64, dtype=BF16, width=256, hidden=128, stored=Stored(BF16, 1))
FEW, MXFP8_EXPERTS = replace(EXPERTS, path="few", width=192, hidden=192), replace(EXPERTS, stored=MXFP8)
MANY = replace(MXFP8_EXPERTS, path="mxfp8_grouped", expert_pairs=64.0)
TILES = replace(EXPERTS, path="tiles", tokens=256)
PRODUCTS = replace(EXPERTS, path="products", width=256, hidden=512)
ADD_NORM = TokenwiseCase(op="add_norm", tokens=64, dtype=BF16)
ROUTER = TokenwiseCase(op="choose_experts", tokens=64, dtype=F32, experts=128)
ORDERED = OrderedCase(dtype=BF16, widths=(64, 192), router=(512, 16), head=(128, 64))
REACH = 1 << 31  # what an offset of 32 bits can name


def cases(case, **changes):
    """A case with each of several values of one of its attributes."""
    ((name, values),) = changes.items()
    return [replace(case, **{name: value}) for value in values]


RUN = [
    *cases(SPARSE, width=(64, 128)), *cases(SPARSE, block_size=(64, 128)), *cases(SPARSE, slots=(4, 32)),
    *cases(SPARSE, group=(1, 16)), *cases(SPARSE, dtype=(BF16,)), replace(SPARSE, dtype=F16, stored=F16),
    replace(SPARSE, dtype=F32, stored=F32), *cases(SPARSE, schedule=("auto", "invariant", "kv_block_major")),
    replace(SPARSE, queries=16, stored=E4M3), replace(SPARSE, schedule="invariant", stored=E4M3),
    replace(INSERT, stored=E4M3), replace(INSERT, rotated=128), replace(INSERT, width=64),
    replace(SELECT, queries=16, num_blocks=1 << 16), replace(SELECT, num_blocks=1 << 17),
    replace(SELECT, divided=True, forced=1), replace(SPARSE, divided=True), replace(DENSE, slots=0),
    PRODUCT, *cases(PRODUCT, inputs=(6144 + 32,)), *cases(PRODUCT, outputs=(8192 + 64,)),
    replace(PRODUCT, dtype=F16, stored=Stored(F16, 1)), *cases(MXFP8_PRODUCT, rows=(1, 1 << 20)),
    *cases(MXFP8_PRODUCT, inputs=(32,)), *cases(MXFP8_PRODUCT, outputs=(32,)),
    replace(MXFP8_PRODUCT, is_ordered=True, inputs=1, outputs=1), replace(PRODUCT, is_ordered=True, rows=1 << 20),
    EXPERTS, FEW, MXFP8_EXPERTS, MANY, *cases(MXFP8_EXPERTS, tokens=(1, 1 << 20)), replace(EXPERTS, tokens=1 << 20),
    replace(EXPERTS, dtype=F16, stored=Stored(F16, 1)), replace(MXFP8_EXPERTS, by_name=True, width=1, dtype=F32),
    replace(EXPERTS, by_name=True, width=64, dtype=F32, stored=Stored(F32, 1)),
    replace(FEW, by_name=True, tokens=measured.LAUNCH_BOUND_TOKENS), ADD_NORM, replace(ADD_NORM, dtype=F16),
    ROUTER, *cases(ROUTER, experts=(1, 256)), ORDERED, replace(ORDERED, dtype=F16), replace(ORDERED, head=(64, 64)),
    replace(ORDERED, router=(192, 32)), replace(ORDERED, widths=(64,)), replace(ORDERED, head=(96, 32)),
    PRODUCTS, replace(PRODUCTS, by_name=True, width=192, hidden=64, dtype=F32, stored=Stored(F32, 1)),
]  # fmt: skip
DO_NOT_RUN = [
    *cases(SPARSE, width=(32, 96, 256)), *cases(SPARSE, block_size=(32, 256)), *cases(SPARSE, slots=(3, 33)),
    *cases(SPARSE, group=(17,)), *cases(SELECT, slots=(3, 33)), *cases(SPARSE, stored=(F32, F16, E4M3)),
    replace(SPARSE, queries=17, stored=E4M3), *cases(SPARSE, schedule=("mask", "query_major")),
    replace(SPARSE, queries=16, schedule="kv_block_major"), *cases(DENSE, schedule=("kv_block_major", "mask")),
    replace(SPARSE, dtype=jnp.dtype("float64"), stored=jnp.dtype("float64")), replace(SPARSE, pages=False),
    replace(SELECT, score="lse"), replace(SELECT, divided=True, forced=2), replace(SPARSE, divided=True, forced=2),
    replace(SELECT, divided=True, schedule="invariant"), replace(SELECT, queries=16, num_blocks=(1 << 16) + 1),
    replace(INSERT, rotated=32), replace(INSERT, width=64, rotated=128), replace(INSERT, width=64, rotated=32),
    *cases(PRODUCT, rows=(17,)), *cases(PRODUCT, inputs=(6144 + 16,)), *cases(PRODUCT, outputs=(8192 + 32,)),
    replace(PRODUCT, dtype=F16), replace(PRODUCT, dtype=F32, stored=Stored(F32, 1)),
    *cases(MXFP8_PRODUCT, inputs=(16, 6144 + 16)), *cases(MXFP8_PRODUCT, outputs=(16,)),
    replace(MXFP8_PRODUCT, dtype=F32), replace(MXFP8_PRODUCT, stored=replace(MXFP8, quantises=True)),
    replace(MXFP8_PRODUCT, stored=Stored(None, REACH + 1)),
    replace(MXFP8_PRODUCT, is_ordered=True, stored=Stored(None, REACH + 1)),
    *cases(EXPERTS, width=(64, 192)), *cases(EXPERTS, hidden=(64,)), *cases(EXPERTS, dtype=(F32,)),
    *cases(FEW, tokens=(65,)), *cases(FEW, width=(32, 96)), replace(FEW, by_name=True, tokens=65),
    *cases(MXFP8_EXPERTS, width=(64, 192)), *cases(MXFP8_EXPERTS, hidden=(64,)), *cases(MXFP8_EXPERTS, dtype=(F32,)),
    *cases(MANY, expert_pairs=(63.0,)), replace(MANY, stored=EXPERTS.stored), TILES,
    *cases(ADD_NORM, tokens=(65,)), *cases(ADD_NORM, dtype=(F32,)), *cases(ROUTER, tokens=(65,)),
    *cases(ROUTER, experts=(96, 129)), *cases(ROUTER, dtype=(BF16,)),
    replace(ORDERED, dtype=F32), replace(ORDERED, widths=(64, 96)), replace(ORDERED, router=(384, 16)),
    replace(ORDERED, router=(512, 24)), replace(ORDERED, router=(96, 16)), replace(ORDERED, head=(128, 96)),
    replace(ORDERED, head=(112, 64)), replace(ORDERED, head=(128, 0)), *cases(PRODUCTS, width=(128, 384)),
    *cases(PRODUCTS, hidden=(384,)), *cases(PRODUCTS, dtype=(F16,)), replace(PRODUCTS, stored=MXFP8),
    replace(PRODUCTS, by_name=True, width=96, dtype=F32, stored=Stored(F32, 1)),
]  # fmt: skip
RUN_ON_A_TPU = [
    SPARSE, DENSE, SELECT, replace(SPARSE, dtype=F32, stored=F32), MXFP8_EXPERTS, MXFP8_PRODUCT, TILES,
    *cases(MXFP8_PRODUCT, inputs=(96, 1024, 2048)), *cases(MXFP8_PRODUCT, outputs=(128,)),
    *cases(TILES, tokens=(1 << 20,)), *cases(TILES, hidden=(256,)),
]  # fmt: skip
DO_NOT_RUN_ON_A_TPU = [
    replace(SPARSE, width=64), replace(SPARSE, dtype=F16, stored=F16), replace(SPARSE, schedule="invariant"), PRODUCT,
    EXPERTS, FEW, MANY, ADD_NORM, ROUTER, ORDERED, *cases(MXFP8_PRODUCT, inputs=(1024 + 32, 1536)),
    *cases(MXFP8_PRODUCT, outputs=(64, 192)), replace(MXFP8_PRODUCT, dtype=F16), *cases(TILES, tokens=(255,)),
    *cases(TILES, width=(64,)), *cases(TILES, hidden=(192,)), replace(TILES, dtype=F16), replace(TILES, stored=MXFP8),
    PRODUCTS,
]  # fmt: skip
RUN_BY_CUDNN = [
    DENSE,
    replace(DENSE, dtype=F16, stored=F16),
    *cases(DENSE, width=(64,)),
    *cases(DENSE, queries=(1 << 20,)),
]
DO_NOT_RUN_BY_CUDNN = [
    SPARSE, SELECT, INSERT, *cases(DENSE, queries=(16, 2047)), replace(DENSE, dtype=F32, stored=F32),
    *cases(DENSE, width=(32, 256)), *cases(DENSE, stored=(E4M3,)), *cases(DENSE, schedule=("invariant", "mask")),
    *cases(DENSE, pages=(False,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "run", "do_not"),
    [("triton", RUN, DO_NOT_RUN), ("mosaic_tpu", RUN_ON_A_TPU, DO_NOT_RUN_ON_A_TPU),
     ("cudnn", RUN_BY_CUDNN, DO_NOT_RUN_BY_CUDNN)],
)  # fmt: skip
def test_a_kernel_runs_up_to_its_limits_and_not_beyond(kernels, run, do_not, monkeypatch):
    """Each limit is used up by a case that runs, and passed by one that does not, which differs in that alone."""
    if kernels == "cudnn":
        assert DENSE.why_not(kernels).startswith("no Hopper GPU is at hand")
        monkeypatch.setattr("m3jax.ops.cases.compute_capability", lambda: "9.0")
    refused = {case: reason for case in run if (reason := case.why_not(kernels))}
    assert not refused, refused
    taken = [case for case in do_not if case.why_not(kernels) is None]
    assert not taken, taken


def test_the_reasons_name_the_call_s_numbers():
    for case, reason in (
        (replace(PRODUCT, rows=17), "17 rows, and XLA is faster from 17 on"),
        (replace(PRODUCT, inputs=48), "48 by 8192 channels (it has multiples of 32 and 64)"),
        (replace(ADD_NORM, tokens=65), "65 tokens, and XLA is as fast from 65 on"),
        (replace(FEW, tokens=65), "65 tokens (it has up to 64)"),
        (replace(MANY, expert_pairs=63.0), "63 pairs an expert (it has 64 or more)"),
        (replace(SELECT, queries=1, num_blocks=65537), "there are 65537 blocks, and it ranks up to 65536"),
        (replace(SPARSE, group=17), "groups of 17 heads and 16 slots (it has up to 16 heads, and 4 to 32 slots)"),
        (replace(ORDERED, head=(128, 96)), "96 of 128 dims are rotated (it has powers of two)"),
        (replace(MXFP8_PRODUCT, inputs=48), "a block of 32 input channels is not whole"),
    ):
        assert case.why_not("triton") == reason
    assert replace(TILES, tokens=255).why_not("mosaic_tpu") == "255 tokens (it has 256 or more)"


def test_a_path_by_name_is_held_to_what_its_kernel_takes_and_not_to_what_is_fastest(monkeypatch):
    monkeypatch.setattr(measured, "LAUNCH_BOUND_TOKENS", 100)
    for by_name, most in ((True, 100), (False, 64)):
        few = replace(FEW, by_name=by_name)
        assert replace(few, tokens=most).why_not("triton") is None
        assert replace(few, tokens=most + 1).why_not("triton") == f"{most + 1} tokens (it has up to {most})"


def test_a_name_counts_for_pages_alone(monkeypatch):
    """Attention by name runs or is refused; products, norms, routers, experts and whole models go to XLA in silence."""
    for case in (PRODUCT, MXFP8_PRODUCT, EXPERTS, FEW, MXFP8_EXPERTS, ADD_NORM, ROUTER, ORDERED):
        assert choose(case, "triton") == choose(case) == "xla"  # on a CPU
        with interpret():
            assert choose(case, "triton") == choose(case) == "triton"
            assert choose(case, "xla") == "xla"
    with pytest.raises(ValueError, match="backend = 'triton' cannot run this sparse: it needs a GPU"):
        choose(SPARSE, "triton")
    with interpret():
        assert (choose(SPARSE), choose(SPARSE, "triton")) == ("xla", "triton")
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    for case in (SPARSE, PRODUCT, ORDERED):
        assert choose(case) == "triton" and choose(case, "mosaic_tpu" if not case.is_named else "xla") == "xla"
    with pytest.raises(ValueError, match="backend = 'mosaic_tpu': it needs a TPU, and JAX runs on a GPU"):
        backends.check_backend("mosaic_tpu")
    backends.check_backend("triton")
    backends.check_backend("xla")
    with pytest.raises(ValueError, match="backend = 'cuda': allowed are"):
        backends.check_backend("cuda")
    with interpret("how"):
        assert backends.interpreted() == "how"
    assert backends.interpreted() is False


def test_what_is_stored_says_its_size():
    matrix = jnp.zeros((3, 4, 5, 6), F16)
    assert Stored.of(matrix) == Stored(F16, 360) and not Stored.of(matrix).is_mxfp8
    codes = MXFP8Array(jnp.zeros((2, 64, 3), "uint8"), jnp.zeros((2, 2, 3), "uint8"), 1, 1)
    assert Stored.of(codes) == Stored(None, 384, False) and Stored.of(codes).is_mxfp8
    assert Stored.of(replace(codes, activations="mxfp8")).quantises
    case = ProductCase.of(matrix, 2, 7, BF16)
    assert (case.inputs, case.outputs, case.rows, case.is_ordered) == (20, 6, 7, False)
    assert ProductCase.of(matrix, 1, 7, BF16, is_ordered=True).outputs == 30


def test_measured_sizes_are_those_of_the_nearest_widths():
    assert [measured.stacked_rows(*widths) for widths in ((6144, 8192), (5000, 9000), (192, 192), (300, 150))] == [
        16, 16, 0, 0,
    ]  # fmt: skip
    assert measured.few_tokens(6144, 3072) == measured.few_tokens(192, 192) == 64
    m3 = M3Config.m3()
    width, experts = m3.hidden_size, (m3.hidden_size, m3.intermediate_size)
    heads = m3.num_attention_heads * m3.head_dim
    outputs = {heads, m3.head_dim, m3.dense_intermediate_size, m3.intermediate_size}
    narrow = {(192, 192)}  # the widths of the tests
    assert {*measured.STACKED_ROWS} == {(width, n) for n in outputs} | {experts[::-1]} | narrow
    assert {*measured.FEW_TOKENS} == {experts} | narrow


def test_a_case_of_attention_has_the_numbers_of_its_call(monkeypatch):
    """The sizes of q [B T N H] and of blocks, G query heads a KV head; a pool of host memory's pages is no pages."""
    q, stored = jnp.zeros((2, 3, 6, 8), BF16), jnp.zeros((1, 5, 2, 4, 8))
    view = Paged(stored, stored, None, 0, jnp.zeros((2, 7), jnp.int32), BF16)
    pool = Pooled(stored[:, :, 0], stored[:, :, 0], None, 0, jnp.zeros(10, jnp.int32), view.table, 2, BF16)
    expected = PagesCase(
        op="sparse", queries=3, dtype=BF16, stored=F32, width=8, block_size=4, num_blocks=7, group=3, slots=5,
        schedule="mask", pages=True,
    )  # fmt: skip
    assert attend_case("sparse", q, view, slots=5, schedule="mask") == expected
    assert attend_case("sparse", q, pool, slots=5, schedule="mask") == replace(expected, stored=BF16, pages=False)
    index = PagedIndex(jnp.zeros((1, 5, 4, 8), E4M3), None, 0, view.table, BF16)
    taken = []
    insert_op = import_module("m3jax.ops.insert")  # its function has its name
    monkeypatch.setattr(insert_op, "choose", lambda case, backend: taken.append(case) or backend)
    for pages, stored_in in ((index, F32), (None, F32), (index.replace(k=index.k.astype(F16)), F32)):
        assert insert_op.insert_backend(q, view, pages, 6, "triton") == "triton"
        of_insert = replace(expected, op="insert", stored=stored_in, slots=0, rotated=6, schedule="auto")
        assert taken.pop() == of_insert
    in_bf16 = view.replace(k=view.k.astype(BF16))
    for pages, unusual in ((index, BF16), (index.replace(k=index.k.astype(F16)), F16)):
        insert_op.insert_backend(q, in_bf16, pages, 6)
        assert taken.pop().stored == unusual
    wide = index.replace(k=jnp.zeros((1, 5, 4, 16), BF16))
    insert_op.insert_backend(q, in_bf16, wide, 6)
    assert taken.pop().width == 16
    whole = contiguous(*[jnp.zeros((2, 28, 2, 8))] * 2, 4)
    assert attend_case("dense", q, whole, slots=0) == replace(expected, op="dense", slots=0, schedule="auto")


def test_few_queries_gather_their_blocks_and_many_are_sorted_by_block(monkeypatch):
    """Eight at most; with all blocks there is one way, and a name is that way for any number."""
    taken = []

    def note(case, chosen, schedules, suitable, q, *rest):
        taken.append(suitable)
        return q, q[..., 0]

    monkeypatch.setattr("m3jax.ops.attend._attend", note)
    view, lengths = contiguous(*[jnp.zeros((1, 8, 1, 4))] * 2, 4), jnp.ones(1, jnp.int32)
    for queries in (1, 8, 9):
        q, positions = jnp.zeros((1, queries, 2, 4)), jnp.zeros((1, queries), jnp.int32)
        attend_selected(q, view, jnp.zeros((1, 1, queries, 2), jnp.int32), positions, lengths)
        attend_all(q, view, positions, lengths)
    assert taken == ["query_major", "blockwise"] * 2 + ["kv_block_major", "blockwise"]


def test_no_function_of_a_mesh_is_checked_for_what_differs_between_devices():
    """What `jax.shard_map` checks of them it cannot know of a kernel inside, which it would refuse."""
    sources = [path.read_text(encoding="utf-8") for path in Path(m3jax.__file__).parent.rglob("*.py")]
    calls = [node for source in sources if "shard_map" in source for node in ast.walk(ast.parse(source))]
    calls = [x for x in calls if isinstance(x, ast.Call) and ast.unparse(x.func) == "jax.shard_map"]
    given = [{option.arg: ast.unparse(option.value) for option in call.keywords} for call in calls]
    assert len(given) >= 5 and all(options.get("check_vma") == "False" for options in given), given


def test_a_call_is_divided_by_two_devices_and_more():
    """Then the tower's attention is XLA's, as where a model is to keep to XLA or to one order of sums."""
    one, two = (Mesh(np.array(jax.devices()[:n]), ("tensor",)) for n in (1, 2))
    for compute, is_divided in ((Compute(), False), (Compute(mesh=one), False), (Compute(mesh=two), True)):
        assert compute.is_divided == is_divided
        assert compute.tower_backend == ("xla" if is_divided else "auto") and compute.token_tile is None
    ways = dict(backend="xla"), dict(invariant=True), dict(backend="triton")
    assert [Compute(**way).tower_backend for way in ways] == ["xla", "xla", "auto"]
    assert Compute(invariant=True).token_tile == TOKEN_TILE["cpu"]
    assert (Compute().remat, Compute().invariant) == (False, False)


def test_layers_are_taken_apart_for_steps_on_a_gpu_but_not_in_tiles(monkeypatch):
    """A model in tiles runs one program in prompts and in steps."""
    model = abstract(tiny.config("d"))
    for platform, of_steps, is_cut in (
        ("gpu", model, True),
        ("gpu", model.with_invariance(), False),
        ("cpu", model, False),
    ):
        monkeypatch.setattr("m3jax.decoding.device.step.platform", lambda platform=platform: platform)
        found = jax.eval_shape(lambda model: for_steps(model, 1), of_steps)
        assert (found.stacks[0].apart is not None) == is_cut, (platform, is_cut)


@pytest.mark.usefixtures("eight_devices")
def test_a_tile_of_tokens_is_the_platform_s_and_of_the_invariant_mode():
    assert Compute().token_tile is None and Compute(invariant=True).token_tile == TOKEN_TILE["cpu"] == 32
    one, several = (Mesh(jax.devices()[:size], ("tensor",)) for size in (1, 2))
    assert [Compute(mesh=mesh).is_divided for mesh in (None, one, several)] == [False, False, True]
    expected = {"auto": [Compute(), Compute(mesh=one), Compute(backend="triton")]}
    expected["xla"] = [Compute(backend="xla"), Compute(invariant=True), Compute(mesh=several)]
    for backend, settings in expected.items():
        assert {compute.tower_backend for compute in settings} == {backend}


# On a mesh


@pytest.mark.usefixtures("eight_devices")
def test_queries_are_finished_where_their_tokens_are(monkeypatch):
    """They are exchanged in the model's dtype; few tokens are everywhere, and a kernel may finish their queries."""
    how = Divided(Compute(mesh=make_mesh(expert=2)), has_cache=True)
    norms = Heads(*[jnp.zeros(4)] * 2, None, *[jnp.zeros(4)] * 2)
    for platform, tokens, dtype in (("cpu", 32, BF16), ("tpu", 512, BF16), ("gpu", 512, BF16), ("cpu", 4, F32)):
        monkeypatch.setattr("m3jax.execution.divided.platform", lambda platform=platform: platform)
        raw = Heads(*[jnp.ones((1, tokens, 2, 4))] * 4, jnp.ones((1, tokens, 4)))
        angles = jnp.ones((1, tokens, 1))
        found = how.heads(Projections(raw, norms, angles, angles, 1e-6, BF16))
        assert found.raw.q.dtype == found.raw.index_q.dtype == dtype
        assert found.raw.k.dtype == found.raw.index_k.dtype == F32  # rounded once, to what is stored
        assert [found.norms.q is None, found.norms.index_q is None] == [dtype == BF16] * 2


@pytest.mark.usefixtures("eight_devices")
def test_a_tpu_cuts_the_last_matrix_of_attention_out_late(monkeypatch):
    """Of many tokens, where no kernel multiplies; which layer it is is known when the activations are."""
    how, stack = Divided(Compute(mesh=make_mesh(expert=2)), has_cache=True), jnp.arange(48.0).reshape(2, 2, 3, 4)
    quantised = MXFP8Array(jnp.zeros((2, 64, 4), jnp.uint8), jnp.zeros((2, 2, 4), jnp.uint8))
    for platform, name, of_stack, rows, is_late in (
        ("tpu", "o_proj", stack, 512, True), ("tpu", "q_proj", stack, 512, False), ("tpu", "o_proj", stack, 4, False),
        ("tpu", "gate_proj", quantised, 512, False), ("cpu", "o_proj", stack, 512, False),
    ):  # fmt: skip
        monkeypatch.setattr("m3jax.execution.divided.platform", lambda platform=platform: platform)
        assert how.reads_in_place(name, of_stack, rows, F32) == is_late, (platform, name, rows)
    monkeypatch.setattr("m3jax.execution.divided.platform", lambda: "tpu")
    assert how.stacked(quantised, jnp.int32(1)).backend == "auto"

    def product(x, layer):
        return project("xi,io->xo", x, merge_inputs(how.stacked(stack, layer), 2))

    x, layer = jnp.ones((5, 6)), jnp.int32(1)
    np.testing.assert_array_equal(product(x, layer), x @ stack[1].reshape(6, 4))
    traced = jax.make_jaxpr(product)(x, layer).jaxpr
    readers = [step.primitive.name for step in traced.eqns if any(read is traced.invars[1] for read in step.invars)]
    assert readers == ["optimization_barrier"]  # with the activations; the slice reads what comes out of it


# Experts over devices, as an axis that is mapped over


def test_tokens_are_dispatched_where_that_moves_less():
    """Places for 1.03, 0.62, 0.34 and 0.09 of the tokens, in whole tiles of 8; beyond 3/4 all are gathered."""
    capacity = lambda devices: dispatch_capacity(10_000, 4, devices)
    assert [capacity(devices) for devices in (1, 4, 8, 16, 64)] == [None, None, 6208, 3416, 920]
    assert dispatch_capacity(96, 1, 2) == 72 and dispatch_capacity(95, 1, 2) is None  # 72 of 71.25 in whole tiles


def ragged_all_to_all(rows, out, begin, count, begin_there, count_here, *, axis_name):
    """The definition of `jax.lax.ragged_all_to_all`, which XLA does not have on a CPU; it moves all rows."""
    here = jax.lax.axis_index(axis_name)
    rows, begin, count, begin_there = (jax.lax.all_gather(x, axis_name) for x in (rows, begin, count, begin_there))
    for device in range(len(rows)):
        place = jnp.arange(len(out)) - begin_there[device, here]
        is_sent = (place >= 0) & (place < jnp.minimum(count[device, here], count_here[device]))
        sent = rows[device].at[begin[device, here] + place].get(mode="clip")
        out = jnp.where(is_sent.reshape(-1, *[1] * (out.ndim - 1)), sent, out)
    return out


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    ("way", "capacity"), [("slots", 6), ("slots", 2), ("slots", 5), ("ragged", 6), ("ragged", 5), ("ragged", 1)]
)
def test_tokens_sent_to_their_experts_and_gathered_ones_have_the_same_sums(monkeypatch, way, capacity):
    """Three devices with two experts each; with less room than an uneven choice needs, all tokens are gathered."""
    monkeypatch.setitem(measured.EXPERT_EXCHANGE, "cpu", way)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    devices, tokens, held = 3, 6, 2
    draw = np.random.default_rng(0)
    x = draw.normal(size=(devices, tokens, 2)).astype(np.float32)
    ids = np.array([[draw.permutation(6)[:3] for _ in range(tokens)] for _ in range(devices)], np.int32)
    ids[0, 0], ids[1, 2, 1] = -1, -1
    weights = draw.uniform(size=ids.shape).astype(np.float32)
    scale = np.array([2.0, 3, 5, 7, 11, 13], np.float32)  # what each expert makes of a token: a multiple of it
    mesh, most = Mesh(jax.devices()[:devices], ("expert",)), []

    def part(x, ids, weights, most_pairs):
        most.append(most_pairs)
        own = ids_on_device(ids, held)
        factor = jnp.asarray(scale)[jnp.where(own >= 0, ids, 0)] * jnp.where(own >= 0, weights, 0)
        return x * factor.sum(1, keepdims=True)

    run = lambda x, ids, weights: (
        sums_by_gathering(part, x, ids, weights),
        sums_by_dispatch(part, lambda: 2 * x, x, ids, weights, 3.0, held, capacity, mesh),
    )
    found = jax.jit(jax.vmap(run, axis_name="expert"))(x, ids, weights)
    factor = (np.where(ids >= 0, scale[ids], 0) * weights).sum(-1, keepdims=True)
    np.testing.assert_allclose(found[0], x * factor, rtol=1e-5)
    np.testing.assert_allclose(found[1], 3 * x * factor + 2 * x, rtol=1e-5)  # what stands beside the sums is not scaled
    assert set(most) == {devices * tokens * 3, 27}  # all pairs of the gathered tokens; 1.5 times a device's


@pytest.mark.parametrize(
    ("capacity", "others", "full"), [(3, 2, ("", "")), (2, 1, ("slots", "")), (2, 2, ("slots", "ragged"))]
)
def test_room_for_rows_is_of_a_device_or_of_each_two(capacity, others, full):
    """Two devices send three rows, and one or two, to device 0: 2 C rows for each, or C for each two."""
    rows = np.arange(3)[:, None]
    is_sent = np.stack([(rows < count) & np.array([True, False]) for count in (3, others)])  # [devices X devices]
    for way, where in zip(("slots", "ragged"), full, strict=True):
        lacks_room = jax.vmap(lambda x, way=way: EXCHANGES[way](x, capacity, "d").lacks_room, axis_name="d")(is_sent)
        assert lacks_room.any() == bool(where)


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_have_an_operation_for_the_ragged_exchange(platform):
    mesh = Mesh(jax.devices()[:2], ("d",))

    def there_and_back(rows, is_sent):
        exchange = EXCHANGES["ragged"](is_sent, 4, "d")
        return exchange.back(exchange.there(rows, 0))

    run = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    traced = run.trace(jnp.zeros((16, 2)), jnp.zeros((4, 2), bool))
    assert traced.lower(lowering_platforms=(platform,)).as_text().count("@ragged_all_to_all") == 2


@pytest.mark.parametrize("schedule", [pytest.param("auto", marks=pytest.mark.further), "invariant"])
def test_rows_that_devices_share_are_attended_to_as_one_device_s(schedule):
    """Selection, attention to the selected blocks and to all: on each of two devices what the definition gives."""
    (q, index_q, positions, lengths), (k, v, index_k), of_devices = shared_memory()
    q, index_q, k, v, index_k, positions, lengths = map(jnp.asarray, (q, index_q, k, v, index_k, positions, lengths))
    at, rules = (positions, lengths), SelectionRules(top_k=3)

    def on_device(k, v, index_k, table, first):
        share = Share(first, SIZE, 2, (AXIS,))
        view = Paged(k, v, None, 0, table, jnp.float32, share)
        blocks = select(index_q, PagedIndex(index_k, None, 0, table, jnp.float32, share), *at, rules, schedule=schedule)
        return blocks, (
            attend_selected(q, view, blocks, *at, schedule=schedule), attend_all(q, view, *at, schedule=schedule)
        )  # fmt: skip

    blocks, found = devices_map(on_device, *of_devices)

    @jax.jit
    def by_definition(*at):
        chosen = select_blocks(block_scores(index_q, index_k, *at, SIZE), *at, rules, block_size=SIZE)
        sparse = sparse_attention(q, k, v, chosen, *at, block_size=SIZE, return_lse=True)
        return chosen, (sparse, dense_attention(q, k, v, *at, return_lse=True))

    expected, outputs = by_definition(*at)
    for device in range(2):
        np.testing.assert_array_equal(blocks[device], expected)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(outputs), strict=True):
            np.testing.assert_allclose(x[device], y, atol=1e-6)


def test_a_schedule_is_one_of_its_operation_s(unchecked):
    q, keys, at = (
        jnp.zeros((1, 1, 2, 4)),
        jnp.zeros((1, 8, 1, 4)),
        (jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)),
    )
    view, blocks = contiguous(keys, keys, 4), jnp.zeros((1, 1, 1, 2), jnp.int32)
    for attend, operands, wrong, allowed in (
        (attend_selected, (q, view, blocks, *at), "blockwise", "'auto', 'mask', 'query_major', 'kv_block_major'"),
        (attend_all, (q, view, *at), "kv_block_major", "'auto', 'mask', 'blockwise'"),
    ):
        with pytest.raises(ValueError, match=f"schedule = '{wrong}': allowed are {allowed}"):
            attend(*operands, schedule=wrong)
        for right in re.findall("[a-z_]+", allowed):
            assert jax.eval_shape(partial(attend, schedule=right), *operands)[0].shape == q.shape


def test_a_shared_expert_that_a_kernel_ran_is_added_once(monkeypatch):
    """One kernel runs it beside the routed ones, or the layer adds it: never both, never neither."""
    how, x = Fast(Compute()), jnp.ones((3, 2))
    ids, given = jnp.zeros((3, 2), jnp.int32), jnp.full((3, 2), 0.5)
    stacks = [StackedLayer(jnp.ones((1, 2, 2, 2)), jnp.int32(0)) for _ in range(3)]
    outputs = jnp.broadcast_to(
        jnp.array([2.0, 4.0, 7.0])[:, None], (3, 3, 2)
    )  # of two routed experts and the shared one
    runs = lambda x, *_, shared, **how: outputs if shared else outputs[:, :2]
    monkeypatch.setattr(ops, "run_experts", runs)
    for joins, expected in ((True, 10 * 3 + 7), (False, 10 * 3)):
        monkeypatch.setattr(ops, "joins_shared", lambda *_, joins=joins, **__: joins)
        out, has_shared = how.experts(x, ids, given, stacks, jnp.multiply, stacks, 10.0)
        assert has_shared is joins
        np.testing.assert_array_equal(out, np.full((3, 2), expected))


# Products


@pytest.mark.parametrize(
    ("where", "rows", "channels", "outputs", "dtype", "parts"),
    [("gpu", 63, 2048, 128, "float32", 1), ("gpu", 64, 2048, 128, "float32", 16), ("gpu", 4095, 1024, 8, "float32", 16),
     ("gpu", 4096, 1024, 8, "float32", 4), ("gpu", 64, 2112, 128, "float32", 1), ("gpu", 64, 2048, 129, "float32", 1),
     ("gpu", 64, 2048, 128, "bfloat16", 1), ("cpu", 64, 2048, 128, "float32", 1)],
)  # fmt: skip
def test_a_narrow_float32_product_is_summed_in_parts_on_a_gpu(
    where, rows, channels, outputs, dtype, parts, monkeypatch
):
    """From 64 rows on, and where the parts are whole steps; of integers the sum is the same in any order."""
    monkeypatch.setattr(import_module("m3jax.ops.project"), "platform", lambda: where)
    draw = np.random.default_rng(rows)
    x, matrix = (
        jnp.asarray(draw.integers(-3, 4, shape), dtype) for shape in ((1, rows, channels), (channels, outputs))
    )
    multiply = jax.jit(partial(project, "btd,de->bte"))
    [product] = (e for e in equations(multiply.trace(x, matrix).jaxpr.jaxpr) if e.primitive.name == "dot_general")
    assert math.prod(product.outvars[0].aval.shape) == parts * rows * outputs
    np.testing.assert_array_equal(multiply(x, matrix), np.float32(x) @ np.float32(matrix))


def test_no_gradient_goes_to_the_activations_of_detached_products():
    x, matrices = jnp.arange(3.0), [jnp.eye(3) * factor for factor in (1, 10, 100)]
    for options, expected in (({}, 111), (dict(num_detached=1), 11), (dict(num_detached=2), 1)):
        total = lambda x, options=options: sum(y.sum() for y in project_each("i,io->o", x, matrices, **options))
        np.testing.assert_array_equal(jax.grad(total)(x), [expected] * 3)


@pytest.mark.further  # as in tests/kernels/test_few_tokens.py
def test_products_of_a_kernel_are_detached_as_xla_s_are():
    """Of two matrices in stacks, the second one's product gives x no gradient; their numbers are those of einsum."""
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(2, 32)), BF16)
    stacks = [jnp.asarray(draw.normal(size=(2, 32, 64)), BF16) for _ in range(2)]

    def total(x, num_detached):
        matrices = [StackedLayer(stack, jnp.int32(1), "triton") for stack in stacks]
        products = project_each("xi,io->xo", x, matrices, num_detached)
        return sum(y.sum() for y in products), products

    with interpret():
        for num_detached, counted in ((0, stacks), (1, stacks[:1])):
            gradient, products = jax.grad(total, has_aux=True)(x, num_detached)
            expected = sum(np.asarray(stack[1], np.float64).sum(1) for stack in counted)
            np.testing.assert_allclose(np.asarray(gradient, np.float64), [expected] * 2, rtol=2**-6, atol=0.1)
            for product, stack in zip(products, stacks, strict=True):
                exact = np.asarray(x, np.float64) @ np.asarray(stack[1], np.float64)
                np.testing.assert_allclose(product, exact, rtol=1e-4, atol=1e-4)


dequantize = jax.jit(mxfp8.dequantize, static_argnums=1)


@pytest.fixture
def numbers_of(monkeypatch):
    """Kernels of MXFP8 as numpy would have them; what each was called with: its name, and rows or channels."""
    calls = []

    def numbers(weights, layer, dtype=F32):
        codes, scales = weights
        return dequantize(MXFP8Array(codes[layer], scales[layer]), dtype)

    def of_numbers(weights, layer, dtype, backend, interpret):
        calls.append(("numbers", backend))
        return numbers(weights, layer, dtype)

    def product(name):
        def run(x, stacks, layer, backend, interpret):
            calls.append((name, backend))
            taken = [numbers(stack, layer) if isinstance(stack, tuple) else stack[layer] for stack in stacks]
            return tuple(jnp.asarray(np.asarray(x) @ np.asarray(matrix)) for matrix in taken)

        return run

    monkeypatch.setattr("pallas_kernels.mxfp8_numbers.mxfp8_numbers", of_numbers)
    monkeypatch.setattr("pallas_kernels.mxfp8_project.mxfp8_project", product("mxfp8"))
    monkeypatch.setattr("pallas_kernels.ordered_project.ordered_project", product("ordered"))
    return calls


def test_many_rows_are_multiplied_by_numbers_that_are_written_first(numbers_of):
    """From 49 rows on, and from 65 on where sums have one order: by a kernel, on a TPU by XLA."""
    draw = np.random.default_rng(0)
    codes, scales = draw.integers(0, 126, (2, 32, 8), np.uint8), draw.integers(120, 130, (2, 1, 8), np.uint8)
    kept, stack = MXFP8Array(jnp.asarray(codes), jnp.asarray(scales)), jnp.asarray(draw.normal(size=(2, 32, 8)), F32)
    matrices = [dequantize(MXFP8Array(kept.codes[1], kept.scales[1]), F32), stack[1]]
    rows, layer = jnp.asarray(draw.normal(size=(65, 32)), F32), jnp.int32(1)
    by_kernel, in_order = import_module("m3jax.ops.project")._by_mxfp8_kernel, products_in_order
    for run, num_rows, stacks, expected in (
        (partial(by_kernel, backend="triton"), 48, [kept], [("mxfp8", "triton")]),
        (partial(by_kernel, backend="triton"), 49, [kept], [("numbers", "triton")]),
        (partial(by_kernel, backend="mosaic_tpu"), 48, [kept], [("mxfp8", "mosaic_tpu")]),
        (partial(by_kernel, backend="mosaic_tpu"), 49, [kept], []), (in_order, 65, [stack], [("ordered", "triton")]),
        (in_order, 64, [kept, stack], [("ordered", "triton")]),
        (in_order, 65, [kept, stack], [("numbers", "triton"), ("ordered", "triton")]),
    ):  # fmt: skip
        found = run(rows[:num_rows], stacks, layer)
        for product, given in zip(found, stacks, strict=True):
            matrix = np.asarray(matrices[given is stack], np.float64)
            np.testing.assert_allclose(product, np.float64(rows[:num_rows]) @ matrix, rtol=1e-4, atol=1e-3)
        assert numbers_of == expected, (run, num_rows)
        numbers_of.clear()


# Steps between products, and a layer on a mesh


def test_steps_between_products_are_those_of_numpy():
    x, update = np.float32([[[3, -4], [0, 0]]]), np.float32([[[1, 1], [0, 0]]])
    weight = np.float32([0.5, -0.5])
    normed = lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * (1 + weight)
    np.testing.assert_allclose(plain.gemma_norm(jnp.asarray(x), jnp.asarray(weight), 0.1), normed(x), rtol=1e-6)
    for added in (None, update):
        given = None if added is None else jnp.asarray(added)
        stream, norm = plain.add_norm(jnp.asarray(x), given, jnp.asarray(weight), 0.1)
        expected = x if added is None else x + added
        np.testing.assert_array_equal(stream, expected)
        np.testing.assert_allclose(norm, normed(expected), rtol=1e-6)
    narrow = jnp.full((1, 1, 1), 256, BF16)  # 257 is no bfloat16: rounded once, the sum of two terms is
    found = plain.add(narrow, jnp.full((1, 1, 1), 1.5))
    assert found.dtype == BF16 and found == 258
    heads = np.arange(6, dtype=np.float32).reshape(1, 1, 1, 6)
    cos, sin = np.float32([[[0, 1]]]), np.float32([[[1, 0]]])
    found = plain.apply_rope(*map(jnp.asarray, (heads, cos, sin)))
    assert found[0, 0, 0].tolist() == [-2, 1, 0, 3, 4, 5]  # 0 and 2 turn by a right angle, 1 and 3 by none
    logits, bias = jnp.log(jnp.array([[1.0, 3.0, 1.0, 1.0]])), jnp.array([0.0, 0.0, 0.0, 1.0])
    ids, weights = plain.choose_experts(logits, bias, 3)  # scores of 0.5, 0.75, 0.5, 0.5
    assert ids.tolist() == [[3, 1, 0]]
    np.testing.assert_allclose(weights, [[2 / 7, 3 / 7, 2 / 7]], rtol=1e-6)


def divided(**sizes: int) -> Divided:
    return Divided(Compute(mesh=make_mesh(**sizes)), True)


@pytest.mark.usefixtures("eight_devices")
def test_a_product_is_read_in_place_by_what_a_device_holds():
    """Kernels take multiples of 32 and 64 channels, and 16 rows: of one device's part, not of the whole."""
    stack = lambda *shape: jnp.zeros((2, *shape), BF16)
    whole, halves, rows = Fast(Compute(), True), divided(tensor=2), divided(data=2)
    with interpret():
        for name, shape, alone, by_halves in (
            ("gate_proj", (64, 128), True, True), ("up_proj", (64, 64), True, False),
            ("down_proj", (64, 64), True, True), ("down_proj", (32, 64), True, False),
            ("o_proj", (2, 32, 64), True, True), ("o_proj", (2, 16, 64), True, False),
            ("q_proj", (32, 2, 64), True, True), ("q_proj", (32, 2, 32), True, False),
            ("index_k_proj", (32, 64), True, True), ("gate_proj", (16, 128), False, False),
            ("input_layernorm", (64,), False, False),
        ):  # fmt: skip
            if len(shape) > 1:
                assert whole.reads_in_place(name, stack(*shape), 1, BF16) == alone, (name, shape)
            assert halves.reads_in_place(name, stack(*shape), 1, BF16) == by_halves, (name, shape)
        for num_rows, alone, by_rows in ((16, True, True), (17, False, False), (32, False, True), (34, False, False)):
            assert whole.reads_in_place("gate_proj", stack(64, 64), num_rows, BF16) == alone
            assert rows.reads_in_place("gate_proj", stack(64, 64), num_rows, BF16) == by_rows


@pytest.mark.usefixtures("eight_devices")
def test_matrices_on_a_mesh_say_how_they_are_divided():
    """Experts and what is no matrix stay as they are; KV heads that the axis does not divide are whole."""
    attention = {"q_proj": (6, 4, 3), "k_proj": (6, 1, 3), "o_proj": (4, 3, 6), "q_norm": (3,)}
    mlp = {"gate": (6, 2), "experts": {"up_proj": (2, 6, 4)}, "shared_experts": {"down_proj": (4, 6)}}
    is_shape = lambda x: isinstance(x, tuple)
    layer = jax.tree.map(jnp.zeros, {"self_attn": attention, "mlp": mlp}, is_leaf=is_shape)
    found = divided(tensor=2).prepared(layer)
    attention, mlp = found["self_attn"], found["mlp"]
    partitions = {name: attention[name].partition for name in ("q_proj", "k_proj", "o_proj")}
    to_heads, whole, from_heads = (None, "tensor", None), (None, None, None), ("tensor", None, None)
    assert partitions == {"q_proj": to_heads, "k_proj": whole, "o_proj": from_heads}
    assert mlp["shared_experts"]["down_proj"].partition == ("tensor", None)
    assert attention["o_proj"].is_summed and not attention["q_proj"].is_summed
    assert mlp["gate"] is layer["mlp"]["gate"] and attention["q_norm"] is layer["self_attn"]["q_norm"]
    assert mlp["experts"]["up_proj"] is layer["mlp"]["experts"]["up_proj"]
    assert attention["q_proj"].least_tokens == measured.DIVIDED_TOKENS["cpu"] == 16


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("sizes", [dict(data=2, tensor=2), dict(context=2, tensor=2), dict(expert=2)])
def test_embedding_and_head_on_a_mesh_are_those_of_one_device(sizes):
    """Few rows, and as many as a mesh divides."""
    how, table = divided(**sizes), np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    for batch in (1, 16):
        tokens = np.random.default_rng(batch).integers(0, 8, (batch, 2), np.int32)
        hidden = table[tokens]
        run = jax.jit(lambda tokens, hidden, table: (how.embed(tokens, table), how.unembed(hidden, table)))
        embedded, logits = run(tokens, hidden, table)
        np.testing.assert_array_equal(embedded, hidden)
        np.testing.assert_allclose(logits, hidden @ table.T, rtol=1e-5, atol=1e-6)
        assert logits.sharding.is_fully_replicated or batch == 16  # drawing one of few exchanges nothing more


@pytest.mark.parametrize("leading", [(3,), (1, 4), (3, 5), (16,), (2, 8)])
def test_a_head_on_a_mesh_is_multiplied_where_it_lies_and_few_logits_go_everywhere(leading, unchecked):
    """Whatever axes of tokens stand before the words; of 16 tokens and more the compiler divides the product.

    A mesh of devices that are not there: the program is traced.
    """
    mesh = AbstractMesh((1, 1, 1, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    how = Divided(Compute(mesh=mesh), True)
    shapes = jax.ShapeDtypeStruct((*leading, 3), F32), jax.ShapeDtypeStruct((8, 3), F32)
    traced = jax.make_jaxpr(how.unembed)(*shapes).jaxpr
    if math.prod(leading) >= 16:
        assert [step.primitive.name for step in traced.eqns] == ["dot_general"]
        return
    [step] = traced.eqns
    assert step.params["in_specs"] == (P(), P(("context", "expert", "tensor"), None))
    of_words = {eqn.primitive.name: eqn.outvars[0].aval.shape for eqn in step.params["jaxpr"].eqns}
    assert of_words["dot_general"] == (*leading, 4) and of_words["all_gather"] == (2, *leading, 4)


def test_choices_have_as_many_columns_as_devices_divide():
    """In the invariant mode: columns of no expert, with weight 0, behind the others."""
    ids, given = jnp.arange(6, dtype=jnp.int32).reshape(2, 3), jnp.ones((2, 3))
    padded_ids, padded = with_even_columns(ids, given, 2)
    assert padded_ids.tolist() == [[0, 1, 2, -1], [3, 4, 5, -1]] and padded.tolist() == [[1, 1, 1, 0]] * 2
    assert with_even_columns(ids[:, :2], given[:, :2], 2)[0].tolist() == [[0, 1], [3, 4]]


@pytest.mark.parametrize(
    ("changes", "is_whole"),
    [
        ({}, True), (dict(dtype="float16"), True), (dict(dtype="float32"), False), (dict(backend="xla"), False),
        (dict(num_attention_heads=4, num_key_value_heads=4, index_n_heads=4), True),
        *[(changes, False) for changes in (
            dict(index_head_dim=96), dict(shared_intermediate_size=96), dict(dense_intermediate_size=96),
            dict(num_local_experts=24), dict(hidden_size=96), dict(rotary_dim=96), dict(head_dim=112, rotary_dim=64),
        )],
    ],
    ids=str,
)  # fmt: skip
def test_kernels_of_one_order_take_all_layers_of_a_model_or_none(changes, is_whole):
    changes = dict(changes)
    dtype, backend = changes.pop("dtype", "bfloat16"), changes.pop("backend", "auto")
    with interpret():
        assert kernels_order(replace(M3Config.m3(), **changes), jnp.dtype(dtype), backend) == is_whole


# Named values


def test_an_edit_is_rounded_to_the_value_s_dtype_and_may_see_others():
    value = jnp.arange(3, dtype=BF16)
    assert apply_edit("x", lambda value: value + jnp.float32(0.25), value, {}).dtype == BF16
    seen = {"layer": jnp.int32(4)}
    found = apply_edit("x", lambda value, seen: value + seen["layer"].astype(value.dtype), value, seen)
    np.testing.assert_array_equal(found, [4, 5, 6])
    optional = lambda value, factor=2: factor * value  # one argument that it must be given
    np.testing.assert_array_equal(apply_edit("x", optional, value, seen), [0, 2, 4])
    np.testing.assert_array_equal(apply_edit("x", jnp.negative, value, seen), [0, -1, -2])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda value: value[:2], r"returns float32 \[2\]: must be float32 \[3\]"),
        (lambda value: value > 0, r"returns bool \[3\]: must be float32 \[3\]"),
        (lambda value: value.astype(jnp.int32), r"returns int32 \[3\]: must be float32 \[3\]"),
        (lambda value: None, r"returns a NoneType: must be float32 \[3\]"),
        (lambda value: value if value.sum() > 0 else -value, r"asks for numbers while its program is traced"),
        (lambda value: np.asarray(value), r"asks for numbers while its program is traced"),
        (lambda value: KEPT.append(value) or value, r"edits\['x'\] keeps what it was given"),
        (lambda value: KEPT.append(jnp.sin(value).sum()) or value, r"edits\['x'\] keeps what it was given"),
    ],
)
@pytest.mark.usefixtures("unchecked", "few_objects")
def test_an_edit_that_cannot_be_is_refused(edit, message):
    with pytest.raises(ValueError, match=message):
        jax.jit(partial(apply_edit, "x", edit, seen={}))(jnp.arange(3.0))


KEPT: list = []


@pytest.fixture
def few_objects():
    """Takes what is there from the garbage collector, which would look through all of it, at seconds a time."""
    gc.freeze()


@pytest.mark.usefixtures("few_objects")
def test_a_value_that_waits_for_the_garbage_collector_is_not_kept():
    def edit(value):
        cycle = [2 * value]
        cycle.append(cycle)
        return cycle[0]

    np.testing.assert_array_equal(apply_edit("x", edit, jnp.arange(3.0), {}), [0, 2, 4])


def test_an_edit_that_keeps_nothing_collects_no_garbage(monkeypatch):
    """A collection takes a second in a large process, for each edit of each layer."""
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("garbage was collected"))
    np.testing.assert_array_equal(apply_edit("x", jnp.negative, jnp.arange(3.0), {}), [0, -1, -2])


def test_an_edit_s_own_error_is_its_own():
    def fails(value):
        raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        apply_edit("x", fails, jnp.arange(3.0), {})
    ids = jnp.arange(3, dtype=jnp.int32)
    assert apply_edit("x", lambda value: value + 1, ids, {}).dtype == jnp.int32
    with pytest.raises(ValueError, match="returns float32"):
        apply_edit("x", lambda value: value * 1.0, ids, {})


def edited(name, chosen, old):
    """What `checks()` say of an edit that puts a selection in the place of another, for two rows of three tokens."""
    seen = {"positions": jnp.array([[8, 9, 10], [0, 1, 2]], jnp.int32), "lengths": jnp.array([10, 2], jnp.int32)}
    values = EditedValues({name: lambda value: chosen}, frozenset(), seen, "layers.1.", (4, 6))
    try:
        with m3jax.checks():
            values[name] = old
    except ValueError as error:
        return str(error)
    np.testing.assert_array_equal(values[name], chosen)
    return ""


def test_a_changed_selection_is_looked_at():
    """Position 10 of the first row and 2 of the second are padding, which may hold anything."""
    good = np.full((2, 1, 3, 3), -1, np.int32)
    good[0, 0, :2], good[1, 0, :2, 0] = [0, 2, -1], 0

    def found(index, chosen):
        blocks = good.copy()
        blocks[index] = chosen
        return edited("blocks", jnp.asarray(blocks), jnp.asarray(good))

    assert not found((0, 0, 1), [2, -1, -1]) and not found((0, 0, 0), [0, 1, 2]) and not found((0, 0, 2), [7, 7, 7])
    assert not found((1, 0, 2), [5, 1, -1])
    for chosen in ([2, 0, -1], [0, 0, 2], [0, 1, -1], [-1, 2, -1], [-1, -1, -1], [0, 2, 3], [0, -1, 2]):
        message = found((0, 0, 1), chosen)
        assert f"edits['layers.1.blocks'] gives {chosen} for row 0, KV head 0, token 1: give distinct ids" in message
        assert "the token's own block 2" in message

    def of_experts(index, chosen):
        ids = np.broadcast_to(np.array([0, 5], np.int32), (2, 3, 2)).copy()
        ids[index] = chosen
        return edited("expert_ids", jnp.asarray(ids), jnp.asarray(ids + 0))

    assert not of_experts((0, 1), [5, 0]) and not of_experts((0, 2), [9, 9]) and not of_experts((1, 2), [-1, 0])
    for chosen in ([3, 3], [0, 6], [-1, 2]):
        message = of_experts((1, 1), chosen)
        expected = f"edits['layers.1.expert_ids'] gives {chosen} for row 1, token 1: give distinct ids from 0 to 5"
        assert expected in message


def test_layers_that_are_asked_alike_run_together():
    """Two stacks, of two and three layers: an edit of layer 3, a value of layers 0 and 1, one of all; an early end."""
    identity = lambda value: value
    assert Inside().runs(0, 4) == [(0, 4)]
    inside = Inside(edits={"layers.3.q": identity}, names=("layers.0.k", "layers.1.k", "layers.*.output"))
    assert inside.runs(0, 2) == [(0, 2)] and inside.runs(2, 3) == [(0, 1), (1, 2), (2, 3)]
    assert Inside(names=("layers.*.k",)).runs(2, 3) == [(0, 3)]
    for stop_at, expected in ((0, [0, 0]), (1, [1, 0]), (2, [2, 0]), (3, [2, 1]), (9, [2, 3])):
        ends = [Inside(stop_at=stop_at).runs(before, depth) for before, depth in ((0, 2), (2, 3))]
        assert [sum(end - first for first, end in runs) for runs in ends] == expected
    kept = [{"output": jnp.arange(2)}, *({"output": jnp.array([layer])} for layer in (2, 3, 4))]
    assert inside.of_layers(kept, (2, 3)) == {layer: {"output": layer} for layer in range(5)}
    config = SimpleNamespace(index_block_size=4, num_local_experts=6)
    context = SimpleNamespace(positions=0, lengths=1, config=config)
    plain, changed = inside.values(2, 0, jnp.int32(0), context), inside.values(2, 1, jnp.int32(1), context)
    assert type(plain) is Values and plain.kept == {"output"} and plain.asked == {"output"}
    assert changed.edited == {"q"} and changed.asked == {"q", "output"} and changed.prefix == "layers.3."
    assert int(changed.seen["layer"]) == 3 and changed.limits == (4, 6)
    assert inside.values(0, 0, jnp.int32(0), context).kept == {"k", "output"}
    assert Inside(edits={"logits": jnp.negative}).changed("logits", jnp.ones(1)).tolist() == [-1]


# What is kept of layers


def test_each_way_to_keep_keeps_what_it_says():
    x, layers = jnp.zeros((1, 2, 3)), [dict(output=jnp.full((1, 2, 3), n + 1.0), k=jnp.int32(n)) for n in range(4)]
    keep = KeepResidual((0, 2, 4))
    memory = keep.start(x)
    for layer, values in enumerate(layers):  # two stacks of two
        memory, kept = keep.after_layer(memory, layer // 2 * 2, jnp.int32(layer % 2), values, None)
        assert kept is None
    assert memory[:-1, 0, 0, 0].tolist() == [0, 2, 4]
    values = Values(kept=frozenset({"k"}))
    values.update(layers[1])
    assert KeepNamed().start(x) is None and KeepNamed().after_layer(None, 0, 0, values, None)[1].keys() == {"k"}
    assert KeepNamed(also=("output",)).after_layer(None, 0, 0, values, None)[1].keys() == {"k", "output"}
    of_each = KeepOfEach(lambda values, context: (values["k"], context))
    assert of_each.start(x) is None and of_each.after_layer(None, 0, 0, values, 7) == (None, (1, 7))
    assert KeepNothing().after_layer(None, 0, 0, values, None) == (None, None) == (KeepNothing().start(x), None)
    both = KeepBoth(KeepResidual((1,)), KeepNamed())
    memory, kept = both.after_layer(both.start(x), 0, jnp.int32(0), values, None)
    assert memory[0, 0, 0, 0] == 2 and kept == {"k": 1}
