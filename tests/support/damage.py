"""Hypothesis strategies of damaged files, and the judge of what reading one raises."""

import faulthandler
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

from m3jax.messages import MOST_CHARACTERS

CPU_SECONDS, SILENT_SECONDS = 5, 120
DEEP = "deep"  # stands for a value that json.dumps could not write
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**9, 100_000, 10**30, 10**400, 0.5, -0.0, 1e-320,
    1e308, 1e39, float("nan"), float("inf"), float("-inf"), "", "x", "x" * 10_000, "\x1b[31mred", "\u202e", "\ud800",
    "\0", "../../etc/passwd", [], {}, [[]], [0], [1] * 70, [0] * 200_000, ["x"], {"a": 1}, {"type": "x"}, DEEP,
)  # fmt: skip
KEYS = ("", "x" * 5000, "\x1b]0;title\x07", "\ud800", "unknown")


def sometimes(percent: int) -> st.SearchStrategy[bool]:
    """A strategy that is True in about that percentage of draws."""
    return st.integers(0, 99).map(lambda number: number >= 100 - percent)


@st.composite
def damaged_json(draw: st.DrawFn, original: Any) -> bytes:
    """The text of a JSON value with one to three values or keys changed, or with damage to its bytes."""
    data = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        data = _changed(draw, data)
    text = json.dumps(data).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    if draw(sometimes(5)) and text.startswith("{") and len(text) > 2:
        text = text[:-1] + "," + text[1:]  # every key twice
    damaged = text.encode("utf-8", "surrogatepass")
    return draw(damaged_bytes(damaged)) if draw(sometimes(15)) else damaged


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with one piece cut off, overwritten, doubled or put in front."""
    place = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(("head", "tail", "overwritten", "doubled", "prefixed", "empty")))
    if kind == "overwritten":
        return data[:place] + draw(st.binary(min_size=1, max_size=64)) + data[place + 4 :]
    if kind == "prefixed":
        return draw(st.sampled_from((b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" " * 100, b"["))) + data
    return {"head": data[:place], "tail": data[place:], "doubled": data[:place] + data[place // 2 :], "empty": b""}[
        kind
    ]


def _changed(draw: st.DrawFn, data: Any) -> Any:
    """Change the value or the key at one place; return a replacement for the whole where there is no such place."""
    if not isinstance(data, dict | list) or not data or draw(sometimes(2)):
        return draw(st.sampled_from(VALUES))
    keys = lambda container: st.sampled_from(list(container) if isinstance(container, dict) else range(len(container)))
    container, key = data, draw(keys(data))
    while isinstance(container[key], dict | list) and container[key] and draw(sometimes(70)):
        container = container[key]
        key = draw(keys(container))
    kind = draw(st.sampled_from(("gone", "renamed", "scaled", "scaled", *("replaced",) * 4)))
    if kind == "gone":
        del container[key]
    elif kind == "renamed" and isinstance(container, dict):
        container[draw(st.sampled_from(KEYS))] = container.pop(key)
    elif kind == "scaled" and isinstance(container[key], int):
        factor, offset = draw(st.sampled_from((-1, 2, 3, 1000, 10**6))), draw(st.integers(-1, 1))
        container[key] = container[key] * factor + offset
    else:
        container[key] = draw(st.sampled_from(VALUES))
    return data


def outcome(read: Callable[[], object]) -> str:
    """Return "loaded" or "refused", and fail unless an error of `read` is one that a user can act on.

    It is a ValueError or an OSError of printable text within the package's limit, raised in `CPU_SECONDS`.
    """
    try:
        with _limited():
            read()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a library's panic is no Exception
        text = str(error)
        if isinstance(error, TimeoutError | UnicodeError) or not isinstance(error, ValueError | OSError):
            raise AssertionError(f"{type(error).__name__}: {text[:300]!r}") from error
        is_printable = text.replace("\n", "").isprintable()
        assert text and len(text) <= MOST_CHARACTERS and is_printable, f"{len(text)} characters: {text[:300]!r}"
        return "refused"
    return "loaded"


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError after `CPU_SECONDS`; end a process that stays in a library for `SILENT_SECONDS`."""

    def too_slow(*_: object) -> None:
        raise TimeoutError(f"more than {CPU_SECONDS} s of work")

    before = signal.signal(signal.SIGPROF, too_slow)
    # Of the processor: another load is not the file's fault. A library's own loop sees no signal.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    faulthandler.dump_traceback_later(SILENT_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
