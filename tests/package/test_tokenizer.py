"""The tokenizer: round trips, streaming, the recall words, and errors."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3jax.text import Tokenizer
from m3jax.train.data import python_corpus
from m3jax.train.words import WORDS

ROOT = Path(__file__).parents[2]
TINY = ROOT / "m3jax" / "assets" / "tiny"
TOKENIZER = Tokenizer.from_pretrained(TINY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


def stream(ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    live = TOKENIZER.stream(skip_special_tokens)
    return [live.push(token) for token in ids] + [live.flush()]


def test_vocabulary_is_the_size_of_the_model():
    assert TOKENIZER.vocab_size == 2048


def test_chat_tokens_are_single_and_small():
    assert [TOKENIZER.encode(text) for text in ("]~!b[", "[e~[", "]~b]")] == [[0], [1], [2]]
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id) == (0, 1)


def test_words_are_distinct():
    assert len(set(WORDS)) == len(WORDS) >= 256


@pytest.mark.parametrize("word", ["harbor", "lantern"])
def test_named_words_are_there(word: str):
    assert word in WORDS


def test_every_word_is_one_token():
    several = [word for word in WORDS if len(TOKENIZER.encode(" " + word)) != 1]
    assert not several


def test_indentation_is_one_token():
    assert len(TOKENIZER.encode("\n        return")) == 2


def test_digits_stand_alone():
    assert len(TOKENIZER.encode("1234")) == 4


def test_python_is_compressed():
    text = "".join(list(python_corpus("validation").values())[::8])
    assert len(text.encode()) / len(TOKENIZER.encode(text)) > 2.5


def test_encode_adds_nothing():
    assert TOKENIZER.encode("") == []


@given(st.text())
def test_round_trip(text: str):
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.text(), max_size=4))
def test_batch_is_encode(texts: list[str]):
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]


def test_special_tokens_are_left_out():
    assert TOKENIZER.decode(TOKENIZER.encode("]~!b[a[e~[")) == "a"


@given(st.text())
def test_stream_of_text_is_the_text(text: str):
    assert "".join(stream(TOKENIZER.encode(text), skip_special_tokens=False)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.booleans())
def test_stream_of_any_ids_is_their_decoding(ids: list[int], skip: bool):
    expected = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(ids, skip)) == expected


def test_stream_holds_back_part_of_a_character():
    ids = TOKENIZER.encode("a🦜b")
    shown = stream(ids)
    assert len(ids) == 6
    assert shown == ["a", "", "", "", "🦜", "b", ""]


def test_flush_shows_an_unfinished_character():
    assert stream(TOKENIZER.encode("🦜")[:2])[-1] == "\N{REPLACEMENT CHARACTER}"


def test_other_hub_files_are_read(folder: Path):
    settings = {"bos_token": {"content": "]~b]", "special": True}, "eos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, None)


def test_settings_may_be_absent(folder: Path):
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.from_pretrained(str(folder)).eos_id is None


def test_no_folder(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a folder"):
        Tokenizer.from_pretrained(tmp_path / "absent")


def test_no_tokenizer(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_file(folder: Path, name: str):
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=name):
        Tokenizer.from_pretrained(folder)


def test_unknown_special_token(folder: Path):
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    with pytest.raises(ValueError, match="eos_token '</s>' is not in the vocabulary"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("token", [-1, 2048])
def test_unknown_id(token: int):
    with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary"):
        TOKENIZER.decode([token])
    with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary"):
        TOKENIZER.stream().push(token)


def test_lone_surrogate():
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        TOKENIZER.encode("a\ud800")


def test_training_reserves_the_words_and_repeats():
    spec = importlib.util.spec_from_file_location("train_tokenizer", ROOT / "scripts" / "train_tokenizer.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    texts = list(python_corpus("validation").values())[::4]
    words = ("harbor", "lantern", "lanterns", "->")
    first, second = (script.reserve_words(script.train(texts), words) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 2048
    assert all(len(first.encode(" " + word).ids) == 1 for word in words)
