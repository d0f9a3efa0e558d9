"""What Ctrl-C does to a command line; it is imported before all else, and imports next to nothing."""

import os
import signal

INTERRUPTED = 130


def end_at_interrupts() -> None:
    """From now on Ctrl-C ends the process with status 130 there and then, unless it is ignored, as under nohup.

    So it is during imports: an exception in the middle of one can be swallowed by it, and there is nothing to lose yet.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise_once):
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """From now on the first Ctrl-C raises KeyboardInterrupt, the second ends the process; after `end_at_interrupts`."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise_once)


class NotedInterrupts:
    """Inside, the first Ctrl-C is only noted, for who looks between two steps of work; the second ends the process.

    A context manager; after `end_at_interrupts`. Afterwards Ctrl-C does what it did before.

    Attributes:
      noted: whether there was one.
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
