"""Texts through a model in chunks: the same figures as one position at a time, and nothing large is held."""

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.comparisons import assert_close
from support.evaluation import agrees, token_loss
from tiny.measure import validation_loss

from m3jax.cache import Cache
from m3jax.evaluate import reading
from m3jax.evaluate.perplexity import Text, perplexity, perplexity_table, windows
from m3jax.evaluate.reading import Reading, token_scores
from m3jax.model import M3

CONFIG = tiny.config("dM")
LENGTHS = (61, 9, 40, 2, 27)  # blocks of 8, of which a query selects 3
HOW = Reading(chunk=16, batch=2)


@cache
def model() -> M3:
    return tiny.model(CONFIG)


@cache
def rows() -> tuple[np.ndarray, ...]:
    return tuple(tiny.tokens(CONFIG, 1, length, seed=length)[0] for length in LENGTHS)


@cache
def expected() -> list[tuple[list[float], list[bool]]]:
    """Return each row's (losses, hits) by the definition, from the logits of a call without a cache."""
    found = []
    for row in rows():
        padded = np.zeros((1, max(LENGTHS)), np.int32)
        padded[0, : len(row)] = row
        logits = np.asarray(model()(padded, lengths=np.array([len(row)], np.int32)))[0]
        losses = [token_loss(logits[t], int(row[t + 1])) for t in range(len(row) - 1)]
        one_hot = np.eye(CONFIG.vocab_size)
        found.append((losses, [agrees(logits[t], one_hot[row[t + 1]]) for t in range(len(row) - 1)]))
    return found


def assert_as_defined(scores: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for row, ((loss, is_best), (losses, bests)) in enumerate(zip(scores, expected(), strict=True)):
        assert_close(loss, np.array(losses), rtol=2e-4, atol=2e-4, what=f"losses of row {row}")
        np.testing.assert_array_equal(is_best, bests, err_msg=f"row {row}")


def test_chunks_of_ragged_rows_score_as_each_row_alone():
    """T13, T14: chunks that end inside a block, rows that end inside a chunk, a last group that is not full."""
    assert_as_defined(token_scores(model(), rows(), HOW))


def test_logits_are_made_a_few_positions_at_a_time(monkeypatch):
    """Whatever the chunk: of 16 positions no more than 4 have logits at once, and the figures stay."""
    at_once = 4
    monkeypatch.setattr(reading, "_LOGITS_AT_ONCE", 2 * at_once * CONFIG.vocab_size)
    program = lambda *args: reading._read_chunk.__wrapped__(*args, reading.score_targets)
    zeros = np.zeros((2, 16), np.int32)
    arguments = (model(), Cache.init(CONFIG, 2, 64, "float32"), zeros, zeros, np.array([16, 16], np.int32), (zeros,))
    text = str(jax.make_jaxpr(program)(*arguments))
    assert f"f32[2,{at_once},{CONFIG.vocab_size}]" in text and f"f32[2,16,{CONFIG.vocab_size}]" not in text
    # A chunk that no other test has: what is compiled for it is compiled here.
    assert_as_defined(token_scores(model(), rows(), Reading(chunk=15, batch=2)))


@pytest.mark.further
def test_the_cache_has_the_dtypes_that_were_asked_for():
    """Index keys in float8 move the losses a little, through the selection only; `test_command.py` has other keys."""
    exact = np.concatenate([losses for losses, _ in expected()])
    how = Reading(16, 2, index_dtype="float8_e4m3fn")
    rounded = np.concatenate([loss for loss, _ in token_scores(model(), rows(), how)])
    assert 1e-5 < np.abs(rounded - exact).max() < 2


@pytest.mark.parametrize("how", [HOW, Reading(chunk=0, batch=2)])
def test_rows_that_the_model_cannot_read(unchecked, how):
    with pytest.raises(ValueError, match="a row of 0 tokens: the model reads 1 to 1024"):
        token_scores(model(), [np.zeros(1, np.int32)], how)
    with pytest.raises(ValueError, match="a row of 1025 tokens"):
        token_scores(model(), [np.zeros(1026, np.int32)], how)


def test_whole_rows_are_of_one_length():
    with pytest.raises(ValueError, match="several lengths"):
        token_scores(model(), rows(), Reading(chunk=0))


@given(st.integers(2, 200), st.integers(1, 50), st.data())
def test_each_token_is_predicted_once(num_tokens: int, context: int, data: st.DataObject):
    """Windows cover a text; each but the first begins with `skip` tokens of context, and none is longer than it may."""
    skip = data.draw(st.integers(0, context - 1))
    counted = []
    for start, end, first in windows(num_tokens, context, skip):
        assert 0 <= start <= first < end <= num_tokens - 1 and end - start <= context
        assert first - start == (skip if first > skip else first) and (first == 0 or first - start == min(skip, first))
        counted += range(first, end)
    assert counted == list(range(num_tokens - 1))


def test_perplexity_is_the_mean_over_tokens():
    """Of files of other lengths, in windows of 32 of which 8 are context: each figure from its definition."""
    texts = [Text(name, rows()[i], num_bytes) for name, i, num_bytes in (("long", 0, 100), ("short", 1, 7))]
    found = perplexity(model(), texts, 32, 8, HOW)
    places = [(text, *window) for text in texts for window in windows(len(text.tokens), 32, 8)]
    scores = token_scores(model(), [text.tokens[start : end + 1] for text, start, end, _ in places], HOW)
    losses = [loss[first - start :] for (_, start, _, first), (loss, _) in zip(places, scores, strict=True)]
    seen = [np.arange(first - start, end - start) + 1 for _, start, end, first in places]
    long, short = np.concatenate(losses[:-1]), losses[-1]
    both = np.concatenate([long, short])
    assert found["tokens"] == 60 + 8 == len(both)
    for name, value in {
        "loss": both.mean(), "perplexity": np.exp(both.mean()), "bits_per_byte": both.sum() / np.log(2) / 107,
        "standard_error": both.std(ddof=1) / np.sqrt(68),
    }.items():  # fmt: skip
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(found["files"]["short"]["perplexity"], np.exp(short.mean()), rtol=1e-4)
    positions = np.concatenate(seen)
    assert [(each["from"], each["to"]) for each in found["by_position"]] == [
        (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32)
    ]  # fmt: skip
    for each in found["by_position"]:
        inside = (positions >= each["from"]) & (positions <= each["to"])
        np.testing.assert_allclose((each["tokens"], each["loss"]), (inside.sum(), both[inside].mean()), rtol=1e-4)


def test_a_window_that_is_context_alone_is_refused():
    texts = [Text("long", rows()[0], 100)]
    for skip in (-1, 32):
        with pytest.raises(ValueError, match=f"skip = {skip}: of a window of 32 tokens it must be 0 to 31"):
            perplexity(model(), texts, 32, skip, HOW)


@pytest.mark.further  # of a script
def test_validation_loss_is_a_mean_over_tokens():
    """Not over batches: the second one counts for less here."""
    first = {"tokens": tiny.tokens(CONFIG, 2, 65), "weights": np.random.default_rng(0).choice([0.0, 1.0, 3.0], (2, 64))}
    second = {"tokens": tiny.tokens(CONFIG, 2, 65, seed=1), "weights": np.zeros((2, 64))}
    second["weights"][:, :20] = 1
    total = weight = 0.0
    for batch in (first, second):
        logits = np.asarray(model()(batch["tokens"][:, :-1]))
        for b, t in np.ndindex(2, 64):
            total += batch["weights"][b, t] * token_loss(logits[b, t], int(batch["tokens"][b, t + 1]))
        weight += batch["weights"].sum()
    np.testing.assert_allclose(validation_loss(model(), [first, second]), total / weight, rtol=1e-5)


def test_a_table_of_perplexities():
    """A line a figure, a file and a number of tokens before; what one result lacks is left empty."""
    of = lambda loss, files, by_position: dict(
        perplexity=1234.5, loss=loss, standard_error=None, bits_per_byte=0.5, top1=0.375, tokens=12_345,
        files={name: dict(perplexity=value) for name, value in files.items()},
        by_position=[{"to": to, "loss": value} for to, value in by_position],
    )  # fmt: skip
    one = of(2.0, {"a": 7.0, "b": 8.0}, [(1, 3.0), (2, 2.5), (4, 2.25)])
    two = of(1.0, {"a": 6.5}, [(2, 1.0), (4096, 0.25)])
    assert perplexity_table([one, two]) == [
        ["perplexity", "1,234.500", "1,234.500"], ["loss, nats a token", "2.0000", "1.0000"],
        ["its standard error", "", ""], ["bits a byte", "0.5000", "0.5000"],
        ["most probable token right", "37.5%", "37.5%"], ["tokens counted", "12,345", "12,345"],
        ["  a", "7.000", "6.500"], ["  b", "8.000", ""],
        ["  loss after 1 tokens", "3.0000", ""], ["  loss after 2 tokens", "2.5000", "1.0000"],
        ["  loss after 3 to 4 tokens", "2.2500", ""], ["  loss after 2,049 to 4,096 tokens", "", "0.2500"],
    ]  # fmt: skip
