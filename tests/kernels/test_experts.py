"""The kernels of routed experts in interpret mode against their definition and XLA's tiles, and lowered for CUDA."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import comparisons, tiny
from support.lowering import array, lower, refuse
from support.tpu_interpreter import STRICT

from m3jax import mxfp8
from m3jax.make import Frozen
from m3jax.model.layers import swiglu_oai
from m3jax.msa.inversion import invert
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import interpret, run_experts, sums_in_tiles
from m3jax.ops.experts import ExpertWeights
from pallas_kernels.expert_tiles import expert_tiles
from pallas_kernels.expert_tiles.mosaic_tpu import Config as TilesConfig
from pallas_kernels.few_experts import few_experts
from pallas_kernels.grouped_experts import grouped_experts
from pallas_kernels.mosaic_common import Chip
from pallas_kernels.mxfp8_experts import Weights, mxfp8_experts

CONFIG = tiny.config("dM", hidden_size=128, intermediate_size=128)
TOKENS = 40


@cache
def experts():
    """The experts of two layers, as one stack."""
    return tiny.model(replace(CONFIG, **_two_layers()), dtype="bfloat16").stacks[-1].mlp.experts


def _two_layers():
    kinds = (*CONFIG.layer_types, CONFIG.layer_types[-1]), (*CONFIG.mlp_layer_types, CONFIG.mlp_layer_types[-1])
    return dict(num_hidden_layers=3, layer_types=kinds[0], mlp_layer_types=kinds[1])


def choice(unused: int):
    """Tokens, and two experts for each; the first `unused` experts are chosen by nobody."""
    rng = np.random.default_rng(unused)
    ids = unused + np.argsort(rng.random((TOKENS, CONFIG.num_local_experts - unused)), axis=-1)[:, :2]
    return jnp.asarray(rng.normal(size=(TOKENS, 128)), jnp.bfloat16), jnp.asarray(ids, jnp.int32)


def act(gate, up):
    return swiglu_oai(gate, up, CONFIG.swiglu_alpha, CONFIG.swiglu_limit).astype(jnp.bfloat16)


def on_gpu(experts, x, ids, path):
    weights = ExpertWeights(experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...])
    return run_experts(x, weights, ids, jnp.int32(1), act, path=path)


# The definition: each pair of a token and an expert on its own.

LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 5, 128, 256


def silu_times(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def by_pair(x, weights, ids):
    """Return each pair's output by the second layer's experts, in float64; NaN for an expert that is not held."""
    x, gate, up, down = (np.asarray(array, np.float64) for array in (x, *weights))
    out = np.full((*ids.shape, x.shape[1]), np.nan)
    for token, choice in np.argwhere(ids >= 0):
        e = ids[token, choice]
        out[token, choice] = silu_times(x[token] @ gate[1, e], x[token] @ up[1, e]) @ down[1, e]
    return out


def weights_of(chosen, seed: int):
    """Three projections in float32; NaN in the first layer and for experts that nobody chose: these are not read."""
    draw = np.random.default_rng(seed)
    weights = []
    for inputs, outputs in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        weight = draw.normal(size=(LAYERS, EXPERTS, inputs, outputs)).astype(np.float32) * inputs**-0.5
        weight[0] = weight[:, np.setdiff1d(np.arange(EXPERTS), chosen)] = np.nan
        weights.append(weight)
    return weights


def check_pairs(out, x, weights, ids):
    expected = by_pair(x, weights, ids)
    is_held = ids >= 0
    comparisons.assert_close(np.asarray(out)[is_held], expected[is_held], "out", "PD", atol=2e-5)


@partial(jax.jit, static_argnames="most_pairs")
def sums_in_tiles_on_a_tpu(x, weights, ids, pair_weights, most_pairs):
    with interpret(STRICT):
        act = lambda gate, up: (jax.nn.silu(gate) * up).astype(x.dtype)
        return sums_in_tiles(x, ExpertWeights(*weights), ids, pair_weights, jnp.int32(1), act, most_pairs)


@pytest.mark.parametrize(
    "num_chosen",
    [pytest.param(0, marks=pytest.mark.further), 1, pytest.param(5, marks=pytest.mark.further)],
    ids=["none held", "two tiles of one expert", "all experts"],
)
def test_sums_in_tiles_on_a_tpu_are_those_of_the_pairs(num_chosen):
    """With as many places as there are pairs; memory that nothing wrote is NaN, and so is an expert nobody chose."""
    draw = np.random.default_rng(num_chosen)
    ids = draw.integers(0, max(num_chosen, 1), (140, 2)).astype(np.int32)
    ids[draw.random(ids.shape) < (0.3 if num_chosen else 1.1)] = -1
    x, pair_weights = draw.normal(size=(140, WIDTH)).astype(np.float32), draw.random(ids.shape).astype(np.float32)
    weights, num_pairs = weights_of(ids, num_chosen), int((ids >= 0).sum())
    expected = np.nansum(by_pair(x, weights, ids) * pair_weights[..., None], axis=1)
    most_pairs = 150 if num_chosen == 0 else num_pairs  # without any, as many places as with one expert
    found = sums_in_tiles_on_a_tpu(x, tuple(map(jnp.asarray, weights)), ids, pair_weights, most_pairs)
    comparisons.assert_close(found, expected, "sums", "XD", atol=2e-5)


@jax.jit
def run_few(x, weights, ids):
    options = dict(activate=lambda gate, up: jax.nn.silu(gate) * up, backend="triton", interpret=True)
    return few_experts(x, *weights, jnp.int32(1), ids, **options)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), spread=st.integers(0, EXPERTS))
@pytest.mark.parametrize("shape", [*(pytest.param(x, marks=pytest.mark.further) for x in ((1, 4), (5, 3))), (17, 2)])
def test_few_tokens_meet_the_experts_that_they_chose(shape, seed, spread):
    """From one expert for all to any; some are not held, and a token may choose an expert twice."""
    draw = np.random.default_rng(seed)
    ids = draw.permutation(EXPERTS)[draw.integers(0, max(spread, 1), shape)].astype(np.int32)
    ids[draw.random(shape) < 0.2] = -1
    x, weights = draw.normal(size=(shape[0], WIDTH)).astype(np.float32), weights_of(ids, seed)
    check_pairs(run_few(x, weights, ids), x, weights, ids)


@partial(jax.jit, static_argnames="tile")
def run_grouped(x, weights, ids, tile):
    tiles = invert(ids[None, None], EXPERTS, tile)
    count = jnp.sum(tiles.valid, axis=1, dtype=jnp.int32)
    return grouped_experts(
        x, *weights, jnp.int32(1), tiles.block, tiles.pair, count, num_chosen=ids.shape[1],
        activate=lambda gate, up: jax.nn.silu(gate) * up, backend="triton", interpret=True,
    )  # fmt: skip


LOADS = [(1, 0, 130, 64, 5), (0, 65, 0, 0, 135), (63, 66, 1, 2, 68), (40, 40, 40, 40, 40), (0, 0, 200, 0, 0)]


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_many_tokens_meet_the_experts_that_they_chose(tile, load):
    """Experts of 0 to 200 pairs: tiles that are full, that need half of their rows, and of a single pair."""
    draw = np.random.default_rng(sum(load[:2]))
    ids = draw.permutation(np.repeat(np.arange(EXPERTS, dtype=np.int32), load)).reshape(100, 2)
    if 0 in load:
        ids[draw.random(ids.shape) < 0.1] = -1
    x, weights = draw.normal(size=(100, WIDTH)).astype(np.float32), weights_of(ids, 0)
    check_pairs(run_grouped(x, weights, ids, tile), x, weights, ids)


# Through the model's own door, in bfloat16.


@partial(jax.jit, static_argnums=3)
def with_gradients(experts, x, ids, path):
    """The pairs' outputs, and gradients of the experts and of the tokens."""
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, 2, 128)), jnp.float32)
    loss = lambda experts, x: (on_gpu(experts, x, ids, path) * weight).sum()
    return on_gpu(experts, x, ids, path), jax.grad(loss, (0, 1))(experts, x)


@partial(jax.jit, static_argnums=3)
def with_gradients_of_tokens(experts, x, ids, path):
    """The pairs' outputs, and the gradient of the tokens alone: MXFP8 is frozen."""
    return on_gpu(experts, x, ids, path), jax.grad(lambda x: jnp.sum(on_gpu(experts, x, ids, path) ** 2))(x)


@pytest.mark.parametrize("path", [pytest.param("few", marks=pytest.mark.further), "grouped"])
def test_experts_and_their_gradients_are_those_of_xla(path):
    """The second layer of a stack; of eight experts six are idle, and two have more than a tile."""
    x, ids = choice(6)
    with interpret():
        found = with_gradients(experts(), x, ids, path)
    expected = with_gradients(experts(), x, ids, "tiled")
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        assert np.linalg.norm(mine - theirs) <= 2e-3 * np.linalg.norm(theirs)


@pytest.mark.further  # test_mxfp8.py has both kernels, a whole model and gradients of products
@pytest.mark.parametrize("unused", [0, 6])
def test_experts_in_mxfp8_are_those_of_xla(unused):
    """All eight experts, none with a whole tile, and two that have more; gradients of tokens through them."""
    x, ids = choice(unused)
    with interpret():
        found = with_gradients_of_tokens(kept_experts(), x, ids, "grouped")
    for mine, theirs in zip(found, with_gradients_of_tokens(kept_experts(), x, ids, "tiled"), strict=True):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        assert np.linalg.norm(mine - theirs) <= 2e-3 * np.linalg.norm(theirs)


@cache
def kept_experts():
    """Experts in MXFP8 whose scales differ from block to block, column to column and expert to expert."""
    draw = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: leaf, experts())
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = np.asarray(getattr(drawn, name)[...], np.float32)
        spread = np.exp2(draw.integers(-3, 4, (*weight.shape[:2], weight.shape[2] // 32, weight.shape[3])))
        spread_out = jnp.asarray(weight * spread.repeat(32, axis=2) / 4, jnp.bfloat16)
        setattr(drawn, name, Frozen(jax.jit(mxfp8.quantize)(spread_out)))
    return drawn


def test_the_kernel_s_numbers_are_the_definition_s_under_every_scale():
    """A token for each input channel, and projections that do nothing else: what comes out are the gate's weights."""
    codes = np.random.default_rng(0).integers(0, 256, (1, 2, 128, 128)).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    scales = np.arange(1024).reshape(1, 2, 4, 128) % 247  # 448 * 2^(247 - 127) is beyond bfloat16
    gate = Weights(jnp.asarray(codes), jnp.asarray(scales, jnp.uint8))
    identity = jax.jit(mxfp8.quantize)(np.eye(128, dtype=np.float32)[None, None].repeat(2, axis=1))
    down = Weights(identity.codes, identity.scales)
    token = np.arange(128, dtype=np.int32).reshape(4, 32).repeat(2, axis=0)
    run = jax.jit(partial(mxfp8_experts, activate=lambda gate, up: gate, backend="triton", interpret=True))
    out = run(
        np.eye(128, dtype=jnp.bfloat16), gate, gate, down, np.int32(0), np.arange(8, dtype=np.int32) % 2, token,
        np.ones((8, 32), bool),
    )  # fmt: skip
    found = np.asarray(out).reshape(4, 2, 32, 128).swapaxes(0, 1).reshape(2, 128, 128)
    weight = MXFP8Array(codes[0], scales[0].astype(np.uint8))
    expected = np.asarray(jax.jit(mxfp8.dequantize, static_argnums=1)(weight, "bfloat16"), np.float32)
    # The interpreter's CPU flushes to zero what has no leading bit, the smallest scale too.
    np.testing.assert_allclose(found, expected, rtol=0, atol=448 * 2.0**-127)


def mxfp8_operands(tokens: int, tile: int, **widths):
    tiles = tokens * 4 // tile + min(tokens * 4, 128)
    scales = lambda w: array(jnp.uint8, *w.shape[:2], w.shape[2] // 32, w.shape[3])
    weights = [Weights(w, scales(w)) for w in weights_in(jnp.uint8, **widths)]
    places = array(jnp.int32, tiles), array(jnp.int32, tiles, tile), array(bool, tiles, tile)
    return array(jnp.bfloat16, tokens, weights[0].codes.shape[2]), *weights, array(jnp.int32), *places


def run_mxfp8(*args):
    return mxfp8_experts(*args, activate=act, backend="triton")


@pytest.mark.parametrize(("tokens", "tile"), [(1, 1), pytest.param(32, 16, marks=pytest.mark.further), (2048, 64)])
def test_experts_in_mxfp8_lower(tokens, tile):
    name = "mxfp8_experts_out" if tile == 64 else "mxfp8_experts_few_out"
    assert name in lower(run_mxfp8, *mxfp8_operands(tokens, tile))


def test_wrong_operands_in_mxfp8_are_refused(unchecked):
    x, gate, up, down, *rest = mxfp8_operands(32, 16)
    refuse("need bfloat16 or float16", run_mxfp8, array(jnp.float32, *x.shape), gate, up, down, *rest)
    refuse("tiles of 8 tokens", run_mxfp8, *mxfp8_operands(32, 8))
    refuse("multiples of 32 and 128", run_mxfp8, *mxfp8_operands(1, 16, hidden=96))
    refuse("multiples of 128", run_mxfp8, *mxfp8_operands(100, 32, hidden=192))


def weights_in(dtype, width: int = 6144, hidden: int = 3072):
    """M3's experts, abstract: 57 layers of them."""
    up = array(dtype, 57, 128, width, hidden)
    return up, up, array(dtype, 57, 128, hidden, width)


def operands(tokens: int, tile: int, width: int = 6144, hidden: int = 3072):
    tiles = tokens * 4 // tile + min(tokens * 4, 128)
    places = array(jnp.int32, tiles), array(jnp.int32, tiles, tile), array(jnp.int32, tiles)
    return array(jnp.bfloat16, tokens, width), *weights_in(jnp.bfloat16, width, hidden), array(jnp.int32), *places


def run(*args):
    return grouped_experts(*args, num_chosen=4, activate=act, backend="triton")


@pytest.mark.parametrize(
    ("tokens", "tile"), [(32, 16), pytest.param(2048, 64, marks=pytest.mark.further), (16384, 128)]
)
def test_experts_lower(tokens, tile):
    assert "experts_out" in lower(run, *operands(tokens, tile))


def test_wrong_operands_are_refused(unchecked):
    refuse("tiles of 8 tokens: need 16, 32, 64 or 128", run, *operands(32, 8))
    refuse("from 6144 to 1000 channels: need multiples of 64 and 128", run, *operands(32, 16, hidden=1000))


def few_operands(tokens: int, dtype=jnp.bfloat16, **widths):
    weights = weights_in(dtype, **widths)
    return array(dtype, tokens, weights[0].shape[2]), *weights, array(jnp.int32), array(jnp.int32, tokens, 4)


def run_few_in_bf16(*args):
    return few_experts(*args, activate=act, backend="triton")


@pytest.mark.parametrize("tokens", [1, pytest.param(4, marks=pytest.mark.further), 64])
def test_few_tokens_lower(tokens):
    assert "few_experts_out" in lower(run_few_in_bf16, *few_operands(tokens))
    assert "few_experts_out" in lower(run_few_in_bf16, *few_operands(tokens, width=192, hidden=192))


def test_wrong_operands_of_few_tokens_are_refused(unchecked):
    x, gate, up, down, layer, _ = few_operands(4)
    refuse("4 tokens and the choices of 3", run_few_in_bf16, x, gate, up, down, layer, array(jnp.int32, 3, 4))
    refuse("need as many, 1 to 64", run_few_in_bf16, *few_operands(65))
    refuse("need multiples of 64 and 64", run_few_in_bf16, *few_operands(4, hidden=96))


@pytest.mark.parametrize("cores", [1, 2])
def test_tiles_meet_their_experts_on_every_core(cores, unchecked, monkeypatch):
    """Cores take turns, a part of the hidden channels a step; tiles behind the used ones stay out."""
    monkeypatch.setattr(Chip, "current", lambda interpret: Chip(cores, 32 << 20))
    draw = np.random.default_rng(cores)
    gate, up, down = (draw.normal(size=(2, 4, *shape)).astype(np.float32) for shape in ((8, 16), (8, 16), (16, 8)))
    x, share = draw.normal(size=(5, 4, 8)).astype(np.float32), draw.random((5, 4)).astype(np.float32)
    expert, used = np.int32([2, 0, 1, 3, 1]), 4
    run = partial(
        expert_tiles, activate=jnp.multiply, backend="mosaic_tpu", config=TilesConfig(hidden=8), interpret=True
    )
    found = jax.jit(run)(x, gate, up, down, jnp.int32(1), expert, jnp.int32(used), share)
    for tile in range(used):
        w = [matrix[1, expert[tile]] for matrix in (gate, up, down)]
        expected = ((x[tile] @ w[0]) * (x[tile] @ w[1])) @ w[2] * share[tile][:, None]
        np.testing.assert_allclose(found[tile], expected, rtol=1e-4, atol=1e-4)
