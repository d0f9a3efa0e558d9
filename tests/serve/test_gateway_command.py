"""`m3jax serve` as a process: it begins, serves, drains and ends; and what its command lines refuse."""

import asyncio
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from m3jax.serve import apart, command, together
from m3jax.serve.command import gateway_parser, parser, verify_parser
from m3jax.serve.gateway import server
from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.sampling import Model
from m3jax.serve.gateway.server import Address, Opened, serve
from m3jax.serve.worker.command import parser as worker_parser

ROOT = Path(__file__).resolve().parents[2]


def test_a_server_begins_drains_and_ends():
    """Told to end within a stream it finishes the stream, takes no other request, and exits with 0."""
    server_command = [
        sys.executable,
        "-m",
        "m3jax",
        "serve",
        "--port",
        "0",
        "--no-warmup",
        "--context",
        "512",
        "--max-batch",
        "2",
        "--prefill-chunk",
        "64",
        "--dtype",
        "float32",  # all as in `bench.py serve --smoke`: what one has compiled the other finds
    ]
    with subprocess.Popen(server_command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"127\.0\.0\.1:(\d+)", process.stderr.readline())[0]
            ask = http.client.HTTPConnection(address, timeout=120)
            ask.request("GET", "/health")
            first = ask.getresponse()
            first.read()
            assert (first.status, first.getheader("retry-after")) == (503, "2")  # it listens before it has loaded
            while "ready" not in (line := process.stderr.readline()):
                assert line
            body = {
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 32,
                "ignore_eos": True,
                "stream": True,
            }
            ask.request("POST", "/v1/chat/completions", json.dumps(body))
            response = ask.getresponse()
            assert response.status == 200
            while not (line := response.readline()).startswith(b"data: "):
                assert line in (b": ping\n", b"\n")  # while it compiles
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(OSError):
                other = http.client.HTTPConnection(address, timeout=5)
                other.request("GET", "/health")
                other.getresponse()
            rest = response.read()
            assert b'"finish_reason":"length"' in rest and rest.endswith(b"data: [DONE]\n\n")
            ask.close()
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                process.kill()


def test_refused_before_jax(tmp_path):
    """One line on stderr, without jax, and at once; the other lines: `test_command_lines_that_are_refused`."""
    (tmp_path / "jax.py").write_text("raise SystemExit(77)\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    words = [sys.executable, "-m", "m3jax", "serve", "--port", "70000"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "--port 70000: must be from 0 to 65535" in done.stderr


def test_a_server_is_this_machines_alone_and_asks_no_origin_unless_it_is_told():
    for make in (parser, gateway_parser):
        words = [] if make is parser else ["--worker", "grpc://a:1"]
        args = make().parse_args(words)
        assert (args.host, args.cors_origin, args.allow_media) == ("127.0.0.1", [], [])


def test_documented_commands_are_commands(tmp_path, monkeypatch):
    """Every `m3jax serve` line of the documents has arguments that its parser takes."""
    (tmp_path / "DIR").mkdir()  # as the documents name the folder of a model
    monkeypatch.chdir(tmp_path)
    parsers = {"worker": worker_parser, "gateway": gateway_parser, "verify": verify_parser}
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/serving.md"))
    lines = re.findall(r"^m3jax serve.*$", text, re.M)
    assert len(lines) >= 6 and "`m3jax serve`" in text
    for line in lines:
        words = shlex.split(line)[2:]
        made = parsers[words.pop(0)]() if words and words[0] in parsers else parser()
        made.parse_args(words)
    documented = set(re.findall(r"`(--[a-z-]+)", (ROOT / "docs/serving.md").read_text(encoding="utf-8")))
    helps = "".join(make().format_help() for make in (parser, gateway_parser, verify_parser))
    known = set(re.findall(r"(--[a-z-]+)", helps))
    of_others = {"--model_args", "--continuous-batching", "--limits"}
    assert documented - of_others <= known


# The process


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """The lines that a server prints."""
    lines = []
    monkeypatch.setattr(server, "say", lines.append)
    return lines


def run_until_told(load, clients=()) -> None:
    """Serve until the process is told to end; the workers are none."""
    gateway = Gateway(settings=Settings(), workers=SimpleNamespace(is_up=True))
    gateway.model = Model("m", 100, 50, (1,), can_see=False, block_size=8, defaults={})

    async def run():
        await asyncio.wait_for(serve(gateway, Address(port=0), load), 20)
        for client in clients:
            client.close()
        await asyncio.sleep(0.1)  # a connection that is left sees that its client is gone

    asyncio.run(run())
    assert gateway.state == "draining"


def opened(closed: list[str]) -> Opened:
    """Parts that note when they are closed."""
    closing = lambda name: lambda: asyncio.sleep(0, closed.append(name))
    return Opened(SimpleNamespace(close=lambda: closed.append("pool")), [closing("first"), closing("last")])


@pytest.mark.usefixtures("unchecked")  # the workers are none
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_told_to_end_drains_and_told_twice_ends_at_once(number, said):
    """Then all that it had opened is closed, in order."""
    closed, telling, clients = [], [], []

    async def tell(gateway):
        while gateway.state != "ready":
            await asyncio.sleep(0.01)
        port = re.fullmatch(r"m3jax\.serve: http://127\.0\.0\.1:(\d+) \(loading\)", said[0])[1]
        assert said[1:] == [f"m3jax.serve: ready: m at http://127.0.0.1:{port}"]
        clients.append(socket.create_connection(("127.0.0.1", int(port))))
        clients[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.3)
        assert gateway.state == "draining" and not closed
        os.kill(os.getpid(), number)

    async def load(gateway):
        assert gateway.state == "loading"
        telling.append(asyncio.create_task(tell(gateway)))
        return opened(closed)

    run_until_told(load, clients)
    assert closed == ["pool", "first", "last"]


@pytest.mark.usefixtures("unchecked")  # the workers are none
def test_a_process_that_is_ended_or_fails_while_it_loads(said):
    """The load is cancelled, and what it had opened is closed; its own error is the process's."""
    done = []

    async def load_for_ever(_):
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            done.append("cancelled")

    run_until_told(load_for_ever)
    assert done == ["cancelled"]

    async def fail(_):
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        run_until_told(fail)

    async def load_to_the_end(_):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return opened(done)

    run_until_told(load_to_the_end)
    assert done == ["cancelled", "pool", "first", "last"] and len(said) == 3  # and it was never ready


def test_an_address_is_bound_once():
    with Address(port=0).bound() as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1" and listener.get_inheritable()
        with socket.create_connection((host, port), timeout=5):  # it waits to be served, and is not refused
            pass
        with pytest.raises(ValueError, match=f"--host 127.0.0.1 --port {port}: Address already in use; give another"):
            Address(port=port).bound()


def served(monkeypatch, *words):
    """The engine, the worker's, the gateway and the address that a command line makes; nothing is loaded or served."""
    made = SimpleNamespace(closed=[])

    def engine(folder, **knobs):
        made.engine = {"folder": folder, **knobs}
        return "engine", "lm"

    class Worker:
        def __init__(self, own_engine, lm, *, name):
            made.worker = (own_engine, lm, name)

        async def prepare(self):
            made.closed.append("prepared")

        async def close(self, how):
            made.closed.append(how)

    async def open_gateway(gateway, workers, **options):
        made.opened = options
        return SimpleNamespace(closing=options["closing"])

    async def serve(gateway, address, load):
        made.gateway, made.address = gateway, address
        for close in (await load(gateway)).closing:
            await close()

    monkeypatch.setattr(together, "engine_from_pretrained", engine)
    monkeypatch.setattr(together, "Worker", Worker)
    monkeypatch.setattr(together, "LocalWorker", lambda worker: worker)
    monkeypatch.setattr(together, "open_gateway", open_gateway)
    monkeypatch.setattr(together, "serve", serve)
    monkeypatch.setattr(
        together, "identity", lambda folder, engine: {"weights": "w", "settings_hash": "s", "settings": engine}
    )
    together.serve_together(command.parser().parse_args(words))
    return made


@pytest.mark.usefixtures("unchecked")
def test_a_command_line_is_served_as_it_says(monkeypatch, tmp_path):
    found = served(monkeypatch)
    folder = found.engine.pop("folder")
    assert found.engine == dict(
        mesh=None, draft=None, draft_tokens=None, dtype="bfloat16", invariant=False, max_batch=8, steps_per_call=4
    )
    assert found.worker == ("engine", "lm", None) and found.closed == ["prepared", "abort"]
    assert (found.address.host, found.address.port, found.address.drain_seconds) == ("127.0.0.1", 8000, 30.0)
    assert found.opened["folder"] == folder and found.opened["processes"] == 2 and found.opened["name"] is None
    assert (found.gateway.headers, found.gateway.journal, found.gateway.settings.max_requests) == ({}, None, 256)
    log = tmp_path / "log"
    words = ["--invariant", "--request-log", str(log), "--no-warmup", "--name", "n", "--port", "5", "--host", "h"]
    words += ["--drain", "2", "--deadline", "9", "--max-requests", "3", "--api-key", "k", "--cors-origin", "o"]
    words += ["--pages", "7", "--context", "64", "--prefill-chunk", "16", "--max-batch", "2", "--weights", "mxfp8"]
    words += ["--allow-media", "a.example", "--media-processes", "1", "--model", str(tmp_path)]
    found = served(monkeypatch, *words)
    settings = dict(dtype="bfloat16", invariant=True, weights="mxfp8", max_batch=2, pages=7, prefill_chunk=16)
    settings |= dict(max_length=64, steps_per_call=4)
    assert found.engine == settings | dict(folder=tmp_path, mesh=None, draft=None, draft_tokens=None)
    assert found.worker[2] == "n" and found.closed == ["abort"]
    assert (found.address.host, found.address.port, found.address.drain_seconds) == ("h", 5, 2.0)
    own = found.gateway.settings
    assert (own.api_key, own.max_requests, own.deadline_seconds, own.origins) == ("k", 3, 9.0, ("o",))
    assert found.gateway.headers == {"X-M3JAX-Invariant": "weights=w, settings=s"}
    assert found.opened["sources"].hosts == {"a.example"} and found.opened["processes"] == 1
    assert json.loads(log.read_text())["server"] == {"weights": "w", "settings_hash": "s", "settings": settings}


def loaded_apart(monkeypatch, *words, fails=()):
    """What a gateway alone is opened with, where opening it fails first so often, and what it waited in between."""
    made, fails = SimpleNamespace(waits=[]), list(fails)

    async def tokenizer_folder(worker, into):
        assert into.is_dir()
        return f"of {worker}"

    async def open_gateway(gateway, workers, **options):
        made.asked = getattr(made, "asked", 0) + 1
        if fails:
            raise fails.pop(0)
        made.opened = (gateway, workers, options)
        return "opened"

    async def serve(gateway, address, load):
        made.gateway, made.address, made.loaded = gateway, address, await load(gateway)

    async def sleep(seconds):
        made.waits.append(seconds)

    monkeypatch.setattr(apart, "RemoteWorker", lambda address: f"worker {address}")
    monkeypatch.setattr(apart, "tokenizer_folder", tokenizer_folder)
    monkeypatch.setattr(apart, "open_gateway", open_gateway)
    monkeypatch.setattr(apart, "serve", serve)
    monkeypatch.setattr(apart, "asyncio", SimpleNamespace(run=asyncio.run, sleep=sleep))
    args = command.gateway_parser().parse_args(["--worker", "grpc://a:1", "--worker", "b:2", *words])
    apart.serve_apart(args, ["a:1", "b:2"])
    return made


@pytest.mark.usefixtures("unchecked")
def test_a_gateway_alone_opens_before_its_workers(monkeypatch, tmp_path):
    """It asks them until one answers, has its tokenizer from the first or a folder, and takes no for an answer."""
    lost = ApiError(503, "no worker can be reached", code="worker_lost")
    words = [
        "--host",
        "h",
        "--port",
        "5",
        "--drain",
        "2",
        "--max-requests",
        "3",
        "--media-processes",
        "4",
        "--name",
        "n",
    ]
    found = loaded_apart(monkeypatch, *words, "--allow-media", "a.example", fails=[lost, lost])
    gateway, workers, options = found.opened
    assert (found.asked, found.waits, found.loaded) == (3, [1.0, 1.0], "opened") and gateway is found.gateway
    assert workers == ["worker a:1", "worker b:2"] and options.pop("sources").hosts == {"a.example"}
    assert options == {"folder": "of worker a:1", "name": "n", "processes": 4}
    assert (found.address.host, found.address.port, found.address.drain_seconds) == ("h", 5, 2.0)
    assert gateway.settings.max_requests == 3
    found = loaded_apart(monkeypatch, "--tokenizer", str(tmp_path))
    assert found.opened[2]["folder"] == tmp_path and found.opened[2]["name"] is None and not found.waits
    with pytest.raises(ValueError, match="max_tokens: no"):
        loaded_apart(monkeypatch, fails=[ApiError(400, "max_tokens: no")])


OWN = {"m3jax": "1", "jax": "2", "device": "cpu x"}


def verified(monkeypatch, path, lines, request_id=None, here=OWN):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {}

    async def close(how):
        made["closed"] = how

    async def verify(worker, requests):
        return [(number, None if line["id"] == "a" else "differs") for number, line in requests]

    def from_pretrained(folder, **engine):
        made["engine"] = engine
        return SimpleNamespace(close=close)

    monkeypatch.setattr(together, "identity", lambda folder, engine: {"weights": "w", "settings": engine | here})
    monkeypatch.setattr(together, "verify", verify)
    monkeypatch.setattr(together.Worker, "from_pretrained", from_pretrained)
    return together.verify_log(path, Path("M"), request_id), made


@pytest.mark.usefixtures("unchecked")
def test_a_log_is_replayed_with_its_own_settings(monkeypatch, tmp_path):
    """All of it or one request; on the same weights, versions and devices alone."""
    path, server = tmp_path / "log", {"server": {"weights": "w", "settings": {"dtype": "float32", **OWN}}}
    lines = [server, {"id": "a"}, server, {"id": "b"}]
    found, made = verified(monkeypatch, path, lines)
    assert found == [("a", None), ("b", "differs")] and made == {"engine": {"dtype": "float32"}, "closed": "abort"}
    assert verified(monkeypatch, path, lines, "b")[0] == [("b", "differs")]
    other = {"server": {"weights": "w", "settings": {"dtype": "bfloat16", **OWN}}}
    for given, request, says in (
        (lines, "c", "has no c"), ([server], None, "has no request"), ([{"id": "a"}], None, "has no request"),
        ([server, {"id": "a"}, other], None, "line 3: another server wrote from here on"),
        ([{"server": {**server["server"], "weights": "v"}}, {"id": "a"}], None, "M has the weights w, the log v"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            verified(monkeypatch, path, given, request)
    for name in OWN:
        with pytest.raises(ValueError, match=f"the log was written with {name} {OWN[name]}, this is other"):
            verified(monkeypatch, path, lines, here=OWN | {name: "other"})


@pytest.mark.usefixtures("unchecked")
def test_the_replay_of_a_log_is_its_exit_status(monkeypatch, tmp_path, capsys):
    path = tmp_path / "log"
    path.write_text("")
    args = command.verify_parser().parse_args([str(path), "--model", "M", "--request", "r"])
    for results, status, text in (
        ([("a", None), ("b", None)], 0, "a: the same bits\nb: the same bits\n"),
        ([("a", None), ("b", "it differs")], 1, "a: the same bits\nb: it differs\n"),
    ):
        asked = []
        monkeypatch.setattr(together, "verify_log", lambda *given, r=results, asked=asked: asked.append(given) or r)
        assert command.run_verify(args) == status and capsys.readouterr().out == text
        assert asked == [(path, Path("M"), "r")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--port 70000", "--port 70000: must be from 0 to 65535"), ("--draft-tokens 2", "--draft-tokens needs --draft"),
        ("--request-log log", "--request-log needs --invariant"), ("--process-id 1", "--process-id goes with"),
        ("--max-batch 0", "--max-batch 0: must be at least 1"), ("--api-key ''", "a key has at least one character"),
        ("--port -1", "--port -1"), ("--max-requests 0", "--max-requests 0"), ("--pages 0", "--pages 0"),
        ("--media-processes 0", "--media-processes 0"), ("--prefill-chunk -1", "--prefill-chunk -1"),
        ("--context 0", "--context 0"), ("--deadline 0", "--deadline 0.0: must be above 0 seconds"),
        ("--drain -1", "--drain -1.0: must be above 0"), ("--drain nan", "--drain nan: must be above 0"),
        ("gateway", "--worker"), ("gateway --worker nowhere", "--worker nowhere: give it as grpc://HOST:PORT"),
        ("gateway --worker grpc://:1", "give it as grpc"), ("gateway --worker grpc://a:b", "give it as grpc"),
        ("gateway --worker a:1 --drain 0", "--drain 0.0: must be above 0"), ("verify nowhere", "no such log: nowhere"),
        ("worker --port 65536", "--port 65536: must be from 0 to 65535"), ("worker --port -1", "--port -1: must"),
        ("worker --draft ngram --draft-tokens 9", "--draft-tokens 9: give 1 to 8"),
        ("worker --process-id 1", "--process-id goes with --coordinator"),
        ("worker --role prefill --prefill-from grpc://a:1", "--prefill-from with --role prefill"),
        ("worker --prefill-from grpc://a", "--prefill-from a: give it as grpc://HOST:PORT"),
        ("worker --prefill-from :1", "--prefill-from :1: give it as"), ("worker --role decode", "decode"),
        ("worker --prefill-from a:1 --mesh data=2 --coordinator h:1 --num-processes 2 --process-id 0", "have one host"),
        ("worker --role prefill --mesh data=2 --coordinator h:1 --num-processes 2 --process-id 0", "have one host"),
        ("--no-such-option", "--no-such-option"), ("--dtype", "--dtype"),
    ],
)  # fmt: skip
def test_command_lines_that_are_refused(monkeypatch, capsys, line, says):
    """In one line, before anything is loaded."""
    from m3jax.hosts import run
    from m3jax.serve.worker import command as worker_command

    loaded = lambda *_: pytest.fail("it was loaded")
    monkeypatch.setattr(run, "on_hosts", loaded)
    monkeypatch.setattr(apart, "serve_apart", loaded)
    monkeypatch.setattr(worker_command, "_read_prompts", loaded)
    for module in (command, worker_command):
        monkeypatch.setattr(module, "raise_interrupts", lambda: None)
    assert command.main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and says in err
    part = line.split()[0]
    assert err.startswith(f"m3jax.serve{'' if part.startswith('-') else ' ' + part}: error: ")


@pytest.mark.usefixtures("unchecked")
def test_what_each_part_of_the_command_runs(monkeypatch):
    """Ctrl-C and a SIGTERM end each from its beginning."""
    from m3jax.hosts import run
    from m3jax.serve.worker import command as worker_command

    done = []
    monkeypatch.setattr(run, "on_hosts", lambda args, prog, work: done.append(prog) or work("channel"))
    monkeypatch.setattr(together, "serve_together", lambda args, channel: done.append(("together", args.port, channel)))
    monkeypatch.setattr(apart, "serve_apart", lambda args, addresses: done.append(("apart", addresses)))
    monkeypatch.setattr(worker_command, "_read_prompts", lambda args: done.append(("reads", args.port)))
    monkeypatch.setattr(
        worker_command, "_work", lambda args, channel: done.append(("works", channel, args.prefill_from))
    )
    for module in (command, worker_command):
        monkeypatch.setattr(module, "raise_interrupts", lambda: done.append("interrupts"))
    for line, expected in (
        ("--port 65535 --no-compile-cache", ["m3jax.serve", ("together", 65535, "channel")]),
        ("--port 0 --max-requests 1 --media-processes 1 --max-batch 1 --pages 1 --prefill-chunk 1 --context 1 "
         "--drain 0.1 --deadline 0.1", ["m3jax.serve", ("together", 0, "channel")]),
        ("gateway --worker grpc://a:1 --worker b:2", [("apart", ["a:1", "b:2"])]),
        ("worker --port 65535", ["m3jax.serve worker", ("works", "channel", [])]),
        ("worker --prefill-from grpc://a:1", ["m3jax.serve worker", ("works", "channel", ["a:1"])]),
        ("worker --role prefill --port 0", [("reads", 0)]),
    ):  # fmt: skip
        done.clear()
        assert command.main(line.split()) == 0 and done == ["interrupts", *expected], line


def test_no_part_of_the_command_runs_without_its_extra(monkeypatch, capsys, tmp_path):
    """Each package of the extra is looked for, before anything is loaded; a gateway and a replay need all of them."""
    from m3jax.serve.worker import command as worker_command

    (tmp_path / "log").write_text("")
    for module in (command, worker_command):
        monkeypatch.setattr(module, "raise_interrupts", lambda: pytest.fail("it went on"))
    monkeypatch.setattr(worker_command, "raise_interrupts", lambda: None)
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    imported = {"grpcio": "grpc", "smg-grpc-proto": "smg_grpc_proto", "prometheus-client": "prometheus_client"}
    packages = [re.match(r"[\w-]+", each)[0].lower() for each in extra["serve"]]
    for lacking in (imported.get(name, name) for name in packages):
        absent = lambda name, lacking=lacking: None if name == lacking else object()
        for module in (command, worker_command):
            monkeypatch.setattr(module, "find_spec", absent)
        needs = [[], ["gateway", "--worker", "a:1"], ["verify", str(tmp_path / "log")]]
        if lacking in ("grpc", "smg_grpc_proto", "llguidance"):
            needs += [["worker"], ["worker", "--role", "prefill"]]
        for words in needs:
            assert command.main(words) == 2, words
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1) and lacking in err and "pip install 'm3jax[serve]'" in err
