"""A hub tokenizer.json, with ids and text kept strictly apart from special-token policy."""

import json
from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path
from typing import SupportsIndex

import tokenizers

# Bytes of an unfinished UTF-8 character decode to this.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Text to token ids and back, over a hub folder's tokenizer.json.

    Args:
        backend: the loaded `tokenizers.Tokenizer`.
        bos_id: id that opens a conversation, or None. It is never added by `encode`.
        eos_id: id that ends a turn, or None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos_id: int | None = None, eos_id: int | None = None):
        self.backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Tokenizer":
        """Read a folder's tokenizer.json and, where it is present, its tokenizer_config.json.

        Args:
            folder: a folder in the hub's layout.

        Returns:
            The tokenizer; `bos_id` and `eos_id` are None where the folder names none.

        Raises:
            ValueError: no such folder, no tokenizer.json in it, a file that does not parse, or a
                bos or eos token that the vocabulary does not have.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give one that holds tokenizer.json")
        backend = _read_backend(folder / "tokenizer.json")
        settings = _read_settings(folder / "tokenizer_config.json")
        return cls(
            backend,
            bos_id=_special_id(backend, settings, "bos_token", folder),
            eos_id=_special_id(backend, settings, "eos_token", folder),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Turn a text into token ids; nothing is added, and special tokens written in it are recognised.

        Args:
            text: any string that UTF-8 can hold.

        Returns:
            The ids, in order.

        Raises:
            ValueError: the text holds a lone surrogate.
        """
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Turn several texts into token ids at once, on all cores, each as `encode` does.

        Args:
            texts: any number of strings.

        Returns:
            A list of ids for each text.

        Raises:
            ValueError: as `encode`.
        """
        for text in texts:
            _check_text(text)
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special_tokens: leave special tokens out of the text.

        Returns:
            The text.

        Raises:
            ValueError: an id that the vocabulary does not have.
        """
        token_ids = [index(token) for token in ids]
        for token in token_ids:
            self._check_id(token)
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        """Make an incremental detokenizer for one sequence.

        Args:
            skip_special_tokens: leave special tokens out of the text.

        Returns:
            A new stream.
        """
        return TextStream(self, skip_special_tokens)

    def _check_id(self, token: int) -> None:
        if token < 0 or self.backend.id_to_token(token) is None:
            raise ValueError(
                f"token id {token} is not in the vocabulary of {self.vocab_size} ids; "
                "decode with the tokenizer that made the ids"
            )


class TextStream:
    """Turns token ids into text as they come, without ever showing part of a character.

    The texts that `push` returns, followed by that of `flush`, are together the decoded sequence.

    Args:
        tokenizer: the tokenizer that the ids belong to.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Ids already shown stay as context: some decoders drop the space before a first token.
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token: SupportsIndex) -> str:
        """Take the next token id, and return what text it completes.

        Args:
            token: the next id.

        Returns:
            The text that is complete now and was not returned before; often empty.

        Raises:
            ValueError: an id that the vocabulary does not have.
        """
        self._tokenizer._check_id(index(token))
        self._pending.append(index(token))
        text = self._pending_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """End the sequence, and return the text that was held back.

        Returns:
            What is still held back; an unfinished character is U+FFFD.
        """
        text = self._pending_text()
        self._shown, self._pending = [], []
        return text

    def _pending_text(self) -> str:
        """What the pending ids add to the text of those that were shown last."""
        decode = lambda ids: self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        return decode(self._shown + self._pending)[len(decode(self._shown)) :]


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no tokenizer.json; copy the checkpoint's own there")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{path} is not a tokenizer.json that can be read: {error}") from error


def _read_settings(path: Path) -> dict:
    """What a tokenizer_config.json holds; nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _special_id(backend: tokenizers.Tokenizer, settings: dict, key: str, folder: Path) -> int | None:
    """The id of the special token that the settings name under `key`, or None."""
    token = settings.get(key)
    # Older files write an AddedToken object where newer ones write its string.
    content = token["content"] if isinstance(token, dict) else token
    if content is None:
        return None
    token_id = backend.token_to_id(content)
    if token_id is None:
        raise ValueError(f"{folder}: {key} {content!r} is not in the vocabulary; correct the file")
    return token_id


def _check_text(text: str) -> None:
    """Raise ValueError for a text that has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text holds a lone surrogate at character {error.start}; remove it") from error
