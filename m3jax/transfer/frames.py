"""The frames that carry pages: numbered, with a checksum, refused unless each is whole and the next one.

A frame is bytes, integers little-endian:

    0   4   b"M3KV"
    4   4   version, 1
    8   4   H, bytes of the header
    12  8   N, bytes of the numbers
    20  32  SHA-256 of bytes 0 to 20, the header and the numbers
    52  H   the header, JSON in UTF-8: kind, transfer, number, fields, arrays
    .   N   the arrays' numbers, one array behind the other, C order, little-endian

`transfer` names the transfer, `number` counts its frames from 0, `arrays` lists [name, dtype, shape] in their order,
with the dtypes' names of safetensors. A checksum shows damage, not malice: pages also serve other requests of the same
beginning, so connect only engines that trust each other.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Shaped

from m3jax.files.tensors import DTYPES, dtype_code
from m3jax.messages import shown

VERSION = 1
_MAGIC = b"M3KV"
_SUM_AT, _HEADER_AT = 20, 52


class TransferError(RuntimeError):
    """Raised for pages that came damaged, out of order, of another model, or not at all: nothing of them is used."""


@dataclass(frozen=True)
class Frame:
    """One message of a transfer.

    Attributes:
      kind: "ask" of the engine that decodes; "hello", "pages", "scores", "alive" and "end" of the one that reads the
        prompt.
      fields: values that JSON can hold.
      arrays: by name.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Shaped[np.ndarray, "..."]] = field(default_factory=dict)


def encode(frame: Frame, transfer: str, number: int) -> bytes:
    """Return the bytes of a frame.

    Args:
      frame: its arrays have dtypes that safetensors knows.
      transfer: the name of the transfer.
      number: of the frame in it.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in frame.arrays.items()}
    listed = [[name, dtype_code(array.dtype), list(array.shape)] for name, array in arrays.items()]
    said = dict(kind=frame.kind, transfer=transfer, number=number, fields=frame.fields, arrays=listed)
    header = json.dumps(said, allow_nan=False, separators=(",", ":")).encode()
    numbers = [array.reshape(-1).view(np.uint8) for array in arrays.values()]  # views: the join below is the only copy
    count = sum(each.nbytes for each in numbers)
    sizes = b"".join((VERSION.to_bytes(4, "little"), len(header).to_bytes(4, "little"), count.to_bytes(8, "little")))
    checksum = hashlib.sha256(_MAGIC + sizes)
    for part in (header, *numbers):
        checksum.update(part)
    return b"".join((_MAGIC, sizes, checksum.digest(), header, *map(memoryview, numbers)))


def decode(data: bytes) -> tuple[Frame, str, int]:
    """Return (the frame, its transfer, its number) of what `encode` wrote; its arrays are views of the bytes.

    Raises:
      TransferError: bytes that are damaged, of another version, or no frame. Nothing larger than they are is made.
    """
    if len(data) < _HEADER_AT or data[:4] != _MAGIC:
        raise TransferError(f"{len(data)} bytes that are no frame of pages, or whose beginning is damaged")
    version = int.from_bytes(data[4:8], "little")
    if version != VERSION:
        raise TransferError(
            f"a frame of version {version}, and {VERSION} can be read: run the same m3jax on both sides"
        )
    header_end = _HEADER_AT + int.from_bytes(data[8:12], "little")
    end = header_end + int.from_bytes(data[12:20], "little")
    if end != len(data):
        raise TransferError(f"a frame of {len(data)} bytes that says it has {end}: it was cut, or is damaged")
    checksum = hashlib.sha256(data[:_SUM_AT])
    checksum.update(memoryview(data)[_HEADER_AT:])
    if checksum.digest() != data[_SUM_AT:_HEADER_AT]:
        raise TransferError(f"a frame of {len(data)} bytes whose checksum is another one: it was damaged on its way")
    try:
        said = json.loads(data[_HEADER_AT:header_end])
        arrays, offset = {}, header_end
        for name, code, shape in said["arrays"]:
            dtype, count = DTYPES[code], math.prod(shape)
            arrays[name] = np.frombuffer(data, dtype, count, offset).reshape(shape)
            offset += dtype.itemsize * count
        if offset != end:
            raise ValueError(f"its arrays take {offset - header_end} of {end - header_end} bytes")
        return Frame(said["kind"], said["fields"], arrays), said["transfer"], said["number"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise TransferError(f"a frame that cannot be read: {shown(error)}") from error
