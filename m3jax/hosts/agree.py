"""The facts that all processes of a run must have alike: versions, folders, settings.

Not `multihost_utils.assert_equal`: it runs a program of all devices before versions agree, and names no process.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import jax

from m3jax.hosts.channel import Store
from m3jax.messages import shown
from m3jax.version import VERSION


def versions() -> dict[str, str]:
    """Return the versions that decide which programs a process compiles."""
    return {"m3jax": VERSION, "jax": jax.__version__, "jaxlib": version("jaxlib")}


def fingerprint(folder: str | Path) -> str:
    """Return a hash that tells folders of weights apart: their JSON files, and the size and header of each tensor file.

    The weights themselves are not read: a folder of other numbers in the same shapes, sizes and index is not told apart
    unless its config.json or index says so.

    Args:
      folder: in the hub's layout.

    Raises:
      OSError: a file that cannot be read.
    """
    found = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".json":
            found.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        elif path.suffix == ".safetensors":
            with open(path, "rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                header = file.read(min(header_size, 1 << 26))
            found.update(f"{path.name} {path.stat().st_size} {hashlib.sha256(header).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def agree(store: Store, subject: str, facts: Mapping[str, str]) -> None:
    """Return when every process has the same facts.

    Args:
      store: of the run.
      subject: names this comparison; each name is used once, by all processes.
      facts: by name; every process has the same names.

    Raises:
      ValueError: two processes differ; both are named, on every process.
    """
    of_process = list(map(json.loads, store.gather(f"facts/{subject}", json.dumps(facts).encode())))
    for name, expected in of_process[0].items():
        for process_id, found in enumerate(of_process):
            if found[name] != expected:
                raise ValueError(
                    f"{name} is {shown(expected)} on {store.name_of(0)} and {shown(found[name])} on "
                    f"{store.name_of(process_id)}: every process needs the same"
                )


def folders(named: Iterable[tuple[str, str | Path | None]]) -> dict[str, str]:
    """Return facts for `agree`: the fingerprints of folders, by what they are called; None has none.

    Args:
      named: (what it is called, the folder).
    """
    return {name: "none" if folder is None else fingerprint(folder) for name, folder in named}
