"""Checks of what a step of few tokens runs between attention and experts, for `gpu_check.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks.repeat import twice

from m3jax.model.layers import add_norm as add_norm_definition
from m3jax.model.moe import route
from pallas_kernels.add_norm import add_norm
from pallas_kernels.choose_experts import choose_experts
from pallas_kernels.few_experts import SharedExpert, few_experts
from pallas_kernels.stacked_project import stacked_project

# Rows, inputs and outputs of each projection of a call.
PRODUCTS = [
    (1, 6144, 8192, 512, 512, 512, 128), (1, 3072, 6144), (2, 8192, 6144), (3, 192, 64, 128), (16, 6144, 3072, 3072),
    (1, 12288, 6144), (64, 256, 384, 128), (1, 6144, 12288, 12288), (8, 6144, 8192, 512, 512, 512, 128),
]  # fmt: skip
NORMS = [(1, 6144), (8, 1024), (64, 6144), (3, 192)]  # rows, width
ROUTERS = [(1, 128, 4), (64, 8, 2), (17, 128, 8), (5, 16, 3)]  # tokens, experts, experts a token
SHARED = [
    (1, 16, 4, 6144, 3072),
    (16, 32, 4, 1024, 512),
    (64, 8, 2, 512, 256),
    (5, 8, 2, 192, 192),
]  # tokens, experts, chosen, widths


def check_products(shape, dtype, *, seed: int) -> dict[str, float]:
    """Projections by the second of two layers; the first is NaN."""
    num_rows, inputs, *widths = shape
    keys = jax.random.split(jax.random.key(seed), 1 + len(widths))
    x = jax.random.normal(keys[0], (num_rows, inputs), jnp.float32).astype(dtype)
    draw = lambda key, width: jax.random.normal(key, (2, inputs, width), jnp.float32).astype(dtype).at[0].set(jnp.nan)
    weights = [draw(key, width) for key, width in zip(keys[1:], widths, strict=True)]
    outs, ok = twice(jax.jit(partial(stacked_project, backend="triton")), x, weights, jnp.int32(1))
    wide, error = lambda array: np.asarray(array.astype(jnp.float32), np.float64), 0.0
    for out, w in zip(outs, weights, strict=True):
        want = wide(x) @ wide(w[1])
        error = max(error, np.linalg.norm(out - want) / np.linalg.norm(want))
    return {"error": error, "ok": ok and error < 2e-5}


def check_norm(shape, dtype, *, seed: int) -> dict[str, float]:
    """Sum and norm; the sum to the bit."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x, weight = jax.random.normal(keys[0], shape).astype(dtype), jax.random.normal(keys[1], shape[1:]).astype(dtype)
    update, ok, error = 3 * jax.random.normal(keys[2], shape), True, 0.0
    for added in (update, None):
        fn = jax.jit(lambda x, weight, added=added: add_norm(x, added, weight, eps=1e-6, backend="triton"))
        (total, norm), same = twice(fn, x, weight)
        want, want_norm = add_norm_definition(x[None], None if added is None else added[None], weight, 1e-6)
        ok &= same and np.array_equal(total, np.asarray(want[0], np.float32))
        want_norm = np.asarray(want_norm[0], np.float64)
        error = max(error, np.linalg.norm(norm - want_norm) / np.linalg.norm(want_norm))
    return {"error": error, "ok": ok and error < (1e-6 if dtype == jnp.float32 else 2e-3)}


def check_router(shape, dtype, *, seed: int) -> dict[str, float]:
    """Choices to the id, with scores that are equal for two experts, and a token that is NaN."""
    num_tokens, num_experts, top_k = shape
    keys = jax.random.split(jax.random.key(seed), 2)
    logits = jax.random.normal(keys[0], (num_tokens, num_experts), jnp.float32)
    logits = logits.at[:, 3].set(logits[:, 5] + 2).at[:, 5].add(2)
    bias = (0.1 * jax.random.normal(keys[1], (num_experts,))).at[3].set(0.0).at[5].set(0.0)
    (ids, weights), ok = twice(jax.jit(partial(choose_experts, top_k=top_k, backend="triton")), logits, bias)
    want_ids, want = route(logits, jnp.eye(num_experts), bias, top_k)
    ok &= np.array_equal(ids, np.asarray(want_ids))
    broken = choose_experts(logits.at[0, 7].set(jnp.nan), bias, top_k=top_k, backend="triton")[1]
    ok &= bool(jnp.isnan(broken[0]).all()) and not bool(jnp.isnan(broken[1:]).any())
    error = float(np.abs(weights - np.asarray(want)).max())
    return {"error": error, "ok": ok and error < 1e-6}


def check_shared(shape, dtype, *, seed: int) -> dict[str, float]:
    """The routed experts' outputs are those of a call without the shared one; the first layer is NaN."""
    tokens, count, chosen, width, hidden = shape
    keys = jax.random.split(jax.random.key(seed), 8)
    draw = lambda key, *shape: (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(dtype).at[0].set(jnp.nan)
    shapes = (width, hidden), (width, hidden), (hidden, width)
    weights = [draw(key, 2, count, *shape) for key, shape in zip(keys[:3], shapes, strict=True)]
    shared = SharedExpert(*(draw(key, 2, *shape) for key, shape in zip(keys[3:6], shapes, strict=True)))
    x = jax.random.normal(keys[6], (tokens, width)).astype(dtype)
    ids = jax.random.randint(keys[7], (tokens, chosen), 0, count)
    act = lambda gate, up: (gate * jax.nn.sigmoid(gate) * up).astype(dtype)
    run = partial(few_experts, activate=act, backend="triton")
    both = jax.jit(lambda shared, *args: run(*args, shared=shared))
    (got,), ok = twice(both, shared, x, *weights, jnp.int32(1), ids)
    ok &= np.array_equal(got[:, :chosen], np.asarray(jax.jit(run)(x, *weights, jnp.int32(1), ids)))
    wide = lambda array: np.asarray(array.astype(jnp.float32), np.float64)
    gate, up, down = (wide(w[1]) for w in shared)
    g, u = wide(x) @ gate, wide(x) @ up
    want = (g / (1 + np.exp(-g)) * u) @ down
    error = np.linalg.norm(got[:, -1] - want) / np.linalg.norm(want)
    return {"error": error, "ok": ok and error < 5e-3}
