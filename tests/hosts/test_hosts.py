"""Two processes as one run, over gloo: the tokens of one process, each host's own bytes, and an end in one line."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import conversion, host_process
from support.checkpoint_folders import random_tensors, tiny_config, write_folder
from support.engines import quick

import m3jax.train.grpo as grpo
from m3jax import checkpoint
from m3jax.checkpoint import tree
from m3jax.train.dense import read_dense_with_report
from m3jax.train.keeping import keep, states_in

TESTS = Path(__file__).parents[1]
CONFIG = tiny_config(num_attention_heads=8, num_key_value_heads=4)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    conversion.write_source(folder)
    return write_folder(folder / "hub", CONFIG, random_tensors(CONFIG), shards=2)


@pytest.fixture(scope="module")
def rounds_of_one(hub) -> list[dict]:
    """The lines of three rounds of GRPO on one device; the state after the first was kept by eight, for others."""
    model, folder = host_process.policy(None), hub.parent / "rounds of one"
    host_process.rounds(model, host_process.Letters(fails=False), folder, 1, folder / "metrics.jsonl")
    with states_in(hub.parent / "rounds of eight") as keeper:
        keep(keeper, 2, host_process.kept_state(host_process.policy("data=2,expert=2,tensor=2"), folder))
    shutil.copytree(hub.parent / "rounds of eight", hub.parent / "rounds of two")
    host_process.rounds(model, host_process.Letters(fails=False), folder, 3, folder / "metrics.jsonl")
    return lines(folder)


@pytest.fixture(autouse=True, scope="module")
def _one_optimizer():
    """Runs of this module have one optimiser, so that their step is compiled once."""
    made = grpo.make_optimizer(lambda _: 1e-3, frozen_index=True, weight_decay=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "make_optimizer", lambda *_, **__: made)
        yield


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_same_round(found: dict, expected: dict) -> None:
    for name in ("step", "reward_mean", "reward_std", "loss", "grad_norm", "clipped", "new_tokens"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def ended(folder: Path, work: str) -> list[tuple[dict, int, str, str]]:
    """(report, exit status, stdout, stderr) of two processes that did all their work; then the second was killed."""
    port = str(free_port())
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    flags += f" --xla_force_host_platform_device_count={host_process.DEVICES}"
    # Without warnings: XLA has one for an exchange of 256 bytes that it makes by way of all devices.
    env = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "2"}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, host_process.__file__, str(i), port, str(folder), work],
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
            path = folder / f"{work}{i}.json"
            assert path.is_file(), err
            found.append((json.loads(path.read_text()), process.returncode, out, err))
    return found


@pytest.fixture(scope="module")
def processes(hub) -> list[tuple[dict, int, str, str]]:
    """Two processes that read a checkpoint and serve; then the second was killed."""
    return ended(hub.parent, "serve")


@pytest.fixture(scope="module")
def training(hub, rounds_of_one) -> list[dict]:
    """The reports of two processes that save, train and serve with a draft."""
    return [report for report, *_ in ended(hub.parent, "train")]


@cache
def alone() -> dict:
    """Return what the requests get from an engine on one device."""
    with quick():
        return host_process.work(host_process.made(dict(pages=21), None))


def test_two_processes_generate_what_one_does(processes):
    assert_as_one(processes[0][0]["rows and pages"])


@pytest.mark.further  # other axes of the mesh, and a draft
def test_two_processes_with_a_draft_generate_what_one_does(training):
    assert_as_one(training[0]["heads, one row, draft"], draft=True)


def assert_as_one(found: dict, draft: bool = False) -> None:
    """Requests got what they get from one process; the few that no random number decides where drafts are drawn."""
    expected, together = dict(alone()), dict(found)
    assert expected.keys() - together.keys() <= {"moved"}  # no request with a draft is
    assert together.pop("refused") == expected.pop("refused")
    if draft:  # which draws with other random numbers
        together = {request: together[request] for request in ("first", "guided", "late", "copied")}
    for request, (tokens, reason, logprobs) in together.items():
        # One was stopped in the middle: how far it came depends on how many rows there are.
        count = min(len(tokens), len(expected[request][0])) if reason == "aborted" else None
        assert (tokens[:count], reason) == (expected[request][0][:count], expected[request][1]), request
        np.testing.assert_allclose(logprobs[:count], expected[request][2][:count], atol=2e-5)
    assert together["late"][1] == "deadline"


def test_a_request_has_the_bits_that_it_has_alone(processes):
    """In the invariant mode, over pages of two hosts, beside others and by itself, whatever order gloo adds in."""
    report = processes[0][0]
    for name, (tokens, logprobs) in report["alone"].items():
        beside, _, logprobs_beside = report["rows and pages"][name]
        assert (beside, logprobs_beside) == (tokens, logprobs), name
    assert report["compiled"] == []


def test_guides_are_asked_by_process_0_alone(processes):
    assert processes[0][0]["asked"] > 0
    assert processes[1][0]["asked"] == 0


def test_each_process_reads_its_own_bytes(hub, processes):
    """Experts and heads are cut over both: each device is sent its part, and each host the parts of its devices."""
    reports = [report["bytes"] for report, *_ in processes]
    assert [len(report) for report in reports] == [4, 4]
    model, whole = checkpoint.load_with_report(hub, "float32", progress=False)
    _, as_one = checkpoint.load_with_report(hub, "float32", "expert=2,tensor=4", progress=False)
    assert [size for report in reports for size in report.values()] == list(as_one.bytes_read.values())
    (in_files,) = whole.bytes_read.values()
    assert max(map(max, (report.values() for report in reports))) < 0.5 * in_files
    expected = sum(float(np.abs(np.asarray(x)).sum(dtype=np.float64)) for x in tree.flatten(model).values())
    np.testing.assert_allclose([report["held"] for report, *_ in processes], expected, rtol=1e-12)


@pytest.mark.further  # saving over a mesh of one process is tests/checkpoint's
def test_what_two_processes_saved_one_restores(hub, training):
    model = checkpoint.load(hub, "float32", progress=False)
    for mesh in (None, "tensor=4"):
        restored = checkpoint.load_orbax(
            hub.parent / "orbax", None if mesh is None else checkpoint.loading.as_mesh(mesh)
        )
        expected = tree.flatten(model)
        for name, value in tree.flatten(restored).items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[name]))


@pytest.mark.further  # training over a mesh of one process: tests/train/test_sft.py
def test_two_processes_convert_a_dense_model_as_one_does(hub, training, tmp_path):
    """Each reads its own bytes; process 0 alone writes lines and report, and both write the model."""
    model, as_one = read_dense_with_report(hub.parent / "qwen3", mesh="expert=4,tensor=2", block_size=4)
    reports = [report["dense bytes"] for report in training]
    assert [len(report) for report in reports] == [4, 4]
    assert [size for report in reports for size in report.values()] == list(as_one.bytes_read.values())
    held = sum(host_process.sums(model))
    np.testing.assert_allclose([report["dense held"] for report in training], held, rtol=1e-12)
    conversion.convert(hub.parent, tmp_path, None)
    conversion.assert_same(conversion.told(hub.parent / "converted"), conversion.told(tmp_path))
    expected = tree.flatten(checkpoint.load(tmp_path / "model", "float32", progress=False))
    for name, value in tree.flatten(checkpoint.load_orbax(hub.parent / "converted" / "model")).items():
        np.testing.assert_allclose(value, expected[name], atol=5e-6, err_msg=name)


@pytest.mark.further  # rounds and states over meshes of one process are tests/train's
def test_rounds_of_grpo_go_on_over_another_number_of_hosts(hub, training, rounds_of_one, tmp_path):
    """From eight devices of one process to two processes, which draw and learn as one, and back to one."""
    folder = hub.parent / "rounds of two"
    (line,) = lines(folder)
    assert_same_round(line, rounds_of_one[1])
    assert abs(line["loss"]) > 0.01 and line["grad_norm"] > 0.1 and line["clipped"] < 1
    shutil.copytree(folder, tmp_path / "run")
    host_process.rounds(
        *(host_process.policy(None), host_process.Letters(fails=False), tmp_path / "run", 3),
        tmp_path / "run" / "metrics.jsonl",
    )
    again = lines(tmp_path / "run")
    assert [found["step"] for found in again] == [2, 3]
    assert_same_round(again[1], rounds_of_one[2])


@pytest.mark.further  # over channels of one process: test_shared_task.py
def test_a_reward_is_asked_on_process_0_alone_and_its_error_is_everyone_s(hub, training):
    """The second round was drawn, and its rewards failed: all kept the state after the first, the same to the bit."""
    for report in training:
        assert report["error"] == "reward() of task.py: it fails"
        assert report["state before"] == training[0]["state before"] != report["state after"]
    assert [report["rewards asked"] for report in training] == [2, 0]
    for mesh in (None, "data=2,expert=2,tensor=2"):
        model = host_process.policy(mesh)
        before, after = (
            host_process.kept_state(model, hub.parent / name) for name in ("rounds of eight", "rounds of two")
        )
        for state, name in ((before, "state before"), (after, "state after")):
            np.testing.assert_allclose(training[0][name], host_process.sums(state), rtol=1e-12)


def test_a_killed_process_ends_the_other_in_one_line(processes):
    _, status, out, err = processes[0]
    host = socket.gethostname()
    line = f"m3jax.test: error: process 1 ({host}) ended or is unreachable; this process ends too; start all again"
    assert (status, out, err) == (2, "", line + "\n")
    assert processes[1][1:] == (-9, "", "")
