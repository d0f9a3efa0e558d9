"""Kernels of a step of few tokens on a GPU: products with a stack, sum and norm, router."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from support.on_gpu import distance, exact, shapes_and_dtypes, twice

from m3jax.model.layers import add_norm as add_norm_definition
from m3jax.model.moe import route
from pallas_kernels.add_norm import add_norm
from pallas_kernels.choose_experts import choose_experts
from pallas_kernels.stacked_project import stacked_project

# Rows, inputs and outputs of each projection of a call.
PRODUCTS = [
    (1, 6144, 8192, 512, 512, 512, 128), (1, 3072, 6144), (2, 8192, 6144), (3, 192, 64, 128), (16, 6144, 3072, 3072),
    (1, 12288, 6144), (64, 256, 384, 128), (1, 6144, 12288, 12288), (8, 6144, 8192, 512, 512, 512, 128),
]  # fmt: skip
NORMS = [(1, 6144), (8, 1024), (64, 6144), (3, 192)]  # rows, width
ROUTERS = [(1, 128, 4), (64, 8, 2), (17, 128, 8), (5, 16, 3)]  # tokens, experts, experts a token


@shapes_and_dtypes(PRODUCTS)
def test_products_with_a_stack_are_those_of_float64(shape, dtype, backend, seed):
    """By the second of two layers; the first is NaN."""
    num_rows, inputs, *widths = shape
    keys = jax.random.split(jax.random.key(seed), 1 + len(widths))
    x = jax.random.normal(keys[0], (num_rows, inputs), jnp.float32).astype(dtype)
    draw = lambda key, width: jax.random.normal(key, (2, inputs, width), jnp.float32).astype(dtype).at[0].set(jnp.nan)
    weights = [draw(key, width) for key, width in zip(keys[1:], widths, strict=True)]
    outs = twice(jax.jit(partial(stacked_project, backend=backend)), x, weights, jnp.int32(1))
    for i, (out, w) in enumerate(zip(outs, weights, strict=True)):
        error = distance(out, exact(x) @ exact(w[1]))
        assert error < 2e-5, f"product {i}: error {error:.1e}"


@shapes_and_dtypes(NORMS)
def test_a_sum_is_exact_and_its_norm_that_of_the_definition(shape, dtype, backend, seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    x, weight = jax.random.normal(keys[0], shape).astype(dtype), jax.random.normal(keys[1], shape[1:]).astype(dtype)
    update = 3 * jax.random.normal(keys[2], shape)
    for added in (update, None):
        fn = jax.jit(lambda x, weight, added=added: add_norm(x, added, weight, eps=1e-6, backend=backend))
        total, norm = twice(fn, x, weight)
        want, want_norm = add_norm_definition(x[None], None if added is None else added[None], weight, 1e-6)
        assert np.array_equal(total, np.asarray(want[0], np.float32)), "sum: other bits than the definition's"
        error = distance(norm, np.asarray(want_norm[0], np.float64))
        assert error < (1e-6 if dtype == jnp.float32 else 2e-3), f"norm: error {error:.1e}"


@shapes_and_dtypes(ROUTERS)
def test_a_router_chooses_by_number_between_equal_scores_and_keeps_nan_to_its_token(shape, dtype, backend, seed):
    num_tokens, num_experts, top_k = shape
    keys = jax.random.split(jax.random.key(seed), 2)
    logits = jax.random.normal(keys[0], (num_tokens, num_experts), jnp.float32)
    # Two experts score alike.
    logits = logits.at[:, 3].set(logits[:, 5] + 2).at[:, 5].add(2)
    bias = (0.1 * jax.random.normal(keys[1], (num_experts,))).at[3].set(0.0).at[5].set(0.0)
    ids, weights = twice(jax.jit(partial(choose_experts, top_k=top_k, backend=backend)), logits, bias)
    want_ids, want = route(logits, jnp.eye(num_experts), bias, top_k)
    assert np.array_equal(ids, np.asarray(want_ids)), "other experts than the definition's"
    error = float(np.abs(weights - np.asarray(want)).max())
    assert error < 1e-6, f"weights: error {error:.1e}"
    broken = choose_experts(logits.at[0, 7].set(jnp.nan), bias, top_k=top_k, backend=backend)[1]
    assert bool(jnp.isnan(broken[0]).all()), "a token whose logit is NaN has weights that are not"
    assert not bool(jnp.isnan(broken[1:]).any()), "NaN spread to another token"
