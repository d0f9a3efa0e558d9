"""Kernels that multiply by MXFP8 weights, on a GPU, against float64 and under every scale."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.on_gpu import OUT, distance, exact, shapes_and_dtypes, twice

from m3jax import mxfp8
from m3jax.checkpoint.mxfp8 import dequantize as dequantize_by_table
from m3jax.msa.inversion import invert
from m3jax.mxfp8 import MXFP8Array
from pallas_kernels.grouped_experts import grouped_experts
from pallas_kernels.mxfp8_experts import Weights, mxfp8_experts
from pallas_kernels.mxfp8_grouped import mxfp8_grouped
from pallas_kernels.mxfp8_numbers import mxfp8_numbers
from pallas_kernels.mxfp8_project import mxfp8_project

# tokens, experts, experts a token, width, hidden width, tile
EXPERTS = [
    (32, 32, 4, 6144, 3072, 16), (2048, 32, 4, 1024, 512, 64), (1, 128, 4, 1024, 3072, 16), (77, 8, 2, 256, 384, 16),
    (300, 6, 5, 128, 128, 64), (700, 16, 1, 512, 256, 64), (16, 64, 8, 384, 128, 16), (1000, 4, 2, 2048, 640, 32),
]  # fmt: skip
# Experts a pair at a time; rows, inputs and outputs of each dense projection of a call.
PAIRS = [(1, 32, 4, 6144, 3072, 1), (4, 16, 4, 6144, 3072, 1), (2, 128, 8, 1024, 512, 1), (5, 8, 2, 256, 384, 1)]
PROJECT = [
    (1, 6144, 8192, 512, 512), (4, 8192, 6144), (2, 6144, 512, 128), (3, 224, 96, 32), (16, 6144, 12288, 12288),
    (77, 3072, 6144), (5, 192, 256, 64, 64), (300, 6144, 8192), (129, 256, 128, 32), (1, 12288, 6144),
]  # fmt: skip
MOSAIC_PROJECT = [
    (32, 6144, 8192, 512, 512, 512, 128), (5, 3072, 6144), (300, 8192, 6144), (17, 192, 256, 128), (1, 128, 128),
    (129, 6144, 256), (256, 6144, 3072, 3072), (2, 12288, 6144),
]  # fmt: skip
NARROW = ("bfloat16", "float16")
TINIEST = 448 * 2.0**-127  # what has no leading bit may be flushed
# tokens, experts, experts a token, width, hidden width, tile
GROUPED = [
    (2048, 16, 4, 6144, 3072, 128), (500, 9, 3, 256, 384, 128), (300, 6, 5, 128, 128, 64), (77, 8, 2, 256, 384, 16),
    (1000, 4, 2, 2048, 640, 32), (900, 5, 2, 512, 256, 256),
]  # fmt: skip
# Triton's kernel and Mosaic's, which takes bfloat16 alone.
of_many_tokens = pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
in_16_bits = pytest.mark.parametrize("dtype", [jnp.dtype(name) for name in NARROW], ids=str)


def numbers(weights: Weights, dtype, *index) -> np.ndarray:
    """Return the definition's numbers of the weights at an index, rounded to a dtype, in float64."""
    return exact(mxfp8.dequantize(MXFP8Array(weights.codes[index], weights.scales[index]), dtype))


def tiles_of(ids: np.ndarray, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(expert of each tile, its tokens, which count): tiles of each expert's tokens, and an idle one."""
    expert, token = [], []
    for e in np.unique(ids):
        mine = np.nonzero((ids == e).any(1))[0]
        for part in np.split(mine, range(tile, len(mine), tile)):
            expert.append(e)
            token.append(np.pad(part, (0, tile - len(part)), constant_values=-1))
    token = np.array([*token, np.full(tile, -1)])
    return jnp.asarray([*expert, 0], jnp.int32), jnp.asarray(token.clip(0), jnp.int32), jnp.asarray(token >= 0)


@shapes_and_dtypes(EXPERTS, others=["float16"])
def test_experts_are_those_of_float64(shape, dtype, backend, seed):
    check_experts(shape, dtype, backend, seed)


@shapes_and_dtypes(PAIRS, others=["float16"])
def test_experts_a_pair_at_a_time_are_those_of_float64(shape, dtype, backend, seed):
    check_experts(shape, dtype, backend, seed)


def check_experts(shape, dtype, backend: str, seed: int) -> None:
    tokens, count, chosen, width, hidden, tile = shape
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), 4)

    def draw(key, inputs, outputs):
        codes, scales = jax.random.split(key)
        code = jax.random.randint(codes, (2, count, inputs, outputs), 0, 256).astype(jnp.uint8)
        code = jnp.where(code & 127 == 127, 0, code)
        # Numbers of E4M3 have a root mean square of about 2^7; a scale of 2^-14 or so gives products of about 1.
        scale = jax.random.randint(scales, (2, count, inputs // 32, outputs), 113, 119)
        return Weights(code, (scale - round(np.log2(inputs) / 2)).astype(jnp.uint8))

    x = jax.random.normal(keys[0], (tokens, width), jnp.float32).astype(dtype)
    gate, up, down = draw(keys[1], width, hidden), draw(keys[2], width, hidden), draw(keys[3], hidden, width)
    ids = rng.random((tokens, count - 1)).argsort(axis=1)[:, :chosen]
    expert, token, valid = tiles_of(ids, tile)
    act = lambda gate, up: gate * jax.nn.sigmoid(gate) * up
    used = lambda out, valid: jnp.where(valid[..., None], out, 0)
    fn = jax.jit(lambda *args: used(mxfp8_experts(*args, activate=act, backend=backend), args[-1]))
    (got,) = twice(fn, x, gate, up, down, jnp.int32(1), expert, token, valid)
    error = norm = 0.0
    for i in {0, len(expert) - 2, len(expert) // 2} if len(expert) > 2 else range(len(expert)):
        rows, e = exact(x[token[i][valid[i]]]), int(expert[i])
        g, u = rows @ numbers(gate, "float32", 1, e), rows @ numbers(up, "float32", 1, e)
        want = (g / (1 + np.exp(-g)) * u) @ numbers(down, "float32", 1, e)
        error += ((got[i][valid[i]] - want) ** 2).sum()
        norm += (want**2).sum()
    error = (error / norm) ** 0.5
    assert error < OUT, f"outputs: error {error:.1e}"  # hidden values are rounded


@of_many_tokens
@shapes_and_dtypes(GROUPED, others=["float16"])
def test_grouped_experts_are_those_of_their_numbers(shape, dtype, backend, seed):
    """Sums of the kernel of 16 bits with dequantised weights; the layer that is not used is NaN."""
    tokens, count, chosen, width, hidden, tile = shape
    skip_what_it_does_not_take(backend, dtype, tile)
    keys = jax.random.split(jax.random.key(seed), 7)

    def draw(code_key, scale_key, inputs, outputs):
        code = jax.random.bits(code_key, (2, count, inputs, outputs), jnp.uint8)
        scale = jax.random.randint(scale_key, (2, count, inputs // 32, outputs), 113, 119)
        code = jnp.where(code & 127 == 127, 0, code).at[0].set(127)
        return Weights(code, (scale - round(np.log2(inputs) / 2)).astype(jnp.uint8))

    x = jax.random.normal(keys[0], (tokens, width), jnp.float32).astype(dtype)
    weights = draw(*keys[1:3], width, hidden), draw(*keys[3:5], width, hidden), draw(*keys[5:], hidden, width)
    taste = np.random.default_rng(seed).random((tokens, count)) + np.linspace(0, 1, count)
    ids = taste.argsort(axis=1)[:, :chosen].astype(np.int32)

    def places(tile):
        tiles = invert(jnp.asarray(ids)[None, None], count, tile)
        return jnp.int32(1), tiles.block, tiles.pair, jnp.sum(tiles.valid, axis=1, dtype=jnp.int32)

    options = dict(num_chosen=chosen, activate=lambda gate, up: gate * jax.nn.sigmoid(gate) * up)
    (got,) = twice(jax.jit(partial(mxfp8_grouped, **options, backend=backend)), x, *weights, *places(tile))
    dense = (mxfp8.dequantize(MXFP8Array(w.codes, w.scales), dtype) for w in weights)
    of_16_bits = jax.jit(partial(grouped_experts, **options, backend="triton"))
    want = exact(of_16_bits(x, *dense, *places(min(tile, 128))))
    assert np.isfinite(got).all(), "an output is not finite"
    assert distance(got, want) < OUT, f"outputs: error {distance(got, want):.1e}"


def skip_what_it_does_not_take(backend: str, dtype, tile: int) -> None:
    """Skip a case that the other kernel has."""
    if backend == "mosaic_gpu" and dtype != jnp.bfloat16:
        pytest.skip("Mosaic's kernel takes bfloat16: float16 has Triton's")
    if backend == "triton" and tile > 128:
        pytest.skip("Triton's kernel takes tiles of up to 128 tokens: larger ones have Mosaic's")


@pytest.mark.small
@of_many_tokens
@in_16_bits
def test_grouped_experts_know_every_scale_and_nan(dtype, backend):
    """Tokens that pick one input channel each give the definition's numbers; a code of 127 or 255 is NaN."""
    skip_what_it_does_not_take(backend, dtype, 64)
    codes = np.random.default_rng(0).integers(0, 256, (1, 2, 128, 128)).astype(np.uint8)
    scales = np.arange(1024).reshape(1, 2, 4, 128) % (247 if dtype == jnp.bfloat16 else 134)  # larger ones overflow
    gate = Weights(jnp.asarray(codes), jnp.asarray(scales, jnp.uint8))
    identity = mxfp8.quantize(jnp.eye(128)[None, None].repeat(2, axis=1))
    pair = jnp.arange(256, dtype=jnp.int32).reshape(128, 2).T.reshape(4, 64)  # both experts of each token
    out = mxfp8_grouped(
        jnp.eye(128, dtype=dtype), gate, gate, Weights(identity.codes, identity.scales), jnp.int32(0),
        jnp.asarray([0, 0, 1, 1], jnp.int32), pair, jnp.full(4, 64, jnp.int32), num_chosen=2,
        activate=lambda gate, up: jnp.where(jnp.isnan(gate), 1.0, 0.0), backend=backend,
    )  # fmt: skip
    is_nan = np.asarray(out).swapaxes(0, 1) > 0.5
    expected = np.isnan(numbers(gate, "float32", 0)).any(axis=1, keepdims=True).repeat(128, axis=1)
    assert (is_nan == expected).all(), "a column has a NaN, or not, and the definition differs"
    codes[codes & 127 == 127] = 0
    gate = gate._replace(codes=jnp.asarray(codes))
    out = mxfp8_grouped(
        jnp.eye(128, dtype=dtype), gate, gate, Weights(identity.codes, identity.scales), jnp.int32(0),
        jnp.asarray([0, 0, 1, 1], jnp.int32), pair, jnp.full(4, 64, jnp.int32), num_chosen=2,
        activate=lambda gate, up: gate, backend=backend,
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(out).swapaxes(0, 1), numbers(gate, dtype, 0), rtol=0, atol=TINIEST)


@shapes_and_dtypes(PROJECT, others=["float16"])
def test_projections_are_those_of_float64(shape, dtype, backend, seed):
    check_projections(shape, dtype, backend, seed)


@shapes_and_dtypes(MOSAIC_PROJECT, others=[])
def test_projections_by_mosaic_are_those_of_float64(shape, dtype, seed):
    """One row and several tiles of them; matrices of a single piece beside those of many."""
    check_projections(shape, dtype, "mosaic_gpu", seed)


def check_projections(shape, dtype, backend: str, seed: int) -> None:
    """Multiply by the second of two layers; the first is NaN."""
    num_rows, inputs, *widths = shape
    keys = jax.random.split(jax.random.key(seed), 1 + 2 * len(widths))
    x = jax.random.normal(keys[0], (num_rows, inputs), jnp.float32).astype(dtype)
    weights = []
    for code_key, scale_key, width in zip(keys[1::2], keys[2::2], widths, strict=True):
        code = jax.random.bits(code_key, (2, inputs, width), jnp.uint8)
        code = jnp.where(code & 127 == 127, 0, code).at[0].set(127)
        scale = jax.random.randint(scale_key, (2, inputs // 32, width), 107, 113).astype(jnp.uint8)
        weights.append(Weights(code, scale))
    outs = twice(jax.jit(partial(mxfp8_project, backend=backend)), x, weights, jnp.int32(1))
    for i, (out, w) in enumerate(zip(outs, weights, strict=True)):
        error = distance(out, exact(x) @ numbers(w, dtype, 1))
        assert error < 2e-5, f"projection {i}: error {error:.1e}"


@pytest.mark.small
@of_many_tokens
@in_16_bits
def test_projections_know_every_scale(dtype, backend):
    """Rows that each pick one input channel give the definition's numbers, in few rows and in many."""
    skip_what_it_does_not_take(backend, dtype, 64)
    channels = np.arange(4) * 32 + np.array([0, 7, 18, 31])
    codes = np.random.default_rng(0).integers(0, 127, (1, 128, 128)) | 128 * (np.arange(128) % 2)
    scales = np.arange(512).reshape(1, 4, 128) % (247 if dtype == jnp.bfloat16 else 134)  # larger ones overflow
    weights = Weights(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))
    want = numbers(weights, dtype, 0)[channels]
    for num_rows in (4, 20):
        x = jnp.asarray(np.eye(128)[np.resize(channels, num_rows)], dtype)
        (got,) = mxfp8_project(x, [weights], jnp.int32(0), backend=backend)
        np.testing.assert_allclose(got[:4], want, rtol=0, atol=TINIEST, err_msg=f"{num_rows} rows")
    got = exact(mxfp8_numbers(weights, jnp.int32(0), dtype, backend="triton"))[channels]
    np.testing.assert_allclose(got, want, rtol=0, atol=TINIEST, err_msg="the numbers themselves")


@in_16_bits
def test_the_definition_gives_the_numbers_of_loading(dtype):
    """Every code under every scale, bit by bit."""
    codes, scales = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    block = MXFP8Array(jnp.asarray(codes[:, None].repeat(32, axis=1)), jnp.asarray(scales[:, None]))
    found = np.asarray(jax.jit(mxfp8.dequantize, static_argnums=1)(block, np.dtype(dtype)))[:, 31]
    want = dequantize_by_table(codes, scales, np.dtype(dtype))
    same = (found == want) | (np.isnan(found) & np.isnan(want))
    assert same.all(), f"(scale, code) with another number: {np.argwhere(~same)[:5].tolist()}"


@pytest.mark.small
@in_16_bits
def test_experts_know_every_scale(dtype, backend):
    """Tokens that pick one input channel each give the definition's numbers."""
    codes = np.random.default_rng(0).integers(0, 127, (1, 2, 128, 128)).astype(np.uint8)
    scales = np.arange(1024).reshape(1, 2, 4, 128) % (247 if dtype == jnp.bfloat16 else 134)  # larger ones overflow
    gate = Weights(jnp.asarray(codes), jnp.asarray(scales, jnp.uint8))
    identity = mxfp8.quantize(jnp.eye(128)[None, None].repeat(2, axis=1))
    token = jnp.arange(128, dtype=jnp.int32).reshape(4, 32).repeat(2, axis=0)
    out = mxfp8_experts(
        jnp.eye(128, dtype=dtype), gate, gate, Weights(identity.codes, identity.scales), jnp.int32(0),
        jnp.arange(8, dtype=jnp.int32) % 2, token, jnp.ones((8, 32), bool), activate=lambda gate, up: gate,
        backend=backend,
    )  # fmt: skip
    got = np.asarray(out).reshape(4, 2, 32, 128).swapaxes(0, 1).reshape(2, 128, 128)
    np.testing.assert_allclose(got, numbers(gate, dtype, 0), rtol=0, atol=TINIEST)
