"""The kernels of the invariant mode's products and norms, interpreted, against their definitions; lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lowering import array, lower, refuse

from m3jax.model.layers import apply_rope, gemma_norm
from m3jax.mxfp8 import dequantize, quantize
from pallas_kernels.ordered_project import Weights, ordered_project
from pallas_kernels.ordered_project.triton import Config
from pallas_kernels.qk_norm_rope import qk_norm_rope

LAYERS, INPUTS, OUTPUTS = 2, 128, (192, 64)
LAYER = jnp.int32(1)
ON_CPU = dict(backend="triton", interpret=True)


@partial(jax.jit, static_argnames=("by_output", "config"))
def multiply(x, weights, by_output=False, config=None):
    return ordered_project(x, weights, LAYER, by_output=by_output, config=config, **ON_CPU)


def stack(rng, dtype, *shape):
    """Matrices of two layers; the first, which is not to be read, is NaN."""
    weight = rng.normal(size=(LAYERS, *shape)) * INPUTS**-0.5
    weight[0] = np.nan
    return jnp.asarray(weight, dtype)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**16))
@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [("bfloat16", 1), pytest.param("bfloat16", 37, marks=pytest.mark.further), ("bfloat16", 150), ("float32", 40)],
)
def test_a_product_is_that_of_its_layer(dtype, num_rows, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(num_rows, INPUTS)), dtype)
    weights = [stack(rng, dtype, INPUTS, width) for width in OUTPUTS]
    for found, weight in zip(multiply(x, weights), weights, strict=True):
        expected = np.asarray(x, np.float64) @ np.asarray(weight[1], np.float64)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_many_rows_come_in_groups_of_tiles():
    """Nine tiles of 16 rows: programs of the ninth begin when all columns of the first eight have been taken."""
    rng = np.random.default_rng(4)
    x, weight = jnp.asarray(rng.normal(size=(140, INPUTS)), jnp.bfloat16), stack(rng, "bfloat16", INPUTS, 192)
    config = Config(rows=16, columns=64, columns_first=False, num_warps=4, num_stages=3)
    (found,) = multiply(x, [weight], config=config)
    np.testing.assert_allclose(found, np.asarray(x, np.float64) @ np.asarray(weight[1], np.float64), 2e-5, 2e-6)


def test_an_unembedding_has_its_outputs_first():
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(rng.normal(size=(5, INPUTS)), jnp.bfloat16), stack(rng, "bfloat16", 192, INPUTS)
    (found,) = multiply(x, [weight], by_output=True)
    np.testing.assert_allclose(found, np.asarray(x, np.float64) @ np.asarray(weight[1], np.float64).T, 2e-5, 2e-6)


@pytest.mark.parametrize("num_rows", [pytest.param(3, marks=pytest.mark.further), 70])
def test_mxfp8_is_multiplied_as_its_numbers_are(num_rows):
    """To the bit, in tiles of the same size: a program makes the numbers that the other one reads."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(num_rows, INPUTS)), jnp.bfloat16)
    kept = quantize(jnp.asarray(rng.normal(size=(LAYERS, INPUTS, 64)), jnp.float32))
    config = Config(rows=16, columns=64, columns_first=num_rows == 3, num_warps=4, num_stages=3)
    (found,) = multiply(x, [Weights(kept.codes, kept.scales)], config=config)
    (expected,) = multiply(x, [dequantize(kept, jnp.bfloat16)], config=config)
    np.testing.assert_array_equal(found, expected)


def test_a_sum_in_float32_is_cut_at_fixed_channels():
    """768 channels are three sums of 256, added one after the other: what the router's product is on a GPU."""
    rng = np.random.default_rng(2)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 768), (2, 768, 16)))
    part = lambda i: multiply(x[:, 256 * i : 256 * (i + 1)], [weight[:, 256 * i : 256 * (i + 1)]])[0]
    np.testing.assert_array_equal(multiply(x, [weight])[0], part(0) + part(1) + part(2))


def test_heads_are_normed_and_rotated():
    """Of queries, more than a program takes, and of an index key: all dims rotated, or half of them."""
    rng = np.random.default_rng(3)
    heads = [jnp.asarray(rng.normal(size=(4, *shape)), jnp.float32) for shape in ((18, 32), (1, 16))]
    norms = [jnp.asarray(rng.normal(size=x.shape[2]), jnp.float32) for x in heads]
    angles = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    found = jax.jit(partial(qk_norm_rope, eps=1e-6, dtype=jnp.float32, **ON_CPU))(heads, norms, cos, sin)
    for x, norm, out in zip(heads, norms, found, strict=True):
        expected = apply_rope(gemma_norm(x, norm, 1e-6)[None], cos[None], sin[None])[0]
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 300])
def test_m3_s_products_lower_for_cuda(num_rows):
    """Queries with keys, the unembedding, MXFP8, and the router."""
    bf16, layer = jnp.bfloat16, array(jnp.int32)
    x, wide = array(bf16, num_rows, 6144), [array(bf16, 2, 6144, width) for width in (8192, 512, 512, 512, 128)]
    codes = Weights(array(jnp.uint8, 2, 6144, 512), array(jnp.uint8, 2, 192, 512))
    call = partial(ordered_project, backend="triton")

    def products(x, routed, wide, head, codes, gate, layer):
        return (
            call(x, wide, layer), call(x, [head], layer, by_output=True), call(x, [codes], layer),
            call(routed, [gate], layer),
        )  # fmt: skip

    head, gate, routed = (
        array(bf16, 1, 200064, 6144),
        array(jnp.float32, 2, 6144, 128),
        array(jnp.float32, num_rows, 6144),
    )
    text = lower(products, x, routed, wide, head, codes, gate, layer)
    assert text.count("ordered_project") >= 4
    assert f"tensor<{24 * num_rows}x128xf32>" in text  # the router's sums of 256 channels


def test_what_does_not_fit_is_refused():
    call, layer = partial(ordered_project, backend="triton"), array(jnp.int32)
    refuse("need multiples of 64 and 64", call, array(jnp.bfloat16, 3, 96), [array(jnp.bfloat16, 2, 96, 64)], layer)
    rope = partial(qk_norm_rope, eps=1e-6, dtype=jnp.bfloat16, backend="triton")
    angles = array(jnp.float32, 3, 32)
    refuse("2 R <= H", rope, [array(jnp.float32, 3, 4, 32)], [array(jnp.bfloat16, 32)], angles, angles)
