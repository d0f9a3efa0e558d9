"""The effect of Ctrl-C on a command line; this module is imported first, and imports only `os` and `signal`."""

import os
import signal

INTERRUPTED = 130


def end_at_interrupts() -> None:
    """Let Ctrl-C end the process at once with status 130 from now on, unless it is ignored, as under nohup.

    For the time of imports: an import can swallow an exception raised inside it, and there is nothing to lose yet.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise_once):
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt and the second end the process; needs `end_at_interrupts` before."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise_once)


class NotedInterrupts:
    """A context manager in which the first Ctrl-C only sets `noted`, and the second ends the process.

    The caller reads `noted` between two steps of work. On leaving, Ctrl-C does what it did before. Nothing is changed
    unless `end_at_interrupts` or `raise_interrupts` is in force.

    Attributes:
      noted: True once Ctrl-C was pressed.
    """

    def __enter__(self) -> "NotedInterrupts":
        self.noted = False
        self._before = signal.getsignal(signal.SIGINT)
        if self._before in (_end, _raise_once):
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before in (_end, _raise_once):
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        self.noted = True
        signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # shows the cursor again, which a moving line hides
    os._exit(INTERRUPTED)


def _raise_once(*_: object) -> None:
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt
