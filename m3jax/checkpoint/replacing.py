"""Atomic replacement of a folder's checkpoint: at every instant a reader finds all of the old one or all of the new.

A checkpoint is several files, which no single rename can replace. So:

1. Weights are written under names that nothing has, and synced. Files beside them (config.json) that would change wait
   under pending names (`m3jax.files.pending`). Until here readers find the old checkpoint.
2. One step commits. Where the new weights have an index it is the rename of the index; readers look for that first.
   Where they are a single file it is its rename, or, where the folder had an index, the removal of that index.
3. Pending files get their plain names, and old weights are removed. Readers know where the pending files are meanwhile.

A crash before step 2 leaves files that no reader looks at, a crash in step 3 leaves superfluous files; the next save
tidies up after either.
"""

import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from m3jax.files import (
    INDEX_NAME,
    MOST_INDEX_BYTES,
    MOST_INDEX_ENTRIES,
    PENDING,
    SAVE_KEY,
    SINGLE_NAME,
    NewFile,
    committed_save,
    pending_name,
    read_json,
    sync_folder,
)
from m3jax.files.tensors import Layout, write_tensors

try:
    import fcntl
except ImportError:  # Windows: two saves into one folder at once are the user's own care there
    fcntl = None

_OWN_SHARD = re.compile(r"model-[0-9a-f]{16}-\d{5}-of-\d{5}\.safetensors")
_HUB_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOSYS}


class Replacement:
    """A checkpoint that is being written to a folder; as a context manager it is committed at the end of its block.

    After an error in the block its files are removed, and the folder's checkpoint is the old one.

    Args:
      folder: made if it is not there.
      num_files: of weights; several get an index.
      beside: the contents of the files beside the weights, by name.

    Attributes:
      names: of the files of weights, in order.

    Raises:
      ValueError: another save into this folder is running, or a folder has a name that a file needs.
      OSError: names the path at fault.
    """

    def __init__(self, folder: Path, num_files: int, beside: Mapping[str, bytes]):
        is_new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._beside = folder, beside
        self._lock = _lock(folder)
        self._started: list[Path] = []
        self._is_committed = False
        self._token = secrets.token_hex(8)
        try:
            if is_new:
                sync_folder(folder.absolute().parent)
            _tidy(folder)
            self._old_weights = _weights(folder)
            self._changed = [name for name, data in beside.items() if not _holds(folder / name, data)]
            if folders := [name for name in self._changed if (folder / name).is_dir()]:
                raise ValueError(f"{folder / folders[0]} is a folder, where a file has to be: remove it")
            # With neither old weights nor a file to replace, no reader could mix old and new: no pending names.
            is_taken = bool(self._old_weights) or any(os.path.lexists(folder / name) for name in self._changed)
            self._is_pending = is_taken and bool(self._changed)
            self.names = self._free_names(num_files)
        except BaseException:
            self._unlock()
            raise

    def _free_names(self, num_files: int) -> list[str]:
        """Return names for the files of weights: the hub's, or names with the save's token if one of those is taken."""
        if num_files == 1:
            return [SINGLE_NAME]
        numbers = [f"{i:05}-of-{num_files:05}.safetensors" for i in range(1, num_files + 1)]
        is_taken = any(os.path.lexists(self._folder / f"model-{number}") for number in numbers)
        return [f"model-{self._token}-{number}" if is_taken else f"model-{number}" for number in numbers]

    @property
    def _is_single(self) -> bool:
        return self.names == [SINGLE_NAME]

    def write_weights(
        self,
        name: str,
        layout: Layout,
        values: Iterable[Shaped[np.ndarray, "..."]],
        metadata: Mapping[str, str],
    ) -> None:
        """Write one safetensors file.

        Args:
          name: one of `names`.
          layout: dtype and shape of each tensor by name, in the order of the file.
          values: the tensors in that order, of that dtype and shape; one at a time is asked for and held.
          metadata: of the header.
        """
        if self._is_single and self._is_pending:
            metadata = {**metadata, SAVE_KEY: self._token}
        with self._new_file(pending_name(self._token, name) if self._is_single else name) as file:
            write_tensors(file, layout, values, metadata)

    def write_index(self, weight_map: Mapping[str, str], total_size: int) -> None:
        """Write the index of several files.

        Args:
          weight_map: the file of each tensor.
          total_size: of all tensors, in bytes.
        """
        metadata: dict[str, Any] = {"total_size": total_size}
        if self._is_pending:
            metadata[SAVE_KEY] = self._token
        self._write(pending_name(self._token, INDEX_NAME), as_json({"metadata": metadata, "weight_map": weight_map}))

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            try:
                if error_type is None:
                    self._commit()
                    self._finish()
            finally:
                for path in () if self._is_committed else self._started:
                    path.unlink(missing_ok=True)
        finally:
            self._unlock()

    def _commit(self) -> None:
        """Make all new files current by one rename, or one removal."""
        folder, new_name = self._folder, SINGLE_NAME if self._is_single else INDEX_NAME
        for name in self._changed:
            self._write(pending_name(self._token, name) if self._is_pending else name, self._beside[name])
        sync_folder(folder)
        rename = partial(os.replace, folder / pending_name(self._token, new_name), folder / new_name)
        if self._is_single and INDEX_NAME in self._old_weights:  # readers use the index as long as it is there
            rename()
            self._started.append(folder / new_name)
            sync_folder(folder)
            self._commit_by(partial(os.unlink, folder / INDEX_NAME))
        else:
            self._commit_by(rename)
        sync_folder(folder)

    def _commit_by(self, step: Callable[[], None]) -> None:
        """Take the step that commits; if an interrupt leaves open whether it was taken, no file is removed."""
        self._is_committed = True
        try:
            step()
        except OSError:
            self._is_committed = False
            raise

    def _finish(self) -> None:
        """Give pending files their names, then remove the old weights."""
        folder = self._folder
        if self._is_pending:
            for name in self._changed:
                os.replace(folder / pending_name(self._token, name), folder / name)
            sync_folder(folder)
        current = {*self.names, SINGLE_NAME if self._is_single else INDEX_NAME}
        old = sorted(name for name in self._old_weights - current if os.path.lexists(folder / name))
        for name in old:
            os.unlink(folder / name)
        if old:
            sync_folder(folder)

    def _new_file(self, name: str) -> NewFile:
        file = NewFile(self._folder / name)
        self._started.append(file.path)
        return file

    def _write(self, name: str, data: bytes) -> None:
        with self._new_file(name) as file:
            file.write(data)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def as_json(data: Mapping[str, Any]) -> bytes:
    """Return the contents of a JSON file; keys are sorted, so equal data give equal bytes."""
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode("utf-8")


def _lock(folder: Path) -> int | None:
    """Lock a folder for one save until the descriptor is closed or the process ends; None where there are no locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_LOCKS:
            return None
        if isinstance(error, BlockingIOError):
            raise ValueError(f"another save into {folder} is running: wait for it, or give another folder") from None
        raise OSError(error.errno, error.strerror, str(folder)) from error
    return descriptor


def _tidy(folder: Path) -> None:
    """Finish or undo a save that was cut short: rename its pending files if it was committed, else remove its files."""
    token, named = committed_save(folder), _weights(folder)
    for name in sorted(os.listdir(folder)):
        match = PENDING.fullmatch(name)
        if match and match[1] == token:  # of the save that was committed
            os.replace(folder / name, folder / match[2])
        elif (match and (folder / name).is_file()) or (_OWN_SHARD.fullmatch(name) and name not in named):
            os.unlink(folder / name)


def _weights(folder: Path) -> set[str]:
    """Return the names of a folder's files of weights: those with the hub's names, and those that its index lists."""
    is_folder = lambda name: (folder / name).is_dir() and not (folder / name).is_symlink()
    weight_files = {name for name in os.listdir(folder) if _HUB_WEIGHTS.fullmatch(name) and not is_folder(name)}
    if (folder / INDEX_NAME).is_file():
        weight_files.add(INDEX_NAME)
        try:
            listed = read_json(folder / INDEX_NAME, MOST_INDEX_BYTES, MOST_INDEX_ENTRIES).get("weight_map")
        except ValueError:
            listed = None  # a broken index names no weights
        names = listed.values() if isinstance(listed, dict) else ()
        in_folder = (name for name in names if isinstance(name, str) and name == os.path.basename(name))
        weight_files |= {name for name in in_folder if name.endswith(".safetensors") and not is_folder(name)}
    return weight_files


def _holds(file: Path, data: bytes) -> bool:
    """True if a file is there with these contents."""
    return file.is_file() and file.stat().st_size == len(data) and file.read_bytes() == data
