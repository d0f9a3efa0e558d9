"""The schedules of training, against the definitions and through the model."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

from m3jax import ops
from m3jax.msa import SelectionRules, dense_attention, index_topk, sparse_attention
from m3jax.train import fused
from m3jax.train.losses import MSALoss

BATCH, LENGTH, HEADS, GROUPS, WIDTH, BLOCK = 3, 40, 6, 2, 8, 4
CONFIG = tiny.config("dM")
LOSS = MSALoss(compute_dtype="float32", kl_stride=4)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def rows() -> tuple[jax.Array, jax.Array]:
    at = jnp.arange(LENGTH, dtype=jnp.int32)
    return jnp.broadcast_to(at, (BATCH, LENGTH)), jnp.full(BATCH, LENGTH, jnp.int32)


@cache
def operands() -> tuple[jax.Array, ...]:
    q = 2 * normal(BATCH, LENGTH, HEADS, WIDTH)
    k, v = normal(BATCH, LENGTH, GROUPS, WIDTH, seed=1), normal(BATCH, LENGTH, GROUPS, WIDTH, seed=2)
    index_q, index_k = normal(BATCH, LENGTH, GROUPS, WIDTH, seed=3), normal(BATCH, LENGTH, WIDTH, seed=4)
    choose = jax.jit(partial(index_topk, block_size=BLOCK, top_k=3))
    return q, k, v, choose(index_q, index_k, *rows())


@pytest.mark.parametrize("schedule", ["dense", "mask"])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "row by row"])
def test_attention_is_the_definition(schedule, kernel):
    """The kernel's layout and mask, here with XLA's kernel in place of cuDNN's; values and gradients."""
    q, k, v, blocks = operands()
    blocks = None if schedule == "dense" else blocks
    more = ("xla",) if kernel else ()
    fn = fused.attend_under_mask if kernel else fused.causal_attention

    def expected(q, k, v):
        if blocks is None:
            return dense_attention(q, k, v, *rows())
        return sparse_attention(q, k, v, blocks, *rows(), block_size=BLOCK)

    @jax.jit  # one program in place of one an operation
    def values_and_gradients(q, k, v):
        got, pull = jax.vjp(lambda *x: fn(*x, blocks, BLOCK, *more), q, k, v)
        want, pull_want = jax.vjp(expected, q, k, v)
        return (got, *pull(want)), (want, *pull_want(want))

    for a, b in zip(*values_and_gradients(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_scores_at_once_choose_the_same_blocks(monkeypatch):
    monkeypatch.setattr(fused, "platform", lambda: "gpu")
    index_q, index_k = normal(BATCH, LENGTH, GROUPS, WIDTH, seed=3), normal(BATCH, LENGTH, WIDTH, seed=4)
    select = partial(fused.select_in_whole_rows, rules=SelectionRules(top_k=3), block_size=BLOCK)
    np.testing.assert_array_equal(jax.jit(select)(index_q, index_k), operands()[3])


@pytest.mark.parametrize("tile", [4, 512])
def test_tiles_of_experts(monkeypatch, tile):
    """The product over tiles is the sum over experts, token by token; no token is dropped."""
    monkeypatch.setattr(ops.measured, "COPIED_TILE", tile)
    experts = tiny.model(CONFIG).stacks[1].mlp.experts
    weights = ops.experts.ExpertWeights(experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...])
    x, draw = normal(24, CONFIG.hidden_size), np.random.default_rng(5)
    ids = jnp.asarray(np.stack([draw.permutation(3)[:2] for _ in range(24)]).astype(np.int32))
    act = lambda gate, up: jnp.tanh(gate) * up
    run = jax.jit(partial(ops.run_experts, activate=act, path="copied"))  # one program in place of one an operation
    got = run(x, weights, ids, jnp.int32(0))
    for token, chosen in enumerate(np.asarray(ids)):
        for slot, expert in enumerate(chosen):
            gate, up, down = (np.asarray(weight[0, expert]) for weight in weights)
            want = (np.tanh(x[token] @ gate) * (x[token] @ up)) @ down
            np.testing.assert_allclose(got[token, slot], want, rtol=1e-4, atol=1e-5)


def losses(run) -> tuple:
    """What `run` makes of a loss by the fused schedules and of one by the model's own, which recomputes nothing."""
    model = tiny.model(CONFIG).with_schedule("mask")
    weights = np.random.default_rng(3).choice(np.float32([1, 2]), (2, 64))
    arrays = {"tokens": tiny.tokens(CONFIG, 2, 65), "weights": weights}
    arrays = jax.tree.map(jnp.asarray, arrays)
    each = (replace(LOSS, fused=True), replace(LOSS, remat=False))
    return tuple(jax.jit(run(lambda m, fn=fn: fn(m, arrays)[0]))(model) for fn in each)


def test_losses_are_those_of_the_schedules():
    """Layers attend to all and to some."""
    loss, want = losses(lambda fn: fn)
    np.testing.assert_allclose(loss, want, rtol=1e-6)


@pytest.mark.further  # attention, selection and experts by themselves: above
def test_losses_have_the_gradients_of_the_schedules():
    """T30 too: with recomputed activations, whose blocks are the forward pass's."""
    (loss, grads), (want, want_grads) = losses(jax.value_and_grad)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_given_model_stays_as_it_was():
    model = tiny.model(CONFIG)
    before = jax.tree.structure(model)
    fused.fuse(model)
    assert jax.tree.structure(model) == before
