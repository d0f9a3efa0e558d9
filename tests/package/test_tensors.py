"""Safetensors files: the library reads what is written here, and the other way round; streamed or at once."""

import io
import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

from m3jax.files import NewFile
from m3jax.files.tensors import (
    DTYPES,
    by_width,
    header,
    mapped,
    packed,
    read_header,
    unpacked,
    write_tensors,
)

DRAW = np.random.default_rng(0)
ARRAYS = {code: DRAW.integers(0, 2, (3, 4)).astype(dtype) for code, dtype in DTYPES.items()}
ARRAYS |= {"a scalar": np.float32(3), "none": np.zeros((0, 5), np.int32), "a view": np.arange(12.0).reshape(3, 4).T}
ARRAYS |= {"all axes that there may be": np.ones((1,) * 32, np.float32)}
ARRAYS = {name: np.asarray(array) for name, array in ARRAYS.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_arrays_come_back_with_their_dtypes():
    assert_same(unpacked(packed(ARRAYS), "here"), ARRAYS)
    assert unpacked(packed({}), "here") == {}


def test_the_library_reads_and_writes_the_same():
    plain = {name: ARRAYS[name] for name in ("F64", "F32", "F16", "I64", "I32", "U8", "BOOL", "none")}
    assert_same(load(packed(plain)), plain)
    assert_same(unpacked(save(plain), "here"), plain)


def test_a_file_is_the_same_streamed_and_at_once(tmp_path):
    """One tensor at a time is asked for, and the order is that of the layout."""
    layout = by_width({name: (array.dtype, array.shape) for name, array in ARRAYS.items()})
    widths = [dtype.itemsize for dtype, _ in layout.values()]
    assert widths == sorted(widths, reverse=True)
    path = tmp_path / "x.safetensors"
    with NewFile(path) as file:
        write_tensors(file, layout, (ARRAYS[name] for name in layout))
    assert path.read_bytes() == packed(ARRAYS)
    assert_same(mapped(path, "here"), ARRAYS)


def test_metadata_stands_in_the_header(tmp_path):
    layout = {"x": (np.dtype(ml_dtypes.bfloat16), (2,))}
    begin = header(layout, {"format": "pt"})
    entries, start = read_header(io.BytesIO(begin + b"\0" * 4))
    assert start == len(begin) and start % 8 == 0
    assert entries == {
        "__metadata__": {"format": "pt"},
        "x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
    }
    assert unpacked(begin + b"\0" * 4, "here").keys() == {"x"}


def test_a_tensor_that_is_not_as_the_layout_says_is_refused(tmp_path):
    with NewFile(tmp_path / "x") as file, pytest.raises(ValueError, match=r"^x: float64 \(2,\), and the header says"):
        write_tensors(file, {"x": (np.dtype(np.float32), (2,))}, [np.zeros(2)])


def with_entry(code, shape, offsets):
    """A file of 16 bytes of numbers whose header says this of them."""
    text = json.dumps({"x": {"dtype": code, "shape": shape, "data_offsets": offsets}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "here: 0 bytes are no safetensors file, or only its beginning; make it again"),
        (packed(ARRAYS)[:40], "here: 40 bytes are no safetensors file, or only its beginning"),
        (packed(ARRAYS)[:-1], "here: no safetensors file, or a damaged one .*it ends at byte"),
        (b"\x02" + b"\0" * 7 + b"[]", "here: no safetensors file, or a damaged one"),
        (with_entry("F32", [2, -2], [0, 16]), r"array 'x' has shape \[2, -2\] from byte 0 to 16"),
        (with_entry("F32", [True, 4], [0, 16]), r"array 'x' has shape \[True, 4\]"),
        (with_entry("F32", [10**30, 0], [0, 0]), r"array 'x' has shape"),
        (with_entry("F32", [1] * 33, [0, 4]), r"array 'x' has shape"),
        (with_entry("F32", [2**62, 2**62, 0], [0, 0]), "array is too big|cannot reshape|dimension"),
        (with_entry("F32", [3], [0, 16]), r"array 'x' of shape \[3\] and type F32 lies in 16 bytes"),
        (with_entry("F32", [4], [16, 0]), r"array 'x' of shape \[4\] and type F32 lies in -16 bytes"),
        (with_entry("F33", [4], [0, 16]), "array 'x' is of type 'F33'"),
        (with_entry("F32", math.nan, [0, 16]), "its header has NaN, which is no number"),
        (with_entry("F32", [4], 3), "its header is not of this kind"),
    ],
    ids=range(14),
)
def test_what_is_no_file_is_named(tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        unpacked(data, "here")
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        mapped(tmp_path / "x", "here")


def test_a_header_beyond_the_limit_is_not_read():
    with pytest.raises(ValueError, match="a header of 1,000,000,000,000 bytes; at most 100,000,000 are read"):
        read_header(io.BytesIO((10**12).to_bytes(8, "little")))
    with pytest.raises(ValueError, match="no JSON object"):
        read_header(io.BytesIO((2).to_bytes(8, "little") + json.dumps([]).encode()))
