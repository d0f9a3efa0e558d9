"""The paths of experts: which one runs, by name and by itself, and what stands around the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.lowering import array, equations

from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import EXPERT_PATHS, experts, interpret, measured, run_experts
from m3jax.ops.experts import ExpertCall, ExpertWeights, choose_path, why_not_path
from m3jax.vectors.groups import experts as group
from m3jax.weights import StackedLayer

KERNELS = ("few", "grouped", "products")


def gate(width: int, hidden: int) -> jax.Array:
    return jnp.zeros((1, 8, width, hidden), jnp.bfloat16)


@pytest.mark.parametrize(
    ("path", "width", "hidden", "tokens", "reason"),
    [
        ("few", 32, 24, 24, "experts of 32 by 24 channels (it has multiples of 64)"),
        ("few", 192, 192, 64, None),
        ("few", 192, 192, 65, "65 tokens (it has up to 64)"),
        ("grouped", 192, 192, 24, "experts of 192 by 192 channels (it has multiples of 128)"),
        ("grouped", 128, 256, 2048, None),
    ],
)
def test_a_kernel_by_name_runs_or_says_why_not(path, width, hidden, tokens, reason):
    x = jnp.zeros((tokens, width), jnp.bfloat16)
    wrong_platform = f"it needs a GPU, and JAX runs on a {jax.default_backend().upper()}"
    assert why_not_path(path, x, gate(width, hidden)) == wrong_platform
    with interpret():
        assert why_not_path(path, x, gate(width, hidden)) == reason


@pytest.mark.parametrize("path", [path for path in EXPERT_PATHS if path not in KERNELS])
def test_what_xla_runs_has_no_reason_against_it(path):
    assert why_not_path(path, jnp.zeros((2048, 32)), gate(32, 24)) is None


@pytest.mark.parametrize("path", KERNELS)
def test_a_path_that_cannot_run_is_one_line(path):
    weights = ExpertWeights(*(jnp.zeros((1, 8, *shape)) for shape in ((32, 24), (32, 24), (24, 32))))
    call = lambda: run_experts(
        jnp.zeros((4, 32)), weights, jnp.zeros((4, 2), jnp.int32), jnp.int32(0), jnp.multiply, path=path
    )
    with pytest.raises(ValueError, match=f"^path = '{path}' cannot run these experts: it needs a GPU"):
        call()
    with interpret(), pytest.raises(ValueError, match="experts of 32 by 24 channels"):
        call()


@pytest.mark.further
def test_the_vectors_check_only_what_can_run():
    (case,) = (case for case in group.cases(large=False) if case.name == "layer")
    names = {run.label for run in group.runs(case.inputs, case.rule)}
    assert names == set(EXPERT_PATHS) - set(KERNELS)


def test_the_backward_pass_of_training_keeps_no_copy_of_a_layers_experts():
    """Of weights the stack is kept, which is there anyway: three layers at M3's widths would be 5 GB of copies."""
    weights = ExpertWeights(*(jnp.ones((2, 3, *shape)) for shape in ((8, 4), (8, 4), (4, 8))))
    ids = jnp.zeros((5, 2), jnp.int32)
    copied = lambda x: run_experts(x, weights, ids, jnp.int32(1), jnp.multiply, path="copied")
    kept = jax.eval_shape(lambda x: jax.vjp(copied, x)[1], jnp.ones((5, 8)))
    shapes = {x.shape for x in jax.tree.leaves(kept)}
    assert (2, 3, 8, 4) in shapes, "the stacks were not found"
    assert not {shape for shape in shapes if shape[-3:] in ((3, 8, 4), (3, 4, 8)) and shape[0] != 2}


def test_gradients_of_copied_experts_are_sums_over_their_tiles(monkeypatch):
    """In tiles of two pairs, so that an expert has several; the last expert has none, and one pair is elsewhere."""
    monkeypatch.setattr(measured, "COPIED_TILE", 2)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
    x, weights = draw(7, 8), ExpertWeights(draw(2, 4, 8, 4), draw(2, 4, 8, 4), draw(2, 4, 4, 8))
    ids = jnp.asarray([[0, 1], [0, 2], [1, 0], [2, 1], [-1, 1], [1, 2], [0, 2]])
    factors = jnp.where(ids[..., None] < 0, 0, draw(7, 2, 8))

    def by_copies(x, weights):
        return jnp.sum(factors * run_experts(x, weights, ids, jnp.int32(1), jnp.multiply, path="copied"))

    def of_all_experts(x, weights):
        gate, up, down = (weight[1] for weight in weights)
        hidden = jnp.einsum("xd,edf->xef", x, gate) * jnp.einsum("xd,edf->xef", x, up)
        of_each = jnp.einsum("xef,efd->xed", hidden, down)  # [X E D]
        return jnp.sum(factors * jnp.take_along_axis(of_each, ids[:, :, None], axis=1))

    got, want = (jax.jit(jax.grad(fn, argnums=(0, 1)))(x, weights) for fn in (by_copies, of_all_experts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
    assert not np.asarray(got[1].gate)[1, 3].any()


# Which path runs

PAIRS = [  # platform, (token, expert) pairs of a call, devices that divide the experts, the path
    ("cpu", 16, None, "one_by_one"), ("cpu", 18, None, "tiled"), ("cpu", 32, 2, "one_by_one"), ("cpu", 34, 2, "tiled"),
    ("cpu", 64, 8, "one_by_one"), ("cpu", 66, 8, "tiled"), ("tpu", 16, None, "gathered"), ("tpu", 18, None, "ragged"),
    ("tpu", 16, 1, "one_by_one"), ("tpu", 64, 4, "one_by_one"), ("tpu", 66, 8, "ragged"), ("gpu", 16, None, "gathered"),
    ("gpu", 18, None, "tiled"), ("gpu", 18, 8, "tiled"),
]  # fmt: skip
IN_BF16 = [  # in interpret mode, where a GPU's kernels run: tokens, options, the path
    (64, {}, "tiled"), (64, dict(path="in_fixed_tiles"), "few"), (8, dict(path="copied"), "copied"),
    (65, dict(path="in_fixed_tiles"), "grouped in order"), (4, dict(path="ragged"), "ragged"),
    (65, dict(path="in_fixed_tiles", backend="xla"), "in_fixed_tiles"),
]  # fmt: skip


def call_of(weights: ExpertWeights, tokens: int, num_chosen: int, **facts) -> ExpertCall:
    x = jnp.zeros((tokens, weights.gate.shape[2]), jnp.bfloat16)
    return ExpertCall(x, weights, jnp.zeros((tokens, num_chosen), jnp.int32), jnp.int32(0), jnp.multiply, **facts)


def test_few_pairs_and_many_take_the_path_of_their_platform(monkeypatch):
    """Up to 16 pairs, or as many a device, of four devices at most."""
    weights = ExpertWeights(*(jnp.zeros((1, 8, *shape)) for shape in ((4, 2), (4, 2), (2, 4))))
    for platform, pairs, shares, expected in PAIRS:
        monkeypatch.setattr(experts, "platform", lambda platform=platform: platform)
        path, reasons = choose_path(call_of(weights, pairs // 2, 2, num_shares=shares))
        assert path == expected and path not in reasons, (platform, pairs, shares)


def test_one_order_of_sums_and_mxfp8_take_kernels_where_there_are_some():
    weights = ExpertWeights(*[jnp.zeros((1, 8, 128, 128), jnp.bfloat16)] * 3)
    codes, scales = jnp.zeros((2, 8, 128, 128), jnp.uint8), jnp.zeros((2, 8, 4, 128), jnp.uint8)
    kept = ExpertWeights(*[MXFP8Array(codes, scales)] * 3)
    path_of = lambda weights, tokens, **options: choose_path(call_of(weights, tokens, 4), **options)[0]
    with interpret():
        for tokens, options, expected in IN_BF16:
            assert path_of(weights, tokens, **options) == expected, options
        assert path_of(kept, 4) == "grouped" and path_of(kept, 4, path="in_fixed_tiles") == "grouped in order"
        shared = [StackedLayer(weights.gate[:, 0], jnp.int32(0))] * 3
        assert choose_path(call_of(weights, 4, 4, shared=shared))[0] == "few"
    assert path_of(kept, 4) == "one_by_one"


def test_which_path_runs_on_a_gpu_and_why_not_another(monkeypatch, unchecked):
    """A few tokens go to the kernel that sorts nothing, however narrow; what no kernel takes, XLA's paths run."""
    monkeypatch.setattr("m3jax.ops.backends.platform", lambda: "gpu")
    monkeypatch.setattr(experts, "platform", lambda: "gpu")

    def paths(all_tokens, width, hidden, dtype=jnp.bfloat16, backend="auto"):
        up, down = array(dtype, 2, 8, width, hidden), array(dtype, 2, 8, hidden, width)
        weights = ExpertWeights(up, up, down)
        of = lambda tokens: ExpertCall(
            array(dtype, tokens, width), weights, array(jnp.int32, tokens, 4), 0, jnp.multiply
        )
        return [choose_path(of(tokens), backend=backend)[0] for tokens in all_tokens]

    assert paths((1, 4, 16, 65, 2048), 6144, 3072) == ["few"] * 3 + ["grouped"] * 2
    assert paths((1, 4, 2048), 192, 192) == ["few", "few", "tiled"]
    assert paths((1, 5), 192, 192, jnp.float32) == ["gathered", "tiled"]
    assert paths((1, 5), 6144, 3072, backend="xla") == ["gathered", "tiled"]
    assert paths((1, 5), 96, 128) == ["gathered", "tiled"]
    weights = ExpertWeights(*[jnp.zeros((1, 8, 96, 96), jnp.bfloat16)] * 3)
    _, reasons = choose_path(call_of(weights, 5, 4))
    assert reasons["few"] == "experts of 96 by 96 channels (it has multiples of 64)"
    assert reasons["gathered"] == "20 pairs (it has 16, undivided)"


# What stands around a kernel

EXPERTS = 4


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", jax.lax.Precision.HIGHEST), ("bfloat16", None)])
def test_ragged_products_have_all_bits_and_one_order(dtype, precision):
    """A TPU would round numbers of 32 bits, and refuses to be told of others; pairs of an expert keep their order."""
    weights = ExpertWeights(*(jnp.zeros((2, 3, *shape), dtype) for shape in ((8, 4), (8, 4), (4, 8))))
    act = lambda gate, up: (gate * up).astype(dtype)
    call = lambda x, ids: run_experts(x, weights, ids, jnp.int32(1), act, path="ragged")
    traced = jax.make_jaxpr(call)(jnp.zeros((5, 8), dtype), jnp.zeros((5, 2), jnp.int32)).jaxpr
    steps = [(step.primitive.name, step.params) for step in equations(traced)]
    products = [params for name, params in steps if name.startswith("ragged_dot")]
    assert len(products) == 3
    assert {params["precision"] for params in products} == {precision and (precision, precision)}
    assert {str(params["preferred_element_type"]) for params in products} == {"float32"}
    assert all(params["is_stable"] for name, params in steps if name == "sort")


def test_gradients_of_kernels_are_those_of_the_same_outputs(monkeypatch):
    """What stands for a kernel in the backward pass computes what it does, of the layer at hand, the shared one too."""
    monkeypatch.setattr("pallas_kernels.gradient.with_gradient", lambda kernel, schedule, count: schedule)
    monkeypatch.setattr(experts, "tiled", experts.gathered)
    weights = [drawn(2, EXPERTS, *shape, seed=seed) for seed, shape in enumerate(((8, 4), (8, 4), (4, 8)))]
    shared = [weight[:, -1] for weight in weights]
    x, ids = drawn(5, 8), np.random.default_rng(0).integers(0, EXPERTS, (5, 2)).astype(np.int32)
    act = lambda gate, up: gate / (1 + abs(gate)) * up
    of_one = lambda x, gate, up, down: act(x @ gate, x @ up) @ down
    expected = [
        [of_one(one, *(w[1, e] for w in weights)) for e in of_token] for one, of_token in zip(x, ids, strict=True)
    ]
    operands = jnp.asarray(x), ExpertWeights(*map(jnp.asarray, weights)), jnp.asarray(ids), jnp.int32(1), act
    for path in ("few", "grouped", "in_fixed_tiles"):
        np.testing.assert_allclose(EXPERT_PATHS[path](ExpertCall(*operands)), expected, rtol=1e-4, atol=1e-4)
    stacks = [StackedLayer(jnp.asarray(stack), jnp.int32(1)) for stack in shared]
    found = run_experts(*operands, shared=stacks)
    np.testing.assert_allclose(found[:, :2], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[:, 2], of_one(x, *(w[1] for w in shared)), rtol=1e-4, atol=1e-4)
