"""MXFP8: the value of every code under every scale, numbers encoded, and products with weights in it."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from m3jax.checkpoint.mxfp8 import dequantize
from m3jax.mxfp8 import MXFP8Array, quantize
from m3jax.ops import project
from m3jax.vectors.case import Arrays, Case, Group, Rule, Run, on_host

AXES = {
    "codes": "Z C", "scales": "Z Q", "weights": "Z C", "weights_bf16": "Z C", "activations": "X C", "encoded": "X C",
    "encoded_scales": "X Q", "product": "X Z", "product_of_exact": "X Z",
}  # fmt: skip
TOLERANCES = {
    "weights": "bits", "weights_bf16": "bits", "encoded": "bits", "encoded_scales": "bits", "product": "mxfp8",
    "product_of_exact": "mxfp8",
}  # fmt: skip


def cases(large: bool) -> Iterator[Case]:
    """Yield all codes under all scales, numbers that an encoder gets wrong, and a product in which both are encoded."""
    if large:
        return
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1)).view(jnp.float8_e4m3fn)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    what = "all 256 codes under all 255 scales, 2^(z - 127), and under 255, which is NaN; subnormal results too"
    yield Case("all_scales", what, dict(block=32), 91, {"codes": codes, "scales": scales})
    what = (
        "a scale is 2^(floor(log2 of the largest) - 8): largest of 448 x 2^k, just beyond and 512 x 2^k, mixed sizes, "
    )
    what += "a block of zeros, one with a NaN, one with an infinity"
    yield Case("encode", what, dict(block=32), 92, {"activations": numbers_to_encode()}, ("T43",))
    rng = np.random.default_rng(93)
    activations = rng.normal(size=(6, 96)) * np.exp(rng.normal(size=(6, 96)))
    activations[:, ::32] *= 16  # one large number a block, beside which a wrong scale loses the small ones
    activations[2, 32:64] = 0
    codes = (rng.normal(size=(10, 96)) * 64).astype(jnp.float8_e4m3fn)
    scales = rng.integers(115, 120, (10, 3)).astype(np.uint8)
    inputs = {"activations": activations.astype(jnp.bfloat16), "codes": codes, "scales": scales}
    what = "W8A8: activations encoded as in `encode`, then multiplied; product_of_exact leaves them as they are (W8A16)"
    yield Case("product", what, dict(block=32), 93, inputs, ("T43",))


def numbers_to_encode() -> Float[np.ndarray, "X C"]:
    """Return float32 rows of two blocks, each of which another mistake of an encoder would show in."""
    rng, rows = np.random.default_rng(92), []
    for exponent in (-100, -20, 0, 1, 7, 30):
        for largest in (448.0, 448.0 + 2**-14, 463.0, 464.0, 496.0, 511.0, 512.0, 256.0):
            block = rng.normal(size=(2, 32)) * np.exp(3 * rng.normal(size=(2, 32)))  # small numbers beside large ones
            block *= 0.4 * largest / np.abs(block).max(axis=1, keepdims=True)
            block[0, rng.integers(32)], block[1, rng.integers(32)] = largest, -largest
            rows.append(np.ldexp(block, exponent).reshape(64))
    halfway = np.arange(1, 33) * 2.0**-3 + 2.0**-4  # beside 448, steps of E4M3 are wider: ties to even
    rows.append(np.concatenate([np.zeros(32), [448.0], halfway[1:]]))
    rows.append(np.concatenate([[np.nan], rng.normal(size=31), [-np.inf], rng.normal(size=31)]))
    return np.stack(rows).astype(np.float32)


def define(inputs: Arrays, rule: Rule) -> Arrays:
    """Return weights, exact in float64, rounded to float32 and on to bfloat16; numbers encoded; products in float64."""
    outputs = {}
    if "codes" in inputs:
        scales = np.repeat(np.asarray(inputs["scales"]).astype(int), rule["block"], axis=1)
        values = np.asarray(inputs["codes"]).astype(np.float64)
        with np.errstate(over="ignore"):
            weights = np.where(scales == 255, np.nan, np.ldexp(values, scales - 127)).astype(np.float32)
            outputs = {"weights": weights, "weights_bf16": weights.astype(jnp.bfloat16)}
    if "activations" not in inputs:
        return outputs
    exact = np.asarray(inputs["activations"]).astype(np.float64)
    codes, scales = encoded(exact, rule["block"])
    outputs |= {"encoded": codes, "encoded_scales": scales}
    if "weights" in outputs:
        read = np.ldexp(codes.astype(np.float64), np.repeat(scales.astype(int), rule["block"], axis=1) - 127)
        wide = outputs["weights"].astype(np.float64)
        outputs |= {"product": read @ wide.T, "product_of_exact": exact @ wide.T}
    return outputs


def encoded(x: Float[np.ndarray, "X C"], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (float8_e4m3fn numbers [X C], scale bytes [X Q]); beyond 448 a number is cut off, ties go to even."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(axis=-1)
    is_finite = np.isfinite(largest)
    _, exponent = np.frexp(np.where(is_finite, largest, 1.0))  # largest = fraction * 2^exponent, fraction below 1
    scales = np.where(largest == 0, 0, np.maximum(exponent - 1 - 8 + 127, 0))
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.ldexp(blocks, 127 - scales[..., None]), -448, 448)
    codes = np.where(is_finite[..., None], codes, np.nan).astype(jnp.float8_e4m3fn)
    return codes.reshape(x.shape), np.where(is_finite, scales, 255).astype(np.uint8)


def runs(inputs: Arrays, rule: Rule) -> Iterator[Run]:
    """Yield the weights by the loader's table, `quantize`, and products by `project`, in float32 and in bfloat16."""
    if "activations" not in inputs:
        codes, scales = np.asarray(inputs["codes"]).view(np.uint8), np.repeat(inputs["scales"], rule["block"], axis=1)
        yield Run("the loader", "float32", {"weights": dequantize(codes, scales, np.dtype(np.float32))})
        yield Run("the loader", "bfloat16", {"weights_bf16": dequantize(codes, scales, np.dtype(jnp.bfloat16))})
        return
    x = jnp.asarray(inputs["activations"])
    result = jax.jit(partial(quantize, num_outputs=0))(x)
    codes = np.asarray(result.codes).view(jnp.float8_e4m3fn)
    yield Run("quantize", "float32", {"encoded": codes, "encoded_scales": np.asarray(result.scales)})
    if "codes" not in inputs:
        return
    # A product's inputs come first here, the hub's come last.
    weight = MXFP8Array(jnp.asarray(np.asarray(inputs["codes"]).view(np.uint8).T), jnp.asarray(inputs["scales"].T))
    for name, activations in (("product", "mxfp8"), ("product_of_exact", None)):
        multiply = jax.jit(partial(project, "xc,cz->xz"))
        out = multiply(x.astype(jnp.float32), weight.with_activations(activations))
        yield Run("project", "float32", on_host({name: out}))


GROUP = Group("mxfp8", cases, define, runs, AXES, TOLERANCES, on_host=True)
