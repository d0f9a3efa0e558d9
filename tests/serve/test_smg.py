"""The gateway SMG itself, in front of two of our workers."""

import asyncio
import base64
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as protocol
from support.embedded import TOKENIZER
from support.media import image_file
from support.serving import clients
from support.workers import SHAPE, collect, engine_alone, generate_request, settled, text_model

from m3jax.assets import embedded_path
from m3jax.decoding import Engine, Media
from m3jax.media import process_image
from m3jax.serve.worker import Worker
from m3jax.serve.worker.server import start

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.skipif(
    find_spec("smg") is None, reason="waits for the wheel of the gateway SMG: pip install smg==1.13.0 (x86-64 Linux)"
)


@dataclass
class Behind:
    """SMG with its workers."""

    client: "openai.OpenAI"
    workers: list[Worker]
    running: asyncio.AbstractEventLoop

    def do(self, coroutine):
        """Run a coroutine where the workers are."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.running).result(60)

    def chat(self, content, **options):
        options = dict(max_tokens=24, temperature=0) | options
        return self.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], **options
        )


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever, daemon=True)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


@contextmanager
def smg(addresses: list[str], folder: Path) -> Iterator[str]:
    """SMG over workers, once it has found them; its output is in the folder."""
    port, log = free_port(), folder / "smg.log"
    command = [sys.executable, "-m", "smg", "launch", "--backend", "vllm", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--tool-call-parser", "minimax_m3", "--reasoning-parser", "minimax_m3", "--policy", "cache_aware"]
    command += ["--worker-urls", *addresses]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | {"HF_HUB_OFFLINE": "1"}, cwd=folder
        )
        try:
            for _ in range(600):
                text = log.read_text(errors="replace")
                if text.count("Successfully connected gRPC client") >= len(addresses) and "loaded tokenizer" in text:
                    break
                assert process.poll() is None, text[-2000:]
                time.sleep(0.1)
            else:
                raise AssertionError(text[-2000:])
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()  # it would wait five seconds
            process.wait()


@pytest.fixture(scope="module")
def behind(tmp_path_factory) -> Iterator[Behind]:
    """The embedded model, its template with the words by which SMG tells that reasoning can be switched."""
    folder = tmp_path_factory.mktemp("smg") / "tiny"
    shutil.copytree(embedded_path(), folder)
    template = folder / "chat_template.jinja"
    template.write_text("{%- if thinking_mode == 'enabled' -%}{%- endif -%}\n" + template.read_text())
    lm = replace(text_model(), folder=folder)
    with event_loop() as running:
        do = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, running).result(60)
        workers = [Worker(Engine(lm.model, **SHAPE), lm) for _ in range(2)]
        started = [do(start(worker)) for worker in workers]
        with (
            smg([f"grpc://127.0.0.1:{port}" for _, port in started], folder) as url,
            clients.openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield Behind(client, workers, running)
        for (server, _), worker in zip(started, workers, strict=True):
            do(server.stop(0))
            do(worker.close("abort"))


def test_smg_chats(behind):
    said = behind.chat("What is it?")
    assert said.choices[0].message.content and said.usage.completion_tokens > 0
    pieces = behind.chat("What is it?", stream=True, stream_options={"include_usage": True})
    pieces = list(pieces)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == said.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == said.usage.completion_tokens


def test_smg_refuses_what_the_worker_refuses(behind):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(clients.openai.BadRequestError, match="uniqueItems"):
        behind.chat("What is it?", response_format=format)


def test_a_picture_that_smg_preprocessed_reaches_the_model(behind):
    """The embedded model tells a disc from a square, and says of each what it says without a gateway."""
    down, right = np.mgrid[:112, :112]
    shapes = (down - 56) ** 2 + (right - 56) ** 2 < 36**2, (abs(down - 56) < 36) & (abs(right - 56) < 36)
    said = []
    for shape in shapes:
        file = image_file(np.where(shape[..., None], (0, 0, 255), 255).astype(np.uint8))
        url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What color is the shape?"},
        ]
        found = behind.chat(content, logprobs=True, extra_body={"chat_template_kwargs": {"thinking_mode": "disabled"}})
        processed = process_image(file)
        prompt = "]~!b[]~b]system\nm3jax\nthink: off[e~[\n]~b]user\n"
        prompt += "]<]start of image[>[" + "]<]image[>[" * processed.tokens + "]<]end of image[>["
        prompt += "\nWhat color is the shape?[e~[\n]~b]ai\n</mm:think>"
        ids, media = TOKENIZER.encode(prompt), Media([processed])
        expected = engine_alone(behind.workers[0], ids, media, max_new_tokens=24, stop_ids=(1,))
        assert found.choices[0].message.content == TOKENIZER.decode(expected.tokens)
        logprobs = [token.logprob for token in found.choices[0].logprobs.content]
        np.testing.assert_allclose(logprobs, expected.logprobs[: len(logprobs)], rtol=0, atol=1e-4)
        said.append(found.choices[0].message.content)
    assert said == ["Circle.", "Square."]


def infos(behind) -> list[protocol.GetServerInfoResponse]:
    """What each worker says of itself."""
    return [behind.do(worker.GetServerInfo(protocol.GetServerInfoRequest())) for worker in behind.workers]


def test_a_client_of_smg_that_goes_away_frees_its_pages(behind):
    stream = behind.chat("What is it?", stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert any(info.active_requests for info in infos(behind))
    stream.close()
    for worker in behind.workers:
        behind.do(settled(worker))


def test_smg_sends_a_prompt_to_the_worker_that_knows_it(behind):
    """SMG has not seen these prompts: only the workers' own KV events say where they are."""
    seen = []
    for number, worker in enumerate((*behind.workers, *reversed(behind.workers))):
        text = " ".join(f"{number} {word}" for word in range(40))
        prompt = "]~!b[]~b]system\nm3jax\nthink: off[e~[\n]~b]user\n" + text + "[e~[\n]~b]ai\n</mm:think>"
        ids = tuple(TOKENIZER.encode(prompt))
        behind.do(collect(worker, generate_request(prompt=ids, max_tokens=1)))
        time.sleep(0.5)  # for the event to get there
        before = infos(behind)
        body = {"chat_template_kwargs": {"thinking_mode": "disabled"}}
        answer = behind.chat(text, extra_body=body, max_tokens=2)
        changes = zip(behind.workers, before, infos(behind), strict=True)
        asked = [each for each, old, new in changes if new.last_receive_timestamp > old.last_receive_timestamp]
        seen.append(asked == [worker])
        assert answer.usage.prompt_tokens == len(ids)
    assert seen == [True] * 4


def test_smg_is_told_that_a_worker_is_well(behind):
    url = str(behind.client.base_url).replace("/v1/", "/health")
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.status == 200
