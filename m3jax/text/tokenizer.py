"""The tokenizer of a hub folder's tokenizer.json; it never adds special tokens by itself."""

import base64
import binascii
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers

from m3jax.files import current_file, read_json
from m3jax.messages import printable, shortened, shown
from m3jax.text.stream import Spelling, TextStream

# A vocabulary of 200,000 tokens and its merges are some 20 MB.
_MOST_BYTES, _MOST_ITEMS = 256 << 20, 5_000_000


class Tokenizer:
    """Text to token ids and back, over a hub folder's tokenizer.json.

    Args:
        backend: the loaded `tokenizers.Tokenizer`.
        bos_id: id that opens a conversation, or None. It is never added by `encode`.
        eos_id: id that ends a turn, or None.
        folder: the folder that it was read from, or None; the checkpoint's chat template is there too.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_id: int | None = None,
        eos_id: int | None = None,
        folder: Path | None = None,
    ):
        self.backend = backend
        self.folder = folder
        self.bos_id = bos_id
        self.eos_id = eos_id
        self._spelling = Spelling(backend)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Tokenizer":
        """Read a folder's tokenizer.json and, where it is present, its tokenizer_config.json.

        Args:
            folder: a folder in the hub's layout.

        Returns:
            The tokenizer; `bos_id` and `eos_id` are None where the folder names none.

        Raises:
            ValueError: no such folder, no tokenizer.json in it, a file that does not parse or that
                the library cannot use, or a bos or eos token that the vocabulary does not have.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{printable(str(folder))} is not a folder; give one that holds tokenizer.json")
        backend = _read_backend(current_file(folder, "tokenizer.json"))
        settings = current_file(folder, "tokenizer_config.json")
        special = read_json(settings, _MOST_BYTES, _MOST_ITEMS, "a tokenizer config") if settings.is_file() else {}
        return cls(
            backend,
            bos_id=_special_id(backend, special, "bos_token", settings),
            eos_id=_special_id(backend, special, "eos_token", settings),
            folder=folder,
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
            ValueError: no text, or one that holds a lone surrogate.
        """
        _check_text(text)
        with _library_errors("this text cannot be encoded with this tokenizer.json"):
            return self.backend.encode(text, add_special_tokens=False).ids

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, without tokenizing it.

        Tokenizing 64 MB takes minutes and gigabytes, and whether a text can fit has to be known before.

        Args:
            text: any string.

        Returns:
            Its bytes over those of the longest token, rounded up; 0 where a token can stand for a text of any length.
        """
        if self._longest_token == 0:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._longest_token)

    @cached_property
    def _longest_token(self) -> int:
        """The bytes of the longest token; 0 where the tokenizer drops characters of a text or changes them."""
        added = self.backend.get_added_tokens_decoder().values()
        splits = self.backend.pre_tokenizer
        if (
            self._spelling.decoders != ("ByteLevel",)
            or self.backend.normalizer is not None
            or any(token.lstrip or token.rstrip for token in added)
            or (splits is not None and b'"Removed"' in splits.__getstate__())
        ):
            return 0
        return max(len(self._spelling.bytes_of(token)) for token in self.backend.get_vocab().values())

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
        with _library_errors("these texts cannot be encoded with this tokenizer.json"):
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """Turn token ids into text; bytes that are not UTF-8 become U+FFFD, and no character beside them is lost.

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
            self._spelling.check_id(token)
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self._spelling.special_ids]
        with _library_errors("these ids cannot be decoded with this tokenizer.json"):
            return self._spelling.text(self._spelling.well_formed(token_ids))

    def token_bytes(self, token: SupportsIndex) -> bytes:
        """Return the bytes that a token stands for, which may be a part of a character.

        Args:
            token: its id.

        Raises:
            ValueError: an id that the vocabulary does not have.
        """
        token_id = index(token)
        self._spelling.check_id(token_id)
        if "ByteLevel" in self._spelling.decoders:
            return self._spelling.bytes_of(token_id)
        byte = self._spelling.byte_of(token_id)
        return self._spelling.text([token_id]).encode() if byte is None else bytes([byte])

    def vocabulary_bytes(self, size: int) -> tuple[list[bytes], set[int]]:
        """Return what each id writes, for a grammar over bytes.

        Args:
            size: ids of the model, at least those of the vocabulary.

        Returns:
            The UTF-8 of each id from 0 to size - 1, possibly part of a character, and the ids of special tokens; those
            that are no token count as special, too.

        Raises:
            ValueError: a decoder other than ByteLevel, whose tokens have no bytes of their own.
        """
        if self._spelling.decoders != ("ByteLevel",):
            raise ValueError(
                f"the tokenizer's decoder is {' + '.join(self._spelling.decoders) or 'none'}: grammars need ByteLevel"
            )
        is_token = [self.backend.id_to_token(token) is not None for token in range(size)]
        written = [
            self._spelling.bytes_of(token) if is_token[token] else f"<unused {token}>".encode() for token in range(size)
        ]
        unused = {token for token in range(size) if not is_token[token]}
        return written, unused | self._spelling.special_ids

    def stream(self, skip_special_tokens: bool = True, show_unfinished: bool = True) -> "TextStream":
        """Make an incremental detokenizer for one sequence.

        Args:
            skip_special_tokens: leave special tokens out of the text.
            show_unfinished: end with U+FFFD where the last character is unfinished; else it is left out.

        Returns:
            A new stream.

        Raises:
            ValueError: a decoder that has ByteLevel among other steps.
        """
        return TextStream(self._spelling, skip_special_tokens, show_unfinished)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json; the tokenizer neither truncates nor pads the texts that it encodes."""
    if not path.is_file():
        raise ValueError(f"{printable(str(path.parent))} has no tokenizer.json; copy the checkpoint's own there")
    shown_path = printable(str(path))
    if fault := _fault(read_json(path, _MOST_BYTES, _MOST_ITEMS, "a tokenizer")):
        raise ValueError(f"{shown_path} is not a tokenizer.json that can be read: {fault}; download it again")
    with _library_errors(f"{shown_path} is not a tokenizer.json that can be read"):
        backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()  # a file may carry the settings of its training, which would cut prompts without a word
    backend.no_padding()
    return backend


def _fault(layout: dict[str, Any]) -> str | None:
    """Return the fault of a parsed tokenizer.json that would make the library abort or print a trace; else None."""
    model = layout.get("model")
    if not isinstance(model, dict):
        return f"model = {shown(model)}: must be an object"
    prefix, merges = model.get("continuing_subword_prefix") or "", model.get("merges") or []
    if prefix and not (isinstance(prefix, str) and prefix.isascii() and isinstance(merges, list)):
        return f"continuing_subword_prefix = {shown(prefix)}: must be ASCII text, and merges a list"
    for merge in merges if prefix else ():
        # The library cuts as many bytes as the prefix has off the second part, even if that is within a character.
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(parts, list) and len(parts) == 2 and str(parts[1]).startswith(prefix)):
            return f"the merge {shown(merge)} has no second part that begins with {shown(prefix)}"
    return next((fault for normalizer in _steps(layout.get("normalizer")) if (fault := _bad_map(normalizer))), None)


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yield a normalizer, and all those nested in it."""
    if isinstance(step, dict):
        yield step
        inner = step.get("normalizers")
        for each in inner if isinstance(inner, list) else ():
            yield from _steps(each)


def _bad_map(normalizer: dict[str, Any]) -> str | None:
    """Return the fault of a normalizer: a damaged table, or a pattern that matches the empty text; None without one."""
    if normalizer.get("type") == "Replace" and normalizer.get("pattern") in ({"String": ""}, {"Regex": ""}):
        return "a normalizer replaces the empty text"
    if normalizer.get("type") != "Precompiled":
        return None
    try:
        table = base64.b64decode(normalizer.get("precompiled_charsmap"), validate=True)
    except (TypeError, ValueError, binascii.Error):
        return "precompiled_charsmap is not base64"
    # The table is the trie's length in 4 bytes, a trie of that many bytes, and text.
    trie_bytes = int.from_bytes(table[:4], "little")
    return None if len(table) >= 4 + trie_bytes > 4 and trie_bytes % 4 == 0 else "precompiled_charsmap is cut short"


def _special_id(backend: tokenizers.Tokenizer, settings: dict[str, Any], key: str, file: Path) -> int | None:
    """Return the id of the special token that the settings name under `key`, or None."""
    token, shown_path = settings.get(key), printable(str(file))
    # Older files write an AddedToken object where newer ones write its string.
    content = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return None
    if not isinstance(content, str):
        raise ValueError(f"{shown_path}: {key} = {shown(token)}: must be a text, an object with a content, or null")
    token_id = backend.token_to_id(content)
    if token_id is None:
        raise ValueError(f"{shown_path}: {key} {shown(content)} is not in the vocabulary; correct the file")
    return token_id


@contextmanager
def _library_errors(failed: str) -> Iterator[None]:
    """Turn the library's errors into ValueError: a bare Exception, or a Rust panic, which is a BaseException."""
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and not isinstance(error, Exception):
            raise  # an interrupt, an exit
        reason = "its Rust code panicked: " if is_panic else ""
        raise ValueError(shortened(f"{failed}: {reason}{printable(str(error))}")) from error


def _check_text(text: str) -> None:
    """Raise ValueError for what is no text, or for one that UTF-8 cannot encode, which has a lone surrogate."""
    if not isinstance(text, str):
        raise ValueError(f"text is a {type(text).__name__}, {shown(text)}: must be a str; encode_batch takes several")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text holds a lone surrogate at character {error.start}; remove it") from error
