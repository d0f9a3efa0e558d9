"""Reading of safetensors folders: the tensors that they hold, and views of their bytes."""

import mmap
import os
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from m3jax.files import INDEX_NAME, MOST_INDEX_BYTES, MOST_INDEX_ENTRIES, OUTSIDE, SINGLE_NAME, leaves_folder, read_json
from m3jax.files.tensors import read_header
from m3jax.messages import listed, note_problems, printable, shortened, shown

_AGAIN = "download it again"

# 8-bit floats are read as bytes: only their own decoder gives them a meaning.
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
INTEGERS = {"I32", "I64"}
FLOATS = ("BF16", "F16", "F32", "F64")


class CheckpointError(ValueError):
    """A checkpoint that does not fit: the message has the first 8 problems and how many more, the notes have all.

    Attributes:
      problems: a line for each tensor or file at fault, as it was found.
    """

    def __init__(self, folder: str | Path, problems: list[str]):
        self.problems = tuple(problems)
        count = f"{len(problems)} problem" + ("" if len(problems) == 1 else "s")
        shown_folder = shortened(printable(str(folder)), 160)
        super().__init__(f"cannot load the checkpoint {shown_folder}: {count}\n  " + listed(problems, "\n  "))
        note_problems(self, problems)


# The identity of a file when its header was read: device, inode, size and time of the last change.
_Identity = tuple[int, int, int, int]


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: where it lies and what its header says."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    identity: _Identity

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the file."""
        return _DTYPES[self.dtype].itemsize

    def view(self) -> Shaped[np.ndarray, "..."]:
        """Return the tensor's values as a memory map of the file; the map is released with the last view of it.

        Raises:
          CheckpointError: another file has this name by now, or other bytes.
        """
        # A mapping must begin at a page of the file; a tensor may begin anywhere.
        page_start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        lead, size = self.offset - page_start, prod(self.shape)
        with open(self.file, "rb") as file:
            if _identity(os.fstat(file.fileno())) != self.identity:
                raise CheckpointError(self.file.parent, [f"{self.file.name}: replaced while it was read; load again"])
            mapped = mmap.mmap(file.fileno(), lead + size * self.itemsize, offset=page_start, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, _DTYPES[self.dtype], size, lead).reshape(self.shape)


@dataclass
class Folder:
    """The tensors in the files of a folder, and the faults found there.

    Attributes:
      tensors: by stored name.
      problems: a line for each file or tensor at fault.
      lost: names of tensors that stand in a file which cannot be read.
      all_lost: True if no file can be read, so that nothing can be said of single tensors.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    all_lost: bool = False


def read_folder(path: Path) -> Folder:
    """Read the headers of a hub folder: an index and its shards, or a single file.

    Args:
      path: the folder.

    Returns:
      What it holds. Nothing is raised for a bad file: `problems` names each.
    """
    folder = Folder()
    if (path / INDEX_NAME).is_file():
        _read_index(path, folder)
    elif (path / SINGLE_NAME).is_file():
        stored = _read_file(path / SINGLE_NAME, folder)
        folder.all_lost = stored is None
        folder.tensors = stored or {}
    else:
        others = sorted(file.name for file in path.glob("*.safetensors"))
        others_found = f", only {', '.join(others)}" if others else ""
        folder.problems.append(f"no weights: neither {INDEX_NAME} nor {SINGLE_NAME} is there{others_found}")
        folder.all_lost = True
    return folder


def version(path: Path) -> tuple[_Identity | None, ...]:
    """Return the identity of a folder's index and single file: one of them changes when a save replaces the weights."""
    files = (path / INDEX_NAME, path / SINGLE_NAME)
    return tuple(_identity(os.stat(file)) if file.is_file() else None for file in files)


def _read_index(path: Path, folder: Folder) -> None:
    """Read an index and the headers of the shards that it names into `folder`."""
    names_of: dict[str, set[str]] = {}
    if leaves_folder(path / INDEX_NAME):
        folder.problems.append(f"{INDEX_NAME}: {OUTSIDE}")
        folder.all_lost = True
        return
    try:
        index = read_json(path / INDEX_NAME, MOST_INDEX_BYTES, MOST_INDEX_ENTRIES, "an index")
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError(f"found {shown(weight_map)}; {_AGAIN}")
        for name, shard in weight_map.items():
            names_of.setdefault(shard, set()).add(name)
    except ValueError as error:
        folder.problems.append(f"{INDEX_NAME}: no weight_map of tensor to file ({error})")
        folder.all_lost = True
        return
    for shard in sorted(names_of):
        _read_shard(path, shard, names_of[shard], folder)
    if not names_of:
        folder.problems.append(f"{INDEX_NAME}: its weight_map is empty")
        folder.all_lost = True


def _read_shard(path: Path, shard: str, names: set[str], folder: Folder) -> None:
    """Read a shard's header into `folder`, and compare it with the names that the index places there."""
    folder.lost |= names
    file = path / shard
    if fault := _wrong_name(shard):
        folder.problems.append(f"{INDEX_NAME}: places {len(names)} tensors in {shown(shard)}: {fault}")
    elif not file.is_file():
        folder.problems.append(f"{shard}: no such file; {INDEX_NAME} places {len(names)} tensors in it; {_AGAIN}")
    elif (stored := _read_file(file, folder)) is not None:
        absent, extra = sorted(names - set(stored)), sorted(set(stored) - names)
        folder.problems += [f"{name}: {INDEX_NAME} places it in {shard}, which does not hold it" for name in absent]
        folder.problems += [f"{name}: {shard} holds it, but {INDEX_NAME} does not place it there" for name in extra]
        folder.lost |= set(extra)
        folder.lost -= names & set(stored)
        folder.tensors |= {name: stored[name] for name in names & set(stored)}


def _wrong_name(shard: str) -> str | None:
    """Return why a text in an index cannot be the name of a shard in its folder; None if it can."""
    if not shard.isprintable() or any(separator in shard for separator in "/\\:") or not 0 < len(shard) <= 200:
        return "a shard is the plain name of a file in the folder of the index"
    return None if shard.endswith(".safetensors") else "a shard's name ends in .safetensors"


def _read_file(file: Path, folder: Folder) -> dict[str, StoredTensor] | None:
    """Return a file's tensors by name; None, and a line in `folder.problems`, if its header cannot be trusted."""
    if leaves_folder(file):
        folder.problems.append(f"{file.name}: {OUTSIDE}")
        return None
    try:
        with safe_open(file, framework="numpy"):
            pass  # the library checks the header, and that the tensors fill the file exactly
        with open(file, "rb") as stream:
            identity = _identity(os.fstat(stream.fileno()))
            header, data_start = read_header(stream)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        size = file.stat().st_size
        folder.problems.append(f"{file.name}: truncated or damaged, {size} bytes ({error}); {_AGAIN}")
        return None
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            name, file, entry["dtype"], tuple(entry["shape"]), data_start + entry["data_offsets"][0], identity
        )
        for name, entry in header.items()
    }
