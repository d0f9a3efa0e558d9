"""Mixture of experts: the router, the experts, and their clamped SwiGLU."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from m3jax.model.layers import swiglu_oai
from m3jax.model.moe import route
from m3jax.numerics import accumulator, einsum
from m3jax.ops import EXPERT_PATHS, run_experts
from m3jax.ops.experts import ExpertWeights, why_not_path
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal

AXES = {
    "x": "X D", "gate": "D E", "bias": "E", "gate_proj": "E D F", "up_proj": "E D F", "down_proj": "E F D",
    "shared_gate_proj": "D U", "shared_up_proj": "D U", "shared_down_proj": "U D", "router_scores": "X E",
    "expert_ids": "X A", "expert_weights": "X A", "last_kept": "X", "first_dropped": "X", "expert_out": "X A D",
    "shared_out": "X D", "out": "X D", "gate_values": "X F", "up_values": "X F", "activated": "X F",
}  # fmt: skip
TOLERANCES = {
    "router_scores": "router", "expert_ids": "blocks", "expert_weights": "router", "last_kept": "router",
    "first_dropped": "router", "expert_out": "experts", "shared_out": "experts", "out": "experts",
    "expert_out_bf16": "experts_bf16", "shared_out_bf16": "experts_bf16", "out_bf16": "experts_bf16",
    "activated": "activation", "activated_bf16": "norm_bf16",
}  # fmt: skip


def cases(large: bool) -> Iterator[Case]:
    """Yield routers with ties and with extreme scores, experts whose clamps are reached, and their activation alone."""
    if large:
        return
    rng, rule = np.random.default_rng(71), dict(experts_per_token=3)
    # Halves in a few dims: sums are exact, so two experts with the same column and bias have the same score.
    x, gate = (rng.integers(-2, 3, shape) / 2 for shape in ((20, 16), (16, 8)))
    gate[:, 5], gate[:, 6], bias = gate[:, 2], gate[:, 1], rng.integers(-4, 5, 8) / 8
    bias[5], bias[6] = bias[2], bias[1]
    inputs = {"x": x.astype(jnp.bfloat16), "gate": gate.astype(np.float32), "bias": bias.astype(np.float32)}
    what = "experts of equal scores: the lower id; the bias counts in the choice alone"
    yield Case("router_ties", what, rule, 71, inputs)
    rng, (tokens, width, hidden, experts) = np.random.default_rng(72), (24, 32, 24, 8)
    inputs = {
        "x": normal(rng, tokens, width),
        "gate": (rng.normal(size=(width, experts)) * width**-0.5).astype(np.float32),
        "bias": (rng.normal(size=experts) * 0.2).astype(np.float32),
        "gate_proj": normal(rng, experts, width, hidden, scale=2 * width**-0.5),
        "up_proj": normal(rng, experts, width, hidden, scale=2 * width**-0.5),
        "down_proj": normal(rng, experts, hidden, width, scale=hidden**-0.5),
        "shared_gate_proj": normal(rng, width, 40, scale=2 * width**-0.5),
        "shared_up_proj": normal(rng, width, 40, scale=2 * width**-0.5),
        "shared_down_proj": normal(rng, 40, width, scale=40**-0.5),
    }
    constants = dict(experts_per_token=3, alpha=1.702, limit=1.5, routed_scaling_factor=2.0)
    what = "router, experts, shared expert and factor; the clamps at +-limit are reached on both sides"
    yield Case("layer", what, constants, 72, inputs, ("T36",))
    yield activation_case()
    yield router_extremes()


def activation_case() -> Case:
    """Return gates and ups on a grid: within the limit, at it, just beyond it and far beyond it, with both signs."""
    limit, alpha = 7.0, 1.702
    magnitudes = np.array([0, 2**-8, 0.25, 1, 2.5, 6.875, limit, 7.0625, 12, 96])
    values = np.concatenate([-magnitudes[:0:-1], magnitudes])  # [19]
    gate, up = np.meshgrid(values, values, indexing="ij")
    inputs = {"gate_values": gate.astype(jnp.bfloat16), "up_values": up.astype(jnp.bfloat16)}
    what = "(up + 1) * gate * sigmoid(alpha * gate): gate clamped above alone, up on both sides; each pair of 19 values"
    return Case("activation", what, dict(alpha=alpha, limit=limit), 0, inputs, ("T42",))


def router_extremes() -> Case:
    """Return a router whose scores are far below what a sum with an epsilon, or one with a bias, can tell apart.

    Tokens are unit vectors, so that row t of the gate holds the logits of token t. Biases are multiples of 1/64: beside
    them scores of 2e-9 and less do not count, and they alone choose.
    """
    rng, experts = np.random.default_rng(73), 128
    logits = rng.integers(-172, -39, (8, experts)) / 2.0  # -86 to -20: scores that float32 holds with a leading bit
    bias = rng.permutation(experts) / 64 - 1.0
    huge = int(np.argsort(bias)[5])
    bias[huge] = 4096.0
    logits[0, :] = -50  # equal scores: every weight is 1/4
    logits[1, huge], logits[2, huge] = 3.0, -86.0  # its weight is 1, or 0, though its bias is the largest by far
    logits[6:, :] = -1000  # scores of 0 in every dtype
    logits[7, np.argsort(bias)[-3]] = -30  # one of the chosen has all of the weight
    inputs = {
        "x": np.eye(8).astype(jnp.bfloat16), "gate": logits.astype(np.float32), "bias": bias.astype(np.float32),
    }  # fmt: skip
    what = "128 experts with logits of -20 to -86, a bias of 4096; token 6 has scores of 0 alone: its weights are NaN"
    return Case("router_extremes", what, dict(experts_per_token=4), 73, inputs, ("T45",))


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Route the tokens, run every expert on all of them, and keep the outputs of the chosen pairs."""
    if "gate_values" in inputs:
        gate, up = inputs["gate_values"], inputs["up_values"]
        wide = accumulator(gate.dtype)  # as products leave them: float32 in a bfloat16 model
        return {"activated": activation(rule, gate.dtype)(gate.astype(wide), up.astype(wide))}
    routed = routing(inputs, rule)
    if "gate_proj" not in inputs:
        return routed
    x, ids = inputs["x"], routed["expert_ids"]
    activate = activation(rule, x.dtype)
    # An expert at a time: XLA's CPU backend has no product of bfloat16 over a list of matrices.
    weights = zip(*(inputs[name] for name in ("gate_proj", "up_proj", "down_proj")), strict=True)
    product = lambda x, weight: einsum("xd,df->xf", x, weight)
    by_expert = [product(activate(product(x, gate), product(x, up)), down) for gate, up, down in weights]
    by_expert = jnp.stack(by_expert, axis=1)  # [X E D]
    return routed | summed(inputs, rule, routed, jnp.take_along_axis(by_expert, ids[..., None], axis=1))


def routing(inputs: Arrays, rule: Rule) -> dict[str, Array]:
    """Return the chosen experts, best first, their weights, and the scores with bias on both sides of the cut."""
    gate, count = inputs["gate"], rule["experts_per_token"]
    ids, weights = route(inputs["x"], gate, inputs["bias"], count)
    scores = jax.nn.sigmoid(einsum("xd,de->xe", inputs["x"].astype(gate.dtype), gate))
    ordered = jnp.sort(scores + inputs["bias"], axis=-1, descending=True)
    sides = {"last_kept": ordered[:, count - 1], "first_dropped": ordered[:, count]}
    return {"router_scores": scores, "expert_ids": ids, "expert_weights": weights} | sides


def activation(rule: Rule, dtype: jnp.dtype):
    """Return the clamped SwiGLU of a rule, whose result is rounded once, to `dtype`."""
    return lambda gate, up: swiglu_oai(gate, up, rule["alpha"], rule["limit"]).astype(dtype)


def summed(inputs: Arrays, rule: Rule, routed: Arrays, expert_out: Float[Array, "X A D"]) -> dict[str, Array]:
    """Return the layer's output: the sum of each token's weighted experts, scaled, plus the shared expert."""
    x, shared = inputs["x"], [inputs[f"shared_{name}_proj"] for name in ("gate", "up", "down")]
    hidden = activation(rule, x.dtype)(*(einsum("xd,du->xu", x, weight) for weight in shared[:2]))
    shared_out = einsum("xu,ud->xd", hidden, shared[2])
    weighted = jnp.sum(expert_out * routed["expert_weights"][..., None].astype(expert_out.dtype), axis=1)
    out = rule["routed_scaling_factor"] * weighted + shared_out
    return {"expert_out": expert_out, "shared_out": shared_out, "out": out}


def stacked_experts(inputs: Arrays) -> ExpertWeights:
    """Return a case's experts as a stack of one layer."""
    return ExpertWeights(*(inputs[f"{name}_proj"][None] for name in ("gate", "up", "down")))


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield each way of the package to run experts that can run them here."""

    def by_path(path: str, inputs: Arrays, rule: Rule) -> Arrays:
        routed, x = routing(inputs, rule), inputs["x"]
        options = dict(path=path, backend="xla")
        expert_out = run_experts(
            x, stacked_experts(inputs), routed["expert_ids"], jnp.int32(0), activation(rule, x.dtype), **options
        )
        return routed | summed(inputs, rule, routed, expert_out)

    for dtype in ("float32", "bfloat16"):
        given = in_dtype(inputs, dtype)
        if "gate_values" in given:
            yield Run("swiglu_oai", dtype, jitted(define, rule, given))
            continue
        if "gate_proj" not in given:
            yield Run("route", dtype, jitted(routing, rule, given))
            continue
        gate = stacked_experts(given).gate
        for path in (name for name in EXPERT_PATHS if why_not_path(name, given["x"], gate) is None):
            yield Run(path, dtype, jitted(partial(by_path, path), rule, given))


GROUP = Group("experts", cases, define, runs, AXES, TOLERANCES, rounded=("expert_out", "shared_out", "out", "activated"))
