"""The effect of Ctrl-C on a command line; this module is imported first, and imports at the top nothing slow.

Python runs a signal's handler in the main thread between two bytecodes, so a compiler that holds that thread for half a
minute holds the handler too. A thread of its own hears of each Ctrl-C at once, and answers where the handler does not.
"""

import os
import signal
import sys
from contextlib import suppress

INTERRUPTED = 130
WAITING = "m3jax: Ctrl-C: stops when the step under way is done; a second one ends it at once"
_PATIENCE = 0.3  # seconds that the main thread has for the handler before the listening thread answers
_SIGINT, _HANDLED = bytes([signal.SIGINT]), b"\0"  # what the listening thread reads; no signal has the number 0
_handled_pipe: int | None = None  # where the handlers say that they ran; None before anybody listens


def end_at_interrupts() -> None:
    """Let Ctrl-C end the process at once with status 130 from now on, unless it is ignored, as under nohup.

    For the time of imports: an import can swallow an exception raised inside it, and there is nothing to lose yet.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise_once):
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt and the second end the process; needs `end_at_interrupts` before.

    Where the main thread is busy outside Python, the first is answered by a line on stderr.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise_once)
        if _handled_pipe is None:
            _start_listening()


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
        _take_first()


def _end(*_: object) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # shows the cursor again, which a moving line hides
    os._exit(INTERRUPTED)


def _raise_once(*_: object) -> None:
    _take_first()
    raise KeyboardInterrupt


def _take_first() -> None:
    """Let the next Ctrl-C end the process, and tell the listening thread that this one was handled."""
    signal.signal(signal.SIGINT, _end)
    if _handled_pipe is not None:
        os.write(_handled_pipe, _HANDLED)


def _start_listening() -> None:
    """Start the thread that answers a Ctrl-C while the main thread runs no Python."""
    import threading

    global _handled_pipe
    listening, _handled_pipe = os.pipe()
    os.set_blocking(_handled_pipe, False)
    # The interpreter's own C handler writes the signal's number there at once, whatever the main thread does.
    signal.set_wakeup_fd(_handled_pipe, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(listening,), name="m3jax interrupts", daemon=True).start()


def _listen(listening: int) -> None:
    """Answer each Ctrl-C that no handler takes in time: the first by a line, the second by the end of the process."""
    import select

    while True:
        if os.read(listening, 1) != _SIGINT:
            continue
        if not select.select([listening], [], [], _PATIENCE)[0]:
            if signal.getsignal(signal.SIGINT) is _end:
                _end()
            with suppress(OSError):  # nobody reads stderr any more
                print(WAITING, file=sys.stderr, flush=True)
        if os.read(listening, 1) == _SIGINT:
            _end()
