"""Arrays and a JSON header as bytes that are checked before anything in them is believed.

The bytes are a safetensors file: 8 bytes with the length of a JSON header, the header, the arrays' numbers. In the
header's metadata stand the version, what the caller adds, and the SHA-256 of the whole file with 64 zeros in the place
of that sum. It detects damage, not forgery: anyone who can write a file can also write the sum that fits it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from m3jax.files import tensors
from m3jax.messages import shown

VERSION = "1"
_MOST_HEADER_BYTES = 1 << 24
_NO_SUM = b"0" * 64
_SUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')


def seal(arrays: Mapping[str, Shaped[np.ndarray, "..."]], header: Mapping[str, Any]) -> bytes:
    """Return arrays and a header as bytes.

    Args:
      arrays: of the dtypes that a cache or a list of tokens has.
      header: values that JSON can hold.

    Raises:
      ValueError: another dtype.
    """
    for name, array in arrays.items():
        if array.dtype not in tensors.DTYPES.values():
            known = ", ".join(map(str, tensors.DTYPES.values()))
            raise ValueError(f"{name} is an array of {array.dtype}: these bytes can hold {known}")
    layout = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    metadata = {"version": VERSION, "sha256": _NO_SUM.decode(), "header": json.dumps(header, allow_nan=False)}
    data = b"".join((tensors.header(layout, metadata), *(array.tobytes() for array in arrays.values())))
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
    size = tensors.header_size(data, _MOST_HEADER_BYTES)
    if size is None:
        raise ValueError(f"these {len(data)} bytes are no snapshot, or its beginning is damaged")
    found = _SUM.search(data[8 : 8 + size])
    if found is None:
        raise ValueError(f"these {len(data)} bytes are no snapshot: they have no checksum")
    whole = hashlib.sha256(data[: 8 + found.start(1)])
    whole.update(_NO_SUM)
    whole.update(data[8 + found.end(1) :])
    if whole.hexdigest().encode() != found[1]:
        raise ValueError(f"the checksum of these {len(data)} bytes is another one: they are damaged; send them again")
    try:
        arrays, metadata = tensors.parsed(data, size)
        if metadata.get("version") != VERSION:
            raise ValueError(f"its version is {shown(metadata.get('version'))}, and {VERSION} can be read")
        header = json.loads(metadata["header"], parse_constant=tensors.refuse_constant)
    except ValueError as error:
        raise ValueError(f"a snapshot that cannot be read: {error}") from error
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"a snapshot that cannot be read: its header is not of this kind ({shown(error)})") from error
    if not isinstance(header, dict):
        raise ValueError(f"a snapshot that cannot be read: its header is {shown(header)}")
    return arrays, header
