"""What an evaluation is of: texts cut into tokens, windows and pieces, and models in every way that was asked for."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny

from m3jax.evaluate import subjects
from m3jax.evaluate.perplexity import Text
from m3jax.evaluate.reading import Reading
from m3jax.evaluate.sources import python_corpus
from m3jax.evaluate.subjects import Subject, each_loaded, read_texts, spread, tokenised

pytestmark = pytest.mark.usefixtures("unchecked")  # the models and tokenizers here are none
CONFIG = tiny.config("dM", max_position_embeddings=500)


class Letters:
    """A tokenizer of one token a letter, with or without a mark at the beginning."""

    def __init__(self, bos_id: int | None = None):
        self.bos_id = bos_id

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


# Texts


def test_texts_are_cut_where_the_tokens_end():
    """Of each text the id that begins it and its tokens; bytes are those of what is predicted."""
    texts = {"a": "äbc", "b": "defg", "c": "h"}
    of = lambda most, bos_id=None: [
        (text.name, text.tokens.tolist(), text.num_bytes) for text in tokenised(Letters(bos_id), texts, most)
    ]
    a, b = [ord(x) for x in "äbc"], [ord(x) for x in "defg"]
    assert of(99) == [("a", a, 2), ("b", b, 3)]  # the last has one token, which is predicted by none
    assert of(99, 7) == [("a", [7, *a], 4), ("b", [7, *b], 4), ("c", [7, ord("h")], 1)]
    assert of(5) == [("a", a, 2), ("b", b[:2], 1)] and of(4) == of(3) == [("a", a, 2)] and of(2) == [("a", a[:2], 1)]
    with pytest.raises(ValueError, match="the texts have fewer than 2 tokens, or --tokens 1 leaves fewer"):
        of(1)


@pytest.mark.parametrize(("count", "length", "starts"), [(1, 4, [0]), (3, 4, [0, 3, 6]), (4, 1, [0, 3, 6, 9])])
def test_pieces_are_spread_from_the_first_token_to_the_last(count, length, starts):
    texts = [Text("a", np.arange(6), 6), Text("b", np.arange(6, 10), 4)]
    assert [piece.tolist() for piece in spread(texts, count, length)] == [[*range(x, x + length)] for x in starts]


def test_pieces_that_there_are_not():
    texts = [Text("a", np.arange(6), 6)]
    assert len(spread(texts, 1, 6)) == 1
    for count, length in ((0, 3), (1, 0), (1, 7)):
        with pytest.raises(ValueError, match=f"{count} pieces of {length} tokens: the texts have 6 tokens"):
            spread(texts, count, length)


def test_texts_of_files(tmp_path):
    good, empty, wrong = (str(tmp_path / name) for name in ("good", "empty", "wrong"))
    for name, data in ((good, "ä\r\n".encode()), (empty, b""), (wrong, b"ab\xff")):
        Path(name).write_bytes(data)
    assert read_texts([good]) == {good: "ä\r\n"}
    for names, reason in (
        ([good, good], "is given twice; give each file once"), ([empty], "is empty; give"),
        ([wrong], "not UTF-8 text: byte 2 is wrong"), ([str(tmp_path / "none")], "cannot be read: No such file"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            read_texts(names)


def test_a_corpus_is_the_sources_of_one_split(tmp_path):
    """By path, in order; without tests and the like, files that are short, and files that are no UTF-8."""
    names = ["a.py", "b/c.py", "b/a.py", "z.py", *(f"m{i}.py" for i in range(80))]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n" + "x" * 64)
    held_out = {
        name for name in names if int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 25 == 0
    }  # fmt: skip
    (tmp_path / "short.py").write_text("y" * 63)
    (tmp_path / "wrong.py").write_bytes(b"\xff" * 100)
    (tmp_path / "text.txt").write_text("t" * 100)
    for skipped in ("site-packages", "config-3.11", "_sysconfigdata_x"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "s.py").write_text("s" * 100)
    train, validation = (python_corpus(split, tmp_path) for split in ("train", "validation"))
    assert 0 < len(held_out) < len(names) and set(validation) == held_out and set(train) == {*names} - held_out
    assert [*train] == sorted(train) and train["b/c.py"].startswith("# b/c.py")
    (tmp_path / "edge.py").write_text("y" * 64)
    found = python_corpus("train", tmp_path) | python_corpus("validation", tmp_path)
    assert "edge.py" in found and "short.py" not in found
    with pytest.raises(ValueError, match="split 'test' is unknown; give 'train' or 'validation'"):
        python_corpus("test", tmp_path)
    with pytest.raises(ValueError, match="holds no Python sources"):
        python_corpus("train", tmp_path / "none")


# Models


def test_subjects_are_all_ways_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(subjects.M3Config, "from_pretrained", lambda path: CONFIG)
    found = subjects.subjects([None, Path("x")], "float32, bfloat16", "model,float8_e4m3fn", "float32", "auto")
    assert found == [
        Subject(folder, dtype, kv, "float32", "auto")
        for folder in (None, Path("x")) for dtype in ("float32", "bfloat16") for kv in (None, "float8_e4m3fn")
    ]  # fmt: skip
    assert found[4].settings() == {
        "model": "x", "dtype": "float32", "kv_dtype": "float32", "index_dtype": "float32", "backend": "auto"
    }  # fmt: skip
    assert found[3].settings()["kv_dtype"] == "float8_e4m3fn" and found[3].settings()["model"] == "embedded"
    for dtypes, caches, reason in (("model", "model", "--dtype .model"), ("float32", "int8", "--cache-dtype .int8")):
        with pytest.raises(ValueError, match=f"{reason}.*: choose of"):
            subjects.subjects([None], dtypes, caches, "model", "auto")


def test_weights_are_loaded_once_for_neighbours(monkeypatch):
    """Of one folder and dtype; another backend is put on what is loaded."""
    loaded = []

    class Loaded:
        def __init__(self, name, backend=None):
            self.name, self.backend = name, backend

        def with_backend(self, backend):
            return Loaded(self.name, backend)

    load = lambda path, dtype, mesh: loaded.append((path, dtype, mesh)) or Loaded(f"{path} {dtype}")
    monkeypatch.setattr(subjects, "load", load)
    ways = [
        Subject(Path("a"), "float32", None, None, "xla"), Subject(Path("a"), "float32", "bfloat16", None, "auto"),
        Subject(Path("a"), "bfloat16", None, None, "xla"), Subject(Path("b"), "bfloat16", None, None, "xla"),
    ]  # fmt: skip
    found = [(subject, model.name, model.backend) for subject, model in each_loaded(ways, "mesh")]
    assert found == [(way, f"{way.folder} {way.dtype}", way.backend) for way in ways]
    assert loaded == [(Path("a"), "float32", "mesh"), (Path("a"), "bfloat16", "mesh"), (Path("b"), "bfloat16", "mesh")]


@pytest.mark.parametrize(("kv", "index"), [(None, None), ("float8_e4m3fn", None), (None, "float8_e4m3fn")])
def test_scales_are_measured_for_a_cache_in_float8_alone(kv, index, monkeypatch):
    measured = []
    monkeypatch.setattr(subjects, "measure_scales", lambda model, tokens: measured.append(tokens) or "scales")
    subject = Subject(None, "float32", kv, index, "auto")
    found = subject.reading(SimpleNamespace(config=CONFIG), Reading(16, 2), np.arange(900))
    has_float8 = kv is not None or index is not None
    assert found == Reading(16, 2, kv, index, "scales" if has_float8 else None)
    assert [tokens.tolist() for tokens in measured] == ([[[*range(512)]]] if has_float8 else [])
