"""Two processes as one run, over gloo: the tokens of one process, each host's own bytes, and an end in one line."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from support import host_process
from support.checkpoint_folders import random_tensors, tiny_config, write_folder
from support.engines import quick

from m3jax import checkpoint
from m3jax.checkpoint import tree
from m3jax.train.keeping import keep, restored, states_in

TESTS = Path(__file__).parents[1]
CONFIG = tiny_config(num_attention_heads=8, num_key_value_heads=4)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hosts") / "hub", CONFIG, random_tensors(CONFIG), shards=2)


@pytest.fixture(scope="module")
def processes(hub) -> list[tuple[dict, int, str, str]]:
    """(report, exit status, stdout, stderr) of two processes that did all their work; then the second was killed."""
    model = checkpoint.load(hub, "float32", "data=2,expert=2,tensor=2", progress=False)
    with states_in(hub.parent / "run of one") as keeper:
        keep(keeper, 5, host_process.training_state(model, 5))
    port = str(free_port())
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags += f" --xla_force_host_platform_device_count={host_process.DEVICES}"
    env = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "XLA_FLAGS": flags}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, host_process.__file__, str(i), port, str(hub.parent), "idle"],
                    **dict(env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True),
                )
            )
            for i in range(2)
        ]
        for process in started:
            stack.callback(process.kill)  # where one fails the other waits for it
        found = []
        for i, process in enumerate(started):
            out, err = process.communicate(timeout=host_process.LIMIT + 60)
            path = hub.parent / f"report{i}.json"
            assert path.is_file(), err
            found.append((json.loads(path.read_text()), process.returncode, out, err))
    return found


@cache
def alone() -> dict:
    """Return what the requests get from an engine on one device."""
    with quick():
        return host_process.work(host_process.made(dict(pages=21), None))


@pytest.mark.parametrize("name", host_process.ENGINES)
def test_two_processes_generate_what_one_does(name, processes):
    expected, together = dict(alone()), dict(processes[0][0][name])
    assert expected.keys() - together.keys() <= {"moved"}  # no request with a draft is
    assert together.pop("refused") == expected.pop("refused")
    if "draft" in name:  # which draws with other random numbers
        together = {request: together[request] for request in ("first", "guided", "late", "copied")}
    for request, (tokens, reason, logprobs) in together.items():
        # One was stopped in the middle: how far it came depends on how many rows there are.
        count = min(len(tokens), len(expected[request][0])) if reason == "aborted" else None
        assert (tokens[:count], reason) == (expected[request][0][:count], expected[request][1]), request
        np.testing.assert_allclose(logprobs[:count], expected[request][2][:count], atol=2e-5)
    assert together["late"][1] == "deadline"


def test_a_request_has_the_bits_that_it_has_alone(processes):
    """In the invariant mode, over pages of two hosts, beside others and by itself."""
    report = processes[0][0]
    assert report["rows and pages"]["first"][2] == report["alone"]


def test_guides_are_asked_by_process_0_alone(processes):
    assert processes[0][0]["asked"] > 0
    assert processes[1][0]["asked"] == 0


def test_each_process_reads_its_own_bytes(hub, processes):
    """Experts and heads are cut over both: each device is sent its part, and each host the parts of its devices."""
    reports = [report["bytes"] for report, *_ in processes]
    assert [len(report) for report in reports] == [2, 2]
    model, whole = checkpoint.load_with_report(hub, "float32", progress=False)
    _, as_one = checkpoint.load_with_report(hub, "float32", "expert=2,tensor=2", progress=False)
    assert [size for report in reports for size in report.values()] == list(as_one.bytes_read.values())
    (in_files,) = whole.bytes_read.values()
    assert max(map(max, (report.values() for report in reports))) < 0.5 * in_files
    expected = sum(float(np.abs(np.asarray(x)).sum(dtype=np.float64)) for x in tree.flatten(model).values())
    np.testing.assert_allclose([report["held"] for report, *_ in processes], expected, rtol=1e-12)


def test_what_two_processes_saved_one_restores(hub, processes):
    model = checkpoint.load(hub, "float32", progress=False)
    for mesh in (None, "tensor=4"):
        restored = checkpoint.load_orbax(
            hub.parent / "orbax", None if mesh is None else checkpoint.loading.as_mesh(mesh)
        )
        expected = tree.flatten(model)
        for name, value in tree.flatten(restored).items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[name]))


def test_a_training_state_goes_on_over_another_number_of_hosts(hub, processes):
    """That of two processes in one, on one device and on eight; and that of eight devices of one process in two."""
    for mesh in (None, "data=2,expert=2,tensor=2"):
        model = checkpoint.load(hub, "float32", mesh, progress=False)
        before, expected = host_process.training_state(model, 0), host_process.training_state(model, 3)
        with states_in(hub.parent / "run of two") as keeper:
            found = restored(keeper, before)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.sharding == other.sharding
    expected = host_process.training_state(model, 5)
    sums = [float(np.abs(np.asarray(x)).sum(dtype=np.float64)) for x in jax.tree.leaves(expected)]
    for report, *_ in processes:
        np.testing.assert_allclose(report["state"], sums, rtol=1e-12)


def test_a_killed_process_ends_the_other_in_one_line(processes):
    _, status, out, err = processes[0]
    host = socket.gethostname()
    line = f"m3jax.test: error: process 1 ({host}) ended or is unreachable; this process ends too; start all again"
    assert (status, out, err) == (2, "", line + "\n")
    assert processes[1][1:] == (-9, "", "")
