"""MXFP8 weights that stay MXFP8: the numbers to the bit, and a model that is the dequantised one."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from support import tiny
from support.engines import CONFIG

from m3jax import mxfp8
from m3jax.checkpoint.mxfp8 import dequantize as dequantize_by_table
from m3jax.make import dotted_path
from m3jax.model import M3, abstract, dequantize, quantize
from m3jax.model.layers import swiglu_oai
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import EXPERT_PATHS, project, run_experts
from m3jax.ops.experts import ExpertCall, ExpertWeights
from m3jax.parallel import parse_mesh
from m3jax.train.losses import MSALoss
from m3jax.train.step import init_state
from m3jax.weights import merge_inputs

# Input channels of every matrix: 48, 40, 88, 56 and 8 heads of 16. None but the last is whole blocks of 32.
TOKENS = tiny.tokens(CONFIG, 2, 37)
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.fixture(scope="module")
def kept() -> M3:
    """A float32 model in MXFP8."""
    return quantize(tiny.model(CONFIG))


@pytest.fixture(scope="module")
def plain(kept) -> M3:
    """The same numbers as float32."""
    return dequantize(kept)


def same_bits(left: jax.Array, right: jax.Array) -> bool:
    left, right = np.asarray(left), np.asarray(right)
    return (left.shape, left.dtype, left.tobytes()) == (right.shape, right.dtype, right.tobytes())


# The numbers


def nearest(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale bytes) of blocks [... 32] by float64, which holds every quotient; ml_dtypes rounds it."""
    x = x.astype(np.float64)
    largest = np.abs(x).max(-1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - 8, -127)
    exponent = np.maximum(exponent, -127)
    codes = np.clip(np.ldexp(x, -exponent[..., None]), -448, 448).astype(E4M3)
    return codes, (exponent + 127).astype(np.uint8)


_quantize = jax.jit(mxfp8.quantize)
_quantize_blocks = jax.jit(lambda x: mxfp8.quantize(x, num_outputs=0))
_dequantize = jax.jit(mxfp8.dequantize, static_argnums=1)


@given(st.integers(0, 2**32 - 1), st.integers(-160, 127), st.integers(0, 30), st.sampled_from(["float32", "bfloat16"]))
def test_quantizing_is_rounding_to_nearest_even_under_the_scale_of_the_largest(seed, exponent, spread, dtype):
    """T43: Subnormal numbers, zeros of both signs, halves between two codes and numbers beyond 448 are all in."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(6, 64)) * 2.0 ** (exponent - draw.integers(0, spread + 1, (6, 64)))
    # Halves between two codes of the last binade, and one that lies between 448 and the next scale.
    x[0, :40] = (np.arange(40) / 2 + 0.5) * 2.0**exponent
    x[1, :3] = 1.99 * 2.0**exponent
    x[2, :32], x[3, ::2], x[3, 1::2] = 0.0, -0.0, 2.0 ** (exponent - 9)
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    x = np.where(np.isfinite(x.astype(np.float64)), x, np.ones((), x.dtype))
    found = _quantize_blocks(jnp.asarray(x))
    codes, scales = nearest(x.reshape(6, 2, 32))
    assert same_bits(found.codes, codes.reshape(x.shape).view(np.uint8)) and same_bits(found.scales, scales)


def test_halves_between_codes_and_their_neighbours_in_float32_are_rounded_to_the_nearer_one():
    """Of all codes of both signs, under the scale 1: a half goes to the even code, one bit more or less to its side."""
    numbers = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    halves = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([halves, np.nextafter(halves, 0), np.nextafter(halves, np.float32(1e9)), numbers])
    x = np.concatenate([x, -x]).astype(np.float32)
    x = np.pad(x, (0, -len(x) % 31)).reshape(-1, 31)
    x = np.pad(x, ((0, 0), (1, 0)), constant_values=256)  # the largest of each block is in the last binade of scale 1
    found = _quantize_blocks(jnp.asarray(x))
    np.testing.assert_array_equal(found.codes, x.astype(E4M3).view(np.uint8))
    assert (np.asarray(found.scales) == 127).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_code_under_every_scale_is_what_the_loader_reads(dtype):
    """Products below 2^-126 too: where a compiler multiplies, it may flush them to zero."""
    codes, scales = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    weight = MXFP8Array(np.repeat(codes[:, None], 32, 1), scales[:, None])  # [scale 32 code], one block each
    found = np.asarray(_dequantize(weight, dtype))[:, 31]
    expected = dequantize_by_table(codes, scales, np.dtype(dtype))
    is_nan = np.isnan(expected.astype(np.float32))
    assert (np.isnan(found.astype(np.float32)) == is_nan).all()
    assert same_bits(np.where(is_nan, 0, found).astype(dtype), np.where(is_nan, 0, expected).astype(dtype))


def test_numbers_of_mxfp8_stay_as_they_are():
    codes = np.random.default_rng(0).integers(0, 256, (8, 64)).astype(np.uint8)
    codes[codes & 127 == 127] = 126
    weight = MXFP8Array(jnp.asarray(codes), jnp.arange(100, 116, dtype=jnp.uint8).reshape(8, 2), num_outputs=0)
    values = _dequantize(weight, "bfloat16")
    assert same_bits(_dequantize(_quantize_blocks(values), "bfloat16"), values)


def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not():
    x = np.ones((2, 64), np.float32)
    x[1, 40], x[0, 3] = np.nan, np.inf
    found = np.asarray(_dequantize(_quantize_blocks(jnp.asarray(x)), "float32"))
    assert np.isnan(found[1, 32:]).all() and np.isnan(found[0, :32]).all()
    assert (found[1, :32] == 1).all() and (found[0, 32:] == 1).all()


def test_blocks_run_along_all_inputs_as_one_axis():
    """The heads of o_proj's input lie behind each other: 2 heads of 24 channels are a block of 32 and one of 16."""
    draw = np.random.default_rng(0).normal(size=(3, 2, 24, 5)) * 2.0 ** np.arange(48).reshape(2, 24, 1)
    found = jax.jit(lambda x: mxfp8.quantize(x, num_inputs=2))(draw.astype(np.float32))
    assert found.scales.shape == mxfp8.scales_shape(draw.shape, 2, 1) == (3, 2, 5)
    flat = draw.astype(np.float32).reshape(3, 48, 5)
    for block, channels in enumerate((slice(0, 32), slice(32, 48))):
        codes, scales = nearest(np.moveaxis(flat[:, channels], 1, -1))
        assert same_bits(found.scales[:, block], scales)
        assert same_bits(found.codes.reshape(3, 48, 5)[:, channels], np.moveaxis(codes.view(np.uint8), -1, 1))
    powers = np.ldexp(1.0, np.asarray(found.scales, int) - 127).repeat(32, axis=1)[:, :48]
    values = np.asarray(found.codes).view(E4M3).reshape(3, 48, 5).astype(np.float64) * powers
    np.testing.assert_array_equal(np.asarray(_dequantize(found, "float32")).reshape(3, 48, 5), values)
    one = merge_inputs(found[1], 2)
    assert same_bits(_dequantize(one, "float32").reshape(2, 24, 5), _dequantize(found, "float32")[1])


@pytest.mark.parametrize("width", [1, 31, 32, 33, 80])
def test_a_width_that_32_does_not_divide_has_a_last_block_of_fewer(width):
    """Its scale is its own, and the promised shape is the one that is made."""
    draw = np.random.default_rng(width)
    x = (draw.normal(size=(2, width, 3)) * 2.0 ** (np.arange(width) // 32)[:, None]).astype(np.float32)
    made = _quantize(x)
    assert made.scales.shape == mxfp8.scales_shape(x.shape, 1, 1) == (2, -(-width // 32), 3)
    largest = np.abs(x[:, (width - 1) // 32 * 32 :]).max(axis=1)
    np.testing.assert_array_equal(np.asarray(made.scales)[:, -1], np.floor(np.log2(largest)) - 8 + 127)
    np.testing.assert_allclose(_dequantize(made, "float32"), x, rtol=2**-3, atol=2**-9 * np.abs(x).max())


def test_a_matrix_has_no_rows_without_their_scales():
    stack = MXFP8Array(jnp.zeros((2, 64, 3), jnp.uint8), jnp.zeros((2, 2, 3), jnp.uint8))
    with pytest.raises(IndexError, match="2 indices into a stack of 1 axes of MXFP8 matrices: dequantize it first"):
        stack[0, 1]


# The model


def test_only_what_the_release_quantizes_is_quantized(kept):
    tiny_model = tiny.model(CONFIG)
    names = {dotted_path(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(kept)[0]}
    left = {dotted_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tiny_model)[0]} & set(names)
    assert {name.split(".")[-1] for name in left} == {
        *("embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
        *("index_q_norm", "index_k_norm", "gate", "e_score_correction_bias"),
    }
    by_kind = {leaf.dtype.name for name, leaf in names.items() if name not in left}
    assert by_kind == {"uint8"}
    assert "stacks.1.mlp.experts.down_proj.scales" in kept.summary()


def test_logits_of_the_invariant_mode_are_those_of_the_dequantised_model_to_the_bit(kept, plain):
    assert same_bits(*(model.with_invariance()(jnp.asarray(TOKENS)) for model in (kept, plain)))


@pytest.mark.further
def test_on_a_mesh_logits_are_those_of_the_dequantised_model_there():
    """In bfloat16; experts lie on one axis, heads and hidden channels on another, with their codes' own scales."""
    mesh = parse_mesh("expert=2,tensor=2")
    config = tiny.config("M", intermediate_size=64, shared_intermediate_size=64)
    model = quantize(tiny.model(config, dtype="bfloat16", mesh=mesh))
    down = model.stacks[0].mlp.experts.down_proj[...]
    assert down.codes.sharding.shard_shape(down.codes.shape) == (1, 4, 32, 48)
    assert down.scales.sharding.shard_shape(down.scales.shape) == (1, 4, 1, 48)
    assert same_bits(model(jnp.asarray(TOKENS)), dequantize(model)(jnp.asarray(TOKENS)))


@pytest.mark.usefixtures("eight_devices")
def test_scales_lie_where_their_codes_do():
    """Inputs of several axes are one, divided as the first of them is; a mesh that cuts a block of 32 is refused."""
    sizes = dict(hidden_size=64, intermediate_size=64, dense_intermediate_size=64, shared_intermediate_size=64)
    on_mesh = lambda **changes: abstract(
        tiny.config("dM", **(sizes | changes)), mesh="expert=2,tensor=2", weights="mxfp8"
    )
    sparse = on_mesh().stacks[1]
    to_heads, of_experts = P(None, None, "tensor", None), P(None, "expert", "tensor", None)
    for matrix, codes, scales, of_scales in (
        (sparse.self_attn.q_proj, (1, 64, 8, 16), (1, 2, 8, 16), to_heads),
        (sparse.self_attn.o_proj, (1, 8, 16, 64), (1, 4, 64), P(None, "tensor", None)),
        (sparse.mlp.experts.down_proj, (1, 8, 64, 64), (1, 8, 2, 64), of_experts),
    ):
        stored = matrix.get_value()
        assert (stored.codes.shape, stored.codes.dtype, stored.scales.shape) == (codes, jnp.uint8, scales)
        assert stored.scales.sharding.spec == of_scales
        assert stored.codes.sharding.spec[: len(of_scales) - 1] == of_scales[:-1]
    for width in (32, 96):
        with pytest.raises(ValueError, match=f"mesh axis 'tensor' of size 2 cuts {width} input channels"):
            on_mesh(shared_intermediate_size=width)


def test_nnx_takes_codes_and_scales_for_frozen_state(kept):
    graph, trained, frozen = nnx.split(kept, nnx.Param, ...)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trained)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"uint8"}
    merged = nnx.merge(graph, trained, frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(kept)
    assert jax.tree.all(jax.tree.map(same_bits, merged, kept))
    layer = kept.layer(1)
    assert layer.mlp.experts.gate_proj[...].scales.shape == (1, 8, 2, 40) and layer.depth == 1


# Experts: only those that were chosen are read as numbers


def equations(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("path", ["gathered", "one_by_one", "tiled", "in_fixed_tiles"])
def test_experts_are_dequantised_one_by_one_and_never_all(path):
    """Two tokens of two experts each: what is made of codes and scales is never as large as the experts of a layer."""
    width, hidden, num_experts = 64, 32, 32
    shape = lambda *sizes: jax.ShapeDtypeStruct((2, num_experts, *sizes), jnp.float32)
    stacks = [jax.eval_shape(mxfp8.quantize, shape(*s)) for s in ((width, hidden), (width, hidden), (hidden, width))]
    x, ids = jax.ShapeDtypeStruct((2, width), jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.int32)

    def run(x, weights, ids):
        return EXPERT_PATHS[path](ExpertCall(x, ExpertWeights(*weights), ids, jnp.int32(1), lambda gate, up: gate * up))

    traced = jax.make_jaxpr(run)(x, stacks, ids)
    made = [out.aval for equation in equations(traced.jaxpr) for out in equation.outvars]
    is_weight = lambda aval: aval.size >= num_experts * width * hidden // 4
    assert [aval for aval in made if is_weight(aval)] == []


@pytest.mark.parametrize("path", [path for path in EXPERT_PATHS if path not in ("few", "grouped", "products")])
def test_every_way_to_run_experts_takes_codes_and_scales(path, kept, plain):
    draw = np.random.default_rng(0)
    x, ids = jnp.asarray(draw.normal(size=(5, 48)), jnp.float32), jnp.asarray(draw.integers(0, 8, (5, 2)), jnp.int32)

    @jax.jit
    def run(experts):
        weights = ExpertWeights(experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...])
        return run_experts(x, weights, ids, jnp.int32(0), lambda gate, up: gate * up, path=path)

    assert same_bits(run(kept.stacks[1].mlp.experts), run(plain.stacks[1].mlp.experts))


@pytest.mark.further
def test_a_decode_step_s_program_holds_half_the_bytes_of_bfloat16():
    """At widths of whole blocks: codes and scales are 33 bytes for the 64 of bfloat16, and nothing keeps a copy."""
    config = tiny.config("MM", hidden_size=64, intermediate_size=256, shared_intermediate_size=64, num_local_experts=16)
    model = tiny.model(config, dtype="bfloat16")
    arguments = []
    for which in (model, quantize(model)):
        compiled = jax.jit(M3.__call__.__wrapped__).lower(which, jnp.zeros((1, 1), jnp.int32)).compile()
        arguments.append(compiled.memory_analysis())
    in_bfloat16, in_mxfp8 = arguments
    experts = 3 * 2 * 16 * 64 * 256
    saved = in_bfloat16.argument_size_in_bytes - in_mxfp8.argument_size_in_bytes
    assert saved >= experts * (2 - 33 / 32)
    assert in_mxfp8.temp_size_in_bytes < experts // 4


# Activations in MXFP8


def test_quantized_activations_are_the_definition_s(kept):
    """T43: Each token's channels are rounded, 32 by 32; then it is the product with the dequantised weight."""
    draw = np.random.default_rng(1)
    x = (draw.normal(size=(7, 80)) * 2.0 ** draw.integers(-9, 9, (7, 80))).astype(np.float32)
    weight = _quantize(draw.normal(size=(80, 24)).astype(np.float32))
    found = jax.jit(lambda x, w: project("xd,df->xf", x, w))(x, weight.with_activations("mxfp8"))
    padded = np.pad(x, ((0, 0), (0, 16))).reshape(7, 3, 32)  # [X blocks 32]
    codes, scales = nearest(padded)
    rounded = np.ldexp(codes.astype(np.float64), scales.astype(int)[..., None] - 127).reshape(7, 96)[:, :80]
    exact = np.asarray(_dequantize(weight, "float32"), np.float64)
    expected = rounded @ exact
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - x.astype(np.float64) @ exact).max() > 1e-2


def test_activations_are_quantized_where_they_are_asked_to_be(kept, plain):
    """In every linear layer; the head, the embedding and the router are not in MXFP8."""
    asked = kept.with_activations("mxfp8")
    is_array = lambda leaf: isinstance(leaf, MXFP8Array)
    arrays = [leaf for leaf in jax.tree.leaves(asked, is_leaf=is_array) if is_array(leaf)]
    assert len(arrays) == 19 and {array.activations for array in arrays} == {"mxfp8"}
    run = jax.jit(lambda mlp, x: jax.tree.map(lambda leaf: leaf[0], mlp).on_tokens(x[None], CONFIG)[0])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 48)), jnp.float32)
    found, left = run(asked.stacks[0].mlp, x), run(kept.stacks[0].mlp, x)
    assert not same_bits(found, left)
    rounded = _dequantize(_quantize_blocks(x), "float32")
    gate, up = (_dequantize(getattr(kept.stacks[0].mlp, name)[...][0], "float32") for name in ("gate_proj", "up_proj"))
    hidden = swiglu_oai(rounded @ gate, rounded @ up, CONFIG.swiglu_alpha, CONFIG.swiglu_limit)
    hidden = _dequantize(_quantize_blocks(hidden), "float32")
    down = _dequantize(kept.stacks[0].mlp.down_proj[...][0], "float32")
    np.testing.assert_allclose(found, hidden @ down, rtol=1e-4, atol=1e-4)
    assert jax.tree.structure(asked.with_activations(None)) == jax.tree.structure(kept)
    with pytest.raises(ValueError, match="activations = 'fp8': allowed are None and 'mxfp8'"):
        kept.with_activations("fp8")
    with pytest.raises(ValueError, match=r"no weight is in MXFP8; see m3jax\.quantize"):
        plain.with_activations("mxfp8")


# What cannot be


def test_weights_that_are_not_finite_are_refused_by_name():
    model = tiny.model(CONFIG)
    weight = model.stacks[1].mlp.experts.up_proj
    model.stacks[1].mlp.experts.up_proj = nnx.Param(weight[...].at[0, 3, 5, 7].set(np.nan))
    with pytest.raises(
        ValueError, match=r"stacks\.1\.mlp\.experts\.up_proj: layer 0 of its stack has a weight that is"
    ):
        quantize(model)


def test_quantizing_twice(kept):
    with pytest.raises(ValueError, match="the model's weights are in MXFP8 already"):
        quantize(kept)


def test_training_says_that_these_weights_are_frozen(kept):
    with pytest.raises(ValueError, match=r"in MXFP8, which is frozen: train m3jax\.load\(folder, dtype='float32'"):
        init_state(kept, optax.sgd(0.1))
    with pytest.raises(ValueError, match="in MXFP8, which is frozen"):
        MSALoss()(kept, {"tokens": jnp.asarray(TOKENS)})


def test_gradients_go_through_frozen_weights_and_not_into_them():
    """Of activations, as for a layer below: those of the dequantised product."""
    draw = np.random.default_rng(2)
    weight = _quantize(draw.normal(size=(64, 8)).astype(np.float32))
    x = jnp.asarray(draw.normal(size=(3, 64)), jnp.float32)
    loss = lambda x, weight: jnp.sum(project("xd,df->xf", x, weight) ** 2)
    gradient = jax.jit(jax.grad(loss))
    assert same_bits(gradient(x, weight), gradient(x, _dequantize(weight, "float32")))
    through = jax.jit(jax.grad(loss, 1, allow_int=True))(x, weight)
    assert {leaf.dtype for leaf in jax.tree.leaves(through)} == {jax.dtypes.float0}
