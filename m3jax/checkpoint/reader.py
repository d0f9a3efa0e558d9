"""Safetensors folders: which tensors they hold, and views of their bytes."""

import json
import mmap
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
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
        """Bytes an element in the file."""
        return _DTYPES[self.dtype].itemsize

    def view(self) -> np.ndarray:
        """Map the tensor's bytes; the mapping goes with the last view, so that resident memory does."""
        start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with open(self.file, "rb") as file:
            pages = mmap.mmap(
                file.fileno(),
                self.offset - start + prod(self.shape) * self.itemsize,
                offset=start,
                access=mmap.ACCESS_READ,
            )
        flat = np.frombuffer(pages, _DTYPES[self.dtype], prod(self.shape), self.offset - start)
        return flat.reshape(self.shape)


@dataclass
class Folder:
    """The tensors of a folder by stored name, what is wrong, and names that are lost with a file."""

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
        held = _read_file(path / SINGLE_NAME, folder)
        folder.all_lost = held is None
        folder.tensors = held or {}
    else:
        others = sorted(file.name for file in path.glob("*.safetensors"))
        found = f", only {', '.join(others)}" if others else ""
        folder.problems.append(f"no weights: neither {INDEX_NAME} nor {SINGLE_NAME} is there{found}")
        folder.all_lost = True
    return folder


def _read_index(path: Path, folder: Folder) -> None:
    try:
        weight_map = json.loads((path / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        shards = {shard: set() for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            shards[shard].add(name)
        files = {path / shard: names for shard, names in shards.items()}
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
    if not file.is_file():
        folder.problems.append(f"{file.name}: no such file; {INDEX_NAME} places {len(names)} tensors in it")
        folder.lost |= names
        return
    held = _read_file(file, folder)
    if held is None:
        folder.lost |= names
        return
    absent, extra = sorted(names - set(held)), sorted(set(held) - names)
    folder.problems += [f"{name}: {INDEX_NAME} places it in {file.name}, which does not hold it" for name in absent]
    folder.problems += [f"{name}: {file.name} holds it, but {INDEX_NAME} does not place it there" for name in extra]
    folder.lost.update(absent, extra)
    folder.tensors |= {name: held[name] for name in names & set(held)}


def _read_file(file: Path, folder: Folder) -> dict[str, StoredTensor] | None:
    """The tensors of a file; None, and a problem, when its header cannot be trusted."""
    try:
        with safe_open(file, framework="numpy"):
            pass  # the library checks the header, and that the tensors fill the file exactly
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        folder.problems.append(f"{file.name}: truncated or damaged, {size} bytes ({error})")
        return None
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            name,
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
