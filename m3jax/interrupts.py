"""The effect of keys on a command line at work; this module is imported first, and imports at the top nothing slow.

Python runs a signal's handler in the main thread between two bytecodes, so a compiler that holds that thread for half a
minute holds the handler too; and what a handler raises can wait as long for threads that compile. A thread of its own
hears of each Ctrl-C at once, and says so where it has no effect soon.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

INTERRUPTED = 130
WAITING = "m3jax: Ctrl-C: stops when the step under way is done; a second one ends it at once"
_PATIENCE = 0.5  # seconds in which a Ctrl-C has its effect, or the listening thread answers it
_SIGINT, _OBEYED = bytes([signal.SIGINT]), b"\0"  # what the listening thread reads; no signal has the number 0
_pipe: int | None = None  # to the listening thread; None before there is one
_echoing: list | None = None  # the terminal's attributes before `no_echo`; None outside of it


def end_at_interrupts() -> None:
    """Let Ctrl-C end the process at once with status 130 from now on, unless it is ignored, as under nohup.

    For the time of imports: an import can swallow an exception raised inside it, and there is nothing to lose yet.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise_once):
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt and the second end the process; needs `end_at_interrupts` before.

    Where the first has no effect in half a second, a line on stderr says that the second will. A call says too that the
    one before had its effect.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise_once)
        if _pipe is None:
            _start_listening()
        _say_obeyed()


class NotedInterrupts:
    """A context manager in which the first Ctrl-C only sets `noted`, and the second ends the process.

    The caller reads `noted` between two steps of work. On leaving, Ctrl-C does what it did before. Nothing is changed
    unless `end_at_interrupts` or `raise_interrupts` is in force.
    """

    def __enter__(self) -> "NotedInterrupts":
        self._noted = False
        self._before = signal.getsignal(signal.SIGINT)
        if self._before in (_end, _raise_once):
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before in (_end, _raise_once):
            signal.signal(signal.SIGINT, self._before)

    @property
    def noted(self) -> bool:
        """True once Ctrl-C was pressed; whoever reads that is expected to stop."""
        if self._noted:
            _say_obeyed()
        return self._noted

    def _note(self, *_: object) -> None:
        self._noted = True
        signal.signal(signal.SIGINT, _end)


@contextmanager
def no_echo() -> Iterator[None]:
    """Keep what is typed off the screen, where a line moves; the next prompt reads it. Ctrl-C keeps its effect."""
    global _echoing
    try:
        # Who changes a terminal from the background is stopped.
        is_ours = _echoing is None and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # a terminal that does not control this process
        is_ours = False
    if not is_ours:
        yield
        return
    import termios

    attributes = termios.tcgetattr(0)
    quiet = list(attributes)
    quiet[3] &= ~termios.ECHO
    _echoing = attributes
    termios.tcsetattr(0, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        _echo_again()


def _echo_again() -> None:
    """Give the terminal the attributes that it had before `no_echo`."""
    global _echoing
    if _echoing is not None:
        import termios

        attributes, _echoing = _echoing, None
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSADRAIN, attributes)


def _end(*_: object) -> None:
    _echo_again()
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # shows the cursor again, which a moving line hides
    os._exit(INTERRUPTED)


def _raise_once(*_: object) -> None:
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


def _say_obeyed() -> None:
    """Tell the listening thread that a Ctrl-C had its effect."""
    if _pipe is not None:
        with suppress(BlockingIOError):  # the thread has more to read than it needs
            os.write(_pipe, _OBEYED)


def _start_listening() -> None:
    """Start the thread that answers a Ctrl-C without effect."""
    import threading

    global _pipe
    listening, _pipe = os.pipe()
    os.set_blocking(_pipe, False)
    # The interpreter's own C handler writes the signal's number there at once, whatever the main thread does.
    signal.set_wakeup_fd(_pipe, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(listening,), name="m3jax interrupts", daemon=True).start()


def _listen(listening: int) -> None:
    """Answer each Ctrl-C that has no effect in time: the first by a line, the second by the end of the process."""
    import select

    while True:
        if os.read(listening, 1) != _SIGINT:
            continue
        if not select.select([listening], [], [], _PATIENCE)[0]:
            with suppress(OSError):  # nobody reads stderr any more
                print(WAITING, file=sys.stderr, flush=True)
        if os.read(listening, 1) == _SIGINT:
            _end()
