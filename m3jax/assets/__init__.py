"""Paths of the files that come with the package: a tiny model, a draft for it, and a picture that it can read."""

from importlib.resources import files
from pathlib import Path


def embedded_path() -> Path:
    """The folder of the embedded checkpoint, in the hub's layout (docs/tiny.md)."""
    return Path(str(files("m3jax") / "assets" / "tiny"))


def sample_picture_path() -> Path:
    """A PNG file of 112 x 112 pixels: a green circle, a blue star and a red square on grey."""
    return Path(str(files("m3jax") / "assets" / "sample.png"))


def embedded_draft_path() -> Path:
    """The folder of the embedded checkpoint's draft (docs/speculative.md)."""
    return Path(str(files("m3jax") / "assets" / "tiny_draft"))
