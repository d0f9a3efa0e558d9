"""Dumps as files: named arrays in safetensors or npz, in one file or a folder, or in one file for each rank."""

import re
import zipfile
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from m3jax.files.tensors import mapped
from m3jax.messages import printable, shown

_SUFFIXES = (".safetensors", ".npz")
_BFLOAT16_OF_NPZ = np.dtype("V2")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|tp)[-_]?(\d{1,4})(?!\d)", re.IGNORECASE)


class Stored(NamedTuple):
    """One array of a dump.

    Attributes:
      file: the file that holds it.
      ranks: the array as each rank of a sharded model has it; a single one where the model is not sharded.
    """

    file: Path
    ranks: list[Shaped[np.ndarray, "..."]]


def read_dump(source: Path) -> dict[str, Stored]:
    """Return all arrays of a dump by name; large files are mapped, not read.

    Args:
      source: a safetensors or npz file, or a folder of them. Files called rank0, rank1, ... (or tp0, ...) hold the
        ranks' parts of the arrays of one name.

    Raises:
      ValueError: no such file, none in the folder, one that is damaged or of another kind, no array in any, or a name
        that stands in several files which are not called by ranks.
      OSError: a file that cannot be read.
    """
    where = printable(str(source))
    if source.is_dir():
        files = sorted(path for path in source.iterdir() if path.suffix in _SUFFIXES and path.is_file())
        if not files:
            raise ValueError(f"{where}: an empty dump, no .safetensors and no .npz file in this folder")
    elif source.is_file():
        files = [source]
    else:
        raise ValueError(f"{where}: there is no such file or folder")
    pieces: dict[str, list[tuple[Path, np.ndarray]]] = {}
    for file in files:
        for name, array in _arrays(file):
            pieces.setdefault(name, []).append((file, array))
    if not pieces:
        raise ValueError(f"{where}: an empty dump, without a single array")
    return {name: Stored(parts[0][0], _by_rank(name, parts)) for name, parts in pieces.items()}


def _by_rank(name: str, pieces: list[tuple[Path, np.ndarray]]) -> list[np.ndarray]:
    """Return the arrays of one name in the order of the ranks that their files' names give."""
    if len(pieces) == 1:
        return [pieces[0][1]]
    ranks = {}
    for file, array in pieces:
        match = _RANK.search(file.stem)
        if match is None or int(match[1]) in ranks:
            files = " and ".join(printable(file.name) for file, _ in pieces[:2])
            raise ValueError(f"{files} both have {shown(name)}; call the files of ranks rank0, rank1, ...")
        ranks[int(match[1])] = array
    if sorted(ranks) != [*range(len(ranks))]:
        folder = printable(str(pieces[0][0].parent))
        raise ValueError(f"{folder}: {shown(name)} is there for ranks {sorted(ranks)}, not for every one from 0 on")
    return [array for _, array in sorted(ranks.items())]


def _arrays(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the array of each entry of one file; every array is of real numbers."""
    where = printable(str(file))
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"{where}: neither a .safetensors nor a .npz file; docs/compare.md says how to dump")
    if file.suffix == ".npz":
        yield from _of_npz(file, where)
        return
    yield from mapped(file, where).items()


def _of_npz(file: Path, where: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of an npz file; numpy stores bfloat16 as V2, two raw bytes, and these become bfloat16 again."""
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as stream:
                    _check_header(name, stream, member.file_size)
                    stream.seek(0)
                    array = np.lib.format.read_array(stream, allow_pickle=False)
                yield name, array.view(ml_dtypes.bfloat16) if array.dtype == _BFLOAT16_OF_NPZ else array
    except MemoryError:
        raise ValueError(f"{where}: too large for the memory here; dump as .safetensors, which is mapped") from None
    except (ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{where}: no npz file of arrays, or a damaged one ({shown(str(error))}); dump again"
        ) from None


def _check_header(name: str, stream: BufferedIOBase, size: int) -> None:
    """Raise ValueError if the header of an array in an npz file does not fit the file, before numpy makes the array.

    Args:
      name: of the array.
      stream: at the header.
      size: of header and array in bytes, as the archive stores it.
    """
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:  # numpy writes later ones for arrays of records alone
        raise ValueError(f"{shown(name)} has a header of version {version}, which no real numbers need")
    shape, _, dtype = _HEADERS[version](stream)
    if dtype.kind not in "biuf" and dtype != _BFLOAT16_OF_NPZ:
        raise ValueError(f"{shown(name)} has dtype {dtype}, which are no real numbers")
    claimed, stored = prod(shape) * dtype.itemsize, size - stream.tell()
    if claimed > stored:
        raise ValueError(f"{shown(name)}: {claimed} bytes claimed, {max(stored, 0)} there")
