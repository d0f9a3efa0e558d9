"""The kernel of routed experts in interpret mode against what XLA's tiles compute, and its lowering for CUDA."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny
from support.lowering import array, lower, refuse

from m3jax.model.layers import swiglu_oai
from m3jax.ops import interpret, run_experts
from m3jax.ops.experts import ExpertWeights, kernel_runs_experts
from pallas_kernels.grouped_experts import grouped_experts

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
