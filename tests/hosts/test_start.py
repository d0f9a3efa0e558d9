"""Which process of which run this is, and how it finds the others."""

import os
import re
import socket
from argparse import Namespace

import jax
import pytest
from support.fake_store import FakeClient
from support.hosts_arguments import ONE, arguments

from m3jax.hosts import start
from m3jax.hosts.arguments import check_hosts
from m3jax.hosts.job import HostJob
from m3jax.hosts.start import connect

# Arguments


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--coordinator here --mesh data=2", "give HOST:PORT of process 0, or auto"),
        ("--coordinator h:0 --mesh data=2", "give HOST:PORT of process 0, or auto"),
        ("--coordinator h:65536 --mesh data=2", "give HOST:PORT of process 0, or auto"),
        (
            "--coordinator h:1 --mesh data=2 --num-processes 2 --process-id 1 --heartbeat 0",
            "--heartbeat 0: give at least 1",
        ),
        (
            "--coordinator h:1 --mesh data=2 --num-processes 2 --process-id 1 --start-timeout 0",
            "--start-timeout 0: give at least 1 second",
        ),
        ("--coordinator h:1 --mesh data=2 --num-processes 2", "needs --process-id too"),
        ("--coordinator h:1 --mesh data=2 --num-processes 2 --process-id 2", "its own number from 0 to N - 1"),
        ("--coordinator h:1 --mesh data=2 --num-processes 2 --process-id -1", "its own number from 0 to N - 1"),
        ("--coordinator h:1 --mesh data=2 --num-processes 0 --process-id 0", "its own number from 0 to N - 1"),
        ("--coordinator h:1 --num-processes 2 --process-id 1", "needs --mesh"),
        ("--process-id 1", "--process-id goes with --coordinator"),
        ("--coordinator auto --mesh data=2", "no job of SLURM, Open MPI, Kubernetes or Cloud TPU"),
    ],
)
def test_arguments_that_no_run_has(words, message, capsys):
    from m3jax.cli import main

    assert main(["--prompt-tokens", "1", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_edges_of_what_a_run_may_be_called():
    """Ports 1 and 65,535, one process alone, the last of several, timeouts of a second."""
    for words in (
        (*ONE, "--mesh", "data=1"),
        ("--coordinator", "[::1]:65535", "--num-processes", "4", "--process-id", "3", "--mesh", "data=4"),
        (*ONE, "--heartbeat", "1", "--start-timeout", "1", "--mesh", "data=1"),
    ):
        args = arguments(*words)
        check_hosts(args)
        numbers = args.num_processes, args.process_id
        assert HostJob.of(args) == HostJob(words[1], *numbers, None, args.heartbeat, args.start_timeout)
    check_hosts(arguments())
    check_hosts(arguments("--coordinator", "auto", "--mesh", "data=1"))
    assert HostJob.of(arguments()) is None


def test_slurm_names_the_job(monkeypatch):
    """One process a host has all of its devices; of several each has one."""
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "node[3-4]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
    args = Namespace(coordinator="auto", heartbeat=30, start_timeout=5)
    assert HostJob.of(args) == HostJob("node3:1234", 2, 1, None, 30, 5)
    for tasks in ("8(x2)", "1,2", "16"):  # also of a first host with one process and a second with two
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        assert HostJob.of(args) == HostJob("node3:1234", 2, 1, (0,), 30, 5)


# The start


@pytest.fixture
def started(monkeypatch) -> list[tuple[tuple, dict]]:
    """What JAX is asked to start with, each time; it then has a client."""
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: asked.append((args, kwargs)))
    monkeypatch.setattr(jax.config, "update", lambda *setting: asked.append(setting))
    monkeypatch.setattr(start.distributed.global_state, "client", FakeClient())
    monkeypatch.setenv("M3JAX_PROGRESS", "1")
    return asked


@pytest.fixture
def listening():
    """A socket on which something listens, and its address."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("process_id", "waited"), [(0, 0.0), (1, 100.0), (1, 900.0)])
def test_jax_is_started_as_the_job_says(started, listening, monkeypatch, process_id, waited):
    """What waiting for the coordinator took is taken off the time to start; process 0 alone tells what it does."""
    server, address = listening
    if process_id == 0:
        server.close()
    clock = iter([50.0, *[50.0] * (2 * (process_id > 0)), 50.0 + waited])
    monkeypatch.setattr(start.time, "monotonic", lambda: next(clock))
    store = connect(HostJob(address, 3, process_id, (4, 5), heartbeat=7, start_timeout=600))
    store.set("a", b"b")
    assert start.distributed.global_state.client.values == {"m3jax/a": b"b"}
    assert (store.process_id, store.num_processes) == (process_id, 3)
    assert os.environ["M3JAX_PROGRESS"] == ("0" if process_id else "1")
    expected = dict(
        local_device_ids=(4, 5),
        cluster_detection_method="deactivate",
        initialization_timeout={0.0: 600, 100.0: 500, 900.0: 1}[waited],
        heartbeat_timeout_seconds=7,
        shutdown_timeout_seconds=60,
    )
    signals = "jax_enable_preemption_service", False  # SIGTERM ends the process
    assert started == [signals, ((address, 3, process_id), expected)]


def test_a_coordinator_that_never_comes_and_a_port_that_is_taken(started, listening):
    server, address = listening
    line = f"--coordinator {address}: process 0 cannot listen there: Address already in use"
    with pytest.raises(ValueError, match=re.escape(line)):
        connect(HostJob(address, 2, 0))
    server.close()
    line = f"process 1 of 2: no coordinator at {address} in 1 s (Connection refused)"
    with pytest.raises(ValueError, match=re.escape(line)):
        connect(HostJob(address, 2, 1, start_timeout=1))


def test_a_port_is_free_again_as_soon_as_who_listened_has_gone(started, listening):
    """Though a connection that it ended is remembered for a minute, which would refuse the port to a plain bind."""
    server, address = listening
    port = int(address.split(":")[1])
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = server.accept()
        accepted.close()  # the first to close is the one that remembers
        assert client.recv(1) == b""
    server.close()
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("", port))
    connect(HostJob(address, 2, 0))


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("ALREADY_EXISTS: 1", "another process of this run has the same number; give each its own, 0 to 2"),
        ("ABORTED: task 1", "--process-id 1: another process of this run has the same number"),
        ("1 tried to connect with a different incarnation", "another process of this run has the same number"),
        ("DEADLINE_EXCEEDED: barrier", "not all of 3 processes came to ADDRESS in 20 s; start all, each with its own"),
        ("INTERNAL: it broke\nat a line of C", "the processes could not start together: INTERNAL: it broke"),
    ],
)
def test_why_processes_could_not_start(started, listening, monkeypatch, said, line):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(ValueError, match=re.escape(line.replace("ADDRESS", listening[1]))) as caught:
        connect(HostJob(listening[1], 3, 1, start_timeout=20))
    assert "\n" not in str(caught.value)
