"""The invariant mode's kernels on a GPU: what they compute, and that a row has the same bits in any call."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from support.on_gpu import distance, exact, shapes_and_dtypes, twice

from m3jax.model.layers import apply_rope, gemma_norm
from m3jax.mxfp8 import dequantize, quantize
from m3jax.tiles import UNTUNED
from pallas_kernels.ordered_project import Weights, ordered_project
from pallas_kernels.qk_norm_rope import qk_norm_rope

# Rows, input channels, and outputs of each matrix.
ORDERED = [(300, 6144, 8192, 512, 128), (2048, 3072, 6144), (65, 8192, 6144), (70, 256, 192, 64)]
# Tokens, angles, width, heads of each array.
HEADS = [(300, 32, 128, 64, 4, 1), (7, 64, 128, 12), (64, 32, 64, 16, 2), (40, 16, 64, 5)]
FEW = (1, 3, 17, 64)  # rows of smaller calls


def differing(found, whole, num_rows: int) -> int:
    """Return how many rows differ in some bit between calls with `num_rows` rows and the call with all."""
    in_float32 = lambda x: np.asarray(x[:num_rows], np.float32).reshape(num_rows, -1)
    pairs = zip(found, whole, strict=True)
    return sum(int((in_float32(a) != in_float32(b)).any(axis=1).sum()) for a, b in pairs)


@shapes_and_dtypes(ORDERED)
def test_a_row_of_a_product_has_the_same_bits_in_any_call(shape, dtype, backend, seed):
    """By the second of two layers, the first is NaN; of fewer rows, by output, and of weights in MXFP8.

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
    is_narrow, layer = x.dtype.itemsize == 2, jnp.int32(1)
    fn = jax.jit(partial(ordered_project, backend=backend))
    outs = twice(fn, x, weights, layer)

    cublas = jax.jit(
        partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32), compiler_options=UNTUNED
    )
    error = theirs = 0.0
    for out, w in zip(outs, weights, strict=True):
        want = exact(x) @ exact(w[1])
        error, theirs = max(error, distance(out, want)), max(theirs, distance(cublas(x, w[1]), want))
    assert error < (2 * theirs if is_narrow else 2e-6), f"error {error:.1e}, cuBLAS {theirs:.1e}"

    for few in FEW:
        count = differing(fn(x[:few], weights, layer), outs, few)
        assert not count, f"{few} rows alone: {count} have other bits"
    by_output = partial(ordered_project, by_output=True, backend=backend)
    count = differing(by_output(x, [weights[-1].swapaxes(1, 2)], layer), outs[-1:], num_rows)
    assert not count, f"a matrix that is stored by output: {count} of {num_rows} rows have other bits"
    if is_narrow:
        kept = [quantize(w.at[0].set(0).astype(jnp.float32)) for w in weights]
        numbers = fn(x, [dequantize(w, dtype) for w in kept], layer)
        codes = [Weights(w.codes, w.scales) for w in kept]
        for rows in (*FEW, num_rows):
            count = differing(fn(x[:rows], codes, layer), numbers, rows)
            assert not count, f"MXFP8: {count} of {rows} rows differ from those of the dequantised weights"


@shapes_and_dtypes(HEADS)
def test_heads_of_a_token_have_the_same_bits_in_any_call(shape, dtype, backend, seed):
    tokens, half, width, *counts = shape
    keys = iter(jax.random.split(jax.random.key(seed), 2 * len(counts) + 1))
    heads = [jax.random.normal(next(keys), (tokens, count, width)) for count in counts]
    norms = [jax.random.normal(next(keys), (width,)).astype(dtype) for _ in counts]
    angles = jax.random.normal(next(keys), (tokens, half))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    fn = jax.jit(partial(qk_norm_rope, eps=1e-6, dtype=dtype, backend=backend))
    outs = twice(fn, heads, norms, cos, sin)
    for i, (out, x, norm) in enumerate(zip(outs, heads, norms, strict=True)):
        want = np.asarray(apply_rope(gemma_norm(x, norm, 1e-6)[None], cos[None], sin[None])[0], np.float64)
        error = distance(out, want)
        assert error < (1e-6 if dtype == jnp.float32 else 2.0**-8), f"heads {i}: error {error:.1e}"
    for few in (1, 3):
        count = differing(fn([x[:few] for x in heads], norms, cos[:few], sin[:few]), outs, few)
        assert not count, f"{few} tokens alone: {count} have other bits"
