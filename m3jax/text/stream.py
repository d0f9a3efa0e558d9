"""Streaming detokenization: text is never taken back, and at most one character's bytes are held back.

`tokenizers.decoders.DecodeStream` (0.23.3) holds back every text that ends in U+FFFD, in quadratic time and for good.
"""

import codecs
import json
from collections.abc import Sequence
from functools import cached_property
from operator import index
from typing import SupportsIndex

import tokenizers


class Spelling:
    """The way in which a tokenizer's decoder turns tokens into text.

    There are two kinds. ByteLevel joins the bytes of all tokens: a character may end within a token. All other decoders
    give each token a text of its own, which may depend on whether it is the first and on the token before it; with
    ByteFallback some tokens are single bytes.

    Args:
        backend: the loaded `tokenizers.Tokenizer`; its decoder and vocabulary must not change any more.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self._bytes_of: dict[int, bytes] = {}

    @cached_property
    def decoders(self) -> tuple[str, ...]:
        """Names of the decoder's steps, in order; none where the tokenizer has no decoder."""
        if self.backend.decoder is None:
            return ()
        settings = json.loads(self.backend.decoder.__getstate__())
        steps = settings["decoders"] if settings["type"] == "Sequence" else [settings]
        return tuple(step["type"] for step in steps)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which a text can be asked to leave out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def byte_ids(self) -> tuple[int, ...]:
        """The ids of the tokens <0x00> to <0xFF>; () where the decoder has no ByteFallback, or a byte has no token."""
        if "ByteFallback" not in self.decoders:
            return ()
        ids = [self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        return () if None in ids else tuple(ids)

    @cached_property
    def _byte_of_id(self) -> dict[int, int]:
        return {token_id: byte for byte, token_id in enumerate(self.byte_ids)}

    def check_id(self, token: int) -> None:
        """Raise ValueError for an id that the vocabulary does not have."""
        if token < 0 or self.backend.id_to_token(token) is None:
            raise ValueError(
                f"token id {token} is not in the vocabulary of {self.backend.get_vocab_size(with_added_tokens=True)} "
                "ids; decode with the tokenizer that made the ids"
            )

    def byte_of(self, token: int) -> int | None:
        """Return the byte that a token is under ByteFallback; None for a token that is text."""
        return self._byte_of_id.get(token)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token under ByteLevel; its own UTF-8 if one of its characters stands for no byte."""
        if token not in self._bytes_of:
            text = self.backend.id_to_token(token)
            # Added tokens are stored as plain text; ByteLevel's alphabet has no blank, for one.
            is_spelled = all(character in _BYTE_OF for character in text)
            self._bytes_of[token] = bytes(_BYTE_OF[c] for c in text) if is_spelled else text.encode()
        return self._bytes_of[token]

    def well_formed(self, ids: Sequence[int]) -> list[int]:
        """Return the ids, with bytes that are not UTF-8 replaced by those of U+FFFD; only ByteFallback has such ids.

        The decoder itself would lose the valid characters beside such a byte too: it gives up a whole run of bytes.
        """
        if not self.byte_ids:
            return list(ids)
        repair = Utf8Runs(self)
        return [token for token_id in ids for token in repair.push(token_id)] + repair.flush()

    def text(self, ids: Sequence[int]) -> str:
        """Return the decoder's text of a sequence, special tokens included."""
        return self.backend.decode(ids, skip_special_tokens=False)


class Utf8Runs:
    """A filter that passes ids on, byte tokens a whole character at a time; it holds back at most three bytes."""

    def __init__(self, spelling: Spelling):
        self._spelling = spelling
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> list[int]:
        """Take the next id, and return the ids that are complete with it."""
        byte = self._spelling.byte_of(token)
        if byte is None:
            # Text ends a run of bytes, so a character that it left unfinished stays so.
            return [*self.flush(), token]
        return self._spelled(self._characters.decode(bytes([byte])))

    def flush(self) -> list[int]:
        """End a run of byte tokens, and return the ids of U+FFFD if a character is unfinished."""
        return self._spelled(self._characters.decode(b"", final=True))

    def _spelled(self, text: str) -> list[int]:
        return [self._spelling.byte_ids[byte] for byte in text.encode()]


class TextOfBytes:
    """The streamed text of a ByteLevel decoder: the bytes of all tokens, decoded character by character."""

    def __init__(self, spelling: Spelling):
        self._bytes_of = spelling.bytes_of
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""
        return self._characters.decode(b"".join(map(self._bytes_of, tokens)))

    def flush(self) -> str:
        """End the text, and return U+FFFD if a character is unfinished."""
        return self._characters.decode(b"", final=True)


class TextOfTokens:
    """The streamed text of a decoder that gives each token a text of its own.

    What a token adds is the difference that it makes behind the token before it: decoders treat a first token
    otherwise, and CTC joins equal neighbours.
    """

    def __init__(self, spelling: Spelling):
        self._spelling = spelling
        self._runs = Utf8Runs(spelling)
        self._previous: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is complete with these tokens: their own, or characters that their bytes complete."""
        return "".join([self._added(self._runs.push(token)) for token in tokens])

    def flush(self) -> str:
        """End the sequence, and return U+FFFD if a character is unfinished; the next token begins a new sequence."""
        text = self._added(self._runs.flush())
        self._previous = []
        return text

    def _added(self, ids: list[int]) -> str:
        """Return the text that these ids add to the text so far."""
        if not ids:
            return ""
        shown, text = self._spelling.text(self._previous), self._spelling.text(self._previous + ids)
        self._previous = ids
        return text[len(shown) :]


class TextStream:
    """A detokenizer that turns token ids into text as they come, without ever showing part of a character.

    The texts that `push` returns, followed by that of `flush`, are together what `Tokenizer.decode` makes of the
    sequence. Nothing is taken back, at most the bytes of one unfinished character are held back, and a token costs the
    same whatever came before it. A U+FFFD that is text, or a byte that can belong to no character, is shown at once.

    Args:
        spelling: the tokenizer's way from tokens to text (`Tokenizer.stream` passes its own).
        skip_special_tokens: leave special tokens out of the text.
        show_unfinished: end with U+FFFD where the last character is unfinished; else it is left out, which suits a
            sequence that was cut at a limit.

    Raises:
        ValueError: a decoder that has ByteLevel among other steps.
    """

    def __init__(self, spelling: Spelling, skip_special_tokens: bool, show_unfinished: bool):
        self._spelling = spelling
        self._shows_unfinished = show_unfinished
        self._left_out = spelling.special_ids if skip_special_tokens else frozenset()
        if spelling.decoders == ("ByteLevel",):
            self._text: TextOfBytes | TextOfTokens = TextOfBytes(spelling)
        elif "ByteLevel" in spelling.decoders:
            raise ValueError(
                f"a stream cannot follow the decoder {' + '.join(spelling.decoders)}: ByteLevel has to be its only "
                "step; decode the whole sequence instead"
            )
        else:
            self._text = TextOfTokens(spelling)

    def push(self, token: SupportsIndex) -> str:
        """Take the next token id, and return what text it completes.

        Args:
            token: the next id.

        Returns:
            The text that is complete now and was not returned before; often empty.

        Raises:
            ValueError: an id that the vocabulary does not have.
        """
        return self.push_all((token,))

    def push_all(self, tokens: Sequence[SupportsIndex]) -> str:
        """Take the next token ids, and return what text they complete: that of `push` for each, put together.

        Args:
            tokens: the next ids.

        Raises:
            ValueError: an id that the vocabulary does not have; then none of them is taken.
        """
        ids = [index(token) for token in tokens]
        for token in ids:
            self._spelling.check_id(token)
        return self._text.push([token for token in ids if token not in self._left_out])

    def flush(self) -> str:
        """End the sequence, and return the text that was held back.

        Returns:
            What is still held back: U+FFFD for an unfinished character, where those are shown.
        """
        unfinished = self._text.flush()
        return unfinished if self._shows_unfinished else ""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a ByteLevel token stands for.

    Source: GPT-2's `bytes_to_unicode`: what is printable in Latin-1 stands for itself, all else for 256 and on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
