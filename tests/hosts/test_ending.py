"""A run of several processes ends together, whatever ends one of them: each prints one line."""

import json
import os
import socket
import subprocess
import sys
import threading

import jax
import pytest
from support.fake_store import FakeClient
from support.hosts_arguments import ONE, arguments

from m3jax.hosts import run
from m3jax.hosts.agree import fingerprint
from m3jax.hosts.channel import Store
from m3jax.hosts.deaths import dead_line

# By one of the processes


class Ended(BaseException):
    """Raised in place of the end of the process."""


class OneProcess(FakeClient):
    """The store of a run of one process; it notes pauses, and with which status the process ended."""

    def __init__(self):
        super().__init__()
        self.noted, self.status, self.is_over = [], None, threading.Event()

    def end(self, status):
        self.status = status
        self.is_over.set()
        if threading.current_thread() is threading.main_thread():
            raise Ended

    def wait_at_barrier(self, name, milliseconds):
        self.noted.append((name, milliseconds))


@pytest.fixture
def one_process(monkeypatch):
    client, last_word = OneProcess(), threading.Lock()
    monkeypatch.setattr(run, "connect", lambda job: Store(client, job.process_id, job.num_processes))
    monkeypatch.setattr(run, "NativeOutput", lambda: None)
    monkeypatch.setattr(run, "end_in_one_line", lambda *_: None)
    monkeypatch.setattr(run, "takes_last_word", lambda: last_word.acquire(blocking=False))
    monkeypatch.setattr(run.distributed.global_state, "client", client)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: client.noted.append("shutdown"))
    monkeypatch.setattr(run.os, "_exit", client.end)
    monkeypatch.setattr(run.time, "sleep", client.noted.append)
    yield client
    client.values.setdefault("m3jax/failed", b"0 it is over")
    with client.changed:
        client.changed.notify_all()  # the thread that waits for the others' errors


def test_a_run_of_one_command_needs_no_store():
    given = []
    run.on_hosts(arguments(), "m3jax.test", given.append)
    assert given == [None] and run.is_first()


def test_all_agree_on_versions_settings_and_folders_before_the_work(one_process, tmp_path, monkeypatch):
    """The work gets the channel of its run; when all have done theirs, however long that takes, they part."""
    (tmp_path / "config.json").write_text("{}")
    folder, given, waiting = str(tmp_path), [], []
    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: waiting.append(thread) or begin(thread))
    args = arguments(*ONE, "--mesh", "data=2", "--model", folder, "--draft", "ngram")
    run.on_hosts(args, "m3jax.test", given.append, {"the data": tmp_path, "no folder": None})
    (channel,) = given
    channel.send(b"message")
    facts = {name: json.loads(one_process.values[f"m3jax/facts/{name}/0"]) for name in ("versions", "settings")}
    assert facts["versions"].keys() == {"m3jax", "jax", "jaxlib"} and facts["versions"]["jax"] == jax.__version__
    assert facts["settings"] == {
        "--mesh": "data=2", **dict.fromkeys(("--dtype", "--weights", "--backend", "--invariant"), "None"),
        **dict.fromkeys(("--draft-tokens", "--steps", "--save-every"), "None"), "no folder": "none",
        "the folder of --model": fingerprint(tmp_path), "the data": fingerprint(tmp_path),
    }  # fmt: skip
    assert channel.is_sender and one_process.values["m3jax/calls/0/0"] == b"message"
    assert [thread.daemon for thread in waiting] == [True]  # who waits for others' errors holds no process up
    assert one_process.values["m3jax/names/0"].decode() == socket.gethostname()
    (name, milliseconds), last = one_process.noted
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

    with pytest.raises(Ended):
        run.on_hosts(arguments(*ONE), "m3jax.test", work)
    assert one_process.status == status
    assert one_process.values["m3jax/failed"].decode() == f"0 {reason}"
    (seconds,) = one_process.noted
    assert seconds >= 1
    err = capsys.readouterr().err
    assert err.startswith(printed) and (err == printed or status == 1)


def test_an_error_of_the_device_waits_for_the_line_that_names_the_dead(one_process):
    """That line comes within a heartbeat and ends the process; where it has not come, the error itself does."""

    def work(_):
        raise jax.errors.JaxRuntimeError("Gloo: connection closed by peer")

    with pytest.raises(Ended):
        run.on_hosts(arguments(*ONE, "--heartbeat", "7"), "m3jax.test", work)
    assert one_process.noted[0] > 7


def test_a_command_that_exits_by_itself_exits(one_process):
    with pytest.raises(SystemExit, match="3"):
        run.on_hosts(arguments(*ONE), "m3jax.test", lambda _: sys.exit(3))
    assert one_process.status is None and "m3jax/failed" not in one_process.values


@pytest.mark.parametrize(
    ("failed", "is_spoken", "line"),
    [
        (b"1 no space: x", False, "m3jax.test: error: process 1 ended: no space: x\n"),
        (b"0 its own", False, ""),
        (b"1 no space: x", True, ""),  # of two reasons the first is printed
    ],
)
def test_the_error_of_another_process_ends_this_one(one_process, capsys, failed, is_spoken, line):
    """By a line that names it; its own word, and a second one, end nothing."""
    if is_spoken:
        run.takes_last_word()

    def work(_):
        one_process.key_value_set_bytes("m3jax/failed", failed)
        one_process.is_over.wait(10 if line else 0.2)

    run.on_hosts(arguments(*ONE), "m3jax.test", work)
    assert (capsys.readouterr().err, one_process.status) == (line, 2 if line else None)


# By a death, of which JAX's coordination service tells before it aborts: as jaxlib 0.10.2 writes it

PAGE = (
    b"F1124 client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl::Status: "
)
SILENT = (
    PAGE
    + b"""UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
1
3
The tasks have crashed. Check the task logs for an earlier error
RPC: /xla.coordination.CoordinationService/PollForError"""
)
GONE = (
    PAGE
    + b"""UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}"""
)
TWICE = PAGE + b"ABORTED: 1 unexpectedly tried to connect with a different incarnation. It has likely restarted."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SILENT, "host 1, host 3 ended or is unreachable; this process ends too; start all again"),
        (GONE, "host 0, which coordinates, ended or is unreachable; this process ends too; start all again"),
        (TWICE, "--process-id 1 came twice, or was started again alone; start all, each with its own --process-id"),
        (
            PAGE + b"DEADLINE_EXCEEDED: Deadline Exceeded",
            "not all processes of the run came in time; start all, each with its own --process-id",
        ),
        (
            SILENT.replace(b"3\n", b"2\n"),
            "this process was silent for the time of a heartbeat, and the others have ended; start all again",
        ),
        (b"more\n" + PAGE + b"INTERNAL: ?\nmore", (PAGE + b"INTERNAL: ?").decode()),
        (b"terminate called after throwing an instance of 'std::bad_alloc'", None),
        (b"F1124 of distributed tensors: DEADLINE_EXCEEDED", None),
    ],
)
def test_the_line_names_who_is_gone(text, line):
    assert dead_line(text, lambda i: f"host {i}", own_id=2) == line


NATIVE = """if True:
    import os, sys
    from m3jax.hosts.deaths import NativeOutput, end_in_one_line
    output = NativeOutput()
    end_in_one_line("m3jax.test", output, "host {}".format, 0)
    print("a result")
    sys.stderr.write("a word \\N{BULLET}\\n")
    os.write(1, b"native 1\\n[Gloo] Rank [Gloo] Rank 2 is connected\\n")
    os.write(2, b"1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\\n\\nnative ")
    output.pass_on()
    os.write(2, b"2\\nlast\\n")
    sys.stdin.readline()
    os.write(2, sys.argv[1].encode())
    sys.stdout.flush()
    if sys.argv[2] == "abort":
        os.abort()
    output.pass_on()
"""


@pytest.mark.parametrize(
    ("text", "how", "status", "last"),
    [
        ("coordination_service says\nthe end\n", "leave", 0, "the end\n"),
        ("std::bad_alloc\n", "abort", -6, "native 2\nlast\nstd::bad_alloc\n"),
        ("JAX distributed service: unhealthy (stopped sending heartbeats):\n2\n", "abort", 2,
         "m3jax.test: error: host 2 ended or is unreachable; this process ends too; start all again\n"),
    ],
)  # fmt: skip
def test_what_native_code_writes_while_python_prints(text, how, status, last):
    """Python's streams are the process's own. What native code writes comes on stderr within a second, in whole lines,
    but for what Gloo and the coordination service say; an abort's page is one line, and of another abort all is shown.
    """
    env = os.environ | {"PYTHONIOENCODING": "ascii:backslashreplace"}
    command = [sys.executable, "-c", NATIVE, text, how]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=env, **pipes) as process:
        for line in ("a word \\u2022", "native 1", "native 2", "last"):
            assert process.stderr.readline() == f"{line}\n"
        out, err = process.communicate("\n")
    assert (process.returncode, out) == (status, "a result\n"), err
    assert err == last or (status == -6 and err.endswith(last)), err
