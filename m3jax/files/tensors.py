"""Safetensors files: headers, arrays of a file in memory or mapped, and files that are written a tensor at a time.

A file is 8 bytes with the length of a JSON header, the header, and the tensors' numbers, each where its entry says.
"""

import json
import mmap
from collections.abc import Iterable, Mapping
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from m3jax.files.durable import NewFile
from m3jax.messages import shown

MOST_HEADER_BYTES = 100_000_000  # what the safetensors library reads
_MOST_AXES = 32
DTYPES = {
    code: np.dtype(getattr(ml_dtypes, name, name))
    for code, name in {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
        "U64": "uint64", "I64": "int64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F16": "float16",
        "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    }.items()
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}

Arrays = Mapping[str, Shaped[np.ndarray, "..."]]
Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape of each tensor, in the order of the file


def dtype_code(dtype: np.dtype) -> str:
    """Return the name that safetensors has for a dtype."""
    return _CODES[np.dtype(dtype)]


def by_width(layout: Layout) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Return a layout in the order of the safetensors library: wide dtypes first, so that every tensor is aligned."""
    return {name: layout[name] for name in sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))}


def header(layout: Layout, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the beginning of a file, up to the first tensor's numbers: the same layout gives the same bytes.

    Args:
      layout: of the tensors that follow.
      metadata: texts by name.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in layout.items():
        end = offset + dtype.itemsize * prod(shape)
        entries[name] = {"dtype": dtype_code(dtype), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as the library does it: numbers begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    file: NewFile,
    layout: Layout,
    values: Iterable[Shaped[np.ndarray, "..."]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file one tensor after the other.

    Args:
      file: which nothing has been written to.
      layout: of the tensors.
      values: the tensors in that order, of that dtype and shape; one at a time is asked for and held.
      metadata: of the header.

    Raises:
      ValueError: a tensor that is not as the layout says.
      OSError: names the file.
    """
    file.write(header(layout, metadata))
    for (name, stored), array in zip(layout.items(), values, strict=True):
        if (array.dtype, array.shape) != stored:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, and the header says {stored}")
        # As bytes: bfloat16 and float8 are no formats of Python's buffers.
        file.write(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


def packed(arrays: Arrays, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return arrays as a file, in the order of `by_width`: the same arrays give the same bytes."""
    layout = by_width({name: (array.dtype, array.shape) for name, array in arrays.items()})
    return b"".join((header(layout, metadata), *(np.ascontiguousarray(arrays[name]).tobytes() for name in layout)))


def unpacked(data: bytes | memoryview, called: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file, which share its memory.

    Args:
      data: the whole file, or a view of where it is mapped.
      called: its name, for errors.

    Raises:
      ValueError: the file is truncated, or is none.
    """
    size = header_size(data)
    if size is None:
        raise ValueError(f"{called}: {len(data)} bytes are no safetensors file, or only its beginning; make it again")
    try:
        arrays, _ = parsed(data, size)
    except ValueError as error:
        raise ValueError(f"{called}: no safetensors file, or a damaged one ({error}); make it again") from None
    return arrays


def header_size(data: bytes | memoryview, most: int = MOST_HEADER_BYTES) -> int | None:
    """Return how many bytes the header of a file has; None if they are not there, or more than `most`."""
    # The smallest header is {}. A size from damaged bytes may be anything up to 2^64.
    size = int.from_bytes(data[:8], "little")
    return size if 2 <= size <= min(most, len(data) - 8) else None


def parsed(data: bytes | memoryview, size: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a file, which share its memory, and the metadata of its header.

    Nothing is believed: whatever sizes the header asks for, nothing larger than the bytes is made.

    Args:
      data: the whole file.
      size: of its header, from `header_size`.

    Raises:
      ValueError: the header is of another kind, or an array that it speaks of is not there.
    """
    try:
        entries = json.loads(bytes(data[8 : 8 + size]), parse_constant=refuse_constant)
        metadata = entries.pop("__metadata__", {})
        return {name: _array(name, entry, data, 8 + size) for name, entry in entries.items()}, metadata
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its header is not of this kind ({shown(error)})") from error


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN or an infinity, which Python's JSON has and JSON has not (`json.loads`)."""
    raise ValueError(f"its header has {name}, which is no number")


def _array(name: str, entry: Mapping[str, Any], data: bytes | memoryview, start: int) -> Shaped[np.ndarray, "..."]:
    """Return one array, whose place behind byte `start` must be as long as its shape says."""
    code, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    is_count = lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    if not isinstance(shape, list) or len(shape) > _MOST_AXES or not all(map(is_count, (first, end, *shape))):
        raise ValueError(f"array {shown(name)} has shape {shown(shape)} from byte {shown(first)} to {shown(end)}")
    if code not in DTYPES:
        raise ValueError(f"array {shown(name)} is of type {shown(code)}")
    if end > len(data) - start:
        raise ValueError(f"it ends at byte {len(data)}, before the {start + end} that its header speaks of")
    if end - first != prod(shape) * DTYPES[code].itemsize:
        raise ValueError(f"array {shown(name)} of shape {shown(shape)} and type {code} lies in {end - first} bytes")
    return np.frombuffer(data[start + first : start + end], DTYPES[code]).reshape(shape)


def mapped(file: Path, called: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file where they lie on the disk: they are read as they are used.

    Args:
      file: its path.
      called: its name, for errors.

    Raises:
      ValueError: the file is empty or truncated, or is none.
      OSError: it cannot be opened.
    """
    with open(file, "rb") as stream:
        is_empty = stream.seek(0, 2) == 0  # which cannot be mapped
        data = b"" if is_empty else memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    return unpacked(data, called)


def read_header(stream: BufferedIOBase) -> tuple[dict[str, Any], int]:
    """Return the header of a file, its metadata included, and the byte at which the tensors' numbers begin.

    Args:
      stream: at the beginning of the file.

    Raises:
      ValueError: a header that is too large, or no JSON object.
    """
    size = int.from_bytes(stream.read(8), "little")
    if size > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {size:,} bytes; at most {MOST_HEADER_BYTES:,} are read")
    entries = json.loads(stream.read(size))
    if not isinstance(entries, dict):
        raise ValueError("a header that is no JSON object")
    return entries, 8 + size
