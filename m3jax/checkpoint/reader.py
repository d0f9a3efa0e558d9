"""Safetensors folders: which tensors they hold, and views of their bytes."""

import json
import mmap
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# 8-bit floats are read as bytes: only their own decoder gives them a meaning.
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
}
FLOATS = ("BF16", "F16", "F32", "F64")


class CheckpointError(ValueError):
    """A checkpoint that does not fit; `problems` has a line for each tensor or file at fault."""

    def __init__(self, folder: str | Path, problems: list[str]):
        self.problems = tuple(problems)
        lines = "".join(f"\n  {problem}" for problem in problems)
        count = f"{len(problems)} problem" + ("" if len(problems) == 1 else "s")
        super().__init__(f"cannot load the checkpoint {folder}: {count}{lines}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: where it lies and what its header says."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the file."""
        return _DTYPES[self.dtype].itemsize

    def view(self) -> Shaped[np.ndarray, "..."]:
        """The tensor's values where they lie in the file, mapped: with the last view its memory is free again."""
        # A mapping begins at a page of the file, a tensor anywhere.
        page_start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        lead, size = self.offset - page_start, prod(self.shape)
        with open(self.file, "rb") as file:
            mapped = mmap.mmap(file.fileno(), lead + size * self.itemsize, offset=page_start, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, _DTYPES[self.dtype], size, lead).reshape(self.shape)


@dataclass
class Folder:
    """What the files of a folder hold.

    Attributes:
      tensors: by stored name.
      problems: a line for each file or tensor at fault.
      lost: names of tensors that stand in a file which cannot be read.
      all_lost: whether no file can be read, so that nothing can be said of single tensors.
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
        found = f", only {', '.join(others)}" if others else ""
        folder.problems.append(f"no weights: neither {INDEX_NAME} nor {SINGLE_NAME} is there{found}")
        folder.all_lost = True
    return folder


def _read_index(path: Path, folder: Folder) -> None:
    """Read an index and the headers of the shards that it names into `folder`."""
    try:
        weight_map = json.loads((path / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        names_of = {shard: set() for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            names_of[shard].add(name)
        files = {path / shard: names for shard, names in names_of.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        folder.problems.append(f"{INDEX_NAME}: no weight_map of tensor to file ({error!r})")
        folder.all_lost = True
        return
    for file, names in files.items():
        _read_shard(file, names, folder)
    if not files:
        folder.problems.append(f"{INDEX_NAME}: its weight_map is empty")
        folder.all_lost = True


def _read_shard(file: Path, names: set[str], folder: Folder) -> None:
    """Read a shard's header into `folder`, and compare it with the names that the index places there."""
    if not file.is_file():
        folder.problems.append(f"{file.name}: no such file; {INDEX_NAME} places {len(names)} tensors in it")
        folder.lost |= names
        return
    stored = _read_file(file, folder)
    if stored is None:
        folder.lost |= names
        return
    absent, extra = sorted(names - set(stored)), sorted(set(stored) - names)
    folder.problems += [f"{name}: {INDEX_NAME} places it in {file.name}, which does not hold it" for name in absent]
    folder.problems += [f"{name}: {file.name} holds it, but {INDEX_NAME} does not place it there" for name in extra]
    folder.lost.update(absent, extra)
    folder.tensors |= {name: stored[name] for name in names & set(stored)}


def _read_file(file: Path, folder: Folder) -> dict[str, StoredTensor] | None:
    """The tensors of a file by name; None, and a line in `folder.problems`, when its header cannot be trusted."""
    try:
        with safe_open(file, framework="numpy"):
            pass  # the library checks the header, and that the tensors fill the file exactly
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        folder.problems.append(f"{file.name}: truncated or damaged, {size} bytes ({error})")
        return None
    with open(file, "rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    return {
        name: StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), data_start + entry["data_offsets"][0])
        for name, entry in header.items()
    }
