"""Compile programs ahead of their first call, several at once, without running any."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any


def compile_all(calls: Iterable[partial[Any]], meanwhile: Callable[[], None] | None = None) -> None:
    """Compile the jitted functions of some calls for the arguments that these have; nothing runs, nothing is donated.

    Tracing and lowering hold Python's lock and are done here, one after the other. Compiling leaves it alone: threads
    do that, so that a program is compiled while the next one is traced. jax keeps what was lowered and compiled, so
    that the call itself finds it.

    Args:
      calls: of functions from `jax.jit`, with all their arguments; each is traced when its turn comes.
      meanwhile: runs here while the threads compile, if there is something to run.

    Raises:
      Exception: what tracing or compiling raised, the first in the order of the calls; what has not begun then is not
        compiled.
    """
    with ThreadPoolExecutor(_threads(), "m3jax compile") as pool:
        try:
            with _uncollected():
                compiling = [
                    pool.submit(call.func.trace(*call.args, **call.keywords).lower().compile) for call in calls
                ]
            if meanwhile is not None:
                meanwhile()
            for program in compiling:
                program.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's cyclic garbage collector off: tracing makes half a million objects that stay, and few cycles.

    Looking through them again and again takes a third of the time of tracing. Several threads may be in here at once:
    the collector is on again when the first of them leaves.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _threads() -> int:
    """Return the number of programs compiled at once: XLA uses two cores for most of the time that it compiles one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores // 2)
