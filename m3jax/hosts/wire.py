"""The calls of an engine as bytes: values of known types, and nothing that could run as code."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import jax
import numpy as np

from m3jax.decoding import Params, Sampling, Steer
from m3jax.decoding.engine import Media, Snapshot
from m3jax.files.tensors import packed, unpacked
from m3jax.media import ProcessedImage, ProcessedVideo

_TYPES = {kind.__name__: kind for kind in (Params, Sampling, Media, Steer, ProcessedImage, ProcessedVideo)}
_TEXT = "message"  # the array with the JSON of a message, beside those that it speaks of


def to_bytes(value: Any) -> bytes:
    """Return a message as bytes.

    Args:
      value: of None, numbers, texts, lists, tuples, dictionaries, arrays, and the engine's dataclasses.

    Raises:
      ValueError: a value of another type.
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_plain(value, arrays)).encode()
    return packed({_TEXT: np.frombuffer(text, np.uint8)} | arrays)


def from_bytes(data: bytes) -> Any:
    """Return the message that `to_bytes` wrote."""
    arrays = unpacked(data, "a message of process 0")
    return _value(json.loads(arrays[_TEXT].tobytes()), arrays)


def _plain(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value as JSON has it: what JSON has not is an object of one key; arrays are added to `arrays`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | jax.Array):
        name = f"array{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"array": name}
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(x, arrays) for x in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key, arrays), _plain(x, arrays)] for key, x in value.items()]}
    if isinstance(value, Snapshot):
        return {"snapshot": _plain(np.frombuffer(value.to_bytes(), np.uint8), arrays)}
    if type(value) in _TYPES.values():
        of_fields = {field.name: _plain(getattr(value, field.name), arrays) for field in fields(value)}
        return {type(value).__name__: of_fields}
    raise ValueError(f"a call of an engine on several hosts cannot carry a {type(value).__name__}")


def _value(plain: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the value that `_plain` wrote."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "array":
        return arrays[content]
    if kind in ("tuple", "list"):
        items = [_value(x, arrays) for x in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_value(key, arrays): _value(x, arrays) for key, x in content}
    if kind == "snapshot":
        return Snapshot.from_bytes(_value(content, arrays).tobytes())
    return _TYPES[kind](**{name: _value(x, arrays) for name, x in content.items()})
