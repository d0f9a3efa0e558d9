"""The part of a program whose devices exchange by XLA's collectives alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_by_xla: ContextVar[bool] = ContextVar("by_xla", default=False)


@contextmanager
def exchanged_by_xla() -> Iterator[None]:
    """Have whatever is traced inside exchange by XLA's collectives, as where others of these may be under way."""
    token = _by_xla.set(True)
    try:
        yield
    finally:
        _by_xla.reset(token)


def is_exchanged_by_xla() -> bool:
    """Return True inside of `exchanged_by_xla`."""
    return _by_xla.get()
