"""Kernels of routed and shared experts in 16 and 32 bits, on a GPU, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from support.on_gpu import OUT, distance, exact, shapes_and_dtypes, twice

from m3jax.msa.inversion import invert
from pallas_kernels.few_experts import SharedExpert, few_experts
from pallas_kernels.grouped_experts import grouped_experts

# tokens, experts, experts a token, width, hidden width, tile
EXPERTS = [
    (32, 32, 4, 6144, 3072, 16), (2048, 32, 4, 1024, 512, 64), (1, 128, 4, 1024, 3072, 16), (77, 8, 2, 256, 384, 16),
    (300, 6, 5, 128, 128, 64), (700, 16, 1, 512, 256, 64), (16, 64, 8, 384, 128, 16), (1000, 4, 2, 2048, 640, 32),
    (2048, 16, 4, 6144, 3072, 128), (500, 9, 3, 256, 384, 128),
]  # fmt: skip
# The same of calls that sort nothing, without a tile.
FEW_EXPERTS = [
    (1, 16, 4, 6144, 3072), (4, 32, 4, 6144, 3072), (1, 8, 2, 192, 192), (16, 8, 2, 256, 384), (3, 64, 8, 384, 128),
    (33, 40, 4, 1024, 512), (64, 16, 1, 512, 256), (64, 128, 4, 2048, 512),
]  # fmt: skip
SHARED = [(1, 16, 4, 6144, 3072), (16, 32, 4, 1024, 512), (64, 8, 2, 512, 256), (5, 8, 2, 192, 192)]


def silu(x):
    return x / (1 + np.exp(-x))


def draw(shape, dtype, seed: int):
    """(x, expert ids, gate, up, down): weights of two layers, of which calls use the second.

    The last expert is chosen by nobody. It is NaN, as is the first layer: nothing may look there.
    """
    tokens, count, chosen, width, hidden = shape[:5]
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (tokens, width), jnp.float32).astype(dtype)
    # The lower an expert's number the more choose it: from all tokens to one or two.
    taste = rng.random((tokens, count - 1)) + np.linspace(0, 1, count - 1)
    ids = taste.argsort(axis=1)[:, :chosen].astype(np.int32)
    is_chosen = jnp.asarray(np.isin(np.arange(count), ids))[None, :, None, None]
    is_used = is_chosen & (jnp.arange(2) == 1)[:, None, None, None]
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5
    drawn = [normal(key, 2, count, width, hidden) for key in keys[1:3]] + [normal(keys[3], 2, count, hidden, width)]
    return x, ids, *(jnp.where(is_used, weight, jnp.nan).astype(dtype) for weight in drawn)


def activate(gate, up):
    return gate * jax.nn.sigmoid(gate) * up


def check_experts(got: np.ndarray, x, ids, gate, up, down) -> None:
    """Compare all pairs of the experts that are chosen least, most, and in between."""
    assert np.isfinite(got).all(), "an output is not finite"
    error = norm = 0.0
    by_load = np.argsort(np.bincount(ids.reshape(-1), minlength=gate.shape[1]))
    for e in by_load[np.isin(by_load, ids)][[0, len(np.unique(ids)) // 2, -1]]:
        token, choice = np.nonzero(ids == e)
        rows = exact(x[token])
        want = (silu(rows @ exact(gate[1, e])) * (rows @ exact(up[1, e]))) @ exact(down[1, e])
        error += ((got[token, choice] - want) ** 2).sum()
        norm += (want**2).sum()
    error = (error / norm) ** 0.5
    assert error < (2e-5 if x.dtype == jnp.float32 else OUT), f"outputs: error {error:.1e}"


@shapes_and_dtypes(EXPERTS)
def test_grouped_experts_are_those_of_float64(shape, dtype, backend, seed):
    count, chosen, tile = shape[1], shape[2], shape[5]
    x, ids, *weights = draw(shape, dtype, seed)
    tiles = invert(jnp.asarray(ids)[None, None], count, tile)
    used = jnp.sum(tiles.valid, axis=1, dtype=jnp.int32)
    fn = jax.jit(partial(grouped_experts, num_chosen=chosen, activate=activate, backend=backend))
    (got,) = twice(fn, x, *weights, jnp.int32(1), tiles.block, tiles.pair, used)
    check_experts(got, x, ids, *weights)


@shapes_and_dtypes(FEW_EXPERTS)
def test_few_experts_are_those_of_float64(shape, dtype, backend, seed):
    x, ids, *weights = draw(shape, dtype, seed)
    fn = jax.jit(partial(few_experts, activate=activate, backend=backend))
    (got,) = twice(fn, x, *weights, jnp.int32(1), jnp.asarray(ids))
    check_experts(got, x, ids, *weights)


@shapes_and_dtypes(SHARED)
def test_a_shared_expert_is_that_of_float64_and_leaves_the_routed_ones_their_bits(shape, dtype, backend, seed):
    """The first layer is NaN."""
    tokens, count, chosen, width, hidden = shape
    keys = jax.random.split(jax.random.key(seed), 8)
    draw = lambda key, *shape: (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(dtype).at[0].set(jnp.nan)
    shapes = (width, hidden), (width, hidden), (hidden, width)
    weights = [draw(key, 2, count, *shape) for key, shape in zip(keys[:3], shapes, strict=True)]
    shared = SharedExpert(*(draw(key, 2, *shape) for key, shape in zip(keys[3:6], shapes, strict=True)))
    x = jax.random.normal(keys[6], (tokens, width)).astype(dtype)
    ids = jax.random.randint(keys[7], (tokens, chosen), 0, count)
    act = lambda gate, up: activate(gate, up).astype(dtype)
    run = partial(few_experts, activate=act, backend=backend)
    both = jax.jit(lambda shared, *args: run(*args, shared=shared))
    (got,) = twice(both, shared, x, *weights, jnp.int32(1), ids)
    alone = np.asarray(jax.jit(run)(x, *weights, jnp.int32(1), ids))
    assert np.array_equal(got[:, :chosen], alone), "routed experts: other values than without the shared one"
    gate, up, down = (exact(w[1]) for w in shared)
    error = distance(got[:, -1], (silu(exact(x) @ gate) * (exact(x) @ up)) @ down)
    assert error < OUT, f"shared expert: error {error:.1e}"
