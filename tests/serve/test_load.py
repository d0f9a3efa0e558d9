"""Load and faults: the scripts that measure them at a small size, and what a token costs in calls and chunks."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.embedded import TOKENIZER

from m3jax.serve.gateway.http import OPENAI, EventStream, Pace
from m3jax.text import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
HI = [{"role": "user", "content": "Hi"}]


def run_script(name: str, *words: str, level: int = 0) -> str:
    command = [sys.executable, str(ROOT / "scripts" / name), *words]
    option = "--xla_backend_optimization_level="
    flags = os.environ.get("XLA_FLAGS", "").replace(f"{option}0", f"{option}{level}", 1)
    environment = os.environ | {"XLA_FLAGS": flags}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.further  # over HTTP in this process: test_gateway_http.py, test_worker.py
def test_faults_leave_nothing_behind():
    """After each fault no page is in use and `Engine.check` is clean; the script's status would say otherwise."""
    names = ("vanish", "slow", "half", "large", "deep", "streams")
    # Its programs run for longer than they are compiled: there LLVM's first optimizations pay.
    lines = run_script("fault_serve.py", "--small", "--rounds", "1", "--only", *names, level=1).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(names)
    deep = next(line for line in lines if line.startswith("deep"))
    assert "statuses" in deep and "500:" not in deep


@pytest.mark.further  # a script
def test_load_runs(tmp_path):
    """Each workload's requests are answered whole, by our server alone."""
    kept = tmp_path / "rows.json"
    run_script("bench.py", "serve", "--smoke", "--json", str(kept))
    rows = [row for row in json.loads(kept.read_text())["rows"] if "asked" in row]
    assert [row["workload"].partition(",")[0] for row in rows] == ["chat", "agentic", "images"]
    assert all(row["server"] == "m3jax" and row["asked"] == row["whole"] > 0 for row in rows)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(1, 40))
@example(" " * 37, 40)  # blanks, of which one token has many
def test_a_text_has_no_fewer_tokens_than_its_bound(text, times):
    """A bound that is too high would refuse a prompt that fits."""
    text *= times
    assert TOKENIZER.fewest_tokens(text) <= len(TOKENIZER.encode(text))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * (1 << 22)}]}),
        ("/v1/completions", {"prompt": "a" * (1 << 22), "max_tokens": 4}),
        ("/tokenize", {"prompt": "a" * (1 << 22)}),
        ("/tokenize", {"content": "a" * (1 << 22), "with_pieces": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * (1 << 22)}]}),
        ("/detokenize", {"tokens": [5] * (1 << 20)}),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(scripted, monkeypatch, path, body):
    """Tokenizing 64 MiB takes two minutes of a core, and gigabytes: the text is refused by its length."""
    server, worker = scripted
    tokenized = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: tokenized.append(len(text)) or encode(self, text))
    status, _, text = server.ask(path, body)
    assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")
    assert not worker.requests and max(tokenized, default=0) < 1 << 22


def test_a_long_text_is_tokenized_beside_the_event_loop(scripted, monkeypatch):
    """While a text is made to ids, and ids to their pieces and to a text, the server answers others."""
    server, _ = scripted
    threads = []
    note = lambda method: (
        lambda *words, **more: threads.append(threading.current_thread().name) or method(*words, **more)
    )
    for name in ("encode", "decode", "token_bytes"):
        monkeypatch.setattr(Tokenizer, name, note(getattr(Tokenizer, name)))
    _, _, text = server.ask("/tokenize", {"prompt": "A text.", "with_pieces": True})
    ids = [token["id"] for token in json.loads(text)["tokens"]]
    assert json.loads(server.ask("/detokenize", {"tokens": ids})[2])["prompt"] == "A text."
    assert len(threads) == 2 + len(ids) and all(name.startswith("asyncio_") for name in threads), threads


def test_tokens_of_one_message_are_one_chunk(scripted):
    """Four tokens that come at once are one event, in reasoning and in content, and none of the text is lost."""
    server, worker = scripted
    text = "One sentence that is long enough. "
    worker.tokens_per_chunk, worker.script = 4, lambda request, index: f"{text * 4}</mm:think>{text * 4}"
    events = server.events("/v1/chat/completions", {"messages": HI, "stream": True, "thinking": {"type": "enabled"}})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    for name in ("reasoning_content", "content"):
        pieces = [delta[name] for delta in deltas if delta.get(name)]
        num_tokens = len(TOKENIZER.encode(text * 4))
        assert "".join(pieces).strip() == (text * 4).strip()
        assert len(pieces) <= num_tokens / 4 + 2 < num_tokens


def test_a_slow_client_holds_up_what_it_does_not_read():
    """While an event is written no other is made: what a client does not read costs no memory."""
    made, written, ahead = [], [], []

    async def events():
        for number in range(20):
            made.append(number)
            yield f"{number}\n"

    async def send(message: dict) -> None:
        await asyncio.sleep(0.001)
        if body := message.get("body"):
            written.append(body.decode())
            ahead.append(len(made) - len(written))

    async def run() -> None:
        pace = Pace(10.0, 60.0, asyncio.get_running_loop().time())
        stream = EventStream(events(), OPENAI, pace, {}, lambda status: written.append(status))
        await stream({}, asyncio.get_running_loop().create_future, send)

    asyncio.run(run())
    assert written == [*(f"{number}\n" for number in range(20)), "200"] and not any(ahead)
