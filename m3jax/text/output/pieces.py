"""Cutting of text into the events of a stream, of 5 to 200 characters each."""

import json
import re
from collections.abc import Sequence
from typing import Any

from m3jax.text.output.events import Event

FEWEST, MOST = 5, 200
_GRAIN = 32  # characters that stay in one event; in JSON each may be an escape of six
# At most 32 characters of JSON, in which an escape counts as one and stays whole.
_JSON_GRAIN = re.compile(r"(?:[^\\]|\\u[0-9a-f]{4}|\\.){1,32}", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def as_json(value: Any) -> str:
    """Return compact JSON that UTF-8 can encode: lone surrogates are escaped."""
    text = _ENCODER.encode(value)
    return text if text.isascii() else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def grains(text: str) -> Sequence[str]:
    """Cut plain text into parts of 32 characters."""
    return [text[start : start + _GRAIN] for start in range(0, len(text), _GRAIN)]


def json_grains(text: str) -> Sequence[str]:
    """Cut JSON, or the inside of a string of it, into parts of at most 192 characters that part no escape."""
    return [text] if len(text) <= _GRAIN else _JSON_GRAIN.findall(text)


class Pieces:
    """A buffer that collects text of one kind after another, and cuts it into events of 5 to 200 characters.

    The last few characters wait for more, so that the last event of a kind is no smaller; only a text that has less
    than 5 in all is. A number, which is one grain however long, may exceed 200.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind, self._index = "", None
        self._grains: list[str] = []
        self._size = 0

    def add(self, kind: str, index: int | None, parts: Sequence[str]) -> None:
        """Append text of a kind, in grains; text of another kind ends what was before it."""
        if kind != self._kind or index != self._index:
            self.end()
            self._kind, self._index = kind, index
        self._grains += parts
        self._size += sum(map(len, parts))

    def mark(self, event: Event) -> None:
        """Append an event that is no text."""
        self.end()
        self._events.append(event)

    def end(self) -> None:
        """End the text of the current kind: make events of what waits."""
        self._cut(self._grains)
        self._grains, self._size = [], 0

    def taken(self) -> list[Event]:
        """Return the events that are ready and were not taken before."""
        # The last 5 characters or more wait: with what follows, or alone at the end, they are an event of their own.
        if self._size >= 2 * FEWEST:
            waiting = 0
            cut = len(self._grains)
            while waiting < FEWEST:
                cut -= 1
                waiting += len(self._grains[cut])
            if self._size - waiting >= FEWEST:
                self._cut(self._grains[:cut])
                self._grains, self._size = self._grains[cut:], waiting
        events, self._events = self._events, []
        return events

    def _cut(self, parts: Sequence[str]) -> None:
        """Make events of grains, each as large as fits; a small rest goes with the one before it."""
        pieces = [""]
        for part in parts:
            # Room for 4 characters is left: a rest that is too small for an event goes with the last one.
            if pieces[-1] and len(pieces[-1]) + len(part) > MOST - FEWEST + 1:
                pieces.append("")
            pieces[-1] += part
        if len(pieces) > 1 and len(pieces[-1]) < FEWEST:
            rest = pieces.pop()
            pieces[-1] += rest
        self._events += [Event(self._kind, piece, self._index) for piece in pieces if piece]
