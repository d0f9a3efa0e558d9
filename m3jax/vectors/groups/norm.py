"""The norm of a layer, whose weight is stored as its difference from 1."""

from collections.abc import Iterator

import numpy as np

from m3jax.model.layers import gemma_norm
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal

AXES = {"x": "X D", "weight": "D", "normed": "X D"}
TOLERANCES = {"normed": "norm", "normed_bf16": "norm_bf16"}


def cases(large: bool) -> Iterator[Case]:
    """Yield a norm whose stored weights lie around 0, with rows of very different sizes."""
    if large:
        return
    rng = np.random.default_rng(85)
    x = normal(rng, 12, 48) * 2.0 ** np.arange(-8, 4)[:, None]  # eps counts in the smallest rows
    weight = normal(rng, 48, scale=0.3)
    weight[:4] = 0, -1, 1, -2  # factors 1, 0, 2 and -1
    what = "weights as a checkpoint stores them: the factor is 1 + w, added once, at load or in the norm"
    inputs = {"x": x.astype(weight.dtype), "weight": weight}
    yield Case("weights", what, dict(eps=1e-6), 85, inputs, ("T47",))


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Return x / sqrt(mean(x^2) + eps) times 1 + weight, rounded once."""
    x = inputs["x"]
    return {"normed": gemma_norm(x, inputs["weight"], rule["eps"]).astype(x.dtype)}


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield the model's norm in float32 and bfloat16: there is no other implementation."""
    for dtype in ("float32", "bfloat16"):
        yield Run("the model's norm", dtype, jitted(define, rule, in_dtype(inputs, dtype)))


GROUP = Group("norm", cases, define, runs, AXES, TOLERANCES, rounded=("normed",))
