"""Checks of the invariant mode's kernels, for `gpu_check.py`: what they compute, and a row's bits in any call."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks.repeat import twice

from m3jax.model.layers import apply_rope, gemma_norm
from m3jax.mxfp8 import dequantize, quantize
from m3jax.tiles import UNTUNED
from pallas_kernels.ordered_project import Weights, ordered_project
from pallas_kernels.qk_norm_rope import qk_norm_rope

# Rows, input channels, and outputs of each matrix.
ORDERED = [(300, 6144, 8192, 512, 128), (2048, 3072, 6144), (65, 8192, 6144), (70, 256, 192, 64)]
HEADS = [
    (300, 32, 128, 64, 4, 1),
    (7, 64, 128, 12),
    (64, 32, 64, 16, 2),
    (40, 16, 64, 5),
]  # tokens, angles, width, heads
FEW = (1, 3, 17, 64)  # rows of smaller calls


def check_ordered(shape, dtype, *, seed: int) -> dict[str, float]:
    """Products by the second of two layers, the first is NaN; those of fewer rows, and of MXFP8, to the bit.

    In 16 bits a sum of thousands of products in the order of a tensor core has fewer digits than one of float32 adds,
    and cuBLAS's has no more: there the bound is twice its error.
    """
    num_rows, inputs, *widths = shape
    keys = jax.random.split(jax.random.key(seed), 1 + len(widths))
    # Magnitudes of many binades: there each order of a sum has other bits.
    spread = lambda key, *shape: jax.random.normal(key, shape) * jnp.exp2(2 * jax.random.normal(key, shape))
    x = spread(keys[0], num_rows, inputs).astype(dtype)
    weights = [
        spread(key, 2, inputs, width).astype(dtype).at[0].set(jnp.nan)
        for key, width in zip(keys[1:], widths, strict=True)
    ]
    fn = jax.jit(partial(ordered_project, backend="triton"))
    layer = jnp.int32(1)
    outs, ok = twice(fn, x, weights, layer)
    rows, error, theirs = np.asarray(x.astype(jnp.float32), np.float64), 0.0, 0.0
    cublas = jax.jit(
        partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32), compiler_options=UNTUNED
    )
    for out, w in zip(outs, weights, strict=True):
        want = rows @ np.asarray(w[1].astype(jnp.float32), np.float64)
        relative = lambda found, want=want: np.linalg.norm(np.asarray(found) - want) / np.linalg.norm(want)
        error, theirs = max(error, relative(out)), max(theirs, relative(cublas(x, w[1])))
    others = sum(_differing(fn(x[:few], weights, layer), outs, few) for few in FEW)
    by_output = partial(ordered_project, by_output=True, backend="triton")
    others += _differing(by_output(x, [weights[-1].swapaxes(1, 2)], layer), outs[-1:], num_rows)
    if x.dtype.itemsize == 2:
        kept = [quantize(w.at[0].set(0).astype(jnp.float32)) for w in weights]
        numbers = fn(x, [dequantize(w, dtype) for w in kept], layer)
        codes = [Weights(w.codes, w.scales) for w in kept]
        others += sum(_differing(fn(x[:few], codes, layer), numbers, few) for few in (*FEW, num_rows))
    bound = 2 * theirs if x.dtype.itemsize == 2 else 2e-6
    return {"error": error, "cuBLAS": theirs, "other bits": others, "ok": ok and error < bound and not others}


def check_heads(shape, dtype, *, seed: int) -> dict[str, float]:
    """Tokens alone and beside others."""
    tokens, half, width, *counts = shape
    keys = iter(jax.random.split(jax.random.key(seed), 2 * len(counts) + 1))
    heads = [jax.random.normal(next(keys), (tokens, count, width)) for count in counts]
    norms = [jax.random.normal(next(keys), (width,)).astype(dtype) for _ in counts]
    angles = jax.random.normal(next(keys), (tokens, half))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    fn = jax.jit(partial(qk_norm_rope, eps=1e-6, dtype=dtype, backend="triton"))
    outs, ok = twice(fn, heads, norms, cos, sin)
    error = 0.0
    for out, x, norm in zip(outs, heads, norms, strict=True):
        want = np.asarray(apply_rope(gemma_norm(x, norm, 1e-6)[None], cos[None], sin[None])[0], np.float64)
        error = max(error, np.linalg.norm(np.float64(out) - want) / np.linalg.norm(want))
    others = sum(_differing(fn([x[:few] for x in heads], norms, cos[:few], sin[:few]), outs, few) for few in (1, 3))
    bound = 1e-6 if jnp.dtype(dtype) == jnp.float32 else 2.0**-8
    return {"error": error, "other bits": others, "ok": ok and error < bound and not others}


def _differing(found, whole, num_rows: int) -> int:
    """Return how many rows differ in some bit between calls with `num_rows` rows and the call with all."""
    in_float32 = lambda x: np.asarray(x[:num_rows], np.float32).reshape(num_rows, -1)
    pairs = zip(found, whole, strict=True)
    return sum(int((in_float32(a) != in_float32(b)).any(axis=1).sum()) for a, b in pairs)
