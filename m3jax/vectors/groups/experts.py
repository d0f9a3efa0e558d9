"""Router, experts, clamped SwiGLU."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from m3jax.model.layers import swiglu_oai
from m3jax.model.moe import route
from m3jax.numerics import einsum
from m3jax.ops import EXPERT_PATHS, run_experts
from m3jax.ops.experts import ExpertWeights, why_not_path
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal

AXES = {
    "x": "X D", "gate": "D E", "bias": "E", "gate_proj": "E D F", "up_proj": "E D F", "down_proj": "E F D",
    "shared_gate_proj": "D U", "shared_up_proj": "D U", "shared_down_proj": "U D", "router_scores": "X E",
    "expert_ids": "X A", "expert_weights": "X A", "last_kept": "X", "first_dropped": "X", "expert_out": "X A D",
    "shared_out": "X D", "out": "X D",
}  # fmt: skip
TOLERANCES = {
    "router_scores": "router", "expert_ids": "blocks", "expert_weights": "router", "last_kept": "router",
    "first_dropped": "router", "expert_out": "experts", "shared_out": "experts", "out": "experts",
    "expert_out_bf16": "experts_bf16", "shared_out_bf16": "experts_bf16", "out_bf16": "experts_bf16",
}  # fmt: skip


def cases(large: bool) -> Iterator[Case]:
    """A router with ties, and a layer of experts whose clamps are reached."""
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


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """`route`, and each pair of a token and an expert by every expert for all tokens."""
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
    """Chosen experts, best first, their weights, and the scores with bias on both sides of the cut."""
    gate, count = inputs["gate"], rule["experts_per_token"]
    ids, weights = route(inputs["x"], gate, inputs["bias"], count)
    scores = jax.nn.sigmoid(einsum("xd,de->xe", inputs["x"].astype(gate.dtype), gate))
    ordered = jnp.sort(scores + inputs["bias"], axis=-1, descending=True)
    sides = {"last_kept": ordered[:, count - 1], "first_dropped": ordered[:, count]}
    return {"router_scores": scores, "expert_ids": ids, "expert_weights": weights} | sides


def activation(rule: Rule, dtype: jnp.dtype):
    """Clamped SwiGLU, rounded once."""
    return lambda gate, up: swiglu_oai(gate, up, rule["alpha"], rule["limit"]).astype(dtype)


def summed(inputs: Arrays, rule: Rule, routed: Arrays, expert_out: Float[Array, "X A D"]) -> dict[str, Array]:
    """The layer's output from that of each token's experts: weighted, scaled, with the shared expert."""
    x, shared = inputs["x"], [inputs[f"shared_{name}_proj"] for name in ("gate", "up", "down")]
    hidden = activation(rule, x.dtype)(*(einsum("xd,du->xu", x, weight) for weight in shared[:2]))
    shared_out = einsum("xu,ud->xd", hidden, shared[2])
    weighted = jnp.sum(expert_out * routed["expert_weights"][..., None].astype(expert_out.dtype), axis=1)
    out = rule["routed_scaling_factor"] * weighted + shared_out
    return {"expert_out": expert_out, "shared_out": shared_out, "out": out}


def stacked_experts(inputs: Arrays) -> ExpertWeights:
    """A case's experts as a stack of one layer."""
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
        if "gate_proj" not in given:
            yield Run("route", dtype, jitted(routing, rule, given))
            continue
        gate = stacked_experts(given).gate
        for path in (name for name in EXPERT_PATHS if why_not_path(name, given["x"], gate) is None):
            yield Run(path, dtype, jitted(partial(by_path, path), rule, given))


GROUP = Group("experts", cases, define, runs, AXES, TOLERANCES, rounded=("expert_out", "shared_out", "out"))
