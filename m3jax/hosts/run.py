"""A command's work on several processes: started together, ended together."""

import argparse
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import jax
from jax._src import distributed  # the client has no public name

from m3jax.console import ERROR, is_the_users, print_error
from m3jax.hosts.agree import agree, folders, versions
from m3jax.hosts.channel import Channel, Store
from m3jax.hosts.deaths import NativeOutput, end_in_one_line, takes_last_word
from m3jax.hosts.job import HostJob
from m3jax.hosts.start import connect
from m3jax.interrupts import INTERRUPTED

_GRACE_SECONDS = 2.0  # in which the others read why this process ends, before process 0 takes the store away


def is_first() -> bool:
    """True on process 0, which prints and writes for all, and in a run of one process."""
    return jax.process_index() == 0


def on_hosts(
    args: argparse.Namespace,
    prog: str,
    work: Callable[[Channel | None], None],
    paths: Mapping[str, str | Path | None] | None = None,
) -> None:
    """Do a command's work, on several processes where its arguments name them.

    An error of one process ends all: each prints a line, and exits with status 2. In that case this does not return.

    Args:
      args: of a parser that has `m3jax.cli.arguments.add_hosts`.
      prog: the program's name.
      work: takes the channel from process 0 to the others; None in a run of one process.
      paths: folders that have to be the same on every process, by what they are called.

    Raises:
      ValueError: processes that do not come, or that do not fit together.
    """
    job = HostJob.of(args)
    if job is None:
        work(None)
        return
    store: Store | None = None
    name_of = lambda process_id: f"process {process_id}" if store is None else store.name_of(process_id)
    end_in_one_line(prog, NativeOutput(), name_of, job.process_id)
    try:
        store = connect(job)
        store.introduce()
        _work_together(prog, store, work, args, paths or {})
    except SystemExit:
        raise
    except BaseException as error:
        _end_all(error, prog, args.verbose, job, store)


def _work_together(
    prog: str,
    store: Store,
    work: Callable[[Channel | None], None],
    args: argparse.Namespace,
    paths: Mapping[str, str | Path | None],
) -> None:
    """Do the work after all processes agree, and end when all have done theirs."""
    threading.Thread(target=_end_with_others, args=(store, prog), name="m3jax ends together", daemon=True).start()
    agree(store, "versions", versions())
    named = ("model", "draft", "against", "adapter")
    given = {name: getattr(args, name, None) for name in named}
    of_args = [(f"the folder of --{name}", path) for name, path in given.items() if path and Path(path).is_dir()]
    agree(store, "settings", _settings(args) | folders([*of_args, *paths.items()]))
    work(Channel(store, "calls"))
    distributed.global_state.client.wait_at_barrier("m3jax/done", 1000 * 3600 * 24)
    jax.distributed.shutdown()


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the arguments that decide which programs run, by option."""
    names = ("mesh", "dtype", "weights", "backend", "invariant", "draft_tokens", "steps", "save_every")
    return {f"--{name.replace('_', '-')}": str(getattr(args, name, None)) for name in names}


def _end_with_others(store: Store, prog: str) -> None:
    """Wait until another process says that it ends with an error, and end this one."""
    try:
        reason = store.get("failed").decode()
    except Exception:  # the run is over, and the store with it
        return
    number, _, message = reason.partition(" ")
    if int(number) != store.process_id and takes_last_word():
        with suppress(OSError):
            print(f"{prog}: error: {store.name_of(int(number))} ended: {message}", file=sys.stderr, flush=True)
        os._exit(ERROR)


def _end_all(error: BaseException, prog: str, verbose: bool, job: HostJob, store: Store | None) -> None:
    """Print an error, tell the others, and end this process."""
    if isinstance(error, jax.errors.JaxRuntimeError) and store is not None:
        # Where another process died in a collective, the line that names it follows within a heartbeat.
        time.sleep(job.heartbeat + 10)
    if not takes_last_word():
        time.sleep(_GRACE_SECONDS)  # another thread prints, and ends the process
    if isinstance(error, KeyboardInterrupt):
        status, reason = INTERRUPTED, "it was interrupted"
    elif isinstance(error, Exception) and is_the_users(error):
        status, reason = ERROR, str(error).splitlines()[0] if str(error) else type(error).__name__
        print_error(prog, error, verbose)
    else:
        status, reason = 1, f"{type(error).__name__}: {error}"
        traceback.print_exc()
    if store is not None:
        with suppress(jax.errors.JaxRuntimeError):  # another process was faster
            store.set("failed", f"{job.process_id} {reason}".encode())
        time.sleep(_GRACE_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Not `sys.exit`: on its way out JAX would wait for the others.
    os._exit(status)
