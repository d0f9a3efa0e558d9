"""The tokenizer: round trips, streaming, the recall words, and errors."""

import base64
import importlib.util
import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from m3jax.evaluate.sources import python_corpus
from m3jax.evaluate.words import WORDS
from m3jax.text import Tokenizer

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


def test_chat_tokens_are_single_and_small():
    assert [TOKENIZER.encode(text) for text in ("]~!b[", "[e~[", "]~b]")] == [[0], [1], [2]]
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id) == (0, 1)


CALLS_AND_THOUGHTS = {"]<]minimax[>[": 127, "<mm:think>": 128, "</mm:think>": 180}
MEDIA = {"]<]image[>[": 181, "]<]video[>[": 182, "]<]start of image[>[": 183, "]<]end of image[>[": 184}


def test_the_tokens_of_a_chat_are_bytes_that_no_text_has():
    """Their ids were of bytes that UTF-8 never has, so no text got other ids when they came, and no weight moved."""
    for text, token_id in (CALLS_AND_THOUGHTS | MEDIA).items():
        assert TOKENIZER.encode(f"a{text}é") == [*TOKENIZER.encode("a"), token_id, *TOKENIZER.encode("é")], text
        assert TOKENIZER.decode([token_id], skip_special_tokens=False) == text
    in_characters = {byte for code in range(0x110000) if not 0xD800 <= code < 0xE000 for byte in chr(code).encode()}
    spelled = {TOKENIZER.token_bytes(token) for token in range(TOKENIZER.vocab_size)}
    assert {byte for byte in range(256) if bytes([byte]) not in spelled}.isdisjoint(in_characters)


def test_marks_of_what_the_model_says_are_never_left_out():
    """Reasoning and calls are read by them; roles, ends and media are left out of a text."""
    said = "<mm:think>a</mm:think>b]<]minimax[>[<tool_call>"
    assert TOKENIZER.decode(TOKENIZER.encode(f"]~b]{said}]<]image[>[[e~[")) == said
    assert "".join(stream(TOKENIZER.encode(f"{said}[e~["))) == said


def test_words_are_distinct():
    assert len(set(WORDS)) == len(WORDS) >= 256


def test_every_word_is_one_token():
    several = [word for word in WORDS if len(TOKENIZER.encode(" " + word)) != 1]
    assert not several


def test_indentation_is_one_token():
    assert len(TOKENIZER.encode("\n        return")) == 2


def test_digits_stand_alone():
    assert len(TOKENIZER.encode("1234")) == 4


@pytest.mark.further
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
    with_tokens = script.with_chat_tokens(first)
    assert first.get_vocab_size() == with_tokens.get_vocab_size() == 2048
    assert all(len(first.encode(" " + word).ids) == 1 for word in words)
    assert [with_tokens.encode(text).ids for text in texts] == [first.encode(text).ids for text in texts]
    assert {text: with_tokens.encode(text).ids for text in CALLS_AND_THOUGHTS | MEDIA} == {
        text: [token_id] for text, token_id in (CALLS_AND_THOUGHTS | MEDIA).items()
    }


# Files that are damaged, or made to harm

SETTINGS = {
    "no object": ("[]", r"tokenizer_config\.json: a tokenizer config is a JSON object, got list"),
    "a number": ('{"bos_token": 1.5}', r"tokenizer_config\.json: bos_token = 1\.5: must be a text"),
    "a list": ('{"eos_token": ["a"]}', r"eos_token = \['a'\]: must be a text, an object with a content, or null"),
    "no content": ('{"bos_token": {}}', r"bos_token = \{\}: must be a text"),
    "content is a number": ('{"bos_token": {"content": 3}}', r"bos_token = \{'content': 3\}: must be a text"),
    "a surrogate": ('{"eos_token": "\\ud800"}', r"eos_token = '\\ud800': holds a lone surrogate"),
    "unprintable": ('{"eos_token": "\\u001b[31m"}', r"eos_token '\\x1b\[31m' is not in the vocabulary"),
    "deep": ("[" * 10**5, "nest deeper than 64"),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_the_wrong_kind(case: str, folder: Path):
    text, message = SETTINGS[case]
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_pretrained(folder)
    assert str(caught.value).startswith(str(folder)) and str(caught.value).isprintable()


def rewrite(folder: Path, **parts) -> None:
    """Put other parts into a folder's tokenizer.json."""
    layout = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(layout | parts), encoding="utf-8")


BPE = {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2, "#é": 3}}


@pytest.mark.parametrize(
    ("prefix", "merge", "message"),
    [
        ("#", ["a", "é"], r"the merge \['a', 'é'\] has no second part that begins with '#'"),  # ends the process
        ("#", "a é", "the merge 'a é' has no second part"),
        ("x" * 50, ["a", "é"], "has no second part"),  # a panic
        ("éé", ["a", "é"], "continuing_subword_prefix = 'éé': must be ASCII text"),
        (3, ["a", "é"], "continuing_subword_prefix = 3: must be ASCII text"),
        ("#", 7, "the merge 7 has no second part"),
        ("#", ["a"], "has no second part"),
    ],
)
def test_a_prefix_that_the_library_would_cut_off_blindly(prefix, merge, message, folder: Path):
    """tokenizers 0.23 cuts by length: within a character it ends the process, past the end it panics."""
    rewrite(folder, model=BPE | {"continuing_subword_prefix": prefix, "merges": [merge]})
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(folder)


def test_a_prefix_that_is_there_is_read(folder: Path):
    (folder / "tokenizer_config.json").unlink()
    merges = {"continuing_subword_prefix": "#", "merges": [["a", "#é"]]}
    rewrite(folder, model=BPE | merges, pre_tokenizer=None, decoder=None, added_tokens=[])
    assert Tokenizer.from_pretrained(folder).encode("aé") == [2]
    word_piece = {"type": "WordPiece", "unk_token": "no", "continuing_subword_prefix": "##", "vocab": {"a": 0, "no": 1}}
    rewrite(folder, model=word_piece | {"max_input_chars_per_word": 100})
    assert Tokenizer.from_pretrained(folder).encode("a") == [0]


PANICS = {
    "no table": ({"type": "Precompiled", "precompiled_charsmap": ""}, "precompiled_charsmap is cut short"),
    "no base64": ({"type": "Precompiled", "precompiled_charsmap": "?"}, "precompiled_charsmap is not base64"),
    "no text": ({"type": "Precompiled", "precompiled_charsmap": None}, "precompiled_charsmap is not base64"),
    "short": ({"type": "Precompiled", "precompiled_charsmap": "BAAAAA=="}, "precompiled_charsmap is cut short"),
    "empty": ({"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": ""}, "content": "x"}]},
              "a normalizer replaces the empty text"),
}  # fmt: skip


@pytest.mark.parametrize("case", PANICS)
def test_what_the_library_panics_at_is_refused_before(case: str, folder: Path, capfd):
    normalizer, message = PANICS[case]
    rewrite(folder, normalizer=normalizer)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(folder)
    assert capfd.readouterr().err == "", "a panic prints a trace of its own"


def test_a_panic_is_a_value_error_with_the_reason(folder: Path, capfd):
    """It is no Exception in the library, so `except Exception` lets it through."""
    single = [{"Sequence": {"id": "B", "type_id": 0}}]
    rewrite(folder, post_processor={"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}})
    tokenizer = Tokenizer.from_pretrained(folder)
    for encode in (lambda: tokenizer.encode("a"), lambda: tokenizer.encode_batch(["a"])):
        with pytest.raises(ValueError, match=r"cannot be encoded with this tokenizer\.json: its Rust code panicked"):
            encode()
    capfd.readouterr()


def test_an_interrupt_is_not_an_error_of_the_library(monkeypatch, folder: Path):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenizers.Tokenizer.from_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_pretrained(folder)


def test_nothing_is_cut_or_padded_because_the_file_says_so(folder: Path):
    """A file that was saved while training may carry both; the second would fill memory."""
    text = "import os, sys\n" * 10
    truncation = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "]~!b["}  # fmt: skip
    rewrite(folder, truncation=truncation, padding=padding)
    assert Tokenizer.from_pretrained(folder).encode(text) == TOKENIZER.encode(text)


@pytest.mark.parametrize(
    ("trie", "given", "is_whole"),
    [(4, 4, True), (8, 8, True), (12, 12, True), (8, 7, False), (8, 30, True), (0, 4, False), (6, 6, False),
     (2, 8, False), (256, 256, True), (256, 255, False)],
)  # fmt: skip
def test_a_table_is_as_long_as_it_says(trie, given, is_whole, folder: Path):
    """A trie of whole entries of four bytes, of one at least; behind it stands text."""
    table = base64.b64encode(trie.to_bytes(4, "little") + bytes(given)).decode()
    rewrite(folder, normalizer={"type": "Precompiled", "precompiled_charsmap": table})
    with nullcontext() if is_whole else pytest.raises(ValueError, match="precompiled_charsmap is cut short"):
        Tokenizer.from_pretrained(folder)


# What is known of a text before it is encoded


def changed(change) -> Tokenizer:
    """The tokenizer with one part of it replaced."""
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    change(backend)
    return Tokenizer(backend)


@given(st.text())
def test_a_text_has_no_fewer_tokens_than_its_bytes_over_those_of_the_longest(text):
    longest = 37  # a line break, and the spaces of nine levels
    assert TOKENIZER.fewest_tokens(text) == math.ceil(len(text.encode()) / longest) <= len(TOKENIZER.encode(text))
    assert TOKENIZER.fewest_tokens("\ud800" * longest) == 3  # bytes, though it is no text


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", tokenizers.normalizers.Replace("a", "")),
        lambda backend: setattr(backend, "decoder", tokenizers.decoders.Metaspace()),
        lambda backend: setattr(backend, "pre_tokenizer", tokenizers.pre_tokenizers.Split(" ", "removed")),
        lambda backend: backend.add_tokens([tokenizers.AddedToken("<left>", lstrip=True)]),
        lambda backend: backend.add_tokens([tokenizers.AddedToken("<right>", rstrip=True)]),
    ],
    ids=["normalizer", "decoder", "split", "left", "right"],
)
def test_where_characters_can_go_a_text_may_have_no_token(change):
    assert changed(change).fewest_tokens("a " * 10_000) == 0
    assert changed(lambda backend: backend.add_tokens(["<plain>"])).fewest_tokens("a " * 10_000) > 0
    assert changed(lambda backend: setattr(backend, "pre_tokenizer", None)).fewest_tokens("a " * 10_000) > 0
