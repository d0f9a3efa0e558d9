"""The choice of a backend: what "auto" takes, what is refused and why, and that kernels give what XLA gives."""

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from support import comparisons, tiny
from support.engines import CONFIG
from support.msa_strategies import GROUPED, prefill

from m3jax import M3Config
from m3jax import model as m3_model
from m3jax.cache import Cache
from m3jax.decoding import device
from m3jax.decoding.engine.runner import Runner
from m3jax.decoding.engine.shapes import Shapes
from m3jax.msa import Paged, PagedIndex, SelectionRules, contiguous, contiguous_index
from m3jax.msa.share import Share
from m3jax.ops import BACKENDS, attend, attend_all, attend_selected, cases, insert_backend, interpret, measured, select
from m3jax.ops.backends import choose
from m3jax.ops.cases import PagesCase
from m3jax.parallel import AXES
from pallas_kernels import dense_causal

H200 = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)  # fmt: skip
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
SIZES = dict(queries=2048, dtype=BF16, stored=BF16, width=128, block_size=128, num_blocks=512)
PREFILL = PagesCase(op="sparse", **SIZES, group=16, slots=16)
DECODE = replace(PREFILL, queries=1)
SELECT = PagesCase(op="select", **SIZES, slots=16)
DENSE = PagesCase(op="dense", **SIZES, group=16)
INSERT = PagesCase(op="insert", **SIZES, group=16, rotated=64)


@contextlib.contextmanager
def on_a_gpu(mesh: AbstractMesh = H200):
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        yield


@pytest.mark.parametrize(
    "case",
    [PREFILL, DECODE, SELECT, DENSE, INSERT, *(replace(case, queries=4) for case in (SELECT, DENSE, INSERT))],
)
def test_auto_takes_kernels_on_a_gpu_and_xla_elsewhere(case):
    assert choose(case) == choose(case, "xla") == "xla"
    with on_a_gpu():
        assert choose(case) == choose(case, "triton") == "triton"
        assert choose(case, "xla") == "xla"


E4M3 = jnp.dtype("float8_e4m3fn")
REFUSED = [
    (replace(PREFILL, dtype=jnp.dtype("float64"), stored=jnp.dtype("float64")), "no kernel for queries in float64"),
    (replace(PREFILL, stored=E4M3), "does not take keys in float8_e4m3fn for 2048 queries"),
    (replace(DECODE, stored=F32), "does not take keys in float32 for 1 queries"),
    (replace(PREFILL, width=96), "heads of 96 and blocks of 128"),
    (replace(PREFILL, block_size=16), "heads of 128 and blocks of 16"),
    (replace(PREFILL, slots=3), "groups of 16 heads and 3 slots"),
    (replace(PREFILL, slots=33), "groups of 16 heads and 33 slots"),
    (replace(SELECT, slots=3), "and 3 slots"),
    (replace(SELECT, slots=33), "and 33 slots"),
    (replace(PREFILL, group=32), "groups of 32 heads"),
    (replace(PREFILL, schedule="mask"), "the schedule 'mask' is one of XLA's"),
    (replace(DECODE, schedule="kv_block_major"), "the schedule 'kv_block_major' is one of XLA's"),
    (replace(PREFILL, pages=False), "not a pool of host memory's pages"),
    (replace(SELECT, score="lse"), "it has score 'max', and this is 'lse'"),
    (replace(SELECT, divided=True, forced=2), "devices divide the keys"),
    (replace(SELECT, queries=1, num_blocks=1 << 17), "there are 131072 blocks"),
    (replace(INSERT, rotated=48), "48 of 128 dims are rotated"),
    (replace(INSERT, stored=F32), "does not take keys in float32"),
]


@pytest.mark.parametrize(("case", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_a_kernel_cannot_run_is_said(case, reason):
    """T56: An explicit choice never falls back; "auto" does, by the same rule."""
    with on_a_gpu():
        with pytest.raises(ValueError, match=rf"backend = 'triton' cannot run this {case.op}: .*{reason}.*'auto' or"):
            choose(case, "triton")
        assert choose(case) == "xla"


def test_the_wrong_platform_and_unknown_names_are_errors():
    """T56: what was asked for by name runs, or an error says why it does not."""
    with pytest.raises(ValueError, match="needs a GPU, and JAX runs on a CPU"):
        choose(PREFILL, "triton")
    with pytest.raises(ValueError, match="needs a TPU, and JAX runs on a CPU"):
        choose(PREFILL, "mosaic_tpu")
    for fn in (lambda: choose(PREFILL, "cuda"), lambda: tiny.model(CONFIG).with_backend("cuda")):
        with pytest.raises(ValueError, match="backend = 'cuda': allowed are 'auto', 'xla', 'triton', 'mosaic_tpu'"):
            fn()
    with pytest.raises(ValueError, match="cannot run this dense: it needs a GPU"):
        model().with_backend("triton")(jnp.asarray(tiny.tokens(CONFIG, 1, 8)))
    assert set(BACKENDS) == {"auto", "xla", "triton", "mosaic_tpu"}


@pytest.mark.parametrize("index_dtype, expected", [("bfloat16", "triton"), ("float8_e4m3fn", "triton"),
                                                   ("float32", "xla"), ("float16", "xla")])  # fmt: skip
def test_a_kernel_inserts_only_what_it_can_write(index_dtype, expected):
    """Keys that it writes beside index keys that it does not: XLA, and by name an error that says which dtype."""
    shape = (1, 4, 4, 128, 128)
    pool, table = jnp.zeros(shape, jnp.bfloat16), jnp.zeros((1, 4), jnp.int32)
    view = Paged(pool, pool, None, 0, table, jnp.dtype("bfloat16"))
    index = PagedIndex(jnp.zeros((1, 4, 128, 128), index_dtype), None, 0, table, jnp.dtype("bfloat16"))
    q = jnp.zeros((1, 1, 64, 128), jnp.bfloat16)
    with on_a_gpu():
        assert insert_backend(q, view, index, 64) == expected
        if expected == "xla":
            with pytest.raises(ValueError, match=f"does not take keys in {index_dtype}"):
                insert_backend(q, view, index, 64, "triton")


def test_xla_alone_imports_no_kernel():
    """Whoever has no GPU does not pay for Pallas."""
    code = (
        "import sys, m3jax, jax.numpy as jnp; import m3jax.ops, m3jax.decoding;"
        "assert not [m for m in sys.modules if m.startswith('pallas_kernels') or 'pallas.triton' in m]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@cache
def model():
    return tiny.model(CONFIG)


@pytest.mark.parametrize(
    ("few", "forced"),
    [(False, dict(init_blocks=1)), pytest.param(True, dict(local_blocks=2), marks=pytest.mark.further)],
)
def test_ops_in_interpret_mode_give_what_xla_gives(few, forced):
    """Under rules that are not M3's; those are what the models below have. The backward pass is XLA's."""
    case = prefill(GROUPED, 1, lengths=[0, 40, 13])
    q, k, v = map(jnp.asarray, case.qkv())
    index_q, index_k = map(jnp.asarray, case.index())
    index, view = contiguous_index(index_k, GROUPED.P), contiguous(k, v, GROUPED.P)
    first = -8 if few else 0
    rows = jnp.asarray(case.positions)[:, first:], jnp.asarray(case.lengths)

    rules = SelectionRules(top_k=GROUPED.J, **forced)

    def ops(backend, schedule):
        blocks = select(index_q[:, first:], index, *rows, rules, backend=backend)
        sparse = attend_selected(q[:, first:], view, blocks, *rows, schedule=schedule, backend=backend)
        return blocks, sparse, attend_all(q[:, first:], view, *rows, schedule=schedule, backend=backend)[0]

    def gradient(backend, schedule, blocks):
        """Of the output of attention over given blocks, by queries, keys and values."""

        def total(q, k, v):
            view = contiguous(k, v, GROUPED.P)
            out, _ = attend_selected(q[:, first:], view, blocks, *rows, schedule=schedule, backend=backend)
            return jnp.sum(out**2)

        return jax.grad(total, (0, 1, 2))(q, k, v)

    run, slopes = jax.jit(ops, static_argnums=(0, 1)), jax.jit(gradient, static_argnums=(0, 1))
    with interpret():
        found = run("triton", "auto")
        found_slopes = slopes("triton", "auto", found[0])
    for mine, theirs in zip(found_slopes, slopes("xla", "mask", found[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    names, expected = ("blocks", "out", "lse", "dense out"), run("xla", "mask")
    for name, mine, theirs in zip(names, jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        comparisons.assert_close(mine, theirs, name, atol=1e-5)


@pytest.mark.parametrize("op", ["sparse", "dense"])
def test_decode_kernels_read_float8_pages_by_their_scales(op):
    """Scales of each head, other ones for keys than for values, and no powers of two."""
    case = prefill(GROUPED, 3, lengths=[40, 17, 33])
    (q, k, v), blocks = case.qkv(), case.any_blocks()
    scales = jnp.array([0.03, 0.17]), jnp.array([0.05, 0.011])
    of_pages = lambda x: np.moveaxis(x.reshape(30, GROUPED.P, 2, 8), 2, 1)[None]  # [1 pages K P H]
    stored = (jnp.asarray(of_pages(x) / scale[:, None, None], E4M3) for x, scale in zip((k, v), scales, strict=True))
    view = Paged(*stored, scales, jnp.int32(0), jnp.arange(30, dtype=jnp.int32).reshape(3, 10), F32)
    rows = jnp.asarray(case.positions)[:, -4:], jnp.asarray(case.lengths)

    def attend(backend):
        if op == "dense":
            return attend_all(jnp.asarray(q[:, -4:]), view, *rows, backend=backend)
        return attend_selected(jnp.asarray(q[:, -4:]), view, jnp.asarray(blocks[:, :, -4:]), *rows, backend=backend)

    with interpret():
        found = jax.jit(attend, static_argnums=0)("triton")
    for name, mine, theirs in zip(("out", "lse"), found, jax.jit(attend, static_argnums=0)("xla"), strict=True):
        comparisons.assert_close(mine, theirs, f"{name} of {op}_decode", atol=1e-5)


@pytest.mark.further
def test_a_model_in_interpret_mode_has_the_same_logits_blocks_and_gradients():
    tokens = jnp.asarray(tiny.tokens(CONFIG, 2, 70))

    def loss(model, tokens):
        found = model.intermediates(tokens)
        return jnp.mean(jnp.square(found["logits"])), (found["logits"], found["layers"][1]["blocks"])

    run = jax.jit(jax.grad(loss, has_aux=True))
    with interpret():
        gradients, (logits, blocks) = run(model().with_backend("triton"), tokens)
    expected_gradients, (expected_logits, expected_blocks) = run(model(), tokens)
    comparisons.assert_close(logits, expected_logits, "logits", "B T V", atol=2e-4)
    comparisons.assert_same_sets(blocks, expected_blocks)
    for mine, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 * (1e-3 + float(jnp.max(jnp.abs(theirs)))))


@pytest.mark.further  # a whole model's steps by kernels: tests/kernels/test_few_tokens.py, with few tokens' kernels too
def test_steps_in_interpret_mode_have_the_same_logits():
    """Through a cache, behind ragged prompts by XLA: the kernels of a step, and what they wrote for the next one."""
    prompts = np.array([31, 38], np.int32)  # the second and the third new token are the first of a page
    tokens = jnp.asarray(tiny.tokens(CONFIG, 2, 41))

    @jax.jit
    def extend(model, tokens, cache, start, lengths):
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return model(tokens, cache=cache, positions=positions, lengths=lengths)

    _, cache = extend(model(), tokens[:, :38], Cache.init(CONFIG, 2, 48, "float32"), jnp.zeros(2, jnp.int32), prompts)

    def steps(model):
        pages = cache
        for call in range(3):
            now = jnp.take_along_axis(tokens, prompts[:, None] + call, axis=1)
            logits, pages = extend(model, now, pages, prompts + call, prompts + call + 1)
            yield np.asarray(logits)

    with interpret():
        found = [*steps(model().with_backend("triton"))]
    comparisons.assert_close(np.stack(found), np.stack([*steps(model())]), "logits", "X B T V", atol=1e-4)


def narrow_of_two_layers() -> M3Config:
    """M3's heads in a dense layer and a sparse one."""
    full = M3Config.m3()
    return replace(
        full, num_hidden_layers=2, hidden_size=256, num_local_experts=8, vocab_size=512, vision_config=None,
        eos_token_id=(), bos_token_id=None,
        layer_types=full.layer_types[2:4], mlp_layer_types=full.mlp_layer_types[2:4],
    )  # fmt: skip


def test_prefill_and_decode_lower_for_a_gpu_with_kernels(unchecked):
    """The programs of the engine, at M3's head shapes; other dtypes are those of `tests/kernels/test_lowering.py`."""
    weights = m3_model.abstract(narrow_of_two_layers(), "bfloat16")
    runner = Runner(weights, weights.new_cache(64, 2, 32), Shapes(2, 1, (256,), 4, 4))
    arrays = [np.zeros(shape, np.int32) for shape in ((1,), (1, 256), (1,), (1,))]
    chunk = device.Chunk(*arrays, runner.continuations([], 1))
    with on_a_gpu():
        programs = [
            device.prefill.trace(weights, runner.state, chunk),
            device.decode.trace(weights, runner.state, np.full(runner.shapes.batch, 4, np.int32), 4),
        ]
        texts = [program.lower(lowering_platforms=("cuda",)).as_text() for program in programs]
    names = ("index_topk", "query_union", "dense_causal"), ("index_score_decode", "sparse_decode")
    for text, kernels in zip(texts, names, strict=True):
        assert all(kernel in text for kernel in (*kernels, "qk_norm_rope_insert"))


def kernels_of(jaxpr: Jaxpr, on_each_device: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the name of each kernel of a program, and True for those that each device runs on what it has."""
    for step in jaxpr.eqns:
        if step.primitive.name == "pallas_call":
            yield step.params["name"], on_each_device
        for inner in jaxprs_in_params(step.params):
            yield from kernels_of(inner, on_each_device or step.primitive.name == "shard_map")


@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 1), (2, 1, 1, 1)])
def test_kernels_without_a_cache_get_what_one_device_has(sizes, unchecked):
    """The compiler divides no kernel: it gathers all heads for a GPU's, refuses a TPU's, and cuDNN refuses its parts.

    A mesh of GPUs that are not there: the program is traced.
    """
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4, abstract_device=H200.abstract_device)
    model = m3_model.abstract(narrow_of_two_layers(), "bfloat16")
    model.compute = replace(model.compute, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    with on_a_gpu(mesh):
        traced = jax.jit(lambda model, tokens: model(tokens)).trace(model, tokens)
    found = set(kernels_of(traced.jaxpr.jaxpr))
    assert {"dense_causal", "index_topk", "query_union"} <= {name for name, _ in found}
    assert all(on_each_device for _, on_each_device in found), found


@pytest.mark.parametrize(
    ("capability", "queries", "branch"), [("9.0", 20, "cudnn"), ("9.0", 19, "triton"), ("8.0", 20, "triton")]
)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_long_chunk_in_order_is_cudnns_on_hopper_and_any_other_the_kernels(
    capability, queries, branch, in_order, monkeypatch
):
    """Positions that run backwards are no chunk. What a backend that is not for a call computes is NaN here."""
    monkeypatch.setattr(measured, "CUDNN_QUERIES", 20)
    monkeypatch.setattr(cases, "compute_capability", lambda: capability)
    expected, run = branch if in_order else "triton", dense_causal.dense_causal

    def only(*args, backend, **options):
        return tuple(x * (1 if backend == expected else jnp.nan) for x in run(*args, backend=backend, **options))

    monkeypatch.setattr(dense_causal, "dense_causal", only)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 2, 64)), jnp.bfloat16) for n in (queries, 40, 40))
    positions = np.arange(queries) + 5
    at = jnp.asarray(positions if in_order else positions[::-1], jnp.int32)[None], jnp.array([40], jnp.int32)
    view = contiguous(k, v, 8)
    with interpret():
        out, lse = jax.jit(lambda q: attend_all(q, view, *at, backend="triton"))(q)
    want, want_lse = attend_all(q, view, *at, backend="xla")
    comparisons.assert_close(out.astype(jnp.float32), want.astype(jnp.float32), "out", "B T N H", atol=2e-2)
    comparisons.assert_close(lse, want_lse, "lse", "B T N", atol=1e-3)


def test_a_long_chunk_over_a_device_s_share_is_cudnns_up_to_what_all_queries_see(monkeypatch):
    """Every second block is here: positions among its keys do not follow one another."""
    monkeypatch.setattr(measured, "CUDNN_QUERIES", 20)
    monkeypatch.setattr(cases, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(attend, "merge_over_devices", lambda out, lse, *_: (out, lse))
    run, backends = dense_causal.dense_causal, []

    def noted(*args, backend, **options):
        backends.append(backend)
        return tuple(x * (1 if backend == "cudnn_prefix" else jnp.nan) for x in run(*args, backend=backend, **options))

    monkeypatch.setattr(dense_causal, "dense_causal", noted)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((1, 20, 2, 64), *[(1, 4, 2, 8, 64)] * 2))
    share = Share(jnp.array([1], jnp.int32), 8, 2, ("context",), None)
    view = Paged(k, v, None, 0, jnp.arange(4, dtype=jnp.int32)[None], jnp.bfloat16, share)
    at = jnp.arange(25, 45, dtype=jnp.int32)[None], jnp.array([45], jnp.int32)
    with interpret():
        out, lse = jax.jit(lambda q: attend_all(q, view, *at, backend="triton"))(q)
    want, want_lse = attend_all(q, view, *at, backend="xla")
    assert set(backends) == {"cudnn_prefix", "triton"}
    comparisons.assert_close(out.astype(jnp.float32), want.astype(jnp.float32), "out", "B T N H", atol=2e-2)
    comparisons.assert_close(lse, want_lse, "lse", "B T N", atol=1e-3)
