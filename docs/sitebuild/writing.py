"""Pages that are made from something else, as files where Sphinx finds them."""

from pathlib import Path


def write_folder(folder: Path, pages: dict[str, str]) -> None:
    """Makes a folder hold these files and no others: names and texts."""
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name not in pages:
            file.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
