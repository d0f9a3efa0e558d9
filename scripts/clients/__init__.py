"""Server processes, and clients that read streams from bare sockets: what the load and the fault runs measure with.

A client library costs as much processor time for a chunk as the server does, on the same cores. Here a chunk is noted
with its time and read later.
"""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that nobody listened at a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A server of OpenAI's API as a process, from its start until /health says 200.

    Args:
      name: in tables.
      command: of the process, with its port.
      port: that it listens at.

    Attributes:
      command: the same.

    Raises:
      ValueError: the process ended before it served; with the last line that it wrote.
    """

    def __init__(self, name: str, command: Sequence[str], port: int):
        self.name, self.port, self.command = name, port, tuple(command)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `close`)
        # The package is that of this checkout, whatever is installed.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            raise ValueError(f"{name}: {command[0]} cannot be run: {error.strerror}") from None

    def wait_until_ready(self, seconds: float, path: str = "/health") -> None:
        """Wait until the server answers with 200.

        Args:
          seconds: at most.
          path: that is asked for; of a server without /health another one.

        Raises:
          ValueError: it ended, or is not ready.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ValueError(f"{self.name} ended with status {self._process.returncode}: {self.last_line()}")
            with contextlib.suppress(OSError):
                if ask(self.port, path)[0] == 200:
                    return
            time.sleep(0.2)
        raise ValueError(f"{self.name} was not ready within {seconds:g} s: {self.last_line()}")

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def last_line(self) -> str:
        """Return the last line that the process wrote."""
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it wrote nothing"

    def cpu_seconds(self) -> float:
        """Return the processor time of the process so far, of all its threads; 0 where there is no /proc."""
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def resident_bytes(self) -> int:
        """Return the memory of the process; 0 where there is no /proc."""
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def open_files(self) -> int:
        """Return how many files and sockets the process has open; 0 where there is no /proc."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self._process.pid}/fd"))
        return 0

    def kill(self) -> None:
        """End the process at once, as a machine that loses its power does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()


def ask(port: int, path: str, body: Any = None, timeout: float = 60.0) -> tuple[int, str]:
    """Send a request and return status and body of the answer; a body that is no bytes goes as JSON."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def request_bytes(path: str, body: bytes, length: int | None = None) -> bytes:
    """Return a POST of HTTP/1.0, whose answer comes as it is and ends with the connection.

    Args:
      path: of the endpoint.
      body: JSON.
      length: that the head announces; None is the body's.
    """
    head = f"POST {path} HTTP/1.0\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@dataclass(eq=False)
class Streamed:
    """A streamed answer as a client saw it.

    Attributes:
      sent: of `time.perf_counter`, when the request was sent.
      status: of HTTP; 0 if the connection gave none.
      events: (seconds of the same clock, data) of each event.
      ended: when the connection ended.
      is_whole: False if the client stopped reading, or the server did not end the stream.
    """

    sent: float
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    is_whole: bool = False

    @cached_property
    def _read(self) -> tuple[list[float], list[str], int | None, str | None]:
        """Return the times and texts of pieces, the number of new tokens if it was told, and an error if one came."""
        times, texts, tokens, error = [], [], None, None
        for when, data in self.events:
            if data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:  # the body of an error that is no JSON
                error = data.decode(errors="replace")
                continue
            if "error" in event:
                error = str(event["error"])
                continue
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices", ()):
                delta = choice.get("delta", choice)
                text = delta.get("content") or delta.get("reasoning_content") or delta.get("text")
                if text:
                    times.append(when)
                    texts.append(text)
        return times, texts, tokens, error

    @property
    def text(self) -> str:
        """All text, reasoning included."""
        return "".join(self._read[1])

    @property
    def error(self) -> str | None:
        """The error that the stream ended with; None for none."""
        return self._read[3]

    @property
    def tokens(self) -> int:
        """New tokens; where the server does not tell, the pieces that came: llama.cpp's have one token each."""
        _, texts, tokens, _ = self._read
        return len(texts) if tokens is None else tokens

    @property
    def first_token_seconds(self) -> float:
        """Seconds until the first text; infinite if none came."""
        times = self._read[0]
        return times[0] - self.sent if times else float("inf")

    @property
    def token_seconds(self) -> float:
        """Mean seconds of a token behind the first; infinite if there was none."""
        times = self._read[0]
        return (times[-1] - times[0]) / (self.tokens - 1) if len(times) > 1 and self.tokens > 1 else float("inf")


async def streamed(
    port: int, path: str, body: Any, *, seconds: float = 600.0, most_events: int | None = None, pause: float = 0.0
) -> Streamed:
    """Send a request for a stream and read it to its end.

    Args:
      port: of the server on this machine.
      path: of the endpoint.
      body: of the request, sent as JSON.
      seconds: after which the client goes away.
      most_events: after which it goes away; None reads all.
      pause: seconds before each further reading, as a slow reader makes them.
    """
    data = json.dumps(body).encode()
    found = Streamed(time.perf_counter())
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
            writer.write(request_bytes(path, data))
            await _read(reader, found, most_events, pause)
    except (TimeoutError, OSError):
        pass
    finally:
        found.ended = time.perf_counter()
        if writer is not None:
            writer.transport.abort() if not found.is_whole else writer.close()
    return found


async def _read(reader: asyncio.StreamReader, found: Streamed, most_events: int | None, pause: float) -> None:
    """Read an answer's status, skip its head, and note each event with its time."""
    words = (await reader.readline()).split()
    found.status = int(words[1]) if len(words) > 1 else 0
    while (await reader.readline()).strip():
        pass
    while line := await reader.readline():
        if line.startswith(b"data: "):
            found.events.append((time.perf_counter(), line[6:].strip()))
            if len(found.events) == most_events:
                return
        elif found.status != 200 and line.strip():
            found.events.append((time.perf_counter(), line.strip()))
        if pause:
            await asyncio.sleep(pause)
    found.is_whole = True
