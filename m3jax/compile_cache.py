"""The cache of compiled programs on disk, which saves the next process from compiling them."""

import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "M3JAX_CACHE_DIR"
MAX_BYTES = 1 << 30  # what was used longest ago goes first
_JAX_COMPLAINT = r"Error (reading|writing) persistent compilation cache entry"
_LOCK_SECONDS = 2.0
_is_declined = False  # inside of `compile_cache(wanted=False)`


def cache_folder() -> Path | None:
    """The folder of what is kept between runs.

    Returns:
      That of the variable M3JAX_CACHE_DIR; else m3jax in the user's cache folder (XDG_CACHE_HOME, ~/.cache). None
      where the variable is empty, or the user has no home.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return Path(base) / "m3jax" if os.path.isabs(base) else None


def why_not_kept() -> str | None:
    """Return why nothing can be kept in the cache folder, which is made if need be; None if it can or is not wanted."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"


@contextmanager
def compile_cache(wanted: bool = True) -> Iterator[None]:
    """Keep what is compiled inside in the cache folder, and take from it what was compiled before.

    jax's own settings win: where JAX_COMPILATION_CACHE_DIR is set, or the cache is switched off, nothing is changed.
    Otherwise they are as before afterwards, so that other programs of the process do not get into this folder. Several
    processes can share it: jax reads and writes under a lock.

    Args:
      wanted: False changes nothing at all, and what asks for the cache inside does not get it either.
    """
    import jax

    global _is_declined
    if not wanted:
        declined_before, _is_declined = _is_declined, True
        try:
            yield
        finally:
            _is_declined = declined_before
        return
    folder = None if _is_declined else cache_folder()
    is_users_own = jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache
    if is_users_own or folder is None or why_not_kept() is not None:
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache

    folder /= "compiled"
    _remove_unfinished(folder)
    settings = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0}
    if jax.config.jax_compilation_cache_max_size == -1:
        settings["jax_compilation_cache_max_size"] = MAX_BYTES
    before = {name: getattr(jax.config, name) for name in settings}
    # jax keeps the first folder that it used until it is told to forget it.
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        with _damaged_entries_removed(folder):
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def _remove_unfinished(folder: Path) -> None:
    """Remove entries that a process died in writing: they lack the "-atime" file that jax writes after an entry."""
    import filelock

    folder.mkdir(mode=0o700, exist_ok=True)
    with suppress(OSError, filelock.Timeout), filelock.FileLock(folder / ".lockfile", timeout=_LOCK_SECONDS):
        finished = {path.name.removesuffix("-atime") for path in folder.glob("*-atime")}
        for path in folder.glob("*-cache"):
            if path.name.removesuffix("-cache") not in finished:
                path.unlink(missing_ok=True)


@contextmanager
def _damaged_entries_removed(folder: Path) -> Iterator[None]:
    """Remove the entries that jax warns it cannot read: it would compile them at each start and never replace them."""
    show_others = warnings.showwarning

    def show(message: Warning | str, *place: Any) -> None:
        if re.match(_JAX_COMPLAINT, str(message)):
            module_name = str(message).split("'")[1]
            for path in folder.glob(f"{module_name}-*"):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        else:
            show_others(message, *place)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_JAX_COMPLAINT)
        warnings.showwarning = show
        yield
