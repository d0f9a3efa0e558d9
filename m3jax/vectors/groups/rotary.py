"""Per-head norm and rotary embedding: the steps between a projection and a query or key."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from m3jax.model.layers import apply_rope, gemma_norm, rope_table
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, in_dtype, jitted, normal

AXES = {
    "x": "B T N H", "weight": "H", "positions": "B T", "normed": "B T N H", "cos": "B T R", "sin": "B T R",
    "rotated": "B T N H", "picked": "Z C", "rotated_at": "Z H", "rotated_at_slack": "Z H", "cos_slack": "B T R", "sin_slack": "B T R", "rotated_slack": "B T N H",
}  # fmt: skip
TOLERANCES = {
    "normed": "norm", "cos": "rope", "sin": "rope", "rotated": "norm", "normed_bf16": "norm_bf16",
    "rotated_bf16": "norm_bf16", "rotated_at": "norm", "rotated_at_bf16": "norm_bf16",
}  # fmt: skip


def cases(large: bool) -> Iterator[Case]:
    """Yield cases of M3's rotary embedding, which turns half of a head's dims, at positions up to the context's end."""
    if large:
        return
    yield turned("short", "positions to 2,000", 81, [[0, 1, 2, 63, 64, 1000, 1999]])
    yield turned("long", "positions to the context's end, 1,048,575", 82, [[127, 131_071, 524_288, 1_048_575]])
    yield many_rows()


def many_rows() -> Case:
    """Return more than 10,240 rows x heads; `picked` has the (t, n) of those whose results are stored."""
    rng, rule = np.random.default_rng(83), dict(eps=1e-6, rotary_dim=4, theta=5e6)
    tokens, heads, width = 161, 64, 8
    positions = np.sort(rng.choice(np.arange(501, 20_000), tokens, replace=False)).astype(np.int32)[None]  # [B T]
    x, weight = normal(rng, 1, tokens, heads, width, scale=2.0), normal(rng, width, scale=0.5)
    # The first rows, those on both sides of 10,240, the last ones, and some of the others.
    numbers = np.concatenate([np.arange(32), np.arange(10_208, 10_304), rng.choice(np.arange(32, 10_208), 128, False)])
    picked = np.stack(np.divmod(np.sort(numbers), heads), axis=-1).astype(np.int32)  # [Z C]
    angle_error = positions[0, picked[:, 0], None] * rule["theta"] ** (-np.arange(0, 4, 2) / 4) * 3 * 2.0**-24
    half = 9.0 * angle_error  # of a normed number with its weight: sqrt(8) times 1 + 2
    slack = np.concatenate([half, half, np.zeros((len(picked), width - 4))], axis=-1).astype(np.float32)
    inputs = {"x": x, "weight": weight, "positions": positions, "picked": picked, "rotated_at_slack": slack}
    what = "10,304 rows x heads at positions beyond 500: dims (i, i + 2) of 4 turn, the other 4 stay; results at `picked`"
    return Case("many_rows", what, rule, 83, inputs, ("T46",))


def turned(name: str, what: str, seed: int, positions: list[list[int]]) -> Case:
    """Return a case; `*_slack` bounds the error of float32 angles: 3 * 2^-24 of position times frequency."""
    rng, rule = np.random.default_rng(seed), dict(eps=1e-6, rotary_dim=16, theta=5e6)
    positions = np.array(positions, np.int32)
    x, weight = normal(rng, *positions.shape, 3, 32, scale=2.0), normal(rng, 32, scale=0.5)
    frequencies = rule["theta"] ** (-np.arange(0, rule["rotary_dim"], 2) / rule["rotary_dim"])
    # In float32 the frequency is off by two last places, the product by half a last place.
    angle_error = positions[..., None] * frequencies * 3 * 2.0**-24
    largest = 12.0  # of a normed number with its weight: sqrt(32) times 1 + 2
    half = angle_error[:, :, None] * largest * np.ones((1, 1, 3, 1))
    rotated = np.concatenate([half, half, np.zeros((*half.shape[:3], 32 - 2 * half.shape[-1]))], axis=-1)
    inputs = {"x": x, "weight": weight, "positions": positions, "cos_slack": angle_error, "sin_slack": angle_error,
              "rotated_slack": rotated}  # fmt: skip
    inputs = {name: value.astype(np.float32) if name.endswith("slack") else value for name, value in inputs.items()}
    return Case(
        name, f"norm with weight 1 + w, then dims (i, i + 8) turn; the last 16 stay; {what}", rule, seed, inputs
    )


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Apply the model's norm and rotary embedding, rounding where the model rounds a query."""
    x = inputs["x"]
    cos, sin = rope_table(inputs["positions"], rule["rotary_dim"], rule["theta"], x.dtype)
    normed = gemma_norm(x, inputs["weight"], rule["eps"])
    rotated = apply_rope(normed, cos, sin)
    if "picked" in inputs:
        token, head = inputs["picked"].T
        return {"rotated_at": rotated[0, token, head].astype(x.dtype)}
    return {"normed": normed.astype(x.dtype), "cos": cos, "sin": sin, "rotated": rotated.astype(x.dtype)}


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield runs of the same functions in float32 and bfloat16: the model has no other implementation."""
    for dtype in ("float32", "bfloat16"):
        yield Run("the model's layers", dtype, jitted(define, rule, in_dtype(inputs, jnp.dtype(dtype))))


GROUP = Group("rotary", cases, define, runs, AXES, TOLERANCES, rounded=("normed", "rotated", "rotated_at"))
