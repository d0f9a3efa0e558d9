"""One line where another process dies, in place of the native libraries' own end.

JAX cannot: its `missed_heartbeat_callback` ends in std::bad_cast, `jax_enable_recoverability` aborts with process 0.

JAX's coordination service notices a process that is silent for the time of a heartbeat, and process 0's end at once. It
then writes a page of text to the standard error and aborts; there is no call to Python. So while a run has several
processes, what native code writes goes into a file, from which all but that page is passed on, and its SIGABRT is met
by a handler that reads the page.
"""

import ctypes
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from time import sleep
from typing import BinaryIO

_LOST_PROCESSES = re.compile(rb"unhealthy \(stopped sending heartbeats\):\s*(\d+(?:[\s,]+\d+)*)")
_LOST_COORDINATOR = re.compile(rb"Failed to send RPC to coordination service|Socket closed|Connection reset")
_SAME_NUMBER = re.compile(rb"(\d+) unexpectedly tried to connect with a different incarnation")
_OF_SERVICE = re.compile(rb"coordination_service|JAX distributed service")
# A line for each rank, from its beginning and to its end: those of several ranks are written in pieces, side by side,
# and then the end of one may be a line by itself.
_OF_GLOO = re.compile(rb"\[Gloo\] Rank|connected peer ranks is|^\s*$")
_PASS_ON_SECONDS = 0.5
_last_word = threading.Lock()


def takes_last_word() -> bool:
    """True for the first who asks: of several reasons to end, each process prints one."""
    return _last_word.acquire(blocking=False)


class NativeOutput:
    """The file into which native code writes while Python's own streams stay where they were.

    Attributes:
      stderr: where errors are written for people.
    """

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._file: BinaryIO = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._passed = 0
        self._lock = threading.Lock()
        stdout, self.stderr = os.dup(1), os.dup(2)
        sys.stdout = os.fdopen(stdout, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        sys.stderr = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace", buffering=1)
        for descriptor in (1, 2):
            os.dup2(self._file.fileno(), descriptor)
        threading.Thread(target=self._pass_on_for_ever, name="m3jax native output", daemon=True).start()

    def text(self) -> bytes:
        """Return all that native code wrote."""
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0)

    def pass_on(self) -> None:
        """Write what came since the last time to the standard error, but for what the service and Gloo say.

        Empty lines are left out too: they may be Gloo's.
        """
        with self._lock:
            new = self.text()[self._passed :]
            new = new[: new.rfind(b"\n") + 1]  # whole lines: another thread may be in the middle of one
            self._passed += len(new)
            is_theirs = lambda line: _OF_SERVICE.search(line) or _OF_GLOO.search(line)
            lines = [line for line in new.splitlines(keepends=True) if not is_theirs(line)]
            with suppress(OSError):
                os.write(self.stderr, b"".join(lines))

    def _pass_on_for_ever(self) -> None:
        while True:
            sleep(_PASS_ON_SECONDS)
            # Once the service speaks of an error the page follows, which nobody needs.
            if not _OF_SERVICE.search(self.text()):
                self.pass_on()


def end_in_one_line(prog: str, output: NativeOutput, name_of: Callable[[int], str], own_id: int) -> None:
    """Have the process end with one line and status 2 where the coordination service aborts it.

    Another abort is what it was: what native code wrote is passed on, and the process ends as it would have.

    Args:
      prog: the program's name, which the line begins with.
      output: of native code.
      name_of: maps the number of a process to what a message calls it.
      own_id: number of this process.
    """
    libc = ctypes.CDLL(None)

    def at_abort(_: int) -> None:
        line = dead_line(output.text(), name_of, own_id)
        if line is None:
            os.write(output.stderr, output.text())
            return  # behind a handler that returns, abort() goes on
        with suppress(OSError):
            if takes_last_word():
                os.write(output.stderr, f"{prog}: error: {line}\n".encode())
        os._exit(2)

    # `signal.signal` would run Python's handler in the main thread, which may wait for the dead for ever.
    global _handler
    _handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(at_abort)
    libc.signal(int(signal.SIGABRT), _handler)


_handler: Callable[[int], None] | None = None  # ctypes does not keep it alive


def dead_line(text: bytes, name_of: Callable[[int], str], own_id: int) -> str | None:
    """Return the line that says who is gone; None where the coordination service says nothing of the kind.

    Args:
      text: what native code wrote.
      name_of, own_id: as in `end_in_one_line`.
    """
    if b"JAX distributed service" not in text:
        return None
    if found := _LOST_PROCESSES.findall(text):
        lost = sorted({int(number) for numbers in found for number in re.split(rb"[\s,]+", numbers.strip())})
        if own_id in lost:
            return "this process was silent for the time of a heartbeat, and the others have ended; start all again"
        return f"{', '.join(map(name_of, lost))} ended or is unreachable; this process ends too; start all again"
    if _LOST_COORDINATOR.search(text):
        return f"{name_of(0)}, which coordinates, ended or is unreachable; this process ends too; start all again"
    if twice := _SAME_NUMBER.search(text):
        number = twice[1].decode()
        return (
            f"--process-id {number} came twice, or was started again alone; start all, each with its own --process-id"
        )
    if b"DEADLINE_EXCEEDED" in text:
        return "not all processes of the run came in time; start all, each with its own --process-id"
    first = next((line for line in text.splitlines() if b"JAX distributed service" in line), b"")
    return first.decode(errors="replace")[-300:]
