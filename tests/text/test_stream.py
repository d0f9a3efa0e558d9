"""Text as it comes: under every kind of decoder the pieces are the decoded whole, and hardly anything is held back."""

from functools import cache
from pathlib import Path
from time import process_time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from m3jax.text import Tokenizer

TINY = Path(__file__).parents[2] / "m3jax" / "assets" / "tiny"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
WORDS = [
    "<s>",
    "▁",
    "▁a",
    "b",
    "▁▁",
    "ü",
    "🦜",
    UNKNOWN,
    f"x{UNKNOWN}",
    "##s",
    "##",
    ".",
    "c</w>",
    "d</w>",
    "|",
    "<pad>",
]
DECODERS = {
    "ByteLevel": decoders.ByteLevel(),
    "Metaspace": decoders.Metaspace(),
    "ByteFallback and Strip": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "ByteFallback": decoders.Sequence(LLAMA),
    "WordPiece": decoders.WordPiece(),
    "BPEDecoder": decoders.BPEDecoder(),
    "CTC": decoders.CTC(),
    "no decoder": None,
}
RARE = ("WordPiece", "BPEDecoder", "CTC")
EVERY_DECODER = pytest.mark.parametrize(
    "decoder", [pytest.param(name, marks=pytest.mark.further if name in RARE else ()) for name in DECODERS]
)


@cache
def tokenizer(decoder: str) -> Tokenizer:
    """The embedded one for ByteLevel, with tokens that are no bytes; else a few words, and every byte."""
    if decoder == "ByteLevel":
        backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
        backend.add_tokens(["two words", "🦜", UNKNOWN])
        return Tokenizer(backend)
    vocabulary = [*WORDS, *BYTES]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<s>"))
    backend.add_special_tokens(["<s>"])
    if DECODERS[decoder] is not None:
        backend.decoder = DECODERS[decoder]
    return Tokenizer(backend)


def spelled(*tokens: str) -> Tokenizer:
    """A tokenizer of ByteLevel that has these tokens alone."""
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def ids_of(decoder: str, *tokens: str) -> list[int]:
    return [tokenizer(decoder).backend.token_to_id(token) for token in tokens]


def byte_ids(decoder: str, data: bytes) -> list[int]:
    """A token for each byte."""
    if decoder != "ByteLevel":
        return ids_of(decoder, *(BYTES[byte] for byte in data))
    alphabet = {tokenizer(decoder).token_bytes(i): i for i in range(tokenizer(decoder).vocab_size)}
    # The tokens of a chat have taken the places of some bytes that are in no character; 0xFF is another.
    return [alphabet.get(bytes([byte]), alphabet[b"\xff"]) for byte in data]


def pieces(decoder: str, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    stream = tokenizer(decoder).stream(skip_special_tokens)
    return [*map(stream.push, ids), stream.flush()]


@st.composite
def sequences(draw, decoder: str) -> list[int]:
    """Any ids, runs of bytes that are characters or not, the same token again and again, special ones."""
    size = tokenizer(decoder).vocab_size
    data = st.one_of(
        st.binary(max_size=6), st.text("aé€🦜" + UNKNOWN, max_size=3).map(str.encode), st.just(b"\xe2\x82")
    )
    parts = [st.lists(st.integers(0, size - 1), max_size=5), st.integers(0, min(size, 16) - 1).map(lambda i: [i] * 3)]
    if decoder == "ByteLevel" or "ByteFallback" in decoder:
        parts.append(data.map(lambda data: byte_ids(decoder, data)))
    return [token for part in draw(st.lists(st.one_of(parts), max_size=6)) for token in part]


@EVERY_DECODER
@given(data=st.data(), skip=st.booleans())
def test_pieces_are_the_whole_and_nothing_is_taken_back(decoder, data, skip):
    """After every token what was shown is the beginning of what there is; what is missing is one unfinished character.

    That decodes to one U+FFFD; to two where it begins like a surrogate.
    """
    ids = data.draw(sequences(decoder))
    shown, decode = "", tokenizer(decoder).decode
    for count, piece in enumerate(pieces(decoder, ids, skip)[:-1], 1):
        shown += piece
        so_far = decode(ids[:count], skip)
        assert so_far in (shown, shown + UNKNOWN, shown + 2 * UNKNOWN), (
            f"after {count} of {ids}: shown {shown!r}, decoded {so_far!r}"
        )
    assert "".join(pieces(decoder, ids, skip)) == decode(ids, skip), f"the whole of {ids}"
    together, cut = tokenizer(decoder).stream(skip_special_tokens=skip), len(ids) // 2
    assert together.push_all(ids[:cut]) + together.push_all(ids[cut:]) + together.flush() == decode(ids, skip)


@EVERY_DECODER
@given(data=st.data())
def test_the_whole_is_the_library_s(decoder, data):
    """But for runs of bytes that are no UTF-8, of which ByteFallback loses the valid characters too."""
    ids, skip = data.draw(sequences(decoder)), data.draw(st.booleans())
    known = tokenizer(decoder).backend.decode(ids, skip_special_tokens=skip)
    if "ByteFallback" not in decoder or UNKNOWN not in known:
        assert tokenizer(decoder).decode(ids, skip) == known, ids


@pytest.mark.parametrize("decoder", ["ByteLevel", "ByteFallback"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xe2\x82\xac!", ["", "", "€", "!", ""]),
        (b"\xff\xff\xfe", [UNKNOWN, UNKNOWN, UNKNOWN, ""]),  # no character begins with these: nothing to wait for
        (b"\xf0\x9f\xa6", ["", "", "", UNKNOWN]),
        (b"\xe2\x82\xe2\x82\xac", ["", "", UNKNOWN, "", "€", ""]),
        (b"\xe2\x82\xac\xff", ["", "", "€", UNKNOWN, ""]),
        (b"\xef\xbf\xbda", ["", "", UNKNOWN, "a", ""]),  # U+FFFD as text
        (b"\xed\xa0\x80", ["", "", UNKNOWN * 3, ""]),  # a surrogate is no character, and known by its third byte
    ],
)
def test_bytes_are_shown_as_soon_as_they_are_known(decoder, data, expected):
    assert pieces(decoder, byte_ids(decoder, data)) == expected


def test_a_literal_replacement_character_is_text():
    for decoder in DECODERS:
        if decoder != "ByteLevel":
            assert pieces(decoder, ids_of(decoder, UNKNOWN)) == [UNKNOWN, ""], decoder
    assert pieces("ByteLevel", ids_of("ByteLevel", UNKNOWN, "a")) == [UNKNOWN, "a", ""]


def test_a_token_within_two_characters_shows_what_is_whole():
    """A token of ByteLevel may end one character and begin the next; were all of it held back, it could be for ever."""
    stream = spelled("â", "Ĥ¬!â").stream()  # E2, and 82 AC 21 E2
    assert [stream.push(token) for token in (0, 1, 1, 1)] == ["", "€!", "€!", "€!"]
    assert stream.flush() == UNKNOWN


def test_spaces_of_a_stream_through_metaspace():
    """The first token loses its space and no other does, special tokens and bytes between them or not."""
    ids = ids_of("Metaspace", "▁a", "<s>", "▁a", "b", "▁a")
    assert pieces("Metaspace", ids) == ["a", "", " a", "b", " a", ""]
    ids = ids_of("ByteFallback and Strip", "▁", "▁a", "<0xE2>", "<0x82>", "▁a")
    assert pieces("ByteFallback and Strip", ids) == ["", " a", "", "", UNKNOWN + " a", ""]


def test_equal_neighbours_under_ctc():
    ids = ids_of("CTC", "b", "b", "<pad>", "b", "|", "b")
    assert pieces("CTC", ids) == ["b", "", "", "b", " ", "b", ""]


def test_a_flushed_stream_begins_anew():
    for decoder in DECODERS:
        stream, ids = tokenizer(decoder).stream(), list(range(12, 3, -1))
        first, second = ("".join([*map(stream.push, ids), stream.flush()]) for _ in range(2))
        assert first == second == tokenizer(decoder).decode(ids), decoder


def test_a_decoder_that_no_stream_can_follow():
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ValueError, match=r"cannot follow the decoder ByteLevel \+ Strip: .*decode the whole sequence"):
        Tokenizer(backend).stream()
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert Tokenizer(backend).stream().push(100) == Tokenizer(backend).decode([100])


def seconds(decoder: str, ids: list[int]) -> float:
    """Of this process: neighbours on the machine hardly count."""
    stream, began = tokenizer(decoder).stream(), process_time()
    for token in ids:
        stream.push(token)
    return process_time() - began


HOSTILE = {
    "bytes of no character": lambda decoder: byte_ids(decoder, b"\xff"),
    "beginnings of characters": lambda decoder: byte_ids(decoder, b"\xe2\x82"),
    "U+FFFD": lambda decoder: ids_of(decoder, UNKNOWN),
    "special tokens": lambda decoder: [0],
}


@pytest.mark.parametrize("decoder", [pytest.param("ByteLevel", marks=pytest.mark.further), "ByteFallback and Strip"])
@pytest.mark.parametrize("what", HOSTILE)
def test_twice_the_tokens_take_twice_the_time(decoder, what):
    """They took four times as long while all undecodable tokens were held back: 8,000 of them 38 s."""
    few = (HOSTILE[what](decoder) * 1500)[:1500]
    seconds(decoder, few)  # what is read of the tokenizer once
    ratios = []
    while not ratios or (min(ratios) >= 3 and len(ratios) < 8):  # a pause in one of the two says nothing
        ratios.append(seconds(decoder, few * 2) / seconds(decoder, few))
    assert min(ratios) < 3, f"{decoder}, {what}: twice {len(few)} tokens take {min(ratios):.1f} times as long"


def test_what_each_id_writes_and_which_are_no_text():
    """Bytes of each id, of the model's ids too that are none of the tokenizer's; these and special ones are apart."""
    size = tokenizer("ByteLevel").vocab_size
    written, special = tokenizer("ByteLevel").vocabulary_bytes(size + 2)
    ids = byte_ids("ByteLevel", "é🦜".encode())
    assert b"".join(written[token] for token in ids) == "é🦜".encode() and not special & set(ids)
    assert len(written) == size + 2 and special >= {size, size + 1} and len(special) < size
    with pytest.raises(ValueError, match="need ByteLevel"):
        tokenizer("no decoder").vocabulary_bytes(1)


def test_each_byte_has_the_character_that_the_library_writes_for_it():
    """Bytes that no text has are written as GPT-2's table has them: those from 0xAE on stand for themselves."""
    pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizer.alphabet())
    byte_of = dict(zip(alphabet, map(spelled(*alphabet).token_bytes, range(256)), strict=True))
    assert {*byte_of.values()} == {bytes([byte]) for byte in range(256)}
    text = "".join(map(chr, (*range(0x800), 0x800, *range(0x1000, 0xD000, 0x1000), 0xE000, 0x10000, 0x50000, 0x100000)))
    ((written, _),) = pre_tokenizer.pre_tokenize_str(text)
    assert b"".join(byte_of[character] for character in written) == text.encode()
    assert [byte_of[chr(byte)] for byte in range(0xAE, 0x100)] == [bytes([byte]) for byte in range(0xAE, 0x100)]


@EVERY_DECODER
def test_a_token_s_bytes_are_its_own(decoder):
    """Of ByteLevel those that a text is made of; elsewhere what a token decodes to, and the byte of one that is one."""
    known = tokenizer(decoder)
    if decoder == "ByteLevel":
        text = "two words and é 🦜\n"
        assert b"".join(map(known.token_bytes, known.encode(text))) == text.encode()
    else:
        words = [known.backend.token_to_id(word) for word in WORDS]
        of_words = [known.decode([token], skip_special_tokens=False).encode() for token in words]
        assert [*map(known.token_bytes, words)] == of_words
    if "ByteFallback" in decoder:
        assert [known.token_bytes(token) for token in byte_ids(decoder, bytes(range(256)))] == [
            bytes([byte]) for byte in range(256)
        ]
    for wrong in (-1, known.vocab_size):
        for refuses in (known.token_bytes, known.stream().push):
            with pytest.raises(ValueError, match=f"id {wrong} is not in the vocabulary of {known.vocab_size} ids"):
                refuses(wrong)
