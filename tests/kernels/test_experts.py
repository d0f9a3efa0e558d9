"""The kernel of routed experts in interpret mode against what XLA's tiles compute, and its lowering for CUDA."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.lowering import array, lower, refuse

from m3jax import mxfp8
from m3jax.make import Frozen
from m3jax.model.layers import swiglu_oai
from m3jax.mxfp8 import MXFP8Array
from m3jax.ops import interpret, run_experts
from m3jax.ops.experts import ExpertWeights, kernel_runs_experts, kernel_takes
from pallas_kernels.grouped_experts import grouped_experts
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


def test_experts_and_their_gradients_are_those_of_xla():
    """The second layer of a stack; of eight experts six are idle, and two have more than a tile."""
    x, ids = choice(6)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, 2, 128)), jnp.float32)

    def both(experts, x, path):
        loss = lambda experts, x: (on_gpu(experts, x, ids, path) * weight).sum()
        return on_gpu(experts, x, ids, path), jax.grad(loss, (0, 1))(experts, x)

    run = jax.jit(both, static_argnums=2)
    with interpret():
        found = run(experts(), x, "grouped")
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(run(experts(), x, "tiled")), strict=True):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        assert np.linalg.norm(mine - theirs) <= 2e-3 * np.linalg.norm(theirs)


@pytest.mark.parametrize("unused", [0, 6])
def test_experts_in_mxfp8_are_those_of_xla(unused):
    """All eight experts, none with a whole tile, and two that have more; gradients of tokens through them."""
    x, ids = choice(unused)
    kept = kept_experts()

    def both(experts, x, path):
        return on_gpu(experts, x, ids, path), jax.grad(lambda x: jnp.sum(on_gpu(experts, x, ids, path) ** 2))(x)

    run = jax.jit(both, static_argnums=2)
    with interpret():
        found = run(kept, x, "grouped")
    for mine, theirs in zip(found, run(kept, x, "tiled"), strict=True):
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
        setattr(drawn, name, Frozen(mxfp8.quantize(jnp.asarray(weight * spread.repeat(32, axis=2) / 4, jnp.bfloat16))))
    return drawn


def test_the_kernel_s_numbers_are_the_definition_s_under_every_scale():
    """A token for each input channel, and projections that do nothing else: what comes out are the gate's weights."""
    codes = np.random.default_rng(0).integers(0, 256, (1, 2, 128, 128)).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    scales = np.arange(1024).reshape(1, 2, 4, 128) % 247  # 448 * 2^(247 - 127) is beyond bfloat16
    gate = Weights(jnp.asarray(codes), jnp.asarray(scales, jnp.uint8))
    identity = mxfp8.quantize(jnp.eye(128)[None, None].repeat(2, axis=1))
    down = Weights(identity.codes, identity.scales)
    token = jnp.arange(128, dtype=jnp.int32).reshape(4, 32).repeat(2, axis=0)
    out = mxfp8_experts(
        jnp.eye(128, dtype=jnp.bfloat16), gate, gate, down, jnp.int32(0), jnp.arange(8, dtype=jnp.int32) % 2, token,
        jnp.ones((8, 32), bool), activate=lambda gate, up: gate, backend="triton", interpret=True,
    )  # fmt: skip
    found = np.asarray(out).reshape(4, 2, 32, 128).swapaxes(0, 1).reshape(2, 128, 128)
    weight = MXFP8Array(gate.codes[0], gate.scales[0])
    expected = np.asarray(mxfp8.dequantize(weight, "bfloat16"), np.float32)
    # The interpreter's CPU flushes to zero what has no leading bit, the smallest scale too.
    np.testing.assert_allclose(found, expected, rtol=0, atol=448 * 2.0**-127)


def test_when_the_kernel_runs_with_mxfp8():
    weights = lambda *shape, **how: ExpertWeights(*[replace(MXFP8Array(array(jnp.uint8, *shape), None), **how)] * 3)
    assert kernel_takes(weights(57, 128, 6144, 3072))
    assert not kernel_takes(weights(1, 128, 6144, 3072))  # 2.4e9 codes: their offsets would overflow
    assert not kernel_takes(weights(2, 8, 128, 80))
    assert not kernel_takes(weights(57, 128, 6144, 3072, activations="mxfp8"))


def mxfp8_operands(*args, **sizes):
    x, *weights, layer, expert, token, valid = operands(*args, **sizes)
    scales = lambda w: array(jnp.uint8, *w.shape[:2], w.shape[2] // 32, w.shape[3])
    return x, *(Weights(array(jnp.uint8, *w.shape), scales(w)) for w in weights), layer, expert, token, valid


def run_mxfp8(*args):
    return mxfp8_experts(*args, activate=act, backend="triton")


@pytest.mark.parametrize(("tokens", "tile"), [(1, 16), (2048, 64)])
def test_experts_in_mxfp8_lower(tokens, tile):
    assert "mxfp8_experts_out" in lower(run_mxfp8, *mxfp8_operands(tokens, tile))


def test_wrong_operands_in_mxfp8_are_refused(unchecked):
    x, gate, up, down, *rest = mxfp8_operands(32, 16)
    refuse("need \\[L E D F\\] twice", run_mxfp8, x, gate, down, down, *rest)
    refuse("a scale for every 32 input channels", run_mxfp8, x, gate._replace(scales=down.scales), up, down, *rest)
    refuse("need bfloat16 or float16", run_mxfp8, array(jnp.float32, *x.shape), gate, up, down, *rest)
    refuse("tiles of 8 tokens", run_mxfp8, *mxfp8_operands(32, 8))
    refuse("multiples of 64", run_mxfp8, *mxfp8_operands(1, 16, hidden=96))


def test_when_the_kernel_runs():
    assert not kernel_runs_experts("bfloat16", 6144, 3072)  # no GPU here
    with interpret():
        assert kernel_runs_experts("bfloat16", 6144, 3072)
        assert kernel_runs_experts("float16", 128, 128, backend="triton")
        assert not kernel_runs_experts("float32", 6144, 3072)
        assert not kernel_runs_experts("bfloat16", 6144, 1000)
        assert not kernel_runs_experts("bfloat16", 6144, 3072, backend="xla")


def operands(tokens: int, tile: int, width: int = 6144, hidden: int = 3072):
    """M3's experts, abstract: 57 layers of them."""
    bf16 = jnp.bfloat16
    up, down = array(bf16, 57, 128, width, hidden), array(bf16, 57, 128, hidden, width)
    tiles = tokens * 4 // tile + min(tokens * 4, 128)
    places = array(jnp.int32), array(jnp.int32, tiles), array(jnp.int32, tiles, tile), array(bool, tiles, tile)
    return array(bf16, tokens, width), up, up, down, *places


def run(*args):
    return grouped_experts(*args, activate=act, backend="triton")


@pytest.mark.parametrize(("tokens", "tile"), [(32, 16), (2048, 64)])
def test_experts_lower(tokens, tile):
    assert "experts_out" in lower(run, *operands(tokens, tile))


def test_wrong_operands_are_refused(unchecked):
    x, gate, up, down, *rest = operands(32, 16)
    refuse("need \\[L E D F\\] twice", run, x, gate, down, down, *rest)
    refuse("need one dtype", run, array(jnp.float32, *x.shape), gate, up, down, *rest)
    refuse("tiles of 8 tokens", run, *operands(32, 8))
    refuse("tiles of 128 tokens", run, *operands(2048, 128))
    refuse("multiples of 128", run, *operands(32, 16, hidden=1000))
