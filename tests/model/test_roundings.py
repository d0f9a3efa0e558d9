"""The model's roundings in bfloat16: each value from those before it, rounded where docs/numerics.md says."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import comparisons, tiny

from m3jax.model import M3
from m3jax.model.layers import rope_table

BF16 = ml_dtypes.bfloat16
CONFIG = tiny.config("dM", rms_norm_eps=1e-3)
LENGTH = 44  # more blocks than a query keeps
FLOAT32 = 2e-5  # what sums in float32 may be off by, relative to the largest of their kind


@cache
def model() -> M3:
    return tiny.model(CONFIG, dtype="bfloat16").with_schedule("mask")


@cache
def values() -> dict:
    tokens = tiny.tokens(CONFIG, 1, LENGTH)
    return jax.device_get(jax.jit(lambda m, t: m.intermediates(t))(model(), tokens))


@cache
def weight(stack: int, path: str) -> np.ndarray:
    """A parameter of the only layer of a stack, in float64."""
    leaf = model().stacks[stack]
    for name in path.split("."):
        leaf = getattr(leaf, name)
    return np.asarray(leaf[...][0]).astype(np.float64)


def exact(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG.rms_norm_eps) * (1 + w)


def rotated(x: np.ndarray) -> np.ndarray:
    """[B T N H]: dims (i, i + R) turned by position x theta**(-i / R)."""
    half = CONFIG.rotary_dim // 2
    angle = np.arange(x.shape[1])[:, None, None] * CONFIG.rope_theta ** (-np.arange(half) / half)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
    return np.concatenate([*turned, rest], axis=-1)


def assert_rounded_once(found, expected: np.ndarray, what: str) -> None:
    """The nearest bfloat16 of the exact value: off by half a step and what float32 sums may be off by."""
    assert found.dtype == BF16, f"{what} is {found.dtype}, expected bfloat16"
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(expected), 1e-30))) - 7)
    comparisons.assert_close(found, expected, what, atol=step / 2 + FLOAT32 * np.abs(expected).max())


def assert_not_rounded(found, expected: np.ndarray, what: str, slack=0.0) -> None:
    """Check that a value is a float32 sum, equal to the exact one up to float32's roundings."""
    assert found.dtype == np.float32, f"{what} is {found.dtype}, expected float32"
    comparisons.assert_close(found, expected, what, atol=FLOAT32 * np.abs(expected).max() + slack)


@pytest.mark.parametrize("layer", [0, 1])
def test_heads_are_normed_and_rotated_before_their_one_rounding(layer):
    """T26: one more rounding between projection, norm and rotation, or cosines in bfloat16, and half a step is over."""
    found, attention = values()["layers"][layer], partial(weight, layer)
    assert_rounded_once(
        found["attention_norm"], norm(exact(found["input"]), attention("input_layernorm")), "attention_norm"
    )
    x = exact(found["attention_norm"])
    for name in ("q", "k") if layer == 0 else ("q", "k", "index_q", "index_k"):
        projected = np.einsum("btd,d...h->bt...h", x, attention(f"self_attn.{name}_proj"))
        heads = projected[:, :, None] if name == "index_k" else projected
        expected = rotated(norm(heads, attention(f"self_attn.{name}_norm"))).reshape(projected.shape)
        assert_rounded_once(found[name], expected, f"{name} of layer {layer}")
    assert_rounded_once(found["v"], np.einsum("btd,dnh->btnh", x, attention("self_attn.v_proj")), "v")


def test_block_scores_are_not_rounded():
    found = values()["layers"][1]
    scores = np.einsum("btkh,bsh->bkts", exact(found["index_q"]), exact(found["index_k"]))
    scores = np.where(np.tri(LENGTH, dtype=bool), scores, -np.inf)
    scores = np.pad(scores, [(0, 0)] * 3 + [(0, -LENGTH % 8)], constant_values=-np.inf)
    scores = scores.reshape(*scores.shape[:3], -1, 8).max(-1)
    assert found["block_scores"].dtype == np.float32
    comparisons.assert_close(found["block_scores"], scores, "block_scores", "B K T M", atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_is_rounded_once_and_its_projection_is_not(layer):
    found = values()["layers"][layer]
    q, k, v = (exact(found[name]) for name in "qkv")
    scores = np.einsum("btkgh,bskh->bkgts", q.reshape(1, LENGTH, 4, 2, 16), k) * 16**-0.5
    seen = np.tri(LENGTH, dtype=bool)
    if layer == 1:
        chosen = (np.arange(LENGTH)[:, None] // 8 == found["blocks"][..., None, :]).any(-1)  # [B K T S]
        seen = (seen & chosen)[:, :, None]
    p = np.exp(np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(-1, keepdims=True))
    by_token = lambda p, v: np.einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)
    total = np.moveaxis(p.sum(-1), 3, 1).reshape(*q.shape[:3], 1)  # [B T N 1]
    expected, slack = by_token(p.astype(BF16).astype(np.float64), v) / total, by_token(p, np.abs(v)) / total * 1e-4
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(expected), 1e-30))) - 7)
    comparisons.assert_close(found["attention"], expected, "attention", "B T N H", atol=step / 2 + slack)
    out = np.einsum("btnh,nhd->btd", exact(found["attention"]), weight(layer, "self_attn.o_proj"))
    assert_not_rounded(found["attention_out"], out, "attention_out")


def hidden(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SwiGLU, rounded once, and where float32's last bits may decide otherwise."""
    g, u = np.minimum(x @ gate, CONFIG.swiglu_limit), np.clip(x @ up, -CONFIG.swiglu_limit, CONFIG.swiglu_limit)
    h = (u + 1) * g / (1 + np.exp(-CONFIG.swiglu_alpha * g))
    low, high = ((h * (1 + e)).astype(BF16).astype(np.float64) for e in (-FLOAT32, FLOAT32))
    return h.astype(BF16).astype(np.float64), np.abs(high - low)


def mlp(stack: int, path: str, x: np.ndarray, of=()) -> tuple[np.ndarray, np.ndarray]:
    """(output, slack) of an MLP; `of` picks an expert."""
    gate, up, down = (weight(stack, f"{path}{name}_proj")[of] for name in ("gate", "up", "down"))
    h, doubt = hidden(x, gate, up)
    return h @ down, doubt @ np.abs(down)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_residual_stream_is_rounded_once_for_each_addition(layer):
    """And experts not before it: their weighted sum, the factor and the shared expert come in one addition."""
    found = values()["layers"][layer]
    after_attention = (found["input"].astype(np.float32) + found["attention_out"]).astype(BF16)
    assert_rounded_once(
        found["ffn_norm"], norm(exact(after_attention), weight(layer, "post_attention_layernorm")), "ffn_norm"
    )
    x = exact(found["ffn_norm"])[0]
    if layer == 0:
        expected, slack = mlp(0, "mlp.", x)
    else:
        expected, slack = mlp(1, "mlp.shared_experts.", x)
        for token, slot in np.ndindex(LENGTH, CONFIG.num_experts_per_tok):
            share = CONFIG.routed_scaling_factor * float(found["expert_weights"][0, token, slot])
            out, doubt = mlp(1, "mlp.experts.", x[token], found["expert_ids"][0, token, slot])
            expected[token] += share * out
            slack[token] += share * doubt
    assert_not_rounded(found["ffn_out"], expected[None], f"ffn_out of layer {layer}", slack)
    output = (after_attention.astype(np.float32) + found["ffn_out"]).astype(BF16)
    comparisons.assert_equal(found["output"], output, f"output of layer {layer}", "B T D")


def test_the_end_is_rounded_by_the_norm_and_not_after_it():
    found, last = values(), exact(values()["layers"][-1]["output"])
    assert_rounded_once(found["final_norm"], norm(last, exact(model().norm[...])), "final_norm")
    assert_not_rounded(found["logits"], exact(found["final_norm"]) @ exact(model().lm_head[...]).T, "logits")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_angles_are_float32_whatever_the_model_s_dtype(dtype):
    """In bfloat16 the positions 256 and 257 are one, and none has its own angle up to a context of a million."""
    positions = np.array([[0, 1, 255, 256, 257, 1000, 4097, 65_537, 1_048_575]], np.int32)
    cos, sin = rope_table(jnp.asarray(positions), 16, 5e6, jnp.dtype(dtype))
    frequency = np.float32(1) / np.float32(5e6) ** (np.arange(0, 16, 2, dtype=np.float32) / np.float32(16))
    angle = (positions[..., None].astype(np.float32) * frequency).astype(np.float64)
    assert cos.dtype == sin.dtype == np.float32
    comparisons.assert_close(cos, np.cos(angle), "cosine", "B T R", atol=1e-6)
    comparisons.assert_close(sin, np.sin(angle), "sine", "B T R", atol=1e-6)


def test_float64_angles_are_float64():
    with jax.enable_x64(True):
        cos, sin = rope_table(jnp.array([[1_048_575]]), 16, 5e6, jnp.dtype("float64"))
    angle = 1_048_575 * 5e6 ** (-np.arange(8) / 8)
    comparisons.assert_close(cos[0, 0], np.cos(angle), "cosine", "R", atol=1e-9)
    comparisons.assert_close(sin[0, 0], np.sin(angle), "sine", "R", atol=1e-9)
