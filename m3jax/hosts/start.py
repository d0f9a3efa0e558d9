"""The start of a process of a run: it waits for process 0, and is connected with all others."""

import os
import socket
import time

import jax
from jax._src import distributed  # the client has no public name

from m3jax.hosts.channel import Store
from m3jax.hosts.job import HostJob
from m3jax.progress import VARIABLE

_SHUTDOWN_SECONDS = 60


def connect(job: HostJob) -> Store:
    """Connect this process with the others, and return the store that they share.

    Args:
      job: the place of this process among them.

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


def _wait_for_coordinator(job: HostJob) -> None:
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


def _why_not_started(message: str, job: HostJob) -> str:
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
