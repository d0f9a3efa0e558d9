"""The kernels of a step of few tokens besides attention: products with a stack, norms, router, shared expert."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.lowering import array, equations, lower, refuse

from m3jax.model import abstract
from m3jax.model.layers import add_norm as add_norm_definition
from m3jax.model.moe import route
from m3jax.ops import add_norm, interpret, project_each
from m3jax.parallel import parse_mesh
from m3jax.weights import StackedLayer
from pallas_kernels.add_norm import add_norm as add_norm_kernel
from pallas_kernels.choose_experts import choose_experts
from pallas_kernels.few_experts import SharedExpert, few_experts
from pallas_kernels.stacked_project import stacked_project
from pallas_kernels.stacked_project.triton import Config
from pallas_kernels.triton_experts import Piece

LAYER = jnp.int32(1)


def distance(found, expected) -> float:
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


def stack(inputs: int, *outputs: int, dtype="bfloat16", seed: int = 0) -> jax.Array:
    """A matrix for each of three layers; all but the second are NaN."""
    draw = np.random.default_rng(seed)
    drawn = draw.normal(size=(3, inputs, *outputs)) * inputs**-0.5
    drawn[[0, 2]] = np.nan
    return jnp.asarray(drawn, dtype)


def rows_of(num_rows: int, width: int, dtype="bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(num_rows).normal(size=(num_rows, width)), dtype)


def exact(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


# Products

SIZES = [
    (1, "bfloat16", None),
    pytest.param(1, "bfloat16", Config(Piece(64, 32, 4, 2), programs=5), marks=pytest.mark.further),
    (3, "float16", None), pytest.param(17, "float32", None, marks=pytest.mark.further),
    (64, "bfloat16", Config(Piece(32, 64, 4, 2), programs=40)),
]  # fmt: skip


@pytest.mark.parametrize(("num_rows", "dtype", "config"), SIZES, ids=str)
def test_products_are_those_of_the_definition(num_rows, dtype, config):
    """The second of three layers, matrices of two widths in one call, in one part and in several."""
    weights = [stack(192, 256, dtype=dtype), stack(192, 128, dtype=dtype, seed=1)]
    x = rows_of(num_rows, 192, dtype)
    project = jax.jit(partial(stacked_project, backend="triton", interpret=True, config=config))
    found, again = project(x, weights, LAYER), project(x, weights, LAYER)
    for out, same, w in zip(found, again, weights, strict=True):
        assert out.dtype == jnp.float32 and out.shape == (num_rows, w.shape[2])
        assert distance(out, exact(x) @ exact(w)[1]) < 1e-6
        np.testing.assert_array_equal(out, same)


def test_a_layer_s_products_and_their_gradients_are_those_of_xla():
    """Outputs of two axes beside those of one, and a batch; of the last product no gradient goes to the activations."""
    weights = [stack(64, 4, 16), stack(64, 64, seed=1), stack(64, 64, seed=2)]
    x = rows_of(4, 64).reshape(2, 2, 64)

    def products(x, weights, apart):
        layer = [w[1] if apart else StackedLayer(w, LAYER) for w in weights]
        return project_each("bti,i...o->bt...o", x, layer, num_detached=1)

    loss = lambda x, weights, apart: sum(jnp.sum(out**2) for out in products(x, weights, apart))
    both = lambda apart: (products(x, weights, apart), jax.grad(loss, (0, 1))(x, weights, apart))
    with interpret():
        found, (slope, slopes) = jax.jit(lambda: both(False))()
    expected, (expected_slope, expected_slopes) = jax.jit(lambda: both(True))()
    kept = [[np.asarray(y)[1] for y in of_stacks] for of_stacks in (slopes, expected_slopes)]
    for one, other in zip((*found, slope, *kept[0]), (*expected, expected_slope, *kept[1]), strict=True):
        assert one.shape == other.shape and distance(exact(one), exact(other)) < 4e-3
    with_all = jax.jit(jax.grad(lambda x: sum(jnp.sum(y**2) for y in products(x, weights[:2], True)[:1])))(x)
    first = jax.jit(jax.grad(lambda x: loss(x, weights[:1] + weights[2:], True)))(x)
    np.testing.assert_array_equal(exact(first), exact(with_all))


# Norms and the router


@pytest.mark.parametrize("has_update", [True, pytest.param(False, marks=pytest.mark.further)])
def test_a_sum_and_its_norm_are_the_definition_s_to_the_bit(has_update):
    """A width of three pieces; the norm is that of the rounded sum, and gradients are XLA's."""
    x = rows_of(6, 192).reshape(2, 3, 192)
    update = jnp.asarray(rows_of(6, 192, "float32") * 3).reshape(x.shape) if has_update else None
    weight = rows_of(1, 192)[0] * 0.1
    by_xla = partial(add_norm_definition, eps=1e-6)
    by_kernel = partial(add_norm, by_xla, eps=1e-6, backend="auto")
    loss = lambda fn: lambda x, weight: sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in fn(x, update, weight))
    run = lambda fn: (fn(x, update, weight), jax.grad(loss(fn), (0, 1))(x, weight))
    with interpret():
        found = jax.jit(lambda: run(by_kernel))()
        assert "pallas_call" in str(jax.make_jaxpr(lambda: by_kernel(x, update, weight))())
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(lambda: run(by_xla))()), strict=True):
        np.testing.assert_allclose(exact(one), exact(other), rtol=2**-7)
    assert np.mean(np.asarray(found[0][1]) != np.asarray(by_xla(x, update, weight)[1])) < 0.02  # sums in another order
    np.testing.assert_array_equal(found[0][0], by_xla(x, update, weight)[0])


@cache
def routers():
    """(kernel, definition) of 3 of 16 experts, from their logits."""
    kernel = partial(choose_experts, top_k=3, backend="triton", interpret=True)
    by_xla = lambda logits, bias: route(logits, jnp.eye(16), bias, 3)
    return jax.jit(kernel), jax.jit(by_xla)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), ties=st.booleans(), broken=st.booleans())
def test_the_router_chooses_as_its_definition_does(seed, ties, broken):
    """Of equal scores the lower id; the bias counts in the choice alone; a NaN breaks its own token's weights."""
    draw = np.random.default_rng(seed)
    logits = (draw.integers(-2, 3, (5, 16)) if ties else draw.normal(size=(5, 16))).astype(np.float32)
    bias = np.zeros(16, np.float32) if ties else draw.normal(size=16).astype(np.float32)
    if broken:
        logits[2, draw.integers(16)] = np.nan
    kernel, by_xla = routers()
    (ids, weights), (expected_ids, expected_weights) = kernel(logits, bias), by_xla(np.nan_to_num(logits), bias)
    whole = np.array([True, True, not broken, True, True])
    np.testing.assert_array_equal(np.asarray(ids)[whole], np.asarray(expected_ids)[whole])
    np.testing.assert_allclose(np.asarray(weights)[whole], np.asarray(expected_weights)[whole], rtol=1e-6)
    assert np.isnan(weights).all(axis=1).tolist() == (~whole).tolist()
    assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < 16)).all()


# The shared expert


def test_a_shared_expert_is_one_more_choice_of_every_token():
    """The routed ones do not notice it, also where one is not held."""
    num_tokens, num_chosen = 17, 2
    draw = np.random.default_rng(num_tokens)
    weights = [
        draw.normal(size=(2, 5, a, b)).astype(np.float32) * a**-0.5 for a, b in ((64, 128), (64, 128), (128, 64))
    ]
    shared = SharedExpert(*(w[:, 0] + w[:, 1] for w in weights))
    x, ids = draw.normal(size=(num_tokens, 64)).astype(np.float32), draw.integers(-1, 5, (num_tokens, num_chosen))
    weights, shared = jax.tree.map(jnp.asarray, (weights, shared))
    act = lambda gate, up: jax.nn.silu(gate) * up
    run = partial(
        few_experts,
        jnp.asarray(x),
        *weights,
        LAYER,
        jnp.asarray(ids, jnp.int32),
        activate=act,
        backend="triton",
        interpret=True,
    )
    found, routed = jax.jit(lambda: (run(shared=shared), run()))()
    np.testing.assert_array_equal(np.asarray(found)[:, :-1][ids >= 0], np.asarray(routed)[ids >= 0])
    gate, up, down = (np.asarray(w[1], np.float64) for w in shared)
    hidden = x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)
    assert distance(found[:, -1], hidden @ down) < 1e-6


# In the model

MODEL = dict(
    hidden_size=128, intermediate_size=128, shared_intermediate_size=128, dense_intermediate_size=128,
    num_local_experts=4, index_head_dim=64, head_dim=64, rotary_dim=32,
)  # fmt: skip
CONFIG = tiny.config("dMM", **MODEL)


def test_logits_with_kernels_are_those_of_xla_but_for_rounding():
    """Two layers of one stack, one by one, each with its own weights; those of test_mxfp8.py are scanned."""
    ids = jnp.asarray(tiny.tokens(CONFIG, 1, 2))
    drawn = tiny.model(tiny.config("MM", **MODEL), dtype="bfloat16")
    with interpret():
        found = jax.jit(lambda model: model.with_layers_apart(ids.size)(ids))(drawn)
    assert distance(exact(found), exact(drawn(ids))) < 2e-2


@pytest.mark.parametrize("are_apart", [pytest.param(False, marks=pytest.mark.further), True])
def test_no_matrix_is_copied_out_of_its_stack(are_apart):
    """A step's program hands whole stacks to kernels: it neither slices a layer's matrix nor scans it."""
    step = lambda model, ids: (model.with_layers_apart(1) if are_apart else model)(ids)
    with interpret():
        traced = jax.make_jaxpr(step)(abstract(CONFIG, "bfloat16"), array(jnp.int32, 1, 1))
    outside = list(equations(traced.jaxpr))
    cut = {"slice", "dynamic_slice", "squeeze", "gather"}
    made = [out.aval for equation in outside if equation.primitive.name in cut for out in equation.outvars]
    matrices = [aval for aval in made if aval.dtype == jnp.bfloat16 and aval.size >= 128 * 64]
    assert matrices == []
    calls = [equation.params["name"] for equation in outside if equation.primitive.name == "pallas_call"]
    assert {"add_norm", "choose_experts", "few_experts_out"} <= set(calls)
    # Of a layer: q, k, v and what the index has; o; of a dense one also gate and up, and down. The two sparse ones are
    # scanned, or one after the other.
    assert sum(name.startswith("stacked_project") for name in calls) == 4 + (4 if are_apart else 2)


def test_meshes_and_the_invariant_mode_multiply_by_xla():
    """A kernel sees one device's memory, and has an order of sums for each number of rows."""
    alone, divided = (abstract(CONFIG, "bfloat16", mesh) for mesh in (None, parse_mesh("tensor=2")))
    with interpret():
        for other in (alone.with_invariance(), divided):
            program = str(jax.make_jaxpr(lambda model, ids: model(ids))(other, array(jnp.int32, 1, 1)))
            assert not any(name in program for name in ("stacked_project", "add_norm", "choose_experts"))


# Lowering


def operands(num_rows: int, *widths: int, inputs: int = 6144, dtype=jnp.bfloat16):
    """M3's projections of a step, abstract; the stack of all layers, whose offsets need more than 32 bits."""
    return array(dtype, num_rows, inputs), [array(dtype, 57, inputs, n) for n in widths], array(jnp.int32)


def run(x, weights, layer, **options):
    return stacked_project(x, weights, layer, backend="triton", **options)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_products_lower(num_rows):
    assert "stacked_project" in lower(run, *operands(num_rows, 8192, 512, 512, 512, 128))
    assert "stacked_project" in lower(run, *operands(num_rows, 192, inputs=192))


def test_norms_routers_and_shared_experts_lower():
    x, update, weight = array(jnp.bfloat16, 8, 6144), array(jnp.float32, 8, 6144), array(jnp.bfloat16, 6144)
    assert "add_norm" in lower(partial(add_norm_kernel, eps=1e-6, backend="triton"), x, update, weight)
    choose = partial(choose_experts, top_k=4, backend="triton")
    assert "choose_experts" in lower(choose, array(jnp.float32, 8, 128), array(jnp.float32, 128))
    shapes = (6144, 3072), (6144, 3072), (3072, 6144)
    experts = [array(jnp.bfloat16, 3, 128, *shape) for shape in shapes]
    shared = SharedExpert(*(array(jnp.bfloat16, 3, *shape) for shape in shapes))
    act = lambda gate, up: (gate * up).astype(jnp.bfloat16)
    run = lambda x, ids, layer, shared, *experts: few_experts(
        x, *experts, layer, ids, activate=act, shared=shared, backend="triton"
    )
    assert "few_experts_hidden" in lower(run, x, array(jnp.int32, 8, 4), array(jnp.int32), shared, *experts)


def test_wrong_operands_are_refused(unchecked):
    x, (weight,), layer = operands(4, 8192)
    refuse("x is float32, weights\\[0\\] bfloat16", run, array(jnp.float32, *x.shape), [weight], layer)
    few = partial(run, config=Config(Piece(96, 64, 4, 2)))
    refuse("6144 input channels and 8192 outputs: need multiples of 64 and 96", few, x, [weight], layer)
    norm = lambda x, weight: add_norm_kernel(x, None, weight, eps=1e-6, backend="triton")
    refuse("need \\[X D\\] and \\[D\\]", norm, x, array(jnp.bfloat16, 3072))
    choose = partial(choose_experts, top_k=4, backend="triton")
    refuse("need \\[X E\\], \\[E\\] and 1 to E", choose, array(jnp.float32, 2, 128), array(jnp.float32, 64))
    refuse("96 experts: need a power of two", choose, array(jnp.float32, 2, 96), array(jnp.float32, 96))
    experts = [array(jnp.bfloat16, 3, 8, *shape) for shape in ((256, 128), (256, 128), (128, 256))]
    narrow = SharedExpert(*(array(jnp.bfloat16, 3, *shape) for shape in ((256, 64), (256, 64), (64, 256))))
    call = lambda x, ids, layer, shared: few_experts(
        x, *experts, layer, ids, activate=jnp.multiply, shared=shared, backend="triton"
    )
    shared = array(jnp.bfloat16, 2, 256), array(jnp.int32, 2, 2), layer, narrow
    refuse("shared.gate has shape \\(3, 256, 64\\) in bfloat16: need \\(3, 256, 128\\)", call, *shared)


def test_a_long_row_is_added_and_normed_in_pieces_of_at_most_8192():
    """Two of them, powers of two, which cover the row."""
    x, update = (np.random.default_rng(seed).normal(size=(1, 1 << 14)).astype(np.float32) for seed in (0, 1))
    weight = np.linspace(-0.5, 0.5, 1 << 14, dtype=np.float32)
    how = dict(eps=0.1, backend="triton", interpret=True)
    found, norm = add_norm_kernel(*map(jnp.asarray, (x, update, weight)), **how)
    np.testing.assert_array_equal(found, x + update)
    expected = (x + update) / np.sqrt(np.mean(np.square(x + update)) + 0.1) * (1 + weight)
    np.testing.assert_allclose(norm, expected, rtol=1e-5, atol=1e-6)
