"""Kernels that multiply by MXFP8 weights: in interpret mode against the definition, and their lowering for CUDA."""

import inspect
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from support import tiny
from support.lowering import array, equations, lower, refuse
from support.tpu_interpreter import STRICT

from m3jax import mxfp8
from m3jax.checkpoint.mxfp8 import dequantize as dequantize_by_table
from m3jax.model import abstract, quantize
from m3jax.msa.inversion import invert
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import interpret, project, project_each, run_experts
from m3jax.ops.experts import ExpertWeights
from m3jax.ops.measured import MXFP8_ROWS
from m3jax.parallel import parse_mesh
from m3jax.weights import StackedLayer
from pallas_kernels.mosaic_mxfp8 import Config as TpuConfig
from pallas_kernels.mxfp8_experts import mxfp8_experts
from pallas_kernels.mxfp8_grouped import mxfp8_grouped
from pallas_kernels.mxfp8_grouped.mosaic_gpu import rows_of_tiles
from pallas_kernels.mxfp8_grouped.triton import Config as GroupedConfig
from pallas_kernels.mxfp8_numbers import mxfp8_numbers
from pallas_kernels.mxfp8_project import Weights, mxfp8_project
from pallas_kernels.mxfp8_project import mosaic_gpu as project_mosaic
from pallas_kernels.triton_mxfp8 import FewConfig, FragmentConfig

TPU = dict(backend="mosaic_tpu", interpret=STRICT, config=TpuConfig(rows=4, columns=64, depth=64))
LAYER = jnp.int32(1)
# A call is one program: outside of `jit` it would be a program for each of its steps.
STATIC = ("backend", "config", "interpret")
run_project = jax.jit(mxfp8_project, static_argnames=STATIC)
run_mxfp8_experts = jax.jit(mxfp8_experts, static_argnames=(*STATIC, "activate"))
run_numbers = jax.jit(mxfp8_numbers, static_argnames=(*STATIC, "dtype"))
dequantize = jax.jit(mxfp8.dequantize, static_argnames="dtype")


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """After an exception the TPU interpreter's memory would be that of the failed kernel."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def drawn(*shape: int, seed: int = 0) -> Weights:
    """Finite codes of both signs, whose scales differ from block to block and column to column."""
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 127, shape) | draw.integers(0, 2, shape) << 7
    scales = draw.integers(110, 124, (*shape[:-2], shape[-2] // 32, shape[-1]))
    return Weights(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))


def numbers(weights: Weights, dtype="float32") -> np.ndarray:
    """Return the numbers that the second layer's weights stand for, in float64."""
    of_layer = MXFP8Array(*(np.asarray(x)[1] for x in weights))
    return np.asarray(dequantize(of_layer, dtype=dtype)).astype(np.float64)


def tokens(num_rows: int, width: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(num_rows).normal(size=(num_rows, width)), dtype)


def multiply(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (gate * up).astype(jnp.bfloat16)


def distance(found, expected) -> float:
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


# The op


@pytest.mark.parametrize(
    ("num_rows", "widths", "dtype"),
    [
        pytest.param(1, (256, 64, 32), "bfloat16", marks=pytest.mark.further),
        (21, (256, 128), "bfloat16"),
        pytest.param(3, (96, 32), "float16", marks=pytest.mark.further),
        pytest.param(16, (128,), "float16", marks=pytest.mark.further),
    ],
)
def test_projections_are_those_of_the_definition(num_rows, widths, dtype):
    """The second of three layers; matrices of several widths in one call; 7 blocks, which nothing but 1 divides."""
    weights = [drawn(3, 224, width, seed=width) for width in widths]
    x = tokens(num_rows, 224, dtype)
    found = run_project(x, weights, LAYER, backend="triton", interpret=True)
    for out, w in zip(found, weights, strict=True):
        assert out.dtype == jnp.float32
        assert distance(out, np.asarray(x, np.float64) @ numbers(w, dtype)) < 1e-6


@pytest.mark.parametrize(
    "config",
    [
        FewConfig(64, 1, programs=4),
        FragmentConfig(2),
        pytest.param(FewConfig(32, 2, rows=3), marks=pytest.mark.further),
    ],
)
def test_sizes_of_programs_change_nothing_but_the_order_of_sums(config):
    weights = drawn(2, 128, 128)
    x = tokens(4, 128)
    (found,) = run_project(x, [weights], LAYER, backend="triton", interpret=True, config=config)
    assert distance(found, np.asarray(x, np.float64) @ numbers(weights)) < 1e-6


def every_scale() -> Weights:
    """All scales but those beyond bfloat16 with a code of 448, and the scale that is NaN in the last column."""
    codes = np.random.default_rng(0).integers(0, 127, (2, 128, 128)) | 128 * (np.arange(128) % 2)
    scales = np.arange(512).reshape(4, 128) % 247
    scales[:, -1] = 255
    return Weights(jnp.asarray(codes, jnp.uint8), jnp.asarray(np.stack([scales, scales]), jnp.uint8))


@pytest.mark.parametrize("kernel", ["few", "fragments", "tpu"])
def test_weights_are_the_definition_s_under_every_scale(kernel):
    """Each row picks one input channel, in all four blocks: what comes out are weights."""
    weights = every_scale()
    channels = np.arange(4) * 32 + np.array([0, 7, 18, 31])
    x = jnp.asarray(np.eye(128)[channels], jnp.bfloat16)
    options = dict(few=dict(config=FewConfig()), fragments=dict(config=FragmentConfig()), tpu=TPU)[kernel]
    options = dict(backend="triton", interpret=True) | options
    (found,) = run_project(x, [weights], LAYER, **options)
    scales = np.asarray(weights.scales[1]).repeat(32, axis=0)[channels]
    expected = dequantize_by_table(np.asarray(weights.codes[1])[channels], scales, np.dtype("bfloat16"))
    # The interpreter's CPU flushes to zero what has no leading bit, the smallest scale too.
    np.testing.assert_allclose(found, expected.astype(np.float32), rtol=0, atol=448 * 2.0**-127)
    assert np.isnan(found[:, -1]).all() and np.isfinite(found[:, :-1]).all()


def test_a_code_that_is_nan_stays_one():
    weights = drawn(2, 128, 128)
    weights = weights._replace(codes=weights.codes.at[1, 5, 3].set(127).at[1, 77, 9].set(255))
    for num_rows in (1, 16):
        (found,) = run_project(tokens(num_rows, 128), [weights], LAYER, backend="triton", interpret=True)
        assert (np.isnan(found).all(axis=0) == np.isin(np.arange(128), [3, 9])).all()
    found = run_numbers(weights, LAYER, dtype="bfloat16", backend="triton", interpret=True)
    assert (np.argwhere(np.isnan(found)) == [(5, 3), (77, 9)]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.further)])
def test_numbers_of_many_rows_are_the_definition_s_to_the_bit(dtype):
    weights = every_scale()
    if dtype == "float16":
        weights = weights._replace(scales=jnp.clip(weights.scales, 100, 133))
    found = run_numbers(weights, LAYER, dtype=dtype, backend="triton", interpret=True)
    assert found.dtype == dtype
    expected = mxfp8.dequantize(MXFP8Array(weights.codes[1], weights.scales[1]), dtype)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), rtol=0, atol=448 * 2.0**-127)


@pytest.mark.parametrize("tile", [*(pytest.param(tile, marks=pytest.mark.further) for tile in (1, 16)), 32])
def test_experts_of_one_token_of_tensor_cores_and_of_tiles(tile):
    """The second layer; two experts, a tile that is not used, and tokens in another order than they are in."""
    gate, up, down = drawn(2, 3, 128, 256), drawn(2, 3, 128, 256, seed=1), drawn(2, 3, 256, 128, seed=2)
    x, expert = np.asarray(tokens(40, 128)) / jnp.bfloat16(256), np.array([2, 1, 0], np.int32)
    token = np.random.default_rng(0).integers(0, 40, (3, tile), np.int32)
    valid = np.array([[True], [False], [True]]).repeat(tile, axis=1)
    out = run_mxfp8_experts(
        x, gate, up, down, LAYER, expert, token, valid, activate=multiply, backend="triton", interpret=True
    )
    rows = np.asarray(x, np.float64)[np.asarray(token)]  # [tiles C D]
    for i in (0, 2):
        e = int(expert[i])
        hidden = (rows[i] @ numbers(gate)[e]) * (rows[i] @ numbers(up)[e])
        hidden = hidden.astype(jnp.bfloat16).astype(np.float64)
        assert distance(np.asarray(out)[i], hidden @ numbers(down)[e]) < 4e-3


@pytest.mark.further
@pytest.mark.parametrize("num_rows", [1, 6])
def test_projections_on_a_tpu(num_rows):
    """Three steps of depth, two pieces of columns, and rows that do not fill their last tile."""
    weights = [drawn(2, 192, 128), drawn(2, 192, 64, seed=1)]
    x = tokens(num_rows, 192)
    found = run_project(x, weights, LAYER, **TPU)
    for out, w in zip(found, weights, strict=True):
        assert distance(out, np.asarray(x, np.float64) @ numbers(w)) < 1e-6


def test_experts_on_a_tpu():
    """Two tiles of two tokens, and one that is not used."""
    gate, up, down = drawn(2, 3, 64, 128), drawn(2, 3, 64, 128, seed=1), drawn(2, 3, 128, 64, seed=2)
    x, expert = np.asarray(tokens(3, 64)) / jnp.bfloat16(64), np.array([2, 0, 1], np.int32)
    token, valid = np.array([[0, 2], [1, 0], [0, 0]], np.int32), np.array([[1, 1], [1, 0], [0, 0]], bool)
    out = run_mxfp8_experts(
        x, gate, up, down, LAYER, expert, token.repeat(8, axis=1), valid.repeat(8, axis=1), activate=multiply, **TPU
    )
    rows = np.asarray(x, np.float64)[np.asarray(token)]  # [tiles 2 D]
    for tile, e in ((0, 2), (1, 0)):
        hidden = (rows[tile] @ numbers(gate)[e]) * (rows[tile] @ numbers(up)[e])
        hidden = hidden.astype(jnp.bfloat16).astype(np.float64)
        assert distance(np.asarray(out)[tile, ::8], hidden @ numbers(down)[e]) < 2e-2


# In the model


def of_layer(*outputs: int) -> StackedLayer:
    """A matrix of 64 inputs."""
    codes, scales = (np.asarray(y).reshape(*y.shape[:2], *outputs) for y in drawn(2, 64, int(np.prod(outputs))))
    return StackedLayer(MXFP8Array(codes, scales, num_outputs=len(outputs)), LAYER)


@pytest.mark.parametrize("num_rows", [pytest.param(2, marks=pytest.mark.further), 49])
def test_a_layer_s_products_and_their_gradients_are_those_of_xla(num_rows):
    """Outputs of two axes beside those of one, and a batch; the gradient goes to the activations."""
    weights = [of_layer(4, 16), of_layer(32)]
    x = tokens(num_rows, 64).reshape(1, num_rows, 64)
    by_kernel = lambda x: project_each("bti,i...o->bt...o", x, weights)
    product = partial(jnp.einsum, "bti,i...o->bt...o", preferred_element_type=jnp.float32)
    by_xla = lambda x: [product(x, mxfp8.dequantize(w.take(), x.dtype)) for w in weights]

    def loss(x, products):
        outputs = products(x)
        return sum(jnp.sum(out**2) for out in outputs), outputs

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnames="products")
    with interpret():
        gradient, found = run(x, by_kernel)
    slope, expected = run(x, by_xla)
    for one, other in zip((*found, gradient), (*expected, slope), strict=True):
        assert one.shape == other.shape and distance(one, np.asarray(other, np.float64)) < 4e-3


def test_one_product_of_many_rows_is_that_of_its_own_layer():
    """More rows than are multiplied while codes are read: the numbers of the second layer are written first."""
    weight, x = of_layer(32), tokens(MXFP8_ROWS + 1, 64)
    with interpret():
        found = jax.jit(lambda x: project("xi,io->xo", x, weight))(x)
    expected = np.asarray(x, np.float64) @ np.asarray(dequantize(weight.take(), dtype="float32"), np.float64)
    assert distance(found, expected) < 4e-3


SIZES = dict(hidden_size=128, intermediate_size=128, shared_intermediate_size=64, dense_intermediate_size=128)
CONFIG = tiny.config("MM", num_local_experts=4, index_head_dim=32, **SIZES)


def of_shapes(mesh=None):
    return abstract(CONFIG, "bfloat16", mesh, weights="mxfp8")


def test_logits_with_kernels_are_those_of_xla_but_for_rounding():
    """Two layers of one stack, each with its own weights."""
    kept, ids = quantize(tiny.model(CONFIG, dtype="bfloat16")), jnp.asarray(tiny.tokens(CONFIG, 1, 2))
    with interpret():
        found = jax.jit(lambda model, ids: model(ids))(kept, ids)
    assert distance(found, np.asarray(kept(ids), np.float64)) < 1e-2


def test_no_matrix_is_copied_out_of_its_stack_for_a_kernel():
    """Of a decode step's program nothing in bytes is sliced, but scales and codes are handed to kernels as stacks."""
    with interpret():
        traced = jax.make_jaxpr(lambda model, ids: model(ids))(of_shapes(), array(jnp.int32, 1, 1))
    outside = [equation for equation in equations(traced.jaxpr) if equation.primitive.name != "reshape"]
    made = [out.aval for equation in outside for out in equation.outvars if out.aval.dtype == jnp.uint8]
    assert made == []
    calls = [equation.params["name"] for equation in outside if equation.primitive.name == "pallas_call"]
    # q, k, v and both of the index; o; gate and up; down: of a layer that is scanned.
    assert calls.count("mxfp8_project_few") == 4 and "mxfp8_experts_few_out" in calls


@pytest.mark.further  # as the kernels of test_few_tokens.py
def test_meshes_and_the_invariant_mode_multiply_by_xla():
    """A kernel sees one device's memory, and has an order of sums for each number of rows."""
    with interpret():
        for other in (of_shapes().with_invariance(), of_shapes(parse_mesh("tensor=2"))):
            traced = jax.make_jaxpr(lambda model, ids: model(ids))(other, array(jnp.int32, 1, 1))
            assert "mxfp8_project" not in str(traced)


# Lowering


def operands(num_rows: int, *widths: int, inputs: int = 6144, dtype=jnp.bfloat16):
    """M3's projections of a token, abstract."""
    weights = [Weights(array(jnp.uint8, 3, inputs, n), array(jnp.uint8, 3, inputs // 32, n)) for n in widths]
    return array(dtype, num_rows, inputs), weights, array(jnp.int32)


def run(x, weights, layer):
    return mxfp8_project(x, weights, layer, backend="triton")


@pytest.mark.parametrize(("num_rows", "name"), [(1, "mxfp8_project_few"), (16, "mxfp8_project_tiles")])
def test_projections_lower(num_rows, name):
    assert name in lower(run, *operands(num_rows, 8192, 512, 512, 128))


@pytest.mark.parametrize("num_rows", [32, pytest.param(300, marks=pytest.mark.further)])
def test_projections_in_a_gpu_s_registers_lower(num_rows):
    """As far as a CPU can: a matrix of a single piece beside those of many."""
    of_hopper = partial(mxfp8_project, backend="mosaic_gpu")
    assert "mxfp8_project" in lower(of_hopper, *operands(num_rows, 8192, 512, 512, 512, 128))


def test_numbers_lower():
    _, (weights,), layer = operands(1, 8192)
    widen = partial(mxfp8_numbers, dtype=jnp.bfloat16, backend="triton")
    assert "mxfp8_numbers" in lower(widen, weights, layer)


def test_wrong_operands_are_refused(unchecked):
    x, (weights,), layer = operands(4, 8192)
    refuse("need \\[L I O\\], all of one L, with I = 3072", run, array(jnp.bfloat16, 4, 3072), [weights], layer)
    refuse("a scale for every 32 input channels", run, x, [weights._replace(scales=weights.codes)], layer)
    refuse("need bfloat16 or float16", run, array(jnp.float32, *x.shape), [weights], layer)
    few = partial(mxfp8_project, backend="triton", config=FewConfig(columns=96))
    refuse("6144 input channels and 8192 outputs: need multiples of 128 and 96", few, x, [weights], layer)
    far = Weights(array(jnp.uint8, 57, 6144, 8192), array(jnp.uint8, 57, 192, 8192))
    refuse("need below 2\\*\\*31 or above 2\\*\\*32", run, x, [far], layer)
    tpu = partial(mxfp8_project, backend="mosaic_tpu")
    refuse("a TPU kernel needs a multiple of 1024", tpu, *operands(4, 128, inputs=1536))
    hopper = partial(mxfp8_project, backend="mosaic_gpu")
    refuse("x is float16: .* takes bfloat16; use 'triton'", hopper, *operands(4, 256, dtype=jnp.float16))
    refuse("has no interpret mode: .* use 'triton'", partial(hopper, interpret=True), *operands(4, 256))
    units = "need multiples of 64 and of 256, or 128 outputs"
    refuse(f"6144 input channels and 256, 384 outputs: {units}", hopper, *operands(4, 256, 384))
    refuse(f"96 input channels and 128 outputs: {units}", hopper, *operands(4, 128, inputs=96))


# Projections in the registers of a Hopper GPU


@given(
    st.integers(1, 300),
    st.sampled_from([(128, (256, 128)), (192, (768, 128, 256)), (320, (512,)), (64, (128,))]),
    st.sampled_from([1, 5, 24, 132]),
    st.integers(0, 2**32 - 1),
)
def test_the_works_of_a_product_are_all_of_it_once(num_rows, channels_and_widths, programs, seed):
    """Of works that are done in numpy, the sums of parts add up to the product: none is left out, none comes twice."""
    inputs, widths = channels_and_widths
    draw = np.random.default_rng(seed)
    x = draw.integers(-3, 4, (num_rows, inputs)).astype(np.float32)
    matrices = [draw.integers(-3, 4, (inputs, width)).astype(np.float32) for width in widths]
    # Codes and scales of no meaning: the works' products take the matrices themselves.
    weights = tuple(
        Weights(np.zeros((1, *m.shape), np.uint8), np.zeros((1, inputs // 32, m.shape[1]), np.uint8)) for m in matrices
    )

    def in_numpy(x, pairs, apart, data, *, num_works, work, outs, heights, config, **_):
        x, columns = np.asarray(x, np.float32), config.columns
        written = [np.full(out.shape, np.nan, np.float32) for out in outs]
        of_all = jax.device_get(jax.vmap(partial(work, data))(jnp.arange(512)))  # one shape, whatever the case
        assert num_works(data) <= 512
        for index in range(num_works(data)):
            own = jax.tree.map(lambda values, index=index: int(values[index]), of_all)
            assert 0 < own.count <= heights[-1] and own.num_steps > 0 and own.place == (0,)
            rows = slice(own.first_row, own.first_row + own.count)
            channels = slice(64 * own.first_step, 64 * (own.first_step + own.num_steps))
            for piece in {own.piece, own.piece + apart[own.pair]}:
                of_piece = slice(piece * columns, (piece + 1) * columns)
                place = written[own.pair][own.target, : own.count, of_piece]
                assert np.isnan(place).all()
                place[:] = x[rows, channels] @ matrices[own.pair][channels, of_piece]
        return [np.nan_to_num(out) for out in written]

    with mock.patch.multiple(project_mosaic, multiply_pieces=in_numpy, num_programs=lambda: programs):
        found = mxfp8_project(jnp.asarray(x, jnp.bfloat16), weights, jnp.int32(0), backend="mosaic_gpu")
    for out, matrix in zip(found, matrices, strict=True):
        np.testing.assert_array_equal(out, x @ matrix)


def test_on_a_hopper_gpu_some_rows_take_mosaic_s_projections(monkeypatch):
    """In bfloat16, of 3 to 256 rows; more have their numbers written, fewer Triton's kernel."""
    kept, taken = MXFP8Array(*drawn(2, 128, 256)), []

    def product(x, weights, layer, *, backend, **_):
        taken.append(backend)
        return tuple(jnp.zeros((len(x), w.codes.shape[2]), jnp.float32) for w in weights)

    def widen(weights, layer, dtype, **_):
        taken.append("numbers")
        return jnp.zeros(weights.codes.shape[1:], dtype)

    monkeypatch.setattr("pallas_kernels.mxfp8_project.mxfp8_project", product)
    monkeypatch.setattr("pallas_kernels.mxfp8_numbers.mxfp8_numbers", widen)

    def of(capability, num_rows, dtype=jnp.bfloat16, kept=kept):
        taken.clear()
        monkeypatch.setattr("m3jax.ops.cases.compute_capability", lambda: capability)
        monkeypatch.setattr("m3jax.ops.backends.platform", lambda: "gpu")
        layer = StackedLayer(kept, LAYER, "auto")
        jax.eval_shape(lambda x: project("ti,io->to", x, layer), array(dtype, num_rows, kept.shape[1]))
        [path] = taken
        return path

    assert [of("9.0", rows) for rows in (1, 2, 3, 256, 257)] == [
        "triton", "triton", "mosaic_gpu", "mosaic_gpu", "numbers",
    ]  # fmt: skip
    assert of("8.9", 8) == of("10.0", 8) == of("9.0", 8, jnp.float16) == "triton" and of("8.9", 256) == "numbers"
    assert of("9.0", 8, kept=MXFP8Array(*drawn(2, 128, 384))) == "triton"
    assert of("9.0", 8, kept=MXFP8Array(*drawn(2, 96, 256))) == "triton"


# Experts of many tokens


@pytest.mark.parametrize(
    ("tile", "config"), [(32, None), pytest.param(128, GroupedConfig(depth=32), marks=pytest.mark.further)]
)
def test_experts_of_many_tokens_are_those_of_the_definition(tile, config):
    """The second layer: two choices a token, tiles that are half empty, one of no pair, and every kind of code."""
    gate, up, down = drawn(2, 3, 128, 128), drawn(2, 3, 128, 128, seed=1), drawn(2, 3, 128, 128, seed=2)
    x = tokens(40, 128) / 256
    ids = jnp.asarray(np.random.default_rng(0).random((40, 3)).argsort(axis=1)[:, :2], jnp.int32)
    tiles = invert(ids[None, None], 3, tile)
    multiply = lambda gate, up: (gate * up).astype(jnp.bfloat16)
    options = dict(num_chosen=2, activate=multiply, backend="triton", config=config, interpret=True)
    out = jax.jit(partial(mxfp8_grouped, **options))(
        x, gate, up, down, LAYER, tiles.block, tiles.pair, jnp.sum(tiles.valid, axis=1, dtype=jnp.int32)
    )
    rows, chosen = np.asarray(x, np.float64), np.asarray(ids)
    hidden = np.einsum("xd,xadf->xaf", rows, numbers(gate)[chosen]) * np.einsum(
        "xd,xadf->xaf", rows, numbers(up)[chosen]
    )
    hidden = np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float64)
    assert distance(out, np.einsum("xaf,xafd->xad", hidden, numbers(down)[chosen])) < 4e-3


@pytest.mark.parametrize(
    ("dtype", "backend", "tile"),
    [(jnp.bfloat16, "triton", 128), (jnp.bfloat16, "mosaic_gpu", 16), (jnp.bfloat16, "mosaic_gpu", 256),
     pytest.param(jnp.float16, "triton", 128, marks=pytest.mark.further)],
)  # fmt: skip
def test_experts_of_many_tokens_lower(dtype, backend, tile):
    """Both kernels, at M3's sizes: the one in a GPU's registers, which has no interpret mode, as far as a CPU can."""
    weights = lambda inputs, outputs: Weights(
        array(jnp.uint8, 3, 128, inputs, outputs), array(jnp.uint8, 3, 128, inputs // 32, outputs)
    )
    operands = array(dtype, 8192, 6144), weights(6144, 3072), weights(6144, 3072), weights(3072, 6144)
    places = array(jnp.int32), array(jnp.int32, 384), array(jnp.int32, 384, tile), array(jnp.int32, 384)
    run = partial(mxfp8_grouped, num_chosen=4, activate=lambda gate, up: gate * up, backend=backend)
    assert "mxfp8_grouped_out" in lower(run, *operands, *places)


def test_what_a_kernel_of_many_tokens_does_not_take_is_refused(unchecked):
    """Each by the backend that does not take it, with the one that does."""
    weights = lambda inputs, outputs: Weights(
        array(jnp.uint8, 3, 8, inputs, outputs), array(jnp.uint8, 3, 8, inputs // 32, outputs)
    )

    def call(width, hidden, tile, dtype=jnp.bfloat16, **how):
        places = array(jnp.int32), array(jnp.int32, 9), array(jnp.int32, 9, tile), array(jnp.int32, 9)
        operands = array(dtype, 64, width), weights(width, hidden), weights(width, hidden), weights(hidden, width)
        refuse(how.pop("match"), partial(mxfp8_grouped, num_chosen=2, activate=None, **how), *operands, *places)

    call(128, 128, 256, backend="triton", match="tiles of 256 tokens: backend = 'triton' takes up to 128")
    call(128, 128, 512, backend="mosaic_gpu", match="tiles of 512 tokens: need 16, 32, 64, 128 or 256")
    call(128, 192, 64, backend="mosaic_gpu", match="widths 128 and 192: need multiples of 128")
    call(192, 128, 64, backend="mosaic_gpu", match="widths 192 and 128: need multiples of 128")
    call(128, 128, 64, jnp.float16, backend="mosaic_gpu", match="x is float16: .* takes bfloat16; use 'triton'")
    call(128, 128, 64, backend="mosaic_gpu", interpret=True, match="has no interpret mode: .* use 'triton'")
    config = GroupedConfig()
    call(128, 128, 64, backend="mosaic_gpu", config=config, match="takes a .*hopper_mxfp8.Config")


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 16, 3), (5, 16, 40), (7, 32, 100), (3, 64, 192)]))
def test_rows_of_tiles_are_their_pairs_one_tile_behind_the_other(seed, sizes):
    """Each tile's from a multiple of 8 on, which is what a fetch counts in; tiles of no pair, also between others."""
    num_tiles, tile, num_pairs = sizes
    rng = np.random.default_rng(seed)
    count = np.zeros(num_tiles, np.int32)
    for i in rng.permutation(num_tiles):
        count[i] = rng.integers(0, min(tile, num_pairs - count.sum()) + 1)
    pair = rng.integers(0, num_pairs, (num_tiles, tile)).astype(np.int32)
    of_row, first_row = (np.asarray(x) for x in rows_of_tiles(jnp.asarray(pair), jnp.asarray(count), num_pairs))
    assert (first_row % 8 == 0).all() and len(of_row) % 8 == 0
    taken = np.zeros(len(of_row), int)
    for tile_pairs, many, first in zip(pair, count, first_row, strict=True):
        np.testing.assert_array_equal(of_row[first : first + many], tile_pairs[:many])
        taken[first : first + many] += 1
    assert taken.max(initial=0) <= 1 and (of_row[taken == 0] == 0).all()


def test_rows_of_tiles_have_room_for_the_worst_counts():
    """As many tiles as there are pairs, of one pair each: 8 rows for each of them."""
    pair, count = jnp.arange(5, dtype=jnp.int32)[:, None].repeat(16, axis=1), jnp.ones(5, jnp.int32)
    of_row, first_row = rows_of_tiles(pair, count, 5)
    assert first_row.tolist() == [0, 8, 16, 24, 32] and of_row[first_row].tolist() == [0, 1, 2, 3, 4]


def test_on_a_hopper_gpu_many_tokens_take_mosaic_s_kernel(monkeypatch):
    """In bfloat16, from a pair for four experts on, in tiles of twice the mean; never where bits are a pair's own."""
    kept = ExpertWeights(*(MXFP8Array(*drawn(2, 8, 128, 128, seed=seed)) for seed in range(3)))
    multiply = lambda gate, up: (gate * up).astype(gate.dtype)
    taken = []

    def kernel(x, *_, pair, backend, num_chosen, **options):
        taken.append((backend, pair.shape[1]))
        return jnp.zeros((len(x), num_chosen, x.shape[1]), jnp.float32)

    names = list(inspect.signature(mxfp8_grouped).parameters)
    monkeypatch.setattr(
        "pallas_kernels.mxfp8_grouped.mxfp8_grouped",
        lambda *args, **how: kernel(**dict(zip(names, args, strict=False)), **how),
    )

    def of(capability, num_tokens, dtype=jnp.bfloat16, path="grouped"):
        taken.clear()
        monkeypatch.setattr("m3jax.ops.cases.compute_capability", lambda: capability)
        monkeypatch.setattr("m3jax.ops.backends.platform", lambda: "gpu")
        x, ids = tokens(num_tokens, 128).astype(dtype), jnp.zeros((num_tokens, 1), jnp.int32)
        jax.eval_shape(lambda x, ids: run_experts(x, kept, ids, LAYER, multiply, path=path), x, ids)
        return taken

    tiles = {2: 16, 64: 16, 72: 64, 256: 64, 264: 128, 512: 128, 520: 256, 4096: 256}
    assert all(of("9.0", count) == [("mosaic_gpu", tile)] for count, tile in tiles.items())
    assert of("9.0", 1) == [] and of("8.9", 256) == [] and of(None, 256) == []
    assert of("8.9", 512) == of("10.0", 512) == of("9.0", 512, jnp.float16) == [("triton", 128)]
    assert of("9.0", 512, path="in_fixed_tiles") == []
