"""Experts and their router: every way to run them, and the choice; T names as in docs/glossary.md."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import comparisons, tiny

from m3jax.execution import Compute, Fast, plain
from m3jax.model.layers import swiglu_oai
from m3jax.model.moe import Experts, route
from m3jax.ops import run_experts
from m3jax.ops.experts import ExpertWeights
from m3jax.weights import StackedLayer

# For programs whose speed and last bits do not matter: it halves the time to compile them.
QUICK = {"xla_backend_optimization_level": 0}
EXPERTS, ACTIVE, PAIRS = 5, 2, 41
MOE = tiny.config("m", num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE)
ALPHA, LIMIT = 1.3, 0.6


@cache
def experts(dtype: str = "float32") -> Experts:
    """Two layers of them; the tests use the second."""
    config = tiny.config("mm", num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE)
    return tiny.model(config, dtype=dtype).stacks[0].mlp.experts


def one_by_one(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Each (token, expert) pair on its own, in float64."""
    weights = (experts().gate_proj, experts().up_proj, experts().down_proj)
    gate, up, down = (np.asarray(w[...][1], np.float64) for w in weights)
    out = np.zeros((*ids.shape, x.shape[1]))
    for token, slot in np.ndindex(ids.shape):
        e = ids[token, slot]
        g, u = np.minimum(x[token] @ gate[e], LIMIT), np.clip(x[token] @ up[e], -LIMIT, LIMIT)
        out[token, slot] = ((u + 1) * g / (1 + np.exp(-ALPHA * g))) @ down[e]
    return out


def choices() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    pairs = np.array([draw.permutation(EXPERTS)[:ACTIVE] for _ in range(PAIRS)])
    return {
        "any": pairs,
        "one is idle": np.where(pairs == 3, 4, pairs),
        "all to one": np.full((PAIRS, ACTIVE), 2),
        "first and last": np.broadcast_to([0, EXPERTS - 1], (PAIRS, ACTIVE)),
    }


@cache
def path(name: str):
    """One of the ways to compute the experts, as [X A D]; the two with many tokens take any number of them."""

    @partial(jax.jit, static_argnames=("dtype",))
    def call(experts, x, ids, layer, dtype):
        act = lambda gate, up: swiglu_oai(gate, up, ALPHA, LIMIT).astype(dtype)
        weights = ExpertWeights(experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...])
        return run_experts(x, weights, ids, layer, act, path=name)

    return lambda e, x, ids: call(e, x, ids.astype(np.int32), np.int32(1), dtype=x.dtype)


@pytest.mark.parametrize("name", ["gathered", "one_by_one", "tiled", "ragged"])
@pytest.mark.parametrize("choice", choices())
def test_paths_agree_with_one_expert_at_a_time(name, choice):
    """T42: each way to run experts, with clamps that are reached."""
    x = np.random.default_rng(1).normal(size=(PAIRS, MOE.hidden_size)).astype(np.float32)
    ids = choices()[choice]
    comparisons.assert_close(path(name)(experts(), x, ids), one_by_one(x, ids), f"out of {name}", "X A D", atol=1e-5)


def test_a_token_does_not_depend_on_its_tile():
    """T40, bitwise: the tokens beside one, and so its place in a tile, do not matter."""
    draw = np.random.default_rng(2)
    x, ids = draw.normal(size=(PAIRS, MOE.hidden_size)).astype(np.float32), choices()["any"]
    before = path("tiled")(experts(), x, ids)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(PAIRS)
        companions = np.where(np.arange(PAIRS)[:, None] == 7, x, x[order])
        other_ids = np.where(np.arange(PAIRS)[:, None] == 7, ids, ids[order])
        after = path("tiled")(experts(), companions.astype(np.float32), other_ids)
        comparisons.assert_equal(after[7], before[7], "out of token 7", "A D")


def test_paths_sum_the_chosen_experts():
    """The public call, on both sides of the line between a few and many tokens."""
    how = Fast(Compute())

    @jax.jit
    def call(experts, x, ids, weights, layer):
        act = lambda gate, up: swiglu_oai(gate, up, ALPHA, LIMIT).astype(x.dtype)
        matrices = (experts.gate_proj[...], experts.up_proj[...], experts.down_proj[...])
        none = tuple(jnp.zeros_like(matrix[0, 0]) for matrix in matrices)  # a shared expert that adds nothing
        rows = x[None], ids[None], weights[None]
        return how.experts(*rows, [StackedLayer(matrix, layer) for matrix in matrices], act, none, 1.0)[0]

    draw = np.random.default_rng(3)
    for tokens in (4, PAIRS):
        x = draw.normal(size=(tokens, MOE.hidden_size)).astype(np.float32)
        ids, weights = choices()["any"][:tokens], draw.uniform(size=(tokens, ACTIVE))
        out = call(experts(), x, ids.astype(np.int32), weights.astype(np.float32), np.int32(1))
        expected = (one_by_one(x, ids) * weights[..., None]).sum(1)
        comparisons.assert_close(out, expected, f"sum of experts of {tokens} tokens", "X D", atol=1e-5)


def test_experts_in_bfloat16_are_never_widened_all_at_once():
    """A loop over layers, one token: XLA's CPU backend made 32-bit numbers of all experts before it."""
    width, hidden, count, depth = 64, 32, 16, 4
    shape = lambda *sizes: jax.ShapeDtypeStruct((depth, count, *sizes), jnp.bfloat16)
    weights = ExpertWeights(shape(width, hidden), shape(width, hidden), shape(hidden, width))

    def run(x, weights, ids):
        def run_layer(x, layer):
            out = run_experts(x, weights, ids, layer, lambda gate, up: (gate * up).astype(x.dtype), path="one_by_one")
            return x + out.sum(1).astype(x.dtype), None

        return jax.lax.scan(run_layer, x, jnp.arange(depth))[0]

    x, ids = jax.ShapeDtypeStruct((1, width), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2), jnp.int32)
    scratch = jax.jit(run).lower(x, weights, ids).compile().memory_analysis().temp_size_in_bytes
    of_one_layer = 3 * count * width * hidden * 2
    assert scratch < of_one_layer, f"{scratch} bytes of scratch memory beside {of_one_layer} of a layer's experts"


def test_the_clamped_product_has_a_bias_of_its_own():
    gate = up = np.float32([-9, -1, 0.5, 9])
    clamped = np.minimum(gate, 2), np.clip(up, -2, 2)
    expected = (clamped[1] + 0.5) * clamped[0] / (1 + np.exp(-1.5 * clamped[0]))
    np.testing.assert_allclose(swiglu_oai(jnp.asarray(gate), jnp.asarray(up), 1.5, 2.0, 0.5), expected, rtol=1e-5)


def test_the_clamps_of_the_product_pass_the_gradient_at_their_limits():
    """As PyTorch's do, which transformers trains with: a number is cut off beyond its limit, and not on it."""
    limit, alpha = 2.0, 1.5
    points = np.array([-3, -2, -1, 1, 2, 3], np.float32)
    gate, up = (x.ravel() for x in np.meshgrid(points, points))
    total = lambda gate, up: swiglu_oai(gate, up, alpha, limit).sum()
    of_gate, of_up = jax.grad(total, argnums=(0, 1))(jnp.asarray(gate), jnp.asarray(up))
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    sigmoid = 1 / (1 + np.exp(-alpha * g))
    slope = sigmoid * (1 + alpha * g * (1 - sigmoid))
    np.testing.assert_allclose(of_gate, (u + 1) * slope * (gate <= limit), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_up, g * sigmoid * (np.abs(up) <= limit), rtol=1e-5, atol=1e-6)


# Router


def test_weights_of_scores_that_are_all_zero_are_nan():
    """T45: 0 / 0, as in transformers, and no epsilon that hides it; the bias chooses and is in no weight."""
    logits = np.full((3, 8), -200.0, np.float32)  # sigmoid is 0 in float32
    logits[1, 5], logits[2] = -80.0, -80.0
    bias = np.arange(8, dtype=np.float32) / 8
    bias[5] = 1e4
    ids, weights = plain.choose_experts(jnp.asarray(logits), jnp.asarray(bias), 3)
    np.testing.assert_array_equal(ids, [[5, 7, 6]] * 3)
    np.testing.assert_allclose(weights, [[np.nan] * 3, [1, 0, 0], [1 / 3] * 3], rtol=1e-6)


def test_router_bias_chooses_and_does_not_weigh():
    x = np.eye(4, dtype=np.float32)
    gate = np.array([[2, 1, 0, 0], [0, 0, 0, 0], [-9, -9, 3, 3], [1, 2, 3, 4]], np.float32)
    bias = np.array([0, 0, 0, 0.5], np.float32)
    ids, weights = route(jnp.asarray(x), jnp.asarray(gate), jnp.asarray(bias), 2)
    # Of equal scores the lower id; the bias lifts expert 3 to the top everywhere.
    comparisons.assert_equal(ids, [[3, 0], [3, 0], [3, 2], [3, 2]], "expert ids", "X A")
    scores = np.take_along_axis(1 / (1 + np.exp(-gate)), np.asarray(ids), 1)
    comparisons.assert_close(weights, scores / scores.sum(1, keepdims=True), "expert weights", "X A", rtol=1e-6)


def test_router_is_float32_in_a_bfloat16_model():
    config = tiny.config("M")
    model = tiny.model(config, dtype="bfloat16").with_schedule("mask")
    mlp = model.stacks[0].mlp
    assert mlp.gate.dtype == mlp.e_score_correction_bias.dtype == jnp.float32
    assert mlp.experts.gate_proj.dtype == jnp.bfloat16
    probe = lambda values, _: {k: values[k] for k in ("ffn_norm", "expert_ids", "expert_weights")}
    run = jax.jit(lambda m, t: m.run(t, probe=probe, logits=False).probed[0], compiler_options=QUICK)
    values = jax.tree.map(lambda x: x[0], run(model, tiny.tokens(config, 1, 40)))
    assert values["ffn_norm"].dtype == jnp.bfloat16
    assert values["expert_weights"].dtype == jnp.float32
    x = np.asarray(values["ffn_norm"][0], np.float64)
    scores = 1 / (1 + np.exp(-x @ np.asarray(mlp.gate[...][0], np.float64)))
    ids = np.argsort(-(scores + mlp.e_score_correction_bias[...][0]), axis=1, kind="stable")[:, :2]
    comparisons.assert_equal(values["expert_ids"][0], ids, "expert ids", "T A")
    weights = np.take_along_axis(scores, ids, 1)
    # A router in bfloat16 would be off by 1e-3.
    weights /= weights.sum(1, keepdims=True)
    comparisons.assert_close(values["expert_weights"][0], weights, "expert weights", "T A", rtol=2e-6)
