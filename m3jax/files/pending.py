"""The files of a folder that belong to its weights, also where a save was cut short.

A save ends in one rename, that of the weights (or of their index). A file beside them that has to change with them,
config.json say, lies ready by then under a pending name with the save's token, and the weights' metadata names that
token. So the rename makes the weights and all pending files current at once. Afterwards the pending files get their
plain names; until they have them, readers take them from where they are.
"""

import os
import re
from pathlib import Path

from m3jax.files.json_file import read_json
from m3jax.files.tensors import read_header
from m3jax.messages import printable

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SAVE_KEY = "m3jax_save"  # in the metadata of the index or of the single file: the token of the save that wrote it
PENDING = re.compile(r"\.m3jax-([0-9a-f]{16})-(.+)")
OUTSIDE = "a link to a file outside the folder; copy that file there"
MOST_INDEX_BYTES, MOST_INDEX_ENTRIES = 256 << 20, 4_000_000  # that of M3 in MXFP8 has 45,838 entries in some 6 MB


def pending_name(token: str, name: str) -> str:
    """The name under which a save of a token (16 hexadecimal digits) keeps a file until it is committed."""
    return f".m3jax-{token}-{name}"


def current_file(folder: Path, name: str) -> Path:
    """Return the path of a folder's file `name`: the plain one, or the pending one that a committed save left.

    Args:
      folder: a model folder.
      name: a file beside the weights, as config.json.

    Raises:
      ValueError: it is a link to a file outside the folder.
    """
    file = _committed_file(folder, name)
    if file.is_file() and leaves_folder(file):
        raise ValueError(f"{printable(str(file))}: {OUTSIDE}")
    return file


def leaves_folder(file: Path) -> bool:
    """True if a file is a link out of its folder, other than those of a hub cache.

    A folder from elsewhere could otherwise bring a private file of the reader's into what is shown or saved. The hub's
    cache keeps files under `blobs`, and `snapshots/<revision>` holds links to them.
    """
    folder, target = file.parent.resolve(), file.resolve()
    if target.parent == folder:
        return False
    is_snapshot = folder.parent.name == "snapshots"
    return not (is_snapshot and target.parent == (folder.parent.parent / "blobs").resolve())


def _committed_file(folder: Path, name: str) -> Path:
    pending = [match[1] for file in os.listdir(folder) if (match := PENDING.fullmatch(file)) and match[2] == name]
    if pending and (token := committed_save(folder)) in pending:
        file = folder / pending_name(token, name)
        if file.is_file():
            return file
    return folder / name


def committed_save(folder: Path) -> str | None:
    """The token in the metadata of a folder's weights; None where they have none, or cannot be read."""
    try:
        if (folder / INDEX_NAME).is_file():
            metadata = read_json(folder / INDEX_NAME, MOST_INDEX_BYTES, MOST_INDEX_ENTRIES).get("metadata")
        else:
            with open(folder / SINGLE_NAME, "rb") as file:
                metadata = read_header(file)[0].get("__metadata__")
        token = metadata.get(SAVE_KEY)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return token if isinstance(token, str) else None
