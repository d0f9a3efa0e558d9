"""Documents to learn from: files of JSON lines, as tokens that all count."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from m3jax.messages import printable, shown
from m3jax.text import Tokenizer
from m3jax.train.conversations import Example, json_lines


def load_documents(
    file: str | Path, tokenizer: Callable[[], Tokenizer], vocab_size: int, most_tokens: int
) -> list[Example]:
    """Return the documents of a file of JSON lines.

    Args:
      file: lines of {"text": ...}, which stands between the tokenizer's BOS and EOS where it names them, or of
        {"tokens": [...]}, token ids as they are; other columns are not read. Empty lines are passed over.
      tokenizer: makes the model's; called if a line has text.
      vocab_size: V.
      most_tokens: of a row. A longer document is learnt in pieces of so many tokens.

    Raises:
      ValueError: names the file and the line of what cannot be learnt; a file without a document.
      OSError: the file cannot be read.
    """
    examples, reader = [], None
    for _, where, row in json_lines(file):
        if isinstance(row, dict) and isinstance(row.get("tokens"), list):
            tokens = _checked(row["tokens"], vocab_size, where)
        elif isinstance(row, dict) and isinstance(row.get("text"), str):
            reader = tokenizer() if reader is None else reader
            begin, end = ([] if mark is None else [mark] for mark in (reader.bos_id, reader.eos_id))
            tokens = _checked([*begin, *reader.encode(row["text"]), *end], vocab_size, where)
        else:
            raise ValueError(f'{where}: {shown(row)}: write {{"text": ...}} or {{"tokens": [...]}}')
        for start in range(0, len(tokens), most_tokens):
            piece = tokens[start : start + most_tokens]
            examples.append(Example(piece, np.ones(len(piece), bool)))
    if not examples:
        raise ValueError(f'{printable(str(file))}: no document in it; write a line of {{"text": ...}} for each')
    return examples


def _checked(tokens: list, vocab_size: int, where: str) -> np.ndarray:
    """Return token ids as an array; ValueError for what is none, or for fewer than two."""
    is_id = lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
    if wrong := [value for value in tokens if not is_id(value)]:
        raise ValueError(f"{where}: {shown(wrong[0])} is no token: the model has 0 to {vocab_size - 1}")
    if len(tokens) < 2:
        raise ValueError(f"{where}: {len(tokens)} tokens; a document has at least two, the first predicts the second")
    return np.array(tokens, np.int32)
