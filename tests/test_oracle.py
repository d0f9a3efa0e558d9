"""Against transformers' MiniMax-M3: every number on the way, every block set, greedy text, bfloat16, saved folders."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from oracle import CASES, SPARSE, torch

from m3jax import checkpoint
from m3jax.cache import Cache
from m3jax.decoding import generate

LOGITS = 2e-4  # float32: two implementations that sum in different orders
# bfloat16: this many times transformers' own distance from float32, and a floor of one rounding.
BF16_FACTOR, BF16_FLOOR = 1.0, 2.0**-8

SPARSE_CASES = [name for name, case in CASES.items() if case.layers != case.layers.lower()]


@partial(jax.jit)
def run(model, tokens, lengths):
    return model.intermediates(tokens, lengths=lengths)


@cache
def ours(name: str) -> dict[str, Any]:
    pair = oracle.pair(name)
    tokens = pair.case.tokens()
    lengths = np.full(len(tokens), tokens.shape[1], np.int32)
    return jax.device_get(run(pair.ours, tokens, lengths))


@cache
def theirs(name: str) -> dict[str, Any]:
    pair = oracle.pair(name)
    return oracle.intermediates(pair.theirs, pair.case.tokens())


def worst(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    assert worst(ours(name)["logits"], theirs(name)["logits"]) < LOGITS


@pytest.mark.parametrize("name", CASES)
def test_every_value_on_the_way(name):
    found, expected = ours(name), theirs(name)
    assert worst(found["final_norm"], expected["final_norm"]) < LOGITS
    for mine, other in zip(found["layers"], expected["layers"], strict=True):
        assert mine.keys() - {"block_scores"} == other.keys()
        for key in mine.keys() - {"block_scores", "blocks", "expert_ids", "expert_weights"}:
            scale = max(1.0, float(np.abs(other[key]).max()))
            assert worst(mine[key], other[key]) < LOGITS * scale, key


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_every_block_set(name):
    for mine, other in zip(ours(name)["layers"], theirs(name)["layers"], strict=True):
        if "blocks" in other:
            np.testing.assert_array_equal(mine["blocks"], other["blocks"])
