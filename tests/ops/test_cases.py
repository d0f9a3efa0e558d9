"""The cases of kernels: each limit, with a call that uses it up and one that passes it, and the reasons in words."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from m3jax.msa import Paged, contiguous
from m3jax.msa.views import Pooled
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import backends, measured
from m3jax.ops.attend import attend_case
from m3jax.ops.backends import choose, interpret
from m3jax.ops.cases import ExpertsCase, OrderedCase, PagesCase, ProductCase, Stored, TokenwiseCase

BF16, F16, F32, E4M3 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn"))

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


def test_a_case_of_attention_has_the_numbers_of_its_call():
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
    whole = contiguous(*[jnp.zeros((2, 28, 2, 8))] * 2, 4)
    assert attend_case("dense", q, whole, slots=0) == replace(expected, op="dense", slots=0, schedule="auto")
