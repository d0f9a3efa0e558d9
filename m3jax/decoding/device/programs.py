"""The device's programs, compiled with the options that suit a platform and a mode."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from m3jax.decoding.device.compiler_options import OPTIONS, Mode
from m3jax.decoding.device.media import READ_MEDIA_ARGUMENTS, read_media
from m3jax.decoding.device.rounds import ROUNDS_ARGUMENTS, decode_in_rounds
from m3jax.decoding.device.step import DECODE_ARGUMENTS, PREFILL_ARGUMENTS, decode, prefill

# Each jitted function, and how jax takes its arguments: it is compiled with other options too.
_PROGRAMS = {
    "prefill": (prefill, PREFILL_ARGUMENTS),
    "decode": (decode, DECODE_ARGUMENTS),
    "decode_in_rounds": (decode_in_rounds, ROUNDS_ARGUMENTS),
    "read_media": (read_media, READ_MEDIA_ARGUMENTS),
}


PROGRAMS = tuple(_PROGRAMS)


def program(name: str, platform: str, mode: Mode) -> Callable[..., Any]:
    """Return one of the device's functions, jitted with its compiler options.

    Modes and platforms with equal options share one jitted function, and with it what jax has compiled.

    Args:
      name: of `PROGRAMS`.
      platform: "cpu", "gpu" or "tpu".
      mode: "invariant", "narrow" or "wide".
    """
    options = OPTIONS.get((name, platform, mode), {})
    return _with_options(name, tuple(options.items()))


@cache
def _with_options(name: str, options: tuple[tuple[str, bool | int | str], ...]) -> Callable[..., Any]:
    """Return a program with these options; without any it is the function that the package exports."""
    jitted, arguments = _PROGRAMS[name]
    return jax.jit(jitted.__wrapped__, **arguments, compiler_options=dict(options)) if options else jitted
