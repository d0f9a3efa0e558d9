"""Scores of given tokens: the log-softmax of the model's own logits, however they are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

import m3jax
from m3jax.decoding import score as exported_score
from m3jax.decoding.score import score_with_top

CONFIG = tiny.config("dM")  # block 8, top-k 3: from 25 tokens on selection is partial
LENGTHS = [45, 30, 2]
_forward = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))


def texts() -> np.ndarray:
    return np.random.default_rng(3).integers(0, CONFIG.vocab_size, (3, 45)).astype(np.int32)


def expected(model, rows: np.ndarray) -> np.ndarray:
    """[B T-1 V]"""
    return np.asarray(_forward(model, jnp.asarray(rows)))[:, :-1]


def test_scores_are_the_models_log_softmax():
    """In chunks that end within a page; of rows of several lengths, 0 behind their ends."""
    model, rows = tiny.model(CONFIG), texts()
    log_p = expected(model, rows)
    found, ids, top = score_with_top(model, rows, LENGTHS, num_top=3, chunk=16)
    assert found.shape == (3, 44) and found.dtype == np.float32
    assert ids.shape == top.shape == (3, 44, 3)
    for row, length in enumerate(LENGTHS):
        chosen = log_p[row, np.arange(44), rows[row, 1:]]
        np.testing.assert_allclose(found[row, : length - 1], chosen[: length - 1], rtol=0, atol=2e-5)
        assert not found[row, length - 1 :].any() and not top[row, length - 1 :].any()
        best = -np.sort(-log_p[row], axis=-1)[: length - 1, :3]
        np.testing.assert_allclose(top[row, : length - 1], best, rtol=0, atol=2e-5)
        of_ids = np.take_along_axis(log_p[row], ids[row], axis=-1)[: length - 1]
        np.testing.assert_allclose(of_ids, best, rtol=0, atol=2e-5)


@pytest.mark.further  # bits in chunks and rows: tests/model/test_invariance.py
def test_one_text_has_in_the_invariant_mode_the_bits_that_it_has_in_any_chunks_and_rows():
    """A list of tokens is one text; of one token there is no score."""
    assert m3jax.score is exported_score
    model, rows = tiny.model(CONFIG, dtype="bfloat16").with_invariance(), texts()
    whole = m3jax.score(model, rows, LENGTHS, chunk=64)
    found = m3jax.score(model, rows[1, :30].tolist(), chunk=16)
    assert found.shape == (29,)
    np.testing.assert_array_equal(found, whole[1, :29])
    assert m3jax.score(model, [5], chunk=16).shape == (0,)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ("text", {}, "tokens is text: encode it"),
        ([], {}, r"tokens is \[\]: give a list of token ids"),
        ([1, CONFIG.vocab_size], {}, "tokens: 64 is no token id; they are integers from 0 to 63"),
        ([0.5, 1.0], {}, r"tokens is \[0.5, 1.0\]: give a list"),
        ([1, 2], dict(lengths=[2]), "lengths with one text"),
        ([[1, 2], [3, 4]], dict(lengths=[1, 3]), r"lengths is \[1, 3\]: each must be from 1 to 2"),
        ([[1, 2], [3, 4]], dict(lengths=[1]), r"lengths is \[1\]: give one number for each of 2 texts"),
        ([1] * (CONFIG.max_position_embeddings + 1), {}, "the model's context is"),
        ([1, 2], dict(chunk=0), "chunk = 0: must be an integer of at least 1"),
        ([1, 2], dict(num_top=21), "num_top = 21: at most 20"),
    ],
)
def test_what_cannot_be_scored(unchecked, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        score_with_top(tiny.model(CONFIG), tokens, **options)
