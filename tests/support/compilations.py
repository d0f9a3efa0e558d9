"""Counts compilations: nothing may be compiled anew after warm-up."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Counts what XLA compiles, and what jax only traces anew."""
    seen: list[str] = []

    def listener(event: str, *_args, **_kwargs):
        if event.endswith(("backend_compile_duration", "jaxpr_trace_duration")):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
