"""Golden vectors as files: a safetensors file for each case, and manifest.json, which describes their tensors."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from m3jax.files import NewFile, read_json
from m3jax.files.tensors import dtype_code, unpacked
from m3jax.messages import printable, shown

MANIFEST = "manifest.json"
SCHEMA = 1
_MOST_FILE_BYTES = 1 << 30


def sha256(data: bytes) -> str:
    """Return the checksum that manifest.json holds for a file's contents."""
    return hashlib.sha256(data).hexdigest()


def write_new(path: Path, data: bytes) -> None:
    """Write a new file, and make its folder.

    Raises:
      OSError: it is there already, or cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NewFile(path) as file:
        file.write(data)


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as JSON, with a paragraph for each case and a line for each tensor."""
    lines = lambda x: ",\n".join(f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in x.items())

    def case_text(case):
        head = json.dumps({name: value for name, value in case.items() if name != "tensors"})
        return f'  {head[:-1]},\n  "tensors": {{\n{lines(case["tensors"])}}}}}'

    top = {name: value for name, value in manifest.items() if name not in ("cases", "tolerances")}
    cases = ",\n\n".join(map(case_text, manifest["cases"]))
    head = json.dumps(top)[1:-1]
    return f'{{{head},\n "tolerances": {{\n{lines(manifest["tolerances"])}}},\n "cases": [\n{cases}]}}\n'


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder of vectors.

    Raises:
      ValueError: there is none, it is of another schema version, or it lacks what every one has.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(f"{printable(str(folder))}: no {MANIFEST}; it is no folder of golden vectors")
    manifest = read_json(file)
    if manifest.get("schema") != SCHEMA:
        raise ValueError(f"{file}: schema version {shown(manifest.get('schema'))}, and {SCHEMA} can be read")
    cases = manifest.get("cases")
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"{file}: it names no cases; make the vectors again")
    needed = {"group": str, "name": str, "file": str, "sha256": str, "rule": dict, "tensors": dict}
    for index, case in enumerate(cases):
        for name, field_type in needed.items():
            if not isinstance(case, dict) or not isinstance(case.get(name), field_type):
                raise ValueError(f"{file}: case {index} has no {name}; make the vectors again")
        wrong = [name for name, entry in case["tensors"].items() if not isinstance(entry, dict) or "role" not in entry]
        if wrong:
            raise ValueError(f"{file}: tensor {shown(wrong[0])} of case {index} has no role; make the vectors again")
    if not isinstance(manifest.get("tolerances"), dict):
        raise ValueError(f"{file}: it has no tolerances; make the vectors again")
    return manifest


def read_case(folder: Path, case: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], str | None]:
    """Return the tensors of a case, and a fault if a file's checksum is not the one in the manifest.

    Raises:
      ValueError: no file, no safetensors file, a name that leads elsewhere, or tensors that are missing.
    """
    file = folder / case["file"]
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder / MANIFEST}: file {shown(case['file'])} leads out of the folder")
    if not file.is_file():
        raise ValueError(f"{file}: not there, and {MANIFEST} names it; copy or make the vectors again")
    if file.stat().st_size > _MOST_FILE_BYTES:
        raise ValueError(f"{file}: larger than {_MOST_FILE_BYTES:,} bytes")
    data = file.read_bytes()
    arrays = unpacked(data, str(file))
    missing = [name for name in case["tensors"] if name not in arrays]
    if missing:
        raise ValueError(f"{file}: no tensor {shown(missing[0])}, which {MANIFEST} names ({len(missing)} missing)")
    for name, entry in case["tensors"].items():
        stored = [dtype_code(arrays[name].dtype), list(arrays[name].shape)]
        if stored != [entry.get("dtype"), entry.get("shape")]:
            expected = f"{shown(entry.get('dtype'))[1:-1]} {shown(entry.get('shape'))}"
            raise ValueError(f"{file}: tensor {shown(name)} is {stored[0]} {stored[1]}, {MANIFEST} says {expected}")
    sums = {file: (data, case["sha256"])}
    if "model" in case:
        weights = folder / case["model"] / "model.safetensors"
        if not weights.resolve().is_relative_to(folder.resolve()) or not weights.is_file():
            raise ValueError(f"{weights}: not there, and {MANIFEST} names it; copy or make the vectors again")
        sums[weights] = weights.read_bytes(), case.get("model_sha256")
    changed = [file.name for file, (data, expected) in sums.items() if sha256(data) != expected]
    return arrays, f"the sha256 of {changed[0]} is not the one in {MANIFEST}: the file was changed" if changed else None
