"""The part of `gpu_check.py` about routed experts in 16 and 32 bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks.repeat import twice

from m3jax.msa.inversion import invert
from pallas_kernels.few_experts import few_experts
from pallas_kernels.grouped_experts import grouped_experts

OUT = 5e-3  # error of an output in norm
# tokens, experts, experts a token, width, hidden width, tile
EXPERTS = [
    (32, 32, 4, 6144, 3072, 16), (2048, 32, 4, 1024, 512, 64), (1, 128, 4, 1024, 3072, 16), (77, 8, 2, 256, 384, 16),
    (300, 6, 5, 128, 128, 64), (700, 16, 1, 512, 256, 64), (16, 64, 8, 384, 128, 16), (1000, 4, 2, 2048, 640, 32),
    (2048, 16, 4, 6144, 3072, 128), (500, 9, 3, 256, 384, 128),
]  # fmt: skip
MXFP8_EXPERTS = EXPERTS[:-2]
# The same of calls that sort nothing.
FEW_EXPERTS = [
    (1, 16, 4, 6144, 3072), (4, 32, 4, 6144, 3072), (1, 8, 2, 192, 192), (16, 8, 2, 256, 384), (3, 64, 8, 384, 128),
    (33, 40, 4, 1024, 512), (64, 16, 1, 512, 256), (64, 128, 4, 2048, 512),
]  # fmt: skip


def check_experts(shape, dtype, *, seed: int) -> dict[str, float]:
    """The second of two layers, all pairs of the experts that are chosen least, most, and in between.

    The last expert is chosen by nobody. It is NaN, as is the first layer: nothing may look there.
    """
    tokens, count, chosen, width, hidden, tile = shape
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (tokens, width), jnp.float32).astype(dtype)
    # The lower an expert's number the more choose it: from all tokens to one or two.
    taste = rng.random((tokens, count - 1)) + np.linspace(0, 1, count - 1)
    ids = taste.argsort(axis=1)[:, :chosen].astype(np.int32)
    is_used = (
        jnp.asarray(np.isin(np.arange(count), ids))[None, :, None, None] & (jnp.arange(2) == 1)[:, None, None, None]
    )
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5
    drawn = [draw(key, 2, count, width, hidden) for key in keys[1:3]] + [draw(keys[3], 2, count, hidden, width)]
    gate, up, down = (jnp.where(is_used, weight, jnp.nan).astype(dtype) for weight in drawn)
    act = lambda gate, up: gate * jax.nn.sigmoid(gate) * up
    if tile is None:
        fn = jax.jit(partial(few_experts, activate=act, backend="triton"))
        (got,), ok = twice(fn, x, gate, up, down, jnp.int32(1), jnp.asarray(ids))
    else:
        tiles = invert(jnp.asarray(ids)[None, None], count, tile)
        used = jnp.sum(tiles.valid, axis=1, dtype=jnp.int32)
        fn = jax.jit(partial(grouped_experts, num_chosen=chosen, activate=act, backend="triton"))
        (got,), ok = twice(fn, x, gate, up, down, jnp.int32(1), tiles.block, tiles.pair, used)
    wide = lambda array: np.asarray(array.astype(jnp.float32), np.float64)
    error = norm = 0.0
    by_load = np.argsort(np.bincount(ids.reshape(-1), minlength=count))
    for e in by_load[np.isin(by_load, ids)][[0, len(np.unique(ids)) // 2, -1]]:
        token, choice = np.nonzero(ids == e)
        rows = wide(x[token])
        g, u = rows @ wide(gate[1, e]), rows @ wide(up[1, e])
        want = (g / (1 + np.exp(-g)) * u) @ wide(down[1, e])
        error += ((got[token, choice] - want) ** 2).sum()
        norm += (want**2).sum()
    error = (error / norm) ** 0.5
    return {"error": error, "ok": ok and np.isfinite(got).all() and error < (2e-5 if dtype == jnp.float32 else OUT)}
