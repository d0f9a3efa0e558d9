"""Logits of a reference as files: a safetensors file for each prompt, with its `tokens` and `logits`."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from m3jax.evaluate.reading import Reading, Row, read
from m3jax.files import NewFile, read_json
from m3jax.files.tensors import header, mapped
from m3jax.messages import printable, shown
from m3jax.model import M3

ABOUT = "reference.json"
SCHEMA = 1
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_LOGITS_OF_A_CALL = 1 << 26  # numbers that cross between the device and the host at once


@dataclass(frozen=True)
class Dump:
    """One prompt of a reference, with its logits.

    Attributes:
      name: of its file.
      tokens: ids.
      logits: of each position; they stay on the disk until they are used.
    """

    name: str
    tokens: Int[np.ndarray, " T"]
    logits: Shaped[np.ndarray, "T V"]


def write_dump(model: M3, rows: Sequence[Row], folder: Path, about: Mapping[str, Any], how: Reading) -> None:
    """Write a model's logits at every position of some rows, a chunk at a time.

    Args:
      model: the reference.
      rows: token ids.
      folder: one that holds no reference yet; it is made if it is not there.
      about: settings; they are written last, into `reference.json`, with the number of prompts.
      how: sizes and dtypes.

    Raises:
      OSError: a file that is there already, or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = model.config.vocab_size
    how = fitting(how, vocab)
    with ExitStack() as open_files:
        files = {}
        for row, start, logits in read(model, rows, _logits, how=how):
            if start == 0:
                files[row] = open_files.enter_context(NewFile(folder / f"prompt-{row:03d}.safetensors"))
                length = len(rows[row])
                layout = {"tokens": (np.dtype("<i4"), (length,)), "logits": (np.dtype("<f4"), (length, vocab))}
                files[row].write(header(layout))
                files[row].write(rows[row].astype("<i4").tobytes())
            files[row].write(logits.astype("<f4").tobytes())
    text = json.dumps({"schema": SCHEMA, "prompts": len(rows), **about}, indent=1, allow_nan=False) + "\n"
    with NewFile(folder / ABOUT) as file:
        file.write(text.encode())


def _logits(logits: Float[Array, "B X V"]) -> Float[Array, "B X V"]:
    """Return the logits unchanged: a measure that keeps everything."""
    return logits


def fitting(how: Reading, vocab: int) -> Reading:
    """Return the same reading with chunks of at most 2^26 logits, or of one token a row if that is more.

    Args:
      how: sizes and dtypes.
      vocab: V.
    """
    chunk = max(1, min(how.chunk, _LOGITS_OF_A_CALL // (how.batch * vocab)))
    return Reading(chunk, how.batch, how.kv_dtype, how.index_dtype, how.scales)


def read_dump(folder: Path) -> list[Dump]:
    """Return the prompts of a reference, in the order of their files' names.

    Args:
      folder: of safetensors files with `tokens` [T] and `logits` [T V], or with a first axis of 1; or one such file.

    Raises:
      ValueError: no such folder, one without such files, a file that is damaged or lacks a name, shapes that do not
        fit together, a reference that was not finished, or one of another schema version.
    """
    if not folder.exists():
        raise ValueError(f"{printable(str(folder))}: no such folder; write a reference with --write-reference")
    about = folder / ABOUT
    if about.is_file() and read_json(about).get("schema") != SCHEMA:
        version = shown(read_json(about).get("schema"))
        raise ValueError(f"{printable(str(about))}: schema version {version}, and {SCHEMA} can be read")
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"{printable(str(folder))}: holds no .safetensors file; write a reference with --write-reference"
        )
    if about.is_file() and read_json(about).get("prompts") != len(paths):
        asked = shown(read_json(about).get("prompts"))
        raise ValueError(
            f"{printable(str(folder))}: {len(paths)} prompts, and {ABOUT} speaks of {asked}; write it again"
        )
    return [_read_prompt(path) for path in paths]


def _read_prompt(path: Path) -> Dump:
    """Return one prompt of a reference, its file mapped into memory."""
    shown_path = printable(str(path))
    if path.stat().st_size == 0:
        raise ValueError(f"{shown_path}: the file is empty; write it again")
    arrays = mapped(path, shown_path)
    if missing := [name for name in ("tokens", "logits") if name not in arrays]:
        raise ValueError(f"{shown_path}: no tensor {missing[0]!r}; it has {', '.join(map(shown, sorted(arrays)[:8]))}")
    tokens, logits = arrays["tokens"], arrays["logits"]
    tokens = tokens[0] if tokens.ndim == 2 and len(tokens) == 1 else tokens
    logits = logits[0] if logits.ndim == 3 and len(logits) == 1 else logits
    is_fitting = tokens.ndim == 1 and logits.ndim == 2 and len(tokens) == len(logits) > 0
    if not is_fitting or tokens.dtype.kind not in "iu" or str(logits.dtype) not in _FLOATS:
        raise ValueError(
            f"{shown_path}: tokens is {tokens.dtype} {list(tokens.shape)} and logits {logits.dtype} "
            f"{list(logits.shape)}; they must be integers [T] and floating-point numbers [T V]"
        )
    return Dump(path.name, tokens, logits)
