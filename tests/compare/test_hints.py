"""A bug planted into a quantity, and the hint that names it: only where the numbers prove it."""

import ml_dtypes
import numpy as np
import pytest
from support import tiny

from m3jax.compare.hints import _of_float8, hint
from m3jax.compare.pairs import Pair
from m3jax.compare.quantities import quantity
from m3jax.compare.sides import Source, side

CONFIG = tiny.config("dM", hidden_size=32, dense_intermediate_size=24, swiglu_limit=1.5)
LENGTHS = (50, 30)
T, R, H, EPS = max(LENGTHS), CONFIG.rotary_dim, CONFIG.head_dim, CONFIG.rms_norm_eps
DRAW = np.random.default_rng(3)
WEIGHT, W_DOWN = DRAW.normal(size=32) * 0.3, DRAW.normal(size=(24, 32))
W_V = DRAW.normal(size=(32, CONFIG.num_key_value_heads * H))


def unit(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


def swiglu(gate, up, alpha=1.702, limit=1.5, one=1.0):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + one) * gate / (1 + np.exp(-alpha * gate))


def turned(x, width):
    """Complex numbers turned: dim i with dim i + width / 2."""
    half = width // 2
    z = (x[..., :half] + 1j * x[..., half:width]) * np.exp(
        1j * np.arange(T)[:, None, None] * CONFIG.rope_theta ** (-2 * np.arange(half) / width)
    )
    return np.concatenate([z.real, z.imag, x[..., width:]], axis=-1)


def encoded(x, last_binade):
    blocks = x.reshape(2, T, -1, 32)
    scale = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - last_binade)
    return (np.clip(blocks / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale).reshape(x.shape)


def float8(x, kind):
    return (x * 16).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).view(kind).astype(float) / 16


X = DRAW.normal(size=(2, T, 32)) * np.exp(2 * DRAW.normal(size=(2, T, 32)))
NORMED = unit(X) * (1 + WEIGHT)
GATE, UP = 2 * DRAW.normal(size=(2, 2, T, 24))
HEADS = DRAW.normal(size=(2, T, CONFIG.num_attention_heads, H))
KEYS = np.abs(DRAW.normal(size=(2, T, CONFIG.num_key_value_heads, H))) + 0.01  # no zero, whose other sign is NaN
VALUES = (NORMED @ W_V).reshape(2, T, CONFIG.num_key_value_heads, H)
OUT = swiglu(GATE, UP) @ W_DOWN
RIGHT = {
    "layers.0.input": X, "layers.0.attention_norm": NORMED, "layers.0.q": turned(HEADS, R), "layers.0.k": KEYS,
    "layers.0.v": VALUES, "layers.0.gate": GATE, "layers.0.up": UP, "layers.0.ffn_out": OUT,
}  # fmt: skip
SIDE_BY_SIDE = np.concatenate([GATE, UP], axis=-1)
IN_TURN = np.stack([GATE, UP], axis=-1).reshape(2, T, -1)
# Words of the hint, the quantity, and what stands there in the place of the right numbers.
PLANTED = {
    "without alpha, as SiLU (T42)": ("ffn_out", swiglu(GATE, UP, alpha=1.0) @ W_DOWN),
    "without its clamps (T42)": ("ffn_out", swiglu(GATE, UP, limit=1e9) @ W_DOWN),
    "up in the place of up + 1 (T42)": ("ffn_out", swiglu(GATE, UP, one=0.0) @ W_DOWN),
    "gate and up are taken for each other (T42)": ("ffn_out", swiglu(UP, GATE) @ W_DOWN),
    "read as if interleaved (T42)": ("ffn_out", swiglu(SIDE_BY_SIDE[..., ::2], SIDE_BY_SIDE[..., 1::2]) @ W_DOWN),
    "interleaved gate and up are read as halves": ("ffn_out", swiglu(IN_TURN[..., :24], IN_TURN[..., 24:]) @ W_DOWN),
    "the gate is clamped on both sides": ("ffn_out", swiglu(np.maximum(GATE, -1.5), UP) @ W_DOWN),
    "plain SiLU: no alpha, no clamps": ("ffn_out", swiglu(GATE, UP, alpha=1.0, limit=1e9, one=0.0) @ W_DOWN),
    "the activations are in MXFP8 (W8A8)": ("v", (encoded(NORMED, 8) @ W_V).reshape(VALUES.shape)),
    "lacks the 2^8 of E4M3's last binade (T43)": ("v", (encoded(NORMED, 0) @ W_V).reshape(VALUES.shape)),
    "read as e4m3fnuz (T44)": ("k", float8(KEYS, ml_dtypes.float8_e4m3fnuz)),
    "read as e5m2 (T44)": ("k", float8(KEYS, ml_dtypes.float8_e5m2)),
    f"the whole head is turned, not {R} dims of it (T46)": ("q", turned(HEADS, H)),
    "1 + (1 + w) (T47)": ("attention_norm", unit(X) * (2 + WEIGHT)),
    "w in the place of 1 + w (T47)": ("attention_norm", unit(X) * WEIGHT),
    "summed once more over 4 devices (T52)": ("ffn_out", 4 * OUT),
}  # fmt: skip


def side_of(arrays):
    tokens = {"tokens": [np.zeros((2, T), np.int32)], "lengths": [np.array(LENGTHS, np.int32)]}
    numbers = {name: [x.astype(np.float32)] for name, x in arrays.items()}
    return side(Source("a test", numbers | tokens, CONFIG), CONFIG, list(LENGTHS), {})


@pytest.mark.parametrize("words", PLANTED)
def test_a_planted_bug_is_named_where_it_gives_what_was_found(words):
    """T42, T43, T44, T46, T47, T52: one that is wrong at a third of its tokens in another way too gets no such name."""
    kind, wrong = PLANTED[words]
    name = f"layers.0.{kind}"
    elsewhere = wrong.copy()
    elsewhere[:, ::3] = DRAW.permutation(elsewhere[:, ::3].reshape(-1)).reshape(elsewhere[:, ::3].shape)
    for planted, is_named in ((wrong, True), (elsewhere, False)):
        pair = Pair(side_of(RIGHT), side_of(RIGHT | {name: planted}), CONFIG)
        found = hint(pair, quantity(name))
        assert (found is not None and words in found) == is_named, found


@pytest.mark.parametrize("exponent", [-12, -5, -1, 0, 1, 3, 12])
@pytest.mark.parametrize("kind", ["e4m3fnuz", "e5m2"])
def test_bytes_of_float8_are_known_under_any_scale(kind, exponent):
    """Divided by a power of two, the same on both sides; numbers and NaN stand in the same places."""
    codes = np.arange(256, dtype=np.uint8)
    is_number = np.isfinite(codes.view(ml_dtypes.float8_e4m3fn).astype(float))
    codes = codes[is_number & (codes != 0x80)]  # -0 is NaN in one
    read_as = lambda name: codes.view(getattr(ml_dtypes, f"float8_{name}")).astype(float) / 2.0**exponent
    expected, actual = read_as("e4m3fn"), read_as(kind)
    assert [*_of_float8(expected, actual)] == [f"bytes of float8_e4m3fn are read as {kind} (T44)"]
    assert [*_of_float8(expected, expected)] == []
    for place, value in ((7, actual[8]), (9, np.nan)):
        wrong = actual.copy()
        wrong[place] = value
        assert [*_of_float8(expected, wrong)] == []
