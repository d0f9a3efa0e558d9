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
from pathlib import Path
from types import SimpleNamespace

import pytest

from m3jax.serve.command import gateway_parser, parser, verify_parser
from m3jax.serve.gateway import server
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.sampling import Model
from m3jax.serve.gateway.server import Address, Opened, serve
from m3jax.serve.worker.command import parser as worker_parser

ROOT = Path(__file__).resolve().parents[2]


def test_a_server_begins_drains_and_ends():
    """Told to end within a stream it finishes the stream, takes no other request, and exits with 0."""
    command = [
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
        "float32",  # all as in `bench_serve.py --smoke`: what one has compiled the other finds
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
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


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--port 70000", "--port 70000: must be from 0 to 65535"),
        ("--request-log log", "--request-log needs --invariant"),
        ("--max-batch 0", "--max-batch 0: must be at least 1"),
        ("--draft-tokens 2", "--draft-tokens needs --draft"),
        ("worker --draft ngram --draft-tokens 9", "--draft-tokens 9: give 1 to 8"),
        ("--api-key ''", "--api-key"),
        ("gateway", "--worker"),
        ("gateway --worker nowhere", "give it as grpc://HOST:PORT"),
        ("verify nowhere", "no such log: nowhere"),
        ("worker --port 70000", "--port 70000"),
    ],
)
def test_refused_before_jax(tmp_path, line, part):
    """One line on stderr, without jax, and at once."""
    (tmp_path / "jax.py").write_text("raise SystemExit(77)\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    command = [sys.executable, "-m", "m3jax", "serve", *shlex.split(line)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert part in done.stderr


def test_missing_extra_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['uvicorn'] = None\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "m3jax.serve"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 2 and "uvicorn" in done.stderr and "pip install 'm3jax[serve]'" in done.stderr


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
    known = {option for make in (parser, gateway_parser, verify_parser) for option in make()._option_string_actions}
    of_others = {"--model_args", "--continuous-batching", "--limits"}
    assert documented - of_others <= known


# The process


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """The lines that a server prints."""
    lines = []
    monkeypatch.setattr(server, "say", lines.append)
    return lines


def served(load) -> None:
    """Serve until the process is told to end; the workers are none."""
    gateway = Gateway(settings=Settings(), workers=SimpleNamespace(is_up=True))
    gateway.model = Model("m", 100, 50, (1,), can_see=False, block_size=8, defaults={})

    async def run():
        await asyncio.wait_for(serve(gateway, Address(port=0), load), 20)
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
    closed, telling = [], []

    async def tell(gateway):
        while gateway.state != "ready":
            await asyncio.sleep(0.01)
        port = re.fullmatch(r"m3jax\.serve: http://127\.0\.0\.1:(\d+) \(loading\)", said[0])[1]
        assert said[1:] == [f"m3jax.serve: ready: m at http://127.0.0.1:{port}"]
        with socket.create_connection(("127.0.0.1", int(port))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.3)
            assert gateway.state == "draining" and not closed
            os.kill(os.getpid(), number)

    async def load(gateway):
        assert gateway.state == "loading"
        telling.append(asyncio.create_task(tell(gateway)))
        return opened(closed)

    served(load)
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

    served(load_for_ever)
    assert done == ["cancelled"]

    async def fail(_):
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        served(fail)

    async def load_to_the_end(_):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return opened(done)

    served(load_to_the_end)
    assert done == ["cancelled", "pool", "first", "last"] and len(said) == 3  # and it was never ready


def test_an_address_is_bound_once():
    with Address(port=0).bound() as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1" and listener.get_inheritable()
        with socket.create_connection((host, port), timeout=5):  # it waits to be served, and is not refused
            pass
        with pytest.raises(ValueError, match=f"--host 127.0.0.1 --port {port}: Address already in use; give another"):
            Address(port=port).bound()
