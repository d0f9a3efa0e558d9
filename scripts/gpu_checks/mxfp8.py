"""Checks of the kernels that multiply by MXFP8 weights, for `gpu_check.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks.repeat import twice

from m3jax import mxfp8
from m3jax.checkpoint.mxfp8 import dequantize as dequantize_by_table
from m3jax.mxfp8 import MXFP8Array
from pallas_kernels.mxfp8_experts import Weights, mxfp8_experts
from pallas_kernels.mxfp8_numbers import mxfp8_numbers
from pallas_kernels.mxfp8_project import mxfp8_project

ERROR = 5e-3  # of experts, whose hidden values are rounded
# Experts in MXFP8 a pair at a time; rows, inputs and outputs of each dense projection of a call in MXFP8.
MXFP8_PAIRS = [(1, 32, 4, 6144, 3072, 1), (4, 16, 4, 6144, 3072, 1), (2, 128, 8, 1024, 512, 1), (5, 8, 2, 256, 384, 1)]
PROJECT = [
    (1, 6144, 8192, 512, 512), (4, 8192, 6144), (2, 6144, 512, 128), (3, 224, 96, 32), (16, 6144, 12288, 12288),
    (77, 3072, 6144), (5, 192, 256, 64, 64), (300, 6144, 8192), (129, 256, 128, 32), (1, 12288, 6144),
]  # fmt: skip


def check_mxfp8_experts(shape, dtype, *, seed: int) -> dict[str, float]:
    """Like `check_experts`, of codes and scales; and every scale byte, by tokens that pick one input channel each."""
    tokens, count, chosen, width, hidden, tile = shape
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), 4)

    def draw(key, inputs, outputs):
        codes, scales = jax.random.split(key)
        code = jax.random.randint(codes, (2, count, inputs, outputs), 0, 256).astype(jnp.uint8)
        code = jnp.where(code & 127 == 127, 0, code)
        # Numbers of E4M3 have a root mean square of about 2^7; a scale of 2^-14 or so gives products of about 1.
        scale = jax.random.randint(scales, (2, count, inputs // 32, outputs), 113, 119)
        return Weights(code, (scale - round(np.log2(inputs) / 2)).astype(jnp.uint8))

    x = jax.random.normal(keys[0], (tokens, width), jnp.float32).astype(dtype)
    gate, up, down = draw(keys[1], width, hidden), draw(keys[2], width, hidden), draw(keys[3], hidden, width)
    ids = rng.random((tokens, count - 1)).argsort(axis=1)[:, :chosen]
    expert, token, valid = tiles_of(ids, tile)
    act = lambda gate, up: gate * jax.nn.sigmoid(gate) * up
    used = lambda out, valid: jnp.where(valid[..., None], out, 0)
    fn = jax.jit(lambda *args: used(mxfp8_experts(*args, activate=act, backend="triton"), args[-1]))
    (got,), ok = twice(fn, x, gate, up, down, jnp.int32(1), expert, token, valid)
    dense = lambda w, e: np.asarray(mxfp8.dequantize(MXFP8Array(w.codes[1, e], w.scales[1, e]), "float32"), np.float64)
    error = norm = 0.0
    for i in {0, len(expert) - 2, len(expert) // 2} if len(expert) > 2 else range(len(expert)):
        rows, e = np.asarray(x[token[i][valid[i]]].astype(jnp.float32), np.float64), int(expert[i])
        g, u = rows @ dense(gate, e), rows @ dense(up, e)
        want = (g / (1 + np.exp(-g)) * u) @ dense(down, e)
        error += ((got[i][valid[i]] - want) ** 2).sum()
        norm += (want**2).sum()
    error = (error / norm) ** 0.5
    return {"error": error, "ok": ok and error < ERROR and _every_scale(dtype)}


def check_mxfp8_project(shape, dtype, *, seed: int) -> dict[str, float]:
    """Projections by the second of two layers; the first is NaN."""
    num_rows, inputs, *widths = shape
    keys = jax.random.split(jax.random.key(seed), 1 + 2 * len(widths))
    x = jax.random.normal(keys[0], (num_rows, inputs), jnp.float32).astype(dtype)
    weights = []
    for code_key, scale_key, width in zip(keys[1::2], keys[2::2], widths, strict=True):
        code = jax.random.bits(code_key, (2, inputs, width), jnp.uint8)
        code = jnp.where(code & 127 == 127, 0, code).at[0].set(127)
        scale = jax.random.randint(scale_key, (2, inputs // 32, width), 107, 113).astype(jnp.uint8)
        weights.append(Weights(code, scale))
    fn = jax.jit(partial(mxfp8_project, backend="triton"))
    outs, ok = twice(fn, x, weights, jnp.int32(1))
    rows, error = np.asarray(x.astype(jnp.float32), np.float64), 0.0
    for out, w in zip(outs, weights, strict=True):
        numbers = np.asarray(
            mxfp8.dequantize(MXFP8Array(w.codes[1], w.scales[1]), dtype).astype(jnp.float32), np.float64
        )
        want = rows @ numbers
        error = max(error, np.linalg.norm(out - want) / np.linalg.norm(want))
    return {"error": error, "ok": ok and error < 2e-5 and _every_scale_projected(dtype)}


def _every_scale_projected(dtype) -> bool:
    """Return True if rows that each pick one input channel give the definition's numbers, in few rows and in many."""
    channels = np.arange(4) * 32 + np.array([0, 7, 18, 31])
    codes = np.random.default_rng(0).integers(0, 127, (1, 128, 128)) | 128 * (np.arange(128) % 2)
    scales = np.arange(512).reshape(1, 4, 128) % (247 if dtype == jnp.bfloat16 else 134)  # larger ones overflow
    weights = Weights(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))
    want = mxfp8.dequantize(MXFP8Array(weights.codes[0], weights.scales[0]), dtype).astype(jnp.float32)[channels]
    ok = True
    for num_rows in (4, 20):
        x = jnp.asarray(np.eye(128)[np.resize(channels, num_rows)], dtype)
        (got,) = mxfp8_project(x, [weights], jnp.int32(0), backend="triton")
        ok &= np.allclose(got[:4], want, rtol=0, atol=448 * 2.0**-127)  # what has no leading bit may be flushed
    got = mxfp8_numbers(weights, jnp.int32(0), dtype, backend="triton").astype(jnp.float32)[channels]
    return ok and np.allclose(got, want, rtol=0, atol=448 * 2.0**-127)


def _every_scale(dtype) -> bool:
    """Return True if the kernel gives the definition's numbers, and the definition those of loading, bit by bit."""
    codes, scales = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    block = MXFP8Array(jnp.asarray(codes[:, None].repeat(32, axis=1)), jnp.asarray(scales[:, None]))
    found = np.asarray(jax.jit(mxfp8.dequantize, static_argnums=1)(block, np.dtype(dtype)))[:, 31]
    ok = np.array_equal(found, dequantize_by_table(codes, scales, np.dtype(dtype)), equal_nan=True)
    codes = np.random.default_rng(0).integers(0, 127, (1, 2, 128, 128)).astype(np.uint8)
    scales = np.arange(1024).reshape(1, 2, 4, 128) % (247 if dtype == jnp.bfloat16 else 134)  # larger ones overflow
    gate = Weights(jnp.asarray(codes), jnp.asarray(scales, jnp.uint8))
    identity = mxfp8.quantize(jnp.eye(128)[None, None].repeat(2, axis=1))
    token = jnp.arange(128, dtype=jnp.int32).reshape(4, 32).repeat(2, axis=0)
    out = mxfp8_experts(
        jnp.eye(128, dtype=dtype), gate, gate, Weights(identity.codes, identity.scales), jnp.int32(0),
        jnp.arange(8, dtype=jnp.int32) % 2, token, jnp.ones((8, 32), bool), activate=lambda gate, up: gate,
        backend="triton",
    )  # fmt: skip
    got = np.asarray(out).reshape(4, 2, 32, 128).swapaxes(0, 1).reshape(2, 128, 128)
    want = np.asarray(mxfp8.dequantize(MXFP8Array(gate.codes[0], gate.scales[0]), dtype).astype(jnp.float32))
    return ok and np.allclose(got, want, rtol=0, atol=448 * 2.0**-127)  # what has no leading bit may be flushed


def tiles_of(ids, tile: int):
    """(expert of each tile, its tokens, which count): tiles of each expert's tokens, and an idle one."""
    expert, token = [], []
    for e in np.unique(ids):
        mine = np.nonzero((ids == e).any(1))[0]
        for part in np.split(mine, range(tile, len(mine), tile)):
            expert.append(e)
            token.append(np.pad(part, (0, tile - len(part)), constant_values=-1))
    token = np.array([*token, np.full(tile, -1)])
    return jnp.asarray([*expert, 0], jnp.int32), jnp.asarray(token.clip(0), jnp.int32), jnp.asarray(token >= 0)
