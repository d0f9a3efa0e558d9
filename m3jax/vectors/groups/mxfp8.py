"""MXFP8 weights: the value of every code under every scale."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from m3jax.checkpoint.mxfp8 import dequantize
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run

AXES = {"codes": "Z C", "scales": "Z Q", "weights": "Z C", "weights_bf16": "Z C"}
TOLERANCES = {"weights": "bits", "weights_bf16": "bits"}


def cases(large: bool) -> Iterator[Case]:
    """Yield a matrix whose row z has scale z for all its blocks of 32, and all 256 codes."""
    if large:
        return
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1)).view(jnp.float8_e4m3fn)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    what = "all 256 codes under all 255 scales, 2^(z - 127), and under 255, which is NaN; subnormal results too"
    yield Case("all_scales", what, dict(block=32), 91, {"codes": codes, "scales": scales})


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Return the products, exact in float64, rounded to float32 and from there to bfloat16."""
    scales = np.repeat(np.asarray(inputs["scales"]).astype(int), rule["block"], axis=1)
    values = np.asarray(inputs["codes"]).astype(np.float64)
    with np.errstate(over="ignore"):
        weights = np.where(scales == 255, np.nan, np.ldexp(values, scales - 127)).astype(np.float32)
        return {"weights": weights, "weights_bf16": weights.astype(jnp.bfloat16)}


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield the weights by the loader's table, in float32 and in bfloat16."""
    codes, scales = np.asarray(inputs["codes"]).view(np.uint8), np.repeat(inputs["scales"], rule["block"], axis=1)
    yield Run("the loader", "float32", {"weights": dequantize(codes, scales, np.dtype(np.float32))})
    yield Run("the loader", "bfloat16", {"weights_bf16": dequantize(codes, scales, np.dtype(jnp.bfloat16))})


GROUP = Group("mxfp8", cases, define, runs, AXES, TOLERANCES, on_host=True)
