"""Two processes as one run, over gloo: the tokens of one process, each host's own bytes, and an end in one line."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import host_process
from support.checkpoint_folders import random_tensors, tiny_config, write_folder
from support.engines import quick

import m3jax
from m3jax import checkpoint
from m3jax.checkpoint import tree
from m3jax.decoding.engine import Engine
from m3jax.hosts.agree import agree, fingerprint, versions
from m3jax.hosts.channel import Channel, Store
from m3jax.hosts.deaths import NativeOutput, dead_line
from m3jax.hosts.job import Job
from m3jax.hosts.run import _check_free, _wait_for_coordinator
from m3jax.hosts.wire import from_bytes, to_bytes
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
    started = [
        subprocess.Popen(
            [sys.executable, host_process.__file__, str(i), port, str(hub.parent), "idle"],
            **dict(env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True),
        )
        for i in range(2)
    ]
    found = []
    for i, process in enumerate(started):
        out, err = process.communicate(timeout=900)
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


# Without processes


class FakeClient:
    """The key-value store of JAX's coordination service, for threads of one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key, _):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 30)
            return self.values[key]

    def key_value_delete(self, folder):
        with self.changed:
            self.values = {key: x for key, x in self.values.items() if not key.startswith(f"{folder}/")}


def side_by_side(*calls):
    """Return the results of calls on threads, or what they raised."""
    results = [None] * len(calls)

    def note(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=note, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_other_versions_and_folders_are_refused_on_all_and_both_named(tmp_path):
    client = FakeClient()
    stores = [Store(client, i, 3) for i in range(3)]
    side_by_side(*(store.introduce for store in stores))
    facts = [{"m3jax": "1", "jax": "0.10.2"}, {"m3jax": "1", "jax": "0.10.2"}, {"m3jax": "1", "jax": "0.11.0"}]
    calls = [lambda i=i: agree(stores[i], "versions", facts[i]) for i in range(3)]
    host = socket.gethostname()
    line = f"jax is '0.10.2' on process 0 ({host}) and '0.11.0' on process 2 ({host}): every process needs the same"
    assert list(map(str, side_by_side(*calls))) == [line] * 3
    folders = [tmp_path / name for name in "ab"]
    for folder, scale in zip(folders, (1, 2), strict=True):
        write_folder(folder, CONFIG, random_tensors(CONFIG), rope_theta=1e4 * scale)
    assert fingerprint(folders[0]) == fingerprint(folders[0]) != fingerprint(folders[1])


def test_a_checkout_that_is_not_installed_has_a_version():
    """In a process in which no distribution of m3jax is found, as where m3jax is run by PYTHONPATH."""
    code = """if True:
        import importlib.metadata as metadata
        find = metadata.distribution
        def distribution(name):
            if name == "m3jax":
                raise metadata.PackageNotFoundError(name)
            return find(name)
        metadata.distribution = distribution
        from m3jax.hosts.agree import versions
        print(versions()["m3jax"])"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == m3jax.__version__, printed.stderr
    assert versions()["jax"] == jax.__version__


def test_a_fingerprint_tells_folders_apart(tmp_path):
    """By the JSON files and by each tensor file's name, size and header; not by the numbers, which are not read."""
    tensors = {"a": np.arange(6, dtype=np.float32)}
    folders = {name: tmp_path / name for name in ("one", "numbers", "header", "size", "name", "json")}
    for name, folder in folders.items():
        folder.mkdir()
        changed = {"numbers": {"a": tensors["a"] + 1}, "header": {"b": tensors["a"]}, "size": {"a": tensors["a"][:5]}}
        save_file(changed.get(name, tensors), folder / ("y" if name == "name" else "x.safetensors"))
        (folder / "config.json").write_text("{}" if name != "json" else "[]")
    (folders["name"] / "y").rename(folders["name"] / "y.safetensors")
    found = {name: fingerprint(folder) for name, folder in folders.items()}
    assert found["one"] == found["numbers"] and len(set(found.values())) == 5


def test_messages_come_in_order_and_are_forgotten():
    """A reader that is two blocks behind holds the sender up; what all have read leaves the store."""
    client = FakeClient()
    channels = [Channel(Store(client, i, 3), "calls") for i in range(3)]
    numbers = range(1500)
    send = lambda: [channels[0].send(str(i).encode()) for i in numbers]
    receive = [lambda c=c: [int(c.receive()) for _ in numbers] for c in channels[1:]]
    _, *received = side_by_side(send, *receive)
    assert received == [list(numbers)] * 2
    assert len(client.values) < 800


def test_a_reader_holds_the_sender_up_at_two_blocks():
    """The sender stops before message 512 until both others have read the first 256, and forgets those alone."""
    client = FakeClient()
    first, *others = (Channel(Store(client, i, 3), "calls") for i in range(3))
    for i in range(512):
        first.send(b"%d" % i)
    sending = threading.Thread(target=first.send, args=(b"512",))
    sending.start()
    for channel in others:
        for _ in range(255):
            channel.receive()
        sending.join(0.05)
        assert sending.is_alive() and "m3jax/calls/2/0" not in client.values
        channel.receive()
    sending.join(30)
    assert sorted({key.split("/")[2] for key in client.values}) == ["1", "2"]
    assert [int(others[0].receive()) for _ in range(257)] == list(range(256, 513))


class FakeEngine(Engine):
    """What leading and following ask of an engine: its state, its clock, and a call that makes another."""

    def __init__(self):
        self.state = {"load": {"requests": 0}, "pages": {"free": 8, "used": 0}, "tokens": 0}
        self.clock, self.calls = lambda: -1.0, []


@pytest.fixture
def fakes(monkeypatch):
    """A leading and a following engine of two threads, and a function that runs them side by side."""
    from m3jax.hosts import follow

    for name in ("load", "pages"):
        monkeypatch.setattr(Engine, name, property(lambda self, name=name: self.state[name]))
    timings = property(lambda self: Namespace(decoded_tokens=self.state["tokens"]))
    monkeypatch.setattr(Engine, "timings", timings, raising=False)

    def step(self, count=1):
        self.calls.append(("step", count, self.clock()))
        if count > 1:
            self.step(count - 1)
        self.state["tokens"] += 1
        return count

    def abort(self, handle):
        self.calls.append(("abort", handle, self.clock()))
        if handle == "unknown":
            raise ValueError(f"no request {handle}")

    for name, method in (("step", step), ("abort", abort)):
        monkeypatch.setattr(Engine, name, method)
        monkeypatch.setattr(follow.LeadingEngine, name, follow._sent(name))
    engines, client = [FakeEngine(), FakeEngine()], FakeClient()
    channels = [Channel(Store(client, i, 2), "calls") for i in range(2)]

    def run(work):
        def lead():
            with follow.led(engines[0], channels[0]) as leading:
                return work(leading)

        return side_by_side(lead, lambda: follow._follow(engines[1], channels[1]))

    return engines, run


def test_who_follows_makes_the_calls_of_who_leads(fakes):
    """Each once, though one makes another, at the time that process 0 read, with its refusals."""
    engines, run = fakes

    def work(leading):
        with pytest.raises(ValueError, match="no request unknown"):
            leading.abort("unknown")
        return leading.step(3)

    assert run(work) == [3, None]
    assert engines[0].calls == engines[1].calls and [call[:2] for call in engines[0].calls] == [
        ("abort", "unknown"),
        *(("step", count) for count in (3, 2, 1)),
    ]
    assert engines[0].calls[0][2] < engines[0].calls[1][2] == engines[0].calls[3][2]


@pytest.mark.parametrize("what", ["load", "free", "used", "tokens"])
def test_who_has_another_state_does_not_follow(fakes, what):
    engines, run = fakes
    state = engines[1].state
    place, name = {"load": (state["load"], "requests"), "tokens": (state, "tokens")}.get(what, (state["pages"], what))
    place[name] += 1
    _, error = run(lambda leading: leading.step())
    assert isinstance(error, RuntimeError) and "before step process 0 had [0, 8, 0, 0]" in str(error)
    assert not engines[1].calls


def test_native_output_is_passed_on_in_whole_lines(tmp_path):
    """All but what the coordination service says, also of a line that is written in two parts."""
    output = object.__new__(NativeOutput)
    output._passed, output._lock = 0, threading.Lock()
    with open(tmp_path / "native", "w+b", buffering=0) as native, open(tmp_path / "stderr", "w+b") as stderr:
        output._file, output.stderr = native, stderr.fileno()
        native.write(b"one\ntwo: ")
        output.pass_on()
        assert (tmp_path / "stderr").read_bytes() == b"one\n"
        native.write(b"coordination_service says\nthree\nfour")
        output.pass_on()
    assert (tmp_path / "stderr").read_bytes() == b"one\nthree\n"


def test_a_message_is_what_was_sent():
    from m3jax.decoding import Params, Sampling, Steer
    from m3jax.decoding.engine import Media

    params = Params(max_new_tokens=3, sampling=Sampling(logit_bias={3: 1.5}, bad_words=((1, 2),)), stop_ids=(4,))
    steer = Steer(add=np.arange(3, dtype=np.float32))
    media = Media(images=((np.ones((4, 1176), np.float32), (1, 2, 2)),))
    sent = {"call": "add", "args": [(1, 2), params], "x": [None, True, np.int32(3), float("inf"), {1: "é"}]}
    assert from_bytes(to_bytes(sent)) == sent
    assert list(from_bytes(to_bytes({1: 2, (3, "4"): 5}))) == [1, (3, "4")]
    first, second = from_bytes(to_bytes([np.arange(3), np.ones((2, 1), np.int8)]))
    np.testing.assert_array_equal(first, np.arange(3))
    np.testing.assert_array_equal(second, np.ones((2, 1), np.int8), strict=True)
    back = from_bytes(to_bytes([steer, media]))
    np.testing.assert_array_equal(back[0].add, steer.add)
    np.testing.assert_array_equal(back[1].images[0][0], media.images[0][0])
    assert back[1].images[0][1] == (1, 2, 2)
    with pytest.raises(ValueError, match="cannot carry a function"):
        to_bytes(lambda: None)


# As jaxlib 0.10.2 writes them.
SILENT = b"""F1124 client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl: \
UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
1
3
The tasks have crashed. Check the task logs for an earlier error
RPC: /xla.coordination.CoordinationService/PollForError"""
GONE = b"""F1124 client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl: \
UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}"""

ENDED = "the others have ended; start all again"

LATE = (
    b"F1124 client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl::Status: \
DEADLINE_EXCEEDED: Deadline Exceeded"
)

TWICE = (
    b"F1124 client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl::Status: \
ABORTED: 1 unexpectedly tried to connect with a different incarnation. It has likely restarted."
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SILENT, "host 1, host 3 ended or is unreachable; this process ends too; start all again"),
        (GONE, "host 0, which coordinates, ended or is unreachable; this process ends too; start all again"),
        (TWICE, "--process-id 1 came twice, or was started again alone; start all, each with its own --process-id"),
        (LATE, "not all processes of the run came in time; start all, each with its own --process-id"),
        (
            SILENT.replace(b"3\n", b"2\n"),
            "this process was silent for the time of a heartbeat, and the others have ended; start all again",
        ),
        (b"terminate called after throwing an instance of 'std::bad_alloc'", None),
        (b"F1124 of distributed tensors: DEADLINE_EXCEEDED", None),
    ],
)
def test_the_line_names_who_is_gone(text, line):
    assert dead_line(text, lambda i: f"host {i}", own_id=2) == line


def test_a_coordinator_that_never_comes_and_a_port_that_is_taken():
    port = free_port()
    job = Job(f"127.0.0.1:{port}", 2, 1, start_timeout=1)
    with pytest.raises(ValueError, match=f"process 1 of 2: no coordinator at 127.0.0.1:{port} in 1 s .Connection ref"):
        _wait_for_coordinator(job)
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(
            ValueError, match=f"127.0.0.1:{port}: process 0 cannot listen there: Address already in use"
        ):
            _check_free(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--coordinator here --mesh data=2", "give HOST:PORT of process 0, or auto"),
        ("--coordinator h:0 --mesh data=2", "give HOST:PORT of process 0, or auto"),
        ("--coordinator h:65536 --mesh data=2", "give HOST:PORT of process 0, or auto"),
        (
            "--coordinator h:1 --mesh data=2 --num-processes 2 --process-id 1 --heartbeat 0",
            "--heartbeat 0: give at least 1",
        ),
        ("--coordinator h:1 --mesh data=2 --num-processes 2", "needs --process-id too"),
        ("--coordinator h:1 --mesh data=2 --num-processes 2 --process-id 2", "its own number from 0 to N - 1"),
        ("--coordinator h:1 --num-processes 2 --process-id 1", "needs --mesh"),
        ("--process-id 1", "--process-id goes with --coordinator"),
        ("--coordinator auto --mesh data=2", "no job of SLURM, Open MPI, Kubernetes or Cloud TPU"),
    ],
)
def test_arguments_that_no_run_has(arguments, message, capsys):
    from m3jax.cli import main

    assert main(["--prompt-tokens", "1", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_slurm_names_the_job(monkeypatch):
    """One process a host has all of its devices; of several each has one."""
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "node[3-4]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
    args = Namespace(coordinator="auto", heartbeat=30, start_timeout=5)
    assert Job.of(args) == Job("node3:1234", 2, 1, None, 30, 5)
    for tasks in ("8(x2)", "1,2", "16"):  # also of a first host with one process and a second with two
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        assert Job.of(args) == Job("node3:1234", 2, 1, (0,), 30, 5)
