"""The gateway in front of the embedded model's engine: what the model says is what clients get."""

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from importlib.resources import files

import pytest
from support import workers
from support.embedded import TOKENIZER
from support.serving import Running, clients, running
from support.workers import new_worker

from m3jax.dialogue import chat
from m3jax.serve.gateway import gateway as gateway_module
from m3jax.serve.worker import Worker

HI = [{"role": "user", "content": "What is in the picture?"}]
PICTURE = files("m3jax.assets").joinpath("sample.png").read_bytes()
PICTURE_URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


@pytest.fixture(scope="module")
def engine_server() -> Iterator[tuple[Running, Worker]]:
    worker = new_worker()
    with running(worker) as server:
        yield server, worker
    asyncio.run(worker.close("abort"))


def ask(server, **fields):
    return server.openai.chat.completions.create(
        **{"model": "tiny", "messages": HI, "temperature": 0, "max_tokens": 40} | fields
    )


def on_engine(worker, fn):
    async def run():
        return await workers.on_engine(worker, fn)

    return asyncio.run(run())


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_picture(engine_server):
    """A picture by data URL reaches the model: its answer is that of `m3jax.chat` with the same picture."""
    server, worker = engine_server
    part = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What do you see?"}]}]
    answer = ask(server, messages=messages)
    shown = [{"role": "user", "content": [{"type": "image", "image": PICTURE}, messages[0]["content"][1]]}]
    knobs = dict(stream=False, max_new_tokens=40, temperature=0, progress=False)
    same = lambda: chat(workers.text_model().model, TOKENIZER, shown, engine=worker.engine, **knobs)
    expected = on_engine(worker, same)
    assert answer.choices[0].message.content == expected.content != ask(server).choices[0].message.content
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    block = {
        "type": "base64",
        "media_type": "image/jpeg",
        "data": PICTURE_URL.partition(",")[2],
    }  # it says the wrong type
    message = server.anthropic.messages.create(
        model="tiny", max_tokens=40, thinking={"type": "adaptive"}, extra_body={"temperature": 0},
        messages=[{"role": "user", "content": [{"type": "image", "source": block}, messages[0]["content"][1]]}],
    )  # fmt: skip
    assert message.content[-1].text == expected.content


def test_json_schema(engine_server):
    server, _ = engine_server
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    style = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    content = ask(server, response_format=style, max_tokens=100).choices[0].message.content
    assert set(json.loads(content)) == {"yes"}


def test_progress_of_a_long_prompt(engine_server, monkeypatch):
    """While a prompt is read in chunks, a stream that asks says how far it is; what is cached counts as read."""
    monkeypatch.setattr(gateway_module, "_PROGRESS_SECONDS", 0.0)
    server, worker = engine_server
    messages = [{"role": "user", "content": "Which tokens of a long prompt are read by now? " * 12}]
    body = {"messages": messages, "max_tokens": 2, "stream": True, "return_progress": True}
    total = json.loads(server.ask("/tokenize", {"messages": messages})[2])["count"]
    runs = []
    for _ in range(2):
        events = server.events("/v1/chat/completions", body)[:-1]
        runs.append([event["prompt_progress"] for event in events if "prompt_progress" in event])
        first = next(number for number, event in enumerate(events) if event["choices"])
        assert not any("prompt_progress" in event for event in events[first:])
    read = [each["processed"] for each in runs[0]]
    chunk = worker.engine.shapes.chunks[-1]
    assert read == sorted(read) and len({count for count in read if 0 < count < total}) >= 2
    # Other tests' prompts begin as this one does.
    cached = {each["cache"] for each in runs[0] if each["processed"]}
    assert len(cached) == 1 and max(cached) < total / 4, runs[0]
    assert all((count - max(cached)) % chunk == 0 or count in (0, total) for count in read), (chunk, runs[0])
    assert {each["total"] for each in runs[0]} == {total}
    assert all(each["cache"] > max(cached) for each in runs[1] if each["processed"])
    status, _, text = server.ask("/v1/chat/completions", {**body, "stream": False})
    assert (status, json.loads(text)["error"]["param"]) == (400, "return_progress")


def test_client_that_leaves_frees_its_pages(engine_server):
    """A stream that is closed, and a whole answer that is given up, free their pages."""
    server, worker = engine_server
    endless = {"extra_body": {"ignore_eos": True}, "max_tokens": 400}
    stream = ask(server, stream=True, **endless)
    next(iter(stream))
    assert on_engine(worker, lambda: worker.engine.pages["used"]) > 0
    stream.close()
    wait_for(lambda: on_engine(worker, lambda: worker.engine.pages["used"]) == 0)
    with pytest.raises(clients.openai.APITimeoutError):
        server.openai.with_options(timeout=0.3).chat.completions.create(
            model="tiny", messages=HI, max_tokens=450, extra_body={"ignore_eos": True}
        )
    wait_for(lambda: not on_engine(worker, lambda: worker.engine.busy))
    on_engine(worker, worker.engine.check)
    assert on_engine(worker, lambda: worker.engine.pages["used"]) == 0 and server.gateway.running == 0


def test_metrics(engine_server):
    server, _ = engine_server
    ask(server)
    text = server.ask("/metrics")[2]
    figures = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if line[0] != "#"}
    route = 'route="/v1/chat/completions"'
    assert figures[f'm3jax_requests_total{{{route},status="200"}}'] > 0
    assert figures[f"m3jax_time_to_first_token_seconds_count{{{route}}}"] > 0
    assert (
        figures[f"m3jax_output_tokens_total{{{route}}}"]
        > figures[f"m3jax_time_to_first_token_seconds_count{{{route}}}"]
    )
    assert figures['m3jax_worker_up{worker="local"}'] == 1
    assert figures['m3jax_worker_cache_hit_rate{worker="local"}'] > 0
