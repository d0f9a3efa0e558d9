"""The training data: splits, records and their targets, probes, resuming, and errors."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.embedded import TOKENIZER
from tiny.corpus import Corpus, RecordTokens
from tiny.data import PlainBatches, RecallBatches

from m3jax.evaluate.sources import python_corpus
from m3jax.text import Tokenizer


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.build(TOKENIZER, "validation", progress=False)


@pytest.fixture(scope="module")
def sources() -> dict[str, dict[str, str]]:
    """The texts of both splits."""
    return {split: python_corpus(split) for split in ("train", "validation")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A library that is read at once, with a file or more of each split."""
    root = tmp_path_factory.mktemp("library")
    for i in range(40):
        (root / f"part{i}.py").write_text("\n".join(f"def f{i}_{j}(x):\n    return x + {j}" for j in range(20)))
    return root


def records_of(corpus: Corpus, row: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, key, value) of each record, found by reading the row token by token."""
    ids, words = corpus.records, set(corpus.records.words.tolist())
    return [
        (start, int(row[start + 2]), int(row[start + 4]))
        for start in range(len(row) - 4)
        if (row[start], row[start + 1], row[start + 3]) == (ids.newline, ids.hash, ids.arrow)
        and {int(row[start + 2]), int(row[start + 4])} <= words
    ]


def expected_targets(corpus: Corpus, row: np.ndarray) -> dict[str, np.ndarray]:
    weights, recall = np.ones(len(row), np.float32), np.zeros(len(row), bool)
    distance, recent = np.zeros(len(row), np.int32), np.zeros(len(row), np.int32)
    first, last, values = {}, {}, {}
    for start, key, value in records_of(corpus, row):
        at = start + 4
        weights[start : start + 3] = 0
        if key in first:
            assert values[key] == value
            recall[at], distance[at], recent[at] = True, at - first[key], at - last[key]
        else:
            weights[at] = 0
        first.setdefault(key, at)
        values[key], last[key] = value, at
    arrays = {"weights": weights, "recall": recall, "distance": distance, "recent": recent}
    return {name: array[1:] for name, array in arrays.items()}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]):
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_splits_are_disjoint_and_sorted(sources):
    train, validation = sources["train"], sources["validation"]
    assert not train.keys() & validation.keys()
    assert list(train) == sorted(train)
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.08


def test_no_installed_package_and_no_build_settings(sources):
    names = [*sources["train"], *sources["validation"]]
    assert not [name for name in names if "-packages" in name or "sysconfigdata" in name]


def test_corpus_is_the_files(corpus: Corpus, sources):
    texts = list(sources["validation"].values())
    ends = np.append(corpus.starts[1:], len(corpus.tokens))
    for i in (0, len(texts) - 1):
        ids = corpus.tokens[corpus.starts[i] : ends[i]]
        assert (ids[0], ids[-1]) == (TOKENIZER.bos_id, TOKENIZER.eos_id)
        assert TOKENIZER.decode(ids) == texts[i]


def test_a_record_between_lines_is_tokenised_as_written(corpus: Corpus):
    rng = np.random.default_rng(0)
    ids = corpus.records
    for first in rng.integers(len(corpus.newlines) - 8, size=200):
        start, place, end = corpus.newlines[[first, first + 3, first + 6]]
        if set(corpus.tokens[start:end].tolist()) & {TOKENIZER.bos_id, TOKENIZER.eos_id}:
            continue
        record = ids.write(ids.words[:1], ids.words[1:2])[0]
        row = np.concatenate([corpus.tokens[start:place], record, corpus.tokens[place:end]])
        assert TOKENIZER.encode(TOKENIZER.decode(row)) == row.tolist()


def test_cache_is_read_and_replaced_when_stale(folder: Path, tmp_path: Path):
    build = partial(Corpus.build, TOKENIZER, "train", cache=tmp_path / "corpus", progress=False, root=folder)
    cache, corpus = tmp_path / "corpus", build()
    assert len(corpus.tokens) > 1000
    with np.load(cache) as stored:
        fingerprint, tokens = str(stored["fingerprint"]), stored["tokens"]
    np.savez(open_for(cache), fingerprint=fingerprint, tokens=tokens[:1000])
    assert len(build().tokens) == 1000
    np.savez(open_for(cache), fingerprint="of other sources", tokens=tokens[:1000])
    np.testing.assert_array_equal(build().tokens, corpus.tokens)


def open_for(path: Path) -> Path:
    """The path by a name that numpy does not lengthen."""
    link = path.with_suffix(".npz")
    if not link.exists():
        link.symlink_to(path)
    return link


def test_broken_cache(tmp_path: Path):
    (tmp_path / "cache").write_bytes(b"PK not an archive")
    with pytest.raises(ValueError, match="is not a corpus cache"):
        Corpus.build(TOKENIZER, "validation", cache=tmp_path / "cache", progress=False)


@given(st.integers(64, 700), st.integers(0, 2**40), st.integers(0, 10**6))
def test_targets_are_those_read_off_the_row(corpus: Corpus, seq_len: int, seed: int, index: int):
    batch = RecallBatches(corpus, seq_len, 3, seed)[index]
    assert batch["tokens"].shape == (3, seq_len + 1)
    for b in range(3):
        expected = expected_targets(corpus, batch["tokens"][b])
        assert_same({name: batch[name][b] for name in expected}, expected)


def test_words_of_a_row_are_distinct(corpus: Corpus):
    for row in RecallBatches(corpus, 4096, 4, 0, recall_fraction=1.0)[0]["tokens"]:
        pairs = {(key, value) for _, key, value in records_of(corpus, row)}
        assert len({word for pair in pairs for word in pair}) == 2 * len(pairs)


def test_a_run_resumes(folder: Path):
    build = partial(Corpus.build, TOKENIZER, "train", progress=False, root=folder)
    first = RecallBatches(build(), 128, 2, 7)
    seen = [first[i] for i in range(4)]
    assert_same(RecallBatches(build(), 128, 2, 7)[3], seen[3])


def test_plain_batches_cover_the_corpus_in_order(corpus: Corpus):
    batches = PlainBatches(corpus, 512, 4)
    inputs = np.concatenate([batches[i]["tokens"][:, :-1].ravel() for i in range(len(batches))])
    targets = np.concatenate([batches[i]["tokens"][:, 1:].ravel() for i in range(len(batches))])
    np.testing.assert_array_equal(inputs, corpus.tokens[: len(inputs)])
    np.testing.assert_array_equal(targets, corpus.tokens[1 : len(inputs) + 1])
    assert len(corpus.tokens) - len(inputs) <= 512 * 4
    assert batches[0]["weights"].all() and not batches[0]["recall"].any()


def test_unknown_split():
    with pytest.raises(ValueError, match="split 'test' is unknown"):
        python_corpus("test")


def test_unfit_tokenizer():
    class Bytes(Tokenizer):
        def encode_batch(self, texts):
            return [list(text.encode()) for text in texts]

    with pytest.raises(ValueError, match="recall words are not single tokens"):
        RecordTokens.of(Bytes(TOKENIZER.backend))


def test_tokenizer_without_ends():
    with pytest.raises(ValueError, match="no BOS or no EOS"):
        Corpus.build(Tokenizer(TOKENIZER.backend), "validation", progress=False)
