"""The default text of an evaluation: the running Python's own standard library."""

import hashlib
import sysconfig
from pathlib import Path

# Installed packages are not the standard library; code-page tables and build settings are not
# prose or programs, and the latter hold paths of the machine.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "encodings", "__pycache__"})
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
_MIN_CHARACTERS = 64
_VALIDATION_SHARE = 25  # one file of so many


def python_corpus(split: str, root: str | Path | None = None) -> dict[str, str]:
    """Return the sources of one split of a Python standard library.

    Args:
        split: "train" or "validation"; a file belongs to one by a hash of its relative path,
            about 4% of the files to validation.
        root: the library's folder; that of the running Python by default.

    Returns:
        Text by path relative to the library's folder, sorted by path. Files that are not UTF-8
        (some test data is so by design) or shorter than 64 characters are left out.

    Raises:
        ValueError: an unknown split, or a Python without source files.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split {split!r} is unknown; give 'train' or 'validation'")
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    texts = {}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts, name = path.relative_to(root).parts, path.relative_to(root).as_posix()
        if not _SKIPPED_FOLDERS.isdisjoint(parts) or any(part.startswith(_SKIPPED_PREFIXES) for part in parts):
            continue
        if _split_of(name) != split:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= _MIN_CHARACTERS:
            texts[name] = text
    if not texts:
        raise ValueError(f"{root} holds no Python sources; use a Python that ships its library")
    return texts


def _split_of(name: str) -> str:
    """Return "train" or "validation" by a hash of a file's relative path, the same on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    is_held_out = int.from_bytes(digest[:8], "big") % _VALIDATION_SHARE == 0
    return "validation" if is_held_out else "train"
