"""The metrics of a training run, as lines of JSON."""

import json
from collections.abc import Mapping
from pathlib import Path


class MetricLines:
    """A file of JSON lines, one a step or round; a run that goes on writes over the lines of those that it repeats.

    Args:
      path: of the file; None writes nothing.
      keep: the last step whose line stays.
    """

    def __init__(self, path: str | Path | None, keep: int):
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in lines if _is_before(line, keep)]
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, line: Mapping[str, int | float]) -> None:
        """Append a line, at once on disk."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(line)) + "\n")


def _is_before(line: str, keep: int) -> bool:
    try:
        return json.loads(line)["step"] <= keep
    except (ValueError, KeyError, TypeError):
        return False  # half a line, of a process that was killed
