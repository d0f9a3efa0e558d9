"""The divergence from a reference, against the definition in float64, and the reference's files."""

import json
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support import evaluation, tiny
from support.comparisons import assert_close

from m3jax.evaluate.divergence import divergence, divergence_table, score_reference
from m3jax.evaluate.dumps import ABOUT, fitting, read_dump, write_dump
from m3jax.evaluate.reading import Reading
from m3jax.model import M3

CONFIG = tiny.config("dM")
HOW = Reading(chunk=16, batch=2)


@cache
def model(seed: int = 0) -> M3:
    return tiny.model(CONFIG, seed)


@cache
def rows() -> list[np.ndarray]:
    return [tiny.tokens(CONFIG, 1, length, seed=length)[0] for length in (50, 33, 9)]


@cache
def whole_logits(seed: int) -> list[np.ndarray]:
    """Logits of each row, all by one program."""
    lengths = np.array([len(row) for row in rows()], np.int32)
    padded = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows()])
    logits = np.asarray(model(seed)(padded, lengths=lengths))
    return [row[:length] for row, length in zip(logits, lengths, strict=True)]


@pytest.fixture
def reference(tmp_path) -> Path:
    write_dump(model(), rows(), tmp_path / "reference", {"model": "tiny"}, HOW)
    return tmp_path / "reference"


def test_a_reference_with_an_infinite_logit_has_no_divergence():
    """NaN, whatever the model says there: +inf and NaN are no distribution. -inf is a token that cannot come."""
    reference = jnp.asarray([[[0.0, -jnp.inf, 1.0], [0.0, jnp.inf, 1.0], [jnp.inf, jnp.inf, 0.0], [jnp.nan, 0.0, 1.0]]])
    divergences, _ = score_reference(jnp.zeros((1, 4, 3)), reference)
    np.testing.assert_array_equal(np.isnan(divergences), [[False, True, True, True]])


@given(st.integers(0, 10_000), st.sampled_from([0.01, 1.0, 30.0]), st.booleans())
def test_divergence_of_two_distributions(seed: int, scale: float, has_zeros: bool):
    """From nearly equal to far apart; a token that the reference rules out weighs nothing."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(2, 3, 17)).astype(np.float32)
    reference = (logits + scale * draw.normal(size=logits.shape)).astype(np.float32)
    if has_zeros:
        reference[..., :4] = -np.inf
    kl, same = score_reference(jnp.asarray(logits), jnp.asarray(reference))
    with np.errstate(invalid="ignore", divide="ignore"):
        for at in np.ndindex(2, 3):
            kept = slice(4 if has_zeros else 0, None)
            log_p = evaluation.log_probabilities(reference[at])[kept]
            log_q = evaluation.log_probabilities(logits[at])[kept]
            expected = np.sum(np.exp(log_p) * (log_p - log_q))
            if not has_zeros:
                np.testing.assert_allclose(evaluation.divergence(reference[at], logits[at]), expected, atol=1e-12)
            assert_close(kl[at], expected, f"KL at {at}", rtol=1e-4, atol=2e-6)
            assert same[at] == evaluation.agrees(reference[at], logits[at])


def test_the_files_of_a_reference(reference):
    """Any reader of safetensors finds them: tokens and the logits of every position, though a chunk was written at a
    time."""
    for row, (tokens, logits) in enumerate(zip(rows(), whole_logits(0), strict=True)):
        arrays = load_file(reference / f"prompt-{row:03d}.safetensors")
        assert arrays.keys() == {"tokens", "logits"}
        np.testing.assert_array_equal(arrays["tokens"], tokens)
        assert_close(arrays["logits"], logits, f"logits of prompt {row}", "TV", rtol=1e-4, atol=1e-4)
    assert json.loads((reference / ABOUT).read_text()) == {"schema": 1, "prompts": 3, "model": "tiny"}


def test_a_model_is_its_own_reference(reference):
    """The same program on the same device gives the same bits, so nothing differs."""
    found = divergence(model(), read_dump(reference), how=HOW)
    assert (found["mean"], found["max"], found["top1_agreement"]) == (0, 0, 1)
    assert found["positions"] == 25 + 17 + 5  # the second half of each


@pytest.mark.parametrize("skip", [None, 0, 30])
def test_another_model_by_the_definition(reference, skip):
    found = divergence(model(1), read_dump(reference), skip, HOW)
    pairs = [
        (reference[t], logits[t])
        for reference, logits in zip(whole_logits(0), whole_logits(1), strict=True)
        for t in range(len(logits) // 2 if skip is None else skip, len(logits))
    ]
    kl = np.array([evaluation.divergence(*pair) for pair in pairs])
    assert found["positions"] == len(kl) and kl.mean() > 0.01
    expected = {
        "mean": kl.mean(), "standard_error": kl.std(ddof=1) / np.sqrt(len(kl)), "median": np.quantile(kl, 0.5),
        "p99": np.quantile(kl, 0.99), "p99.9": np.quantile(kl, 0.999), "max": kl.max(),
        "top1_agreement": np.mean([evaluation.agrees(*pair) for pair in pairs]),
    }  # fmt: skip
    for name, value in expected.items():
        assert_close(found[name], value, name, rtol=2e-3)
    shares, values = zip(*found["quantiles"], strict=True)
    assert shares == (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
    assert_close(np.array(values), np.quantile(kl, shares), "quantiles", rtol=2e-3, atol=1e-6)


def test_divergence_has_a_direction(reference):
    """KL(reference || model), not the other way round."""
    there = divergence(model(1), read_dump(reference), how=HOW)["mean"]
    other_way = [
        evaluation.divergence(logits[t], reference[t])
        for reference, logits in zip(whole_logits(0), whole_logits(1), strict=True)
        for t in range(len(logits) // 2, len(logits))
    ]
    assert abs(there - np.mean(other_way)) > 0.01 * there


def test_calls_that_return_logits_are_short():
    """At most 2^26 logits of a call, at least one token a row; everything else stays."""
    how = Reading(chunk=512, batch=4, kv_dtype="bfloat16", index_dtype="float32")
    assert fitting(how, 2**15) == how and fitting(how, 2**15 + 1).chunk == 511
    assert fitting(how, 2**24).chunk == fitting(how, 2**25).chunk == 1
    assert fitting(how, 200_064) == Reading(83, 4, "bfloat16", "float32")


def test_a_reference_of_another_engine(tmp_path):
    """A batch axis of 1, bfloat16, ids as int64, one file, no reference.json."""
    logits = whole_logits(0)[2].astype(ml_dtypes.bfloat16)[None]
    save_file({"tokens": rows()[2].astype(np.int64)[None], "logits": logits}, tmp_path / "a.safetensors")
    for place in (tmp_path, tmp_path / "a.safetensors"):
        (dump,) = read_dump(place)
        np.testing.assert_array_equal(dump.tokens, rows()[2])
        assert dump.logits.shape == (9, CONFIG.vocab_size)
        found = divergence(model(), [dump], how=HOW)
        assert 0 < found["mean"] < 1e-3


def broken(folder: Path, how: str) -> Path:
    """A reference with something wrong."""
    file, arrays = folder / "prompt-000.safetensors", {"tokens": np.arange(5, dtype=np.int32)}
    arrays["logits"] = np.zeros((5, CONFIG.vocab_size), np.float32)
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "beginning":
        file.write_bytes(file.read_bytes()[:5])
    elif how == "empty file":
        file.write_bytes(b"")
    elif how == "foreign":
        file.write_bytes(b"not a tensor in here at all, but some text that goes on")
    elif how == "no prompts":
        for path in folder.iterdir():
            path.unlink()
    elif how == "one is missing":
        file.unlink()
    elif how == "schema":
        (folder / ABOUT).write_text('{"schema": 2}')
    elif how == "nowhere":
        return folder / "nowhere"
    else:
        changes = {
            "no logits": {"logits": None}, "no tokens": {"tokens": None},
            "shapes": {"logits": arrays["logits"][:4]}, "vocabulary": {"logits": arrays["logits"][:, :-1]},
            "ids": {"tokens": arrays["tokens"] + CONFIG.vocab_size},
            "integers": {"logits": arrays["logits"].astype(int)},
            "nan": {"logits": arrays["logits"] * np.nan},
        }[how]  # fmt: skip
        arrays |= changes
        save_file({name: x for name, x in arrays.items() if x is not None}, file)
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", r"prompt-000.safetensors: .*it ends at byte"),
        ("beginning", "prompt-000.safetensors: 5 bytes are no safetensors file"),
        ("empty file", "prompt-000.safetensors: the file is empty"),
        ("foreign", "prompt-000.safetensors: .* no safetensors file"),
        ("no prompts", "holds no .safetensors file"),
        ("one is missing", "2 prompts, and reference.json speaks of 3"),
        ("schema", "schema version 2, and 1 can be read"),
        ("nowhere", "nowhere: no such folder"),
        ("no logits", r"prompt-000.safetensors: no tensor 'logits'; it has 'tokens'"),
        ("no tokens", r"prompt-000.safetensors: no tensor 'tokens'; it has 'logits'"),
        ("shapes", r"tokens is int32 \[5\] and logits float32 \[4, 64\]"),
        ("integers", r"logits int64 \[5, 64\]; they must be"),
        ("vocabulary", "prompt-000.safetensors: logits of 63 tokens, and the model has 64"),
        ("ids", "prompt-000.safetensors: token ids from 64 to 68, and the model has 0 to 63"),
        ("nan", "prompt-000.safetensors: position 0: the divergence is nan"),
    ],
)
def test_a_broken_reference_is_one_line(reference, how, message):
    with pytest.raises((ValueError, FloatingPointError), match=message) as error:
        divergence(model(), read_dump(broken(reference, how)), how=HOW)
    assert "\n" not in str(error.value)


def test_a_reference_is_not_written_over(reference):
    before = {path: path.read_bytes() for path in reference.iterdir()}
    with pytest.raises(OSError, match="prompt-00"):
        write_dump(model(1), rows(), reference, {}, HOW)
    assert {path: path.read_bytes() for path in reference.iterdir()} == before


def test_a_table_of_divergences():
    result = dict(mean=0.1234, standard_error=None, median=2e-5, p99=3, max=5, top1_agreement=0.98765, positions=12_345)
    assert divergence_table([result | {"p99.9": 4}]) == [
        ["mean KL, nats", "0.123"], ["its standard error", ""], ["median", "2e-05"], ["99%", "3"], ["99.9%", "4"],
        ["largest", "5"], ["same most probable token", "98.77%"], ["positions counted", "12,345"],
    ]  # fmt: skip
