"""Paths of the files that come with the package: a tiny model, and a draft for it."""

from importlib.resources import files
from pathlib import Path


def embedded_path() -> Path:
    """The folder of the embedded checkpoint, in the hub's layout (docs/tiny.md)."""
    return Path(str(files("m3jax") / "assets" / "tiny"))


def embedded_draft_path() -> Path:
    """The folder of the embedded checkpoint's draft (docs/speculative.md)."""
    return Path(str(files("m3jax") / "assets" / "tiny_draft"))
