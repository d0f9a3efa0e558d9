"""The one reader of JSON files: a file from elsewhere costs no more memory, time or stack than its limits allow."""

import json
import math
from pathlib import Path
from typing import Any

from m3jax.messages import printable, shown

MOST_BYTES = 16 << 20
MOST_ITEMS = 100_000  # of one list or object
MOST_DEPTH = 64
# No number of a model is beyond float32; tokenizer_config.json writes int(1e30) for "no limit".
LARGEST = 3.4028234663852886e38
_MOST_DIGITS = 60  # of an integer: reading many takes quadratic time, and Python refuses 4,300
_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


def read_json(
    file: Path, most_bytes: int = MOST_BYTES, most_items: int = MOST_ITEMS, called: str = "a config"
) -> dict[str, Any]:
    """Read the object in a JSON file.

    Args:
      file: a file that is there.
      most_bytes: how large the file may be.
      most_items: how many entries one list or object in it may have.
      called: what it is, for the error of a file that holds no object.

    Raises:
      ValueError: the file is larger, is not UTF-8, is not JSON or no object; a key stands twice in one object; lists
        and objects nest deeper than 64; a number is NaN, infinite or beyond float32; a text holds a lone surrogate.
        The message begins with the file's path.
      OSError: the file cannot be read.
    """
    parsed = _read(file, most_bytes, most_items)
    if not isinstance(parsed, dict):
        raise ValueError(f"{printable(str(file))}: {called} is a JSON object, got {_kind(parsed)}")
    return parsed


def read_json_list(file: Path, called: str) -> list[Any]:
    """Read the list in a JSON file of at most 16 MiB.

    Args:
      file: a file that is there.
      called: what it is, for the error of a file that holds no list.

    Raises:
      ValueError: as `read_json`, and where the file holds no list.
      OSError: the file cannot be read.
    """
    parsed = _read(file, MOST_BYTES, MOST_ITEMS)
    if not isinstance(parsed, list):
        raise ValueError(f"{printable(str(file))}: {called} is a JSON list, got {_kind(parsed)}")
    return parsed


def read_bytes(file: Path, most_bytes: int) -> bytes:
    """Return what a file holds, which takes no more memory than `most_bytes` however large the file is.

    Args:
      file: a file that is there.
      most_bytes: how large it may be.

    Raises:
      ValueError: it is larger; the message begins with its path.
      OSError: it cannot be read.
    """
    with open(file, "rb") as stream:
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        named = printable(str(file))
        raise ValueError(f"{named}: larger than {most_bytes:,} bytes, the most that is read; is it the right file?")
    return data


def _read(file: Path, most_bytes: int, most_items: int) -> Any:
    """Return the value in a JSON file, within the limits of `read_json`."""
    data, named = read_bytes(file, most_bytes), printable(str(file))
    if data.startswith(_BOMS):
        raise ValueError(f"{named} is not valid JSON: it begins with a byte order mark; save it as UTF-8 without one")
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise ValueError(f"{named} is not valid JSON: byte {error.start} is not UTF-8; download it again") from None
    except RecursionError:
        raise ValueError(f"{named}: lists and objects nest deeper than {MOST_DEPTH}") from None
    except ValueError as error:
        raise ValueError(f"{named} is not valid JSON: {error}; download it again, or correct it") from None
    if isinstance(parsed, dict | list) and (fault := _fault(parsed, most_items)):
        raise ValueError(f"{named}: {fault}")
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a file; raise ValueError for a key that stands in it twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} stands twice in one object, keep one")
    return members


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else math.inf


def _fault(parsed: dict[str, Any] | list[Any], most_items: int) -> str | None:
    """Return a message about the first value that is beyond a limit, by the path of its key; None if there is none."""
    stack: list[tuple[tuple, dict | list]] = [((), parsed)]
    while stack:
        path, container = stack.pop()
        named = lambda *keys, path=path: printable(".".join(map(str, (*path, *keys))))[:120]
        if len(container) > most_items:
            return f"{named() or 'the file'} has {len(container):,} entries, at most {most_items:,} are read"
        if len(path) >= MOST_DEPTH:
            return f"lists and objects nest deeper than {MOST_DEPTH}"
        is_object = isinstance(container, dict)
        for key, value in container.items() if is_object else enumerate(container):
            if is_object and not _has_utf8(key):
                return f"the key {shown(key)} holds a lone surrogate"
            if isinstance(value, dict | list):
                stack.append(((*path, key), value))
            elif isinstance(value, str):
                if not _has_utf8(value):
                    return f"{named(key)} = {shown(value)}: holds a lone surrogate"
            elif not -LARGEST <= (value or 0) <= LARGEST:  # NaN too
                return f"{named(key)} = {shown(value)}: beyond the largest number of float32, {LARGEST:.2g}"
    return None


def _has_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
