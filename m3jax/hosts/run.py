"""A command's work on several processes: started together, ended together."""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import jax
from jax._src import distributed  # the client has no public name

from m3jax.console import ERROR, is_the_users, print_error
from m3jax.hosts.agree import agree, folders, versions
from m3jax.hosts.channel import Channel, Store
from m3jax.hosts.deaths import NativeOutput, end_in_one_line, print_traceback, takes_last_word
from m3jax.hosts.job import Job
from m3jax.interrupts import INTERRUPTED
from m3jax.progress import VARIABLE

_SHUTDOWN_SECONDS = 60
_GRACE_SECONDS = 2.0  # in which the others read why this process ends, before process 0 takes the store away
_store: Store | None = None


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
    job = Job.of(args)
    if job is None:
        work(None)
        return
    output = NativeOutput()
    try:
        store = _start(job, prog, output)
        _work_together(prog, store, work, args, paths or {})
    except SystemExit:
        raise
    except BaseException as error:
        _end_all(error, prog, args.verbose, job)


def _start(job: Job, prog: str, output: NativeOutput) -> Store:
    """Connect this process with the others.

    Raises:
      ValueError: the coordinator's address is taken, or it or another process does not come in time, or two processes
        have the same number.
    """
    if job.process_id:
        os.environ[VARIABLE] = "0"  # process 0 says what all wait for
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    began = time.monotonic()
    if job.process_id == 0:
        _check_free(job.coordinator)
    else:
        _wait_for_coordinator(job)
    end_in_one_line(prog, output, lambda i: f"process {i}" if _store is None else _store.name_of(i), job.process_id)
    try:
        jax.distributed.initialize(
            job.coordinator,
            job.num_processes,
            job.process_id,
            local_device_ids=job.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(job.start_timeout - (time.monotonic() - began))),
            heartbeat_timeout_seconds=job.heartbeat,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(_why_not_started(str(error), job)) from error
    return Store(distributed.global_state.client, job.process_id, job.num_processes)


def _check_free(address: str) -> None:
    """Raise ValueError if another program listens at the coordinator's port of this host."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(f"--coordinator {address}: process 0 cannot listen there: {error.strerror}") from None


def _wait_for_coordinator(job: Job) -> None:
    """Return when something listens at the coordinator's address.

    Raises:
      ValueError: nothing did in time.
    """
    host, _, port = job.coordinator.rpartition(":")
    until, reason = time.monotonic() + job.start_timeout, ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
    raise ValueError(
        f"process {job.process_id} of {job.num_processes}: no coordinator at {job.coordinator} in "
        f"{job.start_timeout} s ({reason}): start process 0 there, or name its address"
    )


def _why_not_started(message: str, job: Job) -> str:
    """Return a line for an error of JAX's start."""
    if "ALREADY_EXISTS" in message or "ABORTED" in message or "different incarnation" in message:
        return (
            f"--process-id {job.process_id}: another process of this run has the same number; give each its own, "
            f"0 to {job.num_processes - 1}"
        )
    if "DEADLINE_EXCEEDED" in message:
        return (
            f"not all of {job.num_processes} processes came to {job.coordinator} in {job.start_timeout} s; start all, "
            "each with its own --process-id"
        )
    return f"the processes could not start together: {message.splitlines()[0]}"


def _work_together(
    prog: str,
    store: Store,
    work: Callable[[Channel | None], None],
    args: argparse.Namespace,
    paths: Mapping[str, str | Path | None],
) -> None:
    """Do the work after all processes agree, and end when all have done theirs."""
    global _store
    store.introduce()
    _store = store
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
        _say_last(f"{prog}: error: {store.name_of(int(number))} ended: {message}")
        os._exit(ERROR)


def _end_all(error: BaseException, prog: str, verbose: bool, job: Job) -> None:
    """Print an error, tell the others, and end this process."""
    if isinstance(error, jax.errors.JaxRuntimeError) and _store is not None:
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
        print_traceback()
    if _store is not None:
        with suppress(jax.errors.JaxRuntimeError):  # another process was faster
            _store.set("failed", f"{job.process_id} {reason}".encode())
        time.sleep(_GRACE_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Not `sys.exit`: on its way out JAX would wait for the others.
    os._exit(status)


def _say_last(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
