"""What a run of several processes is made of, without other processes: messages, agreement, calls, and how it ends."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from contextlib import suppress

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.checkpoint_folders import random_tensors, tiny_config, write_folder
from support.fake_store import FakeClient, side_by_side

import m3jax
from m3jax.decoding.engine import Engine
from m3jax.hosts import channel as channels_of
from m3jax.hosts import deaths, run
from m3jax.hosts.agree import agree, fingerprint, versions
from m3jax.hosts.channel import Channel, Store
from m3jax.hosts.deaths import NativeOutput, dead_line
from m3jax.hosts.job import Job
from m3jax.hosts.run import _check_free, _wait_for_coordinator
from m3jax.hosts.wire import from_bytes, to_bytes

CONFIG = tiny_config(num_attention_heads=8, num_key_value_heads=4)
end_with_others = run._end_with_others  # before a fixture puts something else in its place


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


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
    assert {len(each) for each in found.values()} == {16}


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
    """All but what the coordination service and Gloo say, also of a line that is written in two parts."""
    output = object.__new__(NativeOutput)
    output._passed, output._lock = 0, threading.Lock()
    with open(tmp_path / "native", "w+b", buffering=0) as native, open(tmp_path / "stderr", "w+b") as stderr:
        output._file, output.stderr = native, stderr.fileno()
        native.write(b"one\ntwo: ")
        output.pass_on()
        assert (tmp_path / "stderr").read_bytes() == b"one\n"
        native.write(b"coordination_service says\n[Gloo] Rank [Gloo] Rank 2 is connected\n")
        native.write(b"1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n\nthree\nfour")
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

OTHER = b"F1124 client.h:80] Terminating process because the JAX distributed service detected fatal errors. INTERNAL: ?"


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
        (b"more\n" + OTHER + b"\nmore", OTHER.decode()),
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


def test_a_port_is_free_again_as_soon_as_who_listened_has_gone():
    """Though a connection that it ended is remembered for a minute, which would refuse the port to a plain bind."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the first to close is the one that remembers
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("", port))
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


# Waiting, names, and the start


class Unanswering(FakeClient):
    """A store whose waits end in errors before a value comes."""

    def __init__(self, *errors):
        super().__init__()
        self.errors, self.waited = list(errors), []

    def blocking_key_value_get_bytes(self, key, milliseconds):
        self.waited.append(milliseconds)
        if self.errors:
            raise jax.errors.JaxRuntimeError(self.errors.pop(0))
        return super().blocking_key_value_get_bytes(key, milliseconds)


def test_a_wait_goes_on_until_the_store_itself_fails():
    client = Unanswering(*["DEADLINE_EXCEEDED: no such key"] * 2)
    client.values["m3jax/late"] = b"there"
    assert Store(client, 0, 2).get("late") == b"there" and len(client.waited) == 3
    assert min(client.waited) >= 1000  # it does not ask again and again
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        Store(Unanswering("UNAVAILABLE: the service ended"), 0, 2).get("late")


def test_a_process_is_named_by_its_number_until_hosts_are_known():
    stores = [Store(FakeClient(), 0, 1), Store(FakeClient(), 0, 1)]
    stores[1].introduce()
    assert [stores[0].name_of(0), stores[1].name_of(0), stores[1].name_of(1)] == [
        "process 0", f"process 0 ({socket.gethostname()})", "process 1"
    ]  # fmt: skip


@pytest.mark.parametrize(("process_id", "waited"), [(0, 0.0), (1, 100.0), (1, 900.0)])
def test_jax_is_started_as_the_job_says(monkeypatch, process_id, waited):
    """What waiting for the coordinator took is taken off the time to start; process 0 alone listens and tells."""
    given, clock, looked = {}, iter([50.0, 50.0 + waited]), []
    monkeypatch.setattr(jax.config, "update", lambda name, value: looked.append((name, value)))
    monkeypatch.setenv("M3JAX_PROGRESS", "1")
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(run, "_check_free", lambda address: looked.append("is it free"))
    monkeypatch.setattr(run, "_wait_for_coordinator", lambda job: looked.append("is it there"))
    monkeypatch.setattr(run, "end_in_one_line", lambda *given: looked.append(given[-1]))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: given.update(kwargs, args=args))
    monkeypatch.setattr(run.distributed.global_state, "client", "the client")
    store = run._start(
        Job("h:1", 3, process_id, (4, 5), heartbeat=7, start_timeout=600), "prog", object.__new__(NativeOutput)
    )
    assert (store._client, store.process_id, store.num_processes) == ("the client", process_id, 3)
    signals = "jax_enable_preemption_service", False  # SIGTERM ends the process
    assert looked == [signals, "is it there" if process_id else "is it free", process_id]
    assert os.environ["M3JAX_PROGRESS"] == ("0" if process_id else "1")
    assert given == dict(
        args=("h:1", 3, process_id),
        local_device_ids=(4, 5),
        cluster_detection_method="deactivate",
        initialization_timeout={0.0: 600, 100.0: 500, 900.0: 1}[waited],
        heartbeat_timeout_seconds=7,
        shutdown_timeout_seconds=60,
    )


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("ALREADY_EXISTS: 1", "another process of this run has the same number; give each its own, 0 to 2"),
        ("ABORTED: task 1", "--process-id 1: another process of this run has the same number"),
        ("1 tried to connect with a different incarnation", "another process of this run has the same number"),
        ("DEADLINE_EXCEEDED: barrier", "not all of 3 processes came to h:1 in 20 s; start all, each with its own"),
        ("INTERNAL: it broke\nat a line of C", "the processes could not start together: INTERNAL: it broke"),
    ],
)  # fmt: skip
def test_why_processes_could_not_start(monkeypatch, said, line):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(said)

    for name in ("_wait_for_coordinator", "end_in_one_line"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        run._start(Job("h:1", 3, 1, start_timeout=20), "prog", object.__new__(NativeOutput))
    assert "\n" not in str(caught.value)


# Work and its end


class Ended(BaseException):
    """Raised in place of the end of the process."""


@pytest.fixture
def one_process(monkeypatch):
    """The store of a run of one process. The end of it raises Ended with the status, and pauses are noted."""
    client = FakeClient()
    client.slept = []

    def end(status):
        raise Ended(status)

    def begin(*_):
        return Store(client, 0, 1)

    client.wait_at_barrier = lambda name, milliseconds: client.slept.append((name, milliseconds))
    monkeypatch.setattr(run, "_store", None)
    monkeypatch.setattr(run, "_start", begin)
    monkeypatch.setattr(run, "NativeOutput", lambda: None)
    monkeypatch.setattr(run, "_end_with_others", lambda *_: None)
    monkeypatch.setattr(run.distributed.global_state, "client", client)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: client.slept.append("shutdown"))
    monkeypatch.setattr(run.os, "_exit", end)
    monkeypatch.setattr(run.time, "sleep", client.slept.append)
    monkeypatch.setattr(deaths, "_last_word", threading.Lock())
    return client


def arguments(*words) -> Namespace:
    from m3jax.console import Parser
    from m3jax.hosts.arguments import add_hosts

    parser = Parser("m3jax.test", "for a test")
    for name in ("--mesh", "--model", "--draft"):
        parser.add_argument(name)
    add_hosts(parser)
    return parser.parse_args(words)


ONE = ("--coordinator", "h:1", "--num-processes", "1", "--process-id", "0")


def test_a_run_of_one_command_needs_no_store():
    given = []
    run.on_hosts(arguments(), "m3jax.test", given.append)
    assert given == [None]


def test_all_agree_on_versions_settings_and_folders_before_the_work(one_process, tmp_path, monkeypatch):
    """The work gets the channel of its run; when all have done theirs, however long that takes, they part."""
    (tmp_path / "config.json").write_text("{}")
    folder, given, waiting = str(tmp_path), [], []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: waiting.append(thread) or start(thread))
    args = arguments(*ONE, "--mesh", "data=2", "--model", folder, "--draft", "ngram")
    run.on_hosts(args, "m3jax.test", given.append, {"the data": tmp_path, "no folder": None})
    (channel,) = given
    channel.send(b"message")
    facts = {name: json.loads(one_process.values[f"m3jax/facts/{name}/0"]) for name in ("versions", "settings")}
    assert facts["versions"].keys() == {"m3jax", "jax", "jaxlib"}
    assert facts["settings"] == {
        "--mesh": "data=2", **dict.fromkeys(("--dtype", "--weights", "--backend", "--invariant"), "None"),
        **dict.fromkeys(("--draft-tokens", "--steps", "--save-every"), "None"), "no folder": "none",
        "the folder of --model": fingerprint(tmp_path), "the data": fingerprint(tmp_path),
    }  # fmt: skip
    assert channel.is_sender and one_process.values["m3jax/calls/0/0"] == b"message"
    assert [thread.daemon for thread in waiting] == [True]  # who waits for others' errors holds no process up
    assert one_process.values["m3jax/names/0"].decode() == socket.gethostname()
    (name, milliseconds), last = one_process.slept
    assert (name, last) == ("m3jax/done", "shutdown") and milliseconds >= 24 * 3600 * 1000


@pytest.mark.parametrize(
    ("error", "status", "reason", "printed"),
    [
        (KeyboardInterrupt(), 130, "it was interrupted", ""),
        (ValueError("no such\nfolder"), 2, "no such", "m3jax.test: error: no such; folder\n"),
        (ValueError(), 2, "ValueError", "m3jax.test: error: ValueError\n"),
        (TypeError("a bug"), 1, "TypeError: a bug", "Traceback"),
    ],
)
def test_an_error_ends_all_in_one_line(one_process, capsys, error, status, reason, printed):
    """It is printed here, the others read it in the store, and there is time for that before the store goes."""

    def work(_):
        raise error

    with pytest.raises(Ended) as ended:
        run.on_hosts(arguments(*ONE), "m3jax.test", work)
    assert ended.value.args == (status,)
    assert one_process.values["m3jax/failed"].decode() == f"0 {reason}"
    assert one_process.slept == [2.0]  # seconds, in which the others read it
    err = capsys.readouterr().err
    assert err.startswith(printed) and (err == printed or status == 1)


def test_an_error_of_the_device_waits_for_the_line_that_names_the_dead(one_process):
    """That line comes within a heartbeat and ends the process; where it has not come, the error itself does."""

    def work(_):
        raise jax.errors.JaxRuntimeError("Gloo: connection closed by peer")

    with pytest.raises(Ended):
        run.on_hosts(arguments(*ONE, "--heartbeat", "7"), "m3jax.test", work)
    assert one_process.slept[0] > 7


def test_a_command_that_exits_by_itself_exits(one_process):
    with pytest.raises(SystemExit, match="3"):
        run.on_hosts(arguments(*ONE), "m3jax.test", lambda _: sys.exit(3))
    assert "m3jax/failed" not in one_process.values


def test_the_error_of_another_process_ends_this_one(one_process, capsys):
    """By a line that names it; its own word, and a second one, end nothing."""
    for failed, line in ((b"1 no space: x", "m3jax.test: error: process 1 ended: no space: x\n"), (b"0 its own", "")):
        one_process.values["m3jax/failed"] = failed
        if line:
            with pytest.raises(Ended, match="2"):
                end_with_others(Store(one_process, 0, 2), "m3jax.test")
        else:
            end_with_others(Store(one_process, 0, 2), "m3jax.test")
        assert capsys.readouterr().err == line
    one_process.values["m3jax/failed"] = b"1 again"
    end_with_others(Store(one_process, 0, 2), "m3jax.test")  # the last word is taken
    assert capsys.readouterr().err == ""


NATIVE = """if True:
    import os, sys, time
    from m3jax.hosts.deaths import NativeOutput, end_in_one_line
    output = NativeOutput()
    end_in_one_line("m3jax.test", output, "host {}".format, 0)
    print("a result")
    sys.stderr.write("a word \\N{BULLET}\\n")
    os.write(1, b"native 1\\n")
    os.write(2, b"native 2\\n")
    for _ in range(100):
        time.sleep(0.05)
        if output._passed == 18:
            break
    os.write(2, sys.argv[1].encode())
    sys.stdout.flush()
    if sys.argv[2] == "abort":
        os.abort()
"""


@pytest.mark.parametrize(
    ("text", "how", "status", "last"),
    [
        ("the end\n", "leave", 0, ""),
        ("std::bad_alloc\n", "abort", -6, "native 1\nnative 2\nstd::bad_alloc\n"),
        ("JAX distributed service: unhealthy (stopped sending heartbeats):\n2\n", "abort", 2,
         "m3jax.test: error: host 2 ended or is unreachable; this process ends too; start all again\n"),
    ],
)  # fmt: skip
def test_what_native_code_writes_while_python_prints(text, how, status, last):
    """Python's streams are the process's own; what native code writes comes on stderr, an abort's page as a line."""
    env = os.environ | {"PYTHONIOENCODING": "ascii:backslashreplace"}
    found = subprocess.run(
        [sys.executable, "-c", NATIVE, text, how], capture_output=True, text=True, env=env, check=False
    )
    assert (found.returncode, found.stdout) == (status, "a result\n"), found.stderr
    assert found.stderr == "a word \\u2022\nnative 1\nnative 2\n" + last


# An engine that is led


def test_guides_and_watches_stay_with_process_0(fakes, monkeypatch):
    """Masks travel; a guide, and what watches the compiler, by place or by name, are no part of a message."""
    from m3jax.hosts import follow

    engines, lead_and_follow = fakes

    def add(self, prompt, params, media=None, guide=None, *, n=None):
        masks = None if guide is None else [guide.bits(()), guide.bits((3,))]
        self.calls.append(("add", prompt, params, media, n, str(masks)))

    def warmup(self, watch=None, programs=(), longest=None):
        self.calls.append(("warmup", programs, longest))
        self.watches = [*getattr(self, "watches", []), watch]

    def warmup_for(self, handle, watch=None):
        self.calls.append(("warmup_for", handle))
        self.watches = [*getattr(self, "watches", []), watch]

    for name, method in (("add", add), ("warmup", warmup), ("warmup_for", warmup_for)):
        monkeypatch.setattr(Engine, name, method)
        monkeypatch.setattr(follow.LeadingEngine, name, follow._sent(name))

    class Masks:
        def bits(self, new):
            return np.array([7 + len(new)], np.uint32) if new else None

    def work(leading):
        leading.add(np.array([1, 2]), 5, None, Masks(), n=2)
        leading.add([3], params=6, guide=Masks())
        leading.add([4], 7)
        leading.warmup(min, ("decode",), 9)
        leading.warmup(programs=("prefill",), watch=max)
        leading.warmup_for(3, len)
        leading.warmup_for(4, watch=any)
        with pytest.raises(ValueError, match="weights of an engine on several hosts"):
            leading.update(None)

    assert lead_and_follow(work) == [None, None]
    assert engines[0].calls == engines[1].calls
    assert engines[0].calls[:3] == [
        ("add", (1, 2), 5, None, 2, "[None, array([8], dtype=uint32)]"),
        ("add", (3,), 6, None, None, "[None, array([8], dtype=uint32)]"),
        ("add", (4,), 7, None, None, "None"),
    ]
    assert engines[0].watches == [min, max, len, any] and engines[1].watches == [None] * 4


def test_one_process_leads_itself(fakes):
    from m3jax.hosts import follow

    engines, _ = fakes
    with follow.led(engines[0], None) as leading:
        assert leading is engines[0]


def test_who_follows_refuses_what_it_was_not_told(fakes):
    """A refusal of process 0 that is none here, a refusal of another kind, and a mask that is none."""
    from m3jax.hosts import follow

    engines, _ = fakes
    state = follow._state(engines[1])
    told = dict(call="abort", kwargs={"handle": "unknown"}, now=1.0, state=state)
    for messages, error in (
        ([{"refused": "ValueError"}], "process 0 met a ValueError in a call that went through here"),
        ([told, {"refused": "OutOfPages"}], "no request unknown"),
        ([told | dict(call="step", kwargs={"count": "no number"})], "not supported|must be"),
    ):
        client = FakeClient()
        sender, follower = (Channel(Store(client, i, 2), "calls") for i in range(2))
        for message in (*messages, {"end": True}):
            sender.send(to_bytes(message))
        with pytest.raises((RuntimeError, ValueError, TypeError), match=error):
            follow._follow(engines[1], follower)
    client = FakeClient()
    sender, follower = (Channel(Store(client, i, 2), "calls") for i in range(2))
    sender.send(to_bytes({"call": "step"}))
    with pytest.raises(RuntimeError, match=r"a mask was to come from process 0, and \['call'\] came"):
        follow.HeardGuide(follower).bits(())


def test_the_edges_of_what_a_run_may_be_called():
    """Ports 1 and 65,535, one process alone, the last of several, timeouts of a second; 30 and 300 s by default."""
    from m3jax.hosts.arguments import check_hosts

    for words in (
        (),
        ("--coordinator", "auto"),
        ONE,
        ("--coordinator", "[::1]:65535", "--num-processes", "4", "--process-id", "3", "--mesh", "data=4"),
        (*ONE, "--heartbeat", "1", "--start-timeout", "1"),
    ):
        args = arguments(*words, *(() if not words or "--mesh" in words else ("--mesh", "data=1")))
        check_hosts(args)
        job = Job.of(args) if "auto" not in words else None
        if words and job:
            assert (job.coordinator, job.process_id, job.local_devices) == (words[1], args.process_id, None)
            assert (job.num_processes, job.heartbeat, job.start_timeout) == (
                args.num_processes, args.heartbeat, args.start_timeout
            )  # fmt: skip
    assert Job.of(arguments()) is None
    args = arguments()
    assert (args.heartbeat, args.start_timeout) == (30, 300)
    assert (Job("h:1", 1, 0).heartbeat, Job("h:1", 1, 0).start_timeout) == (30, 300)
    for words in (
        ("--num-processes", "0", "--process-id", "0"),
        ("--num-processes", "2", "--process-id", "-1"),
    ):
        with pytest.raises(ValueError, match="its own number from 0 to N - 1"):
            check_hosts(arguments("--coordinator", "h:1", *words, "--mesh", "data=1"))
    with pytest.raises(ValueError, match="--start-timeout 0: give at least 1 second"):
        check_hosts(arguments(*ONE, "--mesh", "data=1", "--start-timeout", "0"))


def test_numbers_of_a_run():
    """A native line comes within half a second; a wait asks again each minute; 256 messages are forgotten at once."""
    assert (run._GRACE_SECONDS, run._SHUTDOWN_SECONDS) == (2.0, 60)  # in which the others read why a process ends
    assert (deaths._PASS_ON_SECONDS, channels_of._WAIT_MS, channels_of._BLOCK) == (0.5, 60_000, 256)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_server_that_is_ended_while_it_loads_ends_the_others(fakes, monkeypatch, is_made):
    """They are not left waiting for calls: whether process 0 had its engine or not."""
    from m3jax.serve import command, together

    engines, _ = fakes
    client = FakeClient()
    channels = [Channel(Store(client, i, 2), "calls") for i in range(2)]
    of_thread = threading.local()
    monkeypatch.setattr(together, "engine_from_pretrained", lambda *_, **__: (engines[of_thread.i], None))
    monkeypatch.setattr(together, "Worker", lambda *_, **__: pytest.fail("enough"))

    async def serve(gateway, address, load):
        if is_made:
            with suppress(pytest.fail.Exception):
                await load(gateway)

    monkeypatch.setattr(together, "serve", serve)

    async def to_thread(call):
        return call()

    monkeypatch.setattr(together.asyncio, "to_thread", to_thread)
    args = command.parser().parse_args(["--mesh", "data=2"])

    def of_process(i):
        of_thread.i = i
        together.serve_together(args, channels[i])
        return "ended"

    assert side_by_side(lambda: of_process(0), lambda: of_process(1)) == ["ended", "ended"]


def test_process_0_prints():
    """Tests run in one process, which is the first."""
    assert run.is_first()
