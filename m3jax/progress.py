"""Progress on stderr: a moving line on a terminal, ever fewer lines elsewhere.

Rich draws the moving line; in a file it prints nothing before the end, in a notebook nothing without ipywidgets.
"""

import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter

from m3jax.compile_cache import cache_folder
from m3jax.interrupts import no_echo

VARIABLE = "M3JAX_PROGRESS"  # 0 is silence
# Seconds after which a piece of work gets its first line where lines do not move; each next one after twice as long.
PAUSE = 2.0
_NOTEBOOK_PAUSE = 1.0  # between changes of the line in a notebook
_REDRAWN = 4  # times a second, on a terminal
_KEPT_DURATIONS = 512
_log = logging.getLogger("m3jax")


class Activity:
    """The work that a user waits for, as the line on stderr names it.

    Attributes:
      text: what is done now.
      began: when it began, in seconds of `time.perf_counter`.
      last_time: how many seconds it took last time, where that is known.
    """

    def __init__(self, about: object = None):
        self.text, self.began, self.last_time = "", perf_counter(), None
        self._digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        self._durations: dict[str, float] | None = None
        self._new_durations: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Set the text of the progress line."""
        self.text, self.last_time = text, None
        _log.debug("%s", text)

    @contextmanager
    def timed(self, text: str) -> Iterator[None]:
        """Name the work inside and measure it; the line then also says how long it took last time, if that is known."""
        if self._durations is None:
            self._durations = _read_durations()
        self.began, self.text = perf_counter(), text
        self.last_time = self._durations.get(f"{self._digest} {text}")
        _log.info("%s", self)
        yield
        seconds = perf_counter() - self.began
        self._new_durations[f"{self._digest} {text}"] = round(seconds, 2)
        _log.info("%s: done in %.1f s", text, seconds)

    def keep_durations(self) -> None:
        """Write down for next time how long everything took."""
        if self._new_durations:
            _write_durations(self._new_durations)

    def __str__(self) -> str:
        seconds = perf_counter() - self.began
        last_time = "" if (self.last_time or 0) < 1 else f"; last time {self.last_time:.0f} s"
        return f"{self.text}{f', {seconds:.0f} s' if seconds >= 1 else ''}{last_time}"


_shown: Activity | None = None


@contextmanager
def activity(shown: bool = True, about: object = None) -> Iterator[Activity]:
    """Show what is being waited for while something is done.

    On a terminal, and after 2 seconds in a notebook, that is a line on stderr which moves and goes away. Elsewhere a
    line is printed when a piece of work has taken 2, 4, 8, 16 seconds and so on. The logger "m3jax" gets at level INFO
    what was timed. Nothing is printed where M3JAX_PROGRESS is 0. Inside another activity the outer one's line is used.

    Args:
      shown: False prints nothing either.
      about: what durations depend on besides the text, by its `repr`: a model's configuration, say.
    """
    global _shown
    current = Activity(about)
    if not shown or _shown is not None or os.environ.get(VARIABLE) == "0" or sys.stderr is None:
        yield current if _shown is None else _shown
        return
    _shown = current
    try:
        with _moving_line(current) if _is_terminal() else _lines(current):
            yield current
    finally:
        _shown = None
        current.keep_durations()


def _is_terminal() -> bool:
    """Return True if stderr is a terminal on which a line can be written over."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def _moving_line(current: Activity) -> Iterator[None]:
    """Show the activity on one line of the terminal, redrawn until the end and then removed."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots")

    def line() -> Spinner | str:
        spinner.update(text=Text(str(current), no_wrap=True, overflow="ellipsis"))
        return spinner if current.text else ""

    # What is printed meanwhile goes above the line; stdout too, where it is on the terminal and not in a file.
    # `rich.status` leaves no choice: it writes to the terminal what is printed into a file.
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    options = dict(transient=True, refresh_per_second=_REDRAWN, redirect_stdout=on_terminal)
    with no_echo(), Live(console=Console(stderr=True), get_renderable=line, **options):
        yield


@contextmanager
def _lines(current: Activity) -> Iterator[None]:
    """Print lines on stderr from a thread of their own; in a notebook, overwrite one line."""
    is_over = threading.Event()
    in_notebook = type(sys.stderr).__module__.startswith("ipykernel.")

    def print_lines(stream) -> None:
        began, due, width = current.began, PAUSE, 0
        with suppress(OSError, ValueError):  # nobody reads stderr any more
            # Often enough that a new piece of work gets its own first line in time.
            while not is_over.wait(PAUSE / 4):
                if current.began != began:
                    began, due = current.began, PAUSE
                if perf_counter() - began < due:
                    continue
                text = f"m3jax: {current}" if current.text else ""
                if in_notebook:
                    print(f"\r{text:{width}}", end="", file=stream, flush=True)
                    due, width = due + _NOTEBOOK_PAUSE, len(text)
                elif text:
                    print(text, file=stream, flush=True)
                    due *= 2
            if width:
                print(f"\r{'':{width}}\r", end="", file=stream, flush=True)

    thread = threading.Thread(target=print_lines, args=(sys.stderr,), name="m3jax progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _durations_path() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "durations.json"


def _read_durations() -> dict[str, float]:
    """Return the seconds of each kind of work; empty if the file is missing or damaged."""
    try:
        durations = json.loads(_durations_path().read_text(encoding="utf-8"))
        return {str(text): float(seconds) for text, seconds in durations.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _write_durations(new: dict[str, float]) -> None:
    """Add durations to the file, the latest last, in one step: a reader sees the old file or the new one."""
    path = _durations_path()
    if path is None:
        return
    before = _read_durations()
    durations = {text: seconds for text, seconds in before.items() if text not in new} | new
    latest = dict(list(durations.items())[-_KEPT_DURATIONS:])
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            json.dump(latest, file, indent=0)
        os.replace(file.name, path)
