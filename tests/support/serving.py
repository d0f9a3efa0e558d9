"""A gateway over real HTTP for tests, and a worker whose answers are written beforehand."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from smg_grpc_proto import vllm_engine_pb2 as pb
from support.embedded import TOKENIZER

from m3jax.assets import embedded_path
from m3jax.decoding import Generation
from m3jax.serve.gateway.app import app
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.loading import open_gateway
from m3jax.serve.gateway.sources import Sources
from m3jax.serve.gateway.workers import LocalWorker

if TYPE_CHECKING:
    import anthropic
    import openai

EOS = 1
NAME = "scripted"
PATIENCE = 240  # seconds a client waits: a first request compiles, on a busy machine for minutes
NS = "]<]minimax[>["
CALL = (
    f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Paris, the city of light{NS}</city>{NS}</invoke>'
    f'{NS}<invoke name="get_time">{NS}</invoke>{NS}</tool_call>'
)


class Clients:
    """The servers' clients, of a thousand modules each: imported by the first test that speaks to a server."""

    @cached_property
    def openai(self) -> ModuleType:
        import openai

        return openai

    @cached_property
    def anthropic(self) -> ModuleType:
        import anthropic

        return anthropic


clients = Clients()


@dataclass
class ScriptedWorker:
    """A worker that says what it is told to: `script` makes the text of an answer of a request and its number.

    It does what the protocol asks of a worker otherwise: it keeps to max_tokens, ends with the EOS token, counts, and
    gives log-probabilities, which are made up. A prompt that it saw before is in its cache but for the last token.

    Attributes:
      tokens_per_chunk: in one message.
      reading_seconds: before the first chunk of a request, in which one token of its prompt is read.
      gate: what the second chunk of each answer waits for; None does not wait.
      requests: all that came.
      left: ids of requests whose iterator was closed before its end.
    """

    script: Callable[[pb.GenerateRequest, int], str] = lambda request, index: "All is well."
    tokens_per_chunk: int = 1
    reading_seconds: float = 0.0
    gate: threading.Event | None = None
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    async def Generate(self, request: pb.GenerateRequest, *, record: Sequence[str] = (), on_result: Any = None):
        if request.sampling_params.seed == 666:
            raise ValueError("seed = 666: not this one")
        seen = any(request.tokenized.input_ids == other.tokenized.input_ids for other in self.requests)
        self.requests.append(request)
        prompt = len(request.tokenized.input_ids)
        try:
            await asyncio.sleep(self.reading_seconds)
            for index in range(request.sampling_params.n or 1):
                ids = [*TOKENIZER.encode(self.script(request, index)), EOS]
                is_cut = len(ids) > request.sampling_params.max_tokens
                ids = ids[: request.sampling_params.max_tokens]
                for start in range(0, len(ids), self.tokens_per_chunk):
                    if start and self.gate is not None:
                        while not self.gate.is_set():
                            await asyncio.sleep(0.005)
                    part = ids[start : start + self.tokens_per_chunk]
                    counts = dict(prompt_tokens=prompt, cached_tokens=(prompt - 1) * seen)
                    chunk = pb.GenerateStreamChunk(token_ids=part, index=index, **counts)
                    if request.sampling_params.HasField("logprobs"):
                        chunk.output_logprobs.CopyFrom(self._logprobs(part, request.sampling_params.logprobs))
                    yield pb.GenerateResponse(chunk=chunk)
                    await asyncio.sleep(0)
                if on_result is not None:
                    own = (prompt - 1 + np.arange(len(ids))) // 16  # each token reads its own block and the first
                    blocks = np.stack([own, np.zeros_like(own)], -1).reshape(-1, 1, 1, 2).astype(np.int16)
                    on_result(index, Generation(ids, [], "stop_id", prompt, records={"blocks": blocks}))
                complete = pb.GenerateComplete(
                    output_ids=ids, finish_reason="length" if is_cut else "stop", prompt_tokens=prompt,
                    completion_tokens=len(ids), cached_tokens=(prompt - 1) * seen, index=index,
                )  # fmt: skip
                yield pb.GenerateResponse(complete=complete)
        except (GeneratorExit, asyncio.CancelledError):
            self.left.append(request.request_id)
            raise

    def _logprobs(self, ids: Sequence[int], most: int) -> pb.OutputLogProbs:
        tops = [
            pb.TopLogProbs(values=[-0.25, -2.5][:most], token_ids=[token, 40 + (token == 40)][:most]) for token in ids
        ]
        return pb.OutputLogProbs(token_logprobs=[-0.25] * len(ids), token_ids=ids, top_logprobs=tops)

    async def prompt_progress(self, request_id):
        return len(self.requests[-1].tokenized.input_ids), 0, 1

    async def GetModelInfo(self, request):
        return pb.GetModelInfoResponse(
            served_model_name=NAME, max_context_length=4096, vocab_size=2048, supports_vision=True, eos_token_ids=[EOS],
            default_sampling_params_json='{"temperature": 0.5}',
        )  # fmt: skip

    async def GetServerInfo(self, request):
        return pb.GetServerInfoResponse(block_size=16)

    async def HealthCheck(self, request):
        return pb.HealthCheckResponse(healthy=True)

    async def GetLoads(self, request):
        load = pb.SchedulerLoad(num_running_reqs=3, num_waiting_reqs=1, token_usage=0.5, cache_hit_rate=0.25)
        return pb.GetLoadsResponse(loads=[load])


@dataclass(eq=False)
class Running:
    """A gateway that serves.

    Attributes:
      gateway: its state.
      url: without a path.
      loop: of its thread.
    """

    gateway: Gateway
    url: str
    loop: asyncio.AbstractEventLoop

    @cached_property
    def openai(self) -> "openai.OpenAI":
        return clients.openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE)

    @cached_property
    def anthropic(self) -> "anthropic.Anthropic":
        return clients.anthropic.Anthropic(base_url=self.url, api_key="any", max_retries=0, timeout=PATIENCE)

    def close(self) -> None:
        for name in ("openai", "anthropic"):
            if name in self.__dict__:
                getattr(self, name).close()

    def ask(
        self, path: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Send a request and return status, headers and body; a body that is no text or bytes goes as JSON."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE)
        data = body if isinstance(body, bytes | str | None) else json.dumps(body)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
            response = connection.getresponse()
            return response.status, dict(response.headers), response.read().decode()
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Send a request for a stream and return its data, each parsed; "[DONE]" as it is."""
        status, headers, text = self.ask(path, body)
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def running(worker: Any, settings: Settings | None = None, sources: Sources | None = None) -> Iterator[Running]:
    """Serve a worker on a free port from a thread of its own.

    Args:
      worker: that is called as it is, or a function that makes the gateway's workers in that thread's event loop.
    """
    gateway = Gateway(settings=settings or Settings())
    loop = asyncio.new_event_loop()
    server = uvicorn.Server(
        uvicorn.Config(app(gateway), port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
    )

    async def serve() -> None:
        workers = worker() if callable(worker) else [LocalWorker(worker)]
        opened = await open_gateway(
            gateway, workers, folder=embedded_path(), name=None, sources=sources or Sources(), processes=1
        )
        gateway.state = "ready"
        await server.serve()
        opened.pool.close()
        for close in opened.closing:
            await close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        served = Running(gateway, f"http://127.0.0.1:{port}", loop)
        yield served
        served.close()
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        loop.close()
