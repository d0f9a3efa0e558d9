"""The training corpus: the running Python's own standard library, tokenised."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64, UInt

from m3jax.evaluate.prompts import TokenRun, line_breaks
from m3jax.evaluate.sources import python_corpus
from m3jax.evaluate.words import WORDS
from m3jax.progress import activity
from m3jax.text import Tokenizer

# A record is these tokens: newline, "#", key, "->", value.
RECORD_LENGTH = 5
KEY, VALUE = 2, 4


@dataclass(frozen=True)
class RecordTokens:
    """The token ids that a recall record is written with.

    Args:
        newline: id of a line break.
        hash: id of "#" at the start of a line.
        arrow: id of " ->".
        words: ids of the recall words, each with its space.
    """

    newline: int
    hash: int
    arrow: int
    words: Int32[np.ndarray, " W"]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "RecordTokens":
        """The ids in a tokenizer's vocabulary.

        Args:
            tokenizer: one in which every part of a record is a single token.

        Returns:
            The ids.

        Raises:
            ValueError: a part that is several tokens, or a record that is not its parts.
        """
        lines = [f"\n# {word} -> {word}" for word in WORDS]
        encoded = tokenizer.encode_batch(lines)
        split_words = [word for word, ids in zip(WORDS, encoded, strict=True) if len(ids) != RECORD_LENGTH]
        if split_words:
            raise ValueError(
                f"{len(split_words)} recall words are not single tokens here, {split_words[:8]} among them; "
                "use the tokenizer that scripts/train_tokenizer.py writes"
            )
        newline, hash_mark, _, arrow, _ = encoded[0]
        words = np.array([ids[KEY] for ids in encoded], np.int32)
        return cls(newline=newline, hash=hash_mark, arrow=arrow, words=words)

    def write(self, keys: Int32[np.ndarray, " R"], values: Int32[np.ndarray, " R"]) -> Int32[np.ndarray, "R 5"]:
        """The tokens of records that state these keys and values, given as word ids."""
        records = np.empty((len(keys), RECORD_LENGTH), np.int32)
        records[:] = (self.newline, self.hash, 0, self.arrow, 0)
        records[:, KEY], records[:, VALUE] = keys, values
        return records


@dataclass(frozen=True)
class Corpus(TokenRun):
    """A split of the sources as one run of token ids.

    Args:
        tokens: ids of all files, each between the BOS and the EOS id.
        newlines: indices of the line breaks that a record line may be put before.
        starts: index of each file's BOS.
        records: ids that records are written with.
    """

    starts: Int64[np.ndarray, " files"]
    records: RecordTokens

    @classmethod
    def build(
        cls,
        tokenizer: Tokenizer,
        split: str,
        cache: str | Path | None = None,
        progress: bool = True,
        root: str | Path | None = None,
    ) -> "Corpus":
        """Tokenises the sources, or reads them from a cache that fits.

        Args:
            tokenizer: as `RecordTokens.of` needs it, with BOS and EOS.
            split: "train" or "validation".
            cache: an .npz file to read and, where it is absent or of other sources or another
                tokenizer, to write.
            progress: whether to show how far it is (`m3jax.progress`).
            root: the folder of the library; that of the running Python by default.

        Returns:
            The corpus.

        Raises:
            ValueError: a tokenizer that does not fit, or no sources.
        """
        records = RecordTokens.of(tokenizer)
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise ValueError("the tokenizer names no BOS or no EOS; both mark the files' ends")
        texts = list(python_corpus(split, root).values())
        fingerprint = _fingerprint(tokenizer, texts)
        tokens = _read_cache(cache, fingerprint)
        if tokens is None:
            tokens = _tokenise(tokenizer, texts, f"tokenising ({split})", progress)
            if cache is not None:
                with open(cache, "wb") as file:  # a name without .npz stays as given
                    np.savez(file, fingerprint=fingerprint, tokens=tokens)
        starts = np.flatnonzero(tokens == tokenizer.bos_id)
        return cls(tokens=tokens, newlines=line_breaks(tokenizer, tokens), starts=starts, records=records)

    def draw_start(self, rng: np.random.Generator, length: int) -> int:
        """A random index that `length` tokens follow: one in five a file's start, else a line's.

        Args:
            rng: the source of randomness.
            length: tokens needed.

        Returns:
            An index of a BOS or of a line break.
        """
        candidates = self.starts if rng.random() < 0.2 else self.newlines
        num_fitting = np.searchsorted(candidates, len(self.tokens) - length, side="right")
        return int(candidates[rng.integers(num_fitting)])


def _fingerprint(tokenizer: Tokenizer, texts: list[str]) -> str:
    """Return the hash that ties a cache of tokens to this tokenizer and exactly these texts."""
    digest = hashlib.sha256(tokenizer.backend.to_str().encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _read_cache(cache: str | Path | None, fingerprint: str) -> UInt[np.ndarray, " S"] | None:
    """The tokens of a cache file, or None where there is none or it has another fingerprint."""
    if cache is None or not Path(cache).is_file():
        return None
    try:
        with np.load(cache) as stored:
            return stored["tokens"] if str(stored["fingerprint"]) == fingerprint else None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{cache} is not a corpus cache ({error}); delete it") from error


def _tokenise(tokenizer: Tokenizer, texts: list[str], description: str, progress: bool) -> UInt[np.ndarray, " S"]:
    """The ids of all texts in one run, each text between the BOS and the EOS id."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    files = []
    groups = [texts[i : i + 32] for i in range(0, len(texts), 32)]
    with activity(progress) as line:
        for group in groups:
            line.say(f"{description}: {len(files)} of {len(texts)} files")
            for ids in tokenizer.encode_batch(group):
                files.append(np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], dtype))
    return np.concatenate(files)
