"""Dumps for the tests of the diff tool: the golden values of the tiny model, and files with what was made of them."""

import re
from pathlib import Path

import numpy as np

from m3jax.files.tensors import packed, unpacked

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
TINY = VECTORS / "model" / "tiny"


def golden(*, only: str = "") -> dict[str, np.ndarray]:
    """The golden values of the tiny model, as float32; `only` those whose names match."""
    file = VECTORS / "model" / "prompts.safetensors"
    arrays = unpacked(file.read_bytes(), str(file))
    kept = {name: x for name, x in arrays.items() if not name.endswith(("last_kept", "first_dropped"))}
    kept = {name: x for name, x in kept.items() if re.search(only, name) or name == "tokens"}
    return {name: x.astype(np.float32) if x.dtype.kind == "f" else x.astype(np.int32) for name, x in kept.items()}


def written(path: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write a safetensors file, and its folder; returns its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
    return str(path)
