"""Compilations of a run as lines on stderr: which program the compiler has, and how long it took."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the compiler has the program from then on
COMPILED = "/jax/core/compile/backend_compile_duration"
SAID_AFTER = 1.0  # seconds


@dataclass
class Compiles:
    """The compilations of a stretch of a run.

    Attributes:
      count: of programs, among them those of single operations.
      seconds: of all of them together; what is compiled side by side counts twice.
      slowest: seconds by the name of each program that took at least `SAID_AFTER`, the last one of a name.
    """

    count: int = 0
    seconds: float = 0.0
    slowest: dict[str, float] = field(default_factory=dict)


@contextmanager
def compiles_said() -> Iterator[Compiles]:
    """Say on stderr when a program takes a second to compile, and when it is compiled; count all of them.

    A run that is cut off has then said what it was compiling.
    """
    began, found, waiting = time.perf_counter(), Compiles(), {}

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def listen(event: str, seconds: float, fun_name: str = "a program", **_: Any) -> None:
        key = threading.get_ident(), fun_name
        if event == LOWERED:
            waiting[key] = threading.Timer(SAID_AFTER, say, [f"compiling {fun_name}, lowered in {seconds:.1f} s"])
            waiting[key].daemon = True
            waiting[key].start()
        elif event == COMPILED:
            if (timer := waiting.pop(key, None)) is not None:
                timer.cancel()
            found.count, found.seconds = found.count + 1, found.seconds + seconds
            if seconds >= SAID_AFTER:
                found.slowest[fun_name] = seconds
                say(f"compiled {fun_name} in {seconds:.1f} s")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        for timer in waiting.values():
            timer.cancel()
        say(f"{found.count} programs compiled in {found.seconds:.1f} s")
