"""Arrays and a JSON header as bytes that are checked before anything in them is believed.

The bytes are a safetensors file: 8 bytes with the length of a JSON header, the header, the arrays' numbers. In the
header's metadata stand the version, what the caller adds, and the SHA-256 of the whole file with 64 zeros in the place
of that sum. It detects damage, not forgery: anyone who can write a file can also write the sum that fits it.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from m3jax.messages import shown

VERSION = "1"
_MOST_HEADER_BYTES = 1 << 24
_NO_SUM = b"0" * 64
_SUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F8_E4M3":
    "float8_e4m3fn", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
}  # fmt: skip
_NAME_OF_DTYPE = {name: code for code, name in _DTYPES.items()}


def seal(arrays: Mapping[str, Shaped[np.ndarray, "..."]], header: Mapping[str, Any]) -> bytes:
    """Return arrays and a header as bytes.

    Args:
      arrays: of the dtypes that a cache or a list of tokens has.
      header: values that JSON can hold.

    Raises:
      ValueError: another dtype.
    """
    entries: dict[str, Any] = {}
    pieces, offset = [], 0
    for name, array in arrays.items():
        if str(array.dtype) not in _NAME_OF_DTYPE:
            raise ValueError(f"{name} is an array of {array.dtype}: these bytes can hold {', '.join(_NAME_OF_DTYPE)}")
        pieces.append(array.tobytes())
        end = offset + len(pieces[-1])
        code = _NAME_OF_DTYPE[str(array.dtype)]
        entries[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    metadata = {"version": VERSION, "sha256": _NO_SUM.decode(), "header": json.dumps(header, allow_nan=False)}
    text = json.dumps({"__metadata__": metadata} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join((len(text).to_bytes(8, "little"), text, *pieces))
    first = data.index(b'"sha256":"') + len(b'"sha256":"')
    return data[:first] + hashlib.sha256(data).hexdigest().encode() + data[first + 64 :]


def unseal(data: bytes) -> tuple[dict[str, Shaped[np.ndarray, "..."]], dict[str, Any]]:
    """Return the arrays and the header that `seal` was given; the arrays are views of the bytes.

    Raises:
      ValueError: the bytes are damaged, not of this kind, or of another version. Nothing larger than they are is made.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"a snapshot is read from bytes, got {type(data).__name__}")
    data = memoryview(data).cast("B").toreadonly()
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(_MOST_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"these {len(data)} bytes are no snapshot, or its beginning is damaged")
    text, numbers = data[8 : 8 + size], data[8 + size :]
    found = _SUM.search(text)
    if found is None:
        raise ValueError(f"these {len(data)} bytes are no snapshot: they have no checksum")
    whole = hashlib.sha256(data[: 8 + found.start(1)])
    whole.update(_NO_SUM)
    whole.update(data[8 + found.end(1) :])
    if whole.hexdigest().encode() != found[1]:
        raise ValueError(f"the checksum of these {len(data)} bytes is another one: they are damaged; send them again")
    try:
        entries = json.loads(bytes(text), parse_constant=_refuse)
        metadata = entries.pop("__metadata__")
        if metadata.get("version") != VERSION:
            raise ValueError(f"its version is {shown(metadata.get('version'))}, and {VERSION} can be read")
        header = json.loads(metadata["header"], parse_constant=_refuse)
        arrays = {name: _array(name, entry, numbers) for name, entry in entries.items()}
    except ValueError as error:
        raise ValueError(f"a snapshot that cannot be read: {error}") from error
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"a snapshot that cannot be read: its header is not of this kind ({shown(error)})") from error
    if not isinstance(header, dict):
        raise ValueError(f"a snapshot that cannot be read: its header is {shown(header)}")
    return arrays, header


def _refuse(name: str) -> None:
    raise ValueError(f"its header has {name}, which is no number")


def _array(name: str, entry: Mapping[str, Any], numbers: memoryview) -> Shaped[np.ndarray, "..."]:
    """Return one array, whose place in the bytes must be as long as its shape says."""
    code, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    is_count = lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= len(numbers)
    if not isinstance(shape, list) or len(shape) > 32 or not all(map(is_count, (first, end, *shape))):
        raise ValueError(f"array {shown(name)} has shape {shown(shape)} from byte {shown(first)} to {shown(end)}")
    if code not in _DTYPES:
        raise ValueError(f"array {shown(name)} is of type {shown(code)}")
    dtype, count = jnp.dtype(_DTYPES[code]), math.prod(shape)
    if end - first != count * dtype.itemsize or end > len(numbers):
        raise ValueError(f"array {shown(name)} of shape {shown(shape)} and type {code} lies in {end - first} bytes")
    return np.frombuffer(numbers[first:end], dtype).reshape(shape)
