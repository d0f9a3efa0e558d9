"""The settings of a command line's process that its arguments ask for."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from m3jax.compile_cache import compile_cache, why_not_kept
from m3jax.console import say


@contextmanager
def settings(args: argparse.Namespace, prog: str) -> Iterator[None]:
    """Apply the process's settings that the arguments ask for: the cache of compiled programs, and float64.

    Args:
      args: with no_compile_cache, and dtype: a name, or a list of them.
      prog: the command's name, which a note begins with.
    """
    if not args.no_compile_cache and (reason := why_not_kept()):
        say(f"{prog}: note: compiled programs are not kept: {reason}")
    dtypes = [args.dtype] if isinstance(args.dtype, str) else args.dtype
    with compile_cache(not args.no_compile_cache), jax.enable_x64("float64" in dtypes or jax.config.jax_enable_x64):
        yield
