"""The calls of the protocol `vllm.grpc.engine`, carried out by an engine; this file knows no gRPC."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

from jax.typing import DTypeLike
from smg_grpc_proto import vllm_engine_pb2 as protocol

from m3jax.assets import embedded_path
from m3jax.completion import Defaults
from m3jax.decoding import Engine, EngineLoop, RequestStream, TokenEvent
from m3jax.decoding.engine.options import EngineKnobs
from m3jax.hub import load
from m3jax.messages import shown
from m3jax.serve.worker.answers import Answer
from m3jax.serve.worker.orders import Order, OrderReader
from m3jax.text import Tokenizer

MAX_REQUESTS = 1024  # that go on or wait, where the caller does not say
_MOST_PAGES = 4096  # of a pool, likewise
_SUBMITTERS = 32  # threads in which requests are read and handed to the engine


@dataclass(eq=False)
class _Active:
    """A request that has not ended: its streams, once the engine has it."""

    streams: list[RequestStream] = field(default_factory=list)
    is_aborted: bool = False

    def cancel(self) -> None:
        self.is_aborted = True
        for stream in self.streams:
            stream.cancel()


class Worker:
    """An engine behind the calls of SMG's protocol, as coroutines with the service's names and messages.

    `m3jax.serve.worker.server` puts it behind gRPC; a gateway in the same process calls it as it is. One event loop
    calls a worker. What is wrong with a request is a ValueError with the field's name, too many requests are
    `m3jax.decoding.loop.LoopFull`, and after a failure of the engine every call raises `LoopClosed` of the same module.

    Args:
      engine: from now on the worker's alone.
      tokenizer: the model's, for prompts that come as text and for stop strings.
      defaults: of the model's folder, which tells the EOS ids and what a client gets that leaves the sampling open.
      folder: where the model was read from.
      name: under which clients know the model; None is the folder's.
      max_requests: that go on or wait at once.

    Example:
      worker = Worker.from_pretrained()
      async for message in worker.Generate(request):
          print(message.WhichOneof("response"))
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        defaults: Defaults,
        folder: str | Path,
        *,
        name: str | None = None,
        max_requests: int = MAX_REQUESTS,
    ):
        self.engine, self.tokenizer, self.folder = engine, tokenizer, Path(folder)
        self.name = self.folder.name if name is None else name
        self._defaults = defaults
        eos_ids = engine.config.eos_token_id if defaults.stop_ids is None else defaults.stop_ids
        self._eos_ids = tuple(eos_ids)
        self._reader = OrderReader(tokenizer, self._eos_ids, engine.max_length)
        self._loop = EngineLoop(engine, max_requests)
        self._submitters = ThreadPoolExecutor(_SUBMITTERS, thread_name_prefix="m3jax submit")
        self._active: dict[str, _Active] = {}

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path | None = None,
        *,
        name: str | None = None,
        dtype: DTypeLike = "bfloat16",
        invariant: bool = False,
        max_requests: int = MAX_REQUESTS,
        **knobs: Unpack[EngineKnobs],
    ) -> "Worker":
        """Read a folder in the hub's layout and make an engine for it.

        Args:
          folder: None is the embedded checkpoint.
          name: as in the class.
          dtype: of the parameters, as in `m3jax.load`.
          invariant: as in `Engine`.
          max_requests: as in the class.
          **knobs: of `Engine`; without `pages` there are as many as `max_batch` requests of the model's context take,
            and at most 4,096.

        Raises:
          ValueError: a folder that cannot be used, or a bad knob.
        """
        folder = embedded_path() if folder is None else Path(folder)
        tokenizer, defaults = Tokenizer.from_pretrained(folder), Defaults.from_pretrained(folder)
        model = load(folder, dtype=dtype)
        blocks = -(-model.config.max_position_embeddings // model.config.index_block_size)
        knobs = {"pages": min(_MOST_PAGES, blocks * knobs.get("max_batch", 8))} | knobs
        engine = Engine(model, invariant=invariant, **knobs)
        return cls(engine, tokenizer, defaults, folder, name=name, max_requests=max_requests)

    async def close(self, pending: Literal["finish", "abort"] = "finish") -> None:
        """End the engine's thread; nothing can be asked of the worker then.

        Args:
          pending: "finish" lets requests that go on end first, "abort" ends them now.
        """
        await asyncio.to_thread(self._loop.close, pending)
        self._submitters.shutdown(wait=False)

    # The calls of the service, by its names

    async def Generate(self, request: protocol.GenerateRequest) -> AsyncIterator[protocol.GenerateResponse]:
        """Continue a prompt.

        A client that goes away closes the iterator, or cancels the task that reads it: the engine then ends the request
        before its next step, and its pages are free.

        Yields:
          Where `stream` is set a chunk whenever there are new tokens; at the end of each of the `n` continuations,
          which come mixed and are told apart by `index`, a `complete` with all of its ids. Ids include the one that
          stopped. `cached_tokens` is told with `complete`.

        Raises:
          ValueError: what cannot be carried out, with the field's name.
          LoopFull: there are `max_requests` already.
          LoopClosed: the engine failed, or the worker was closed.
        """
        request_id = request.request_id or uuid.uuid4().hex
        if request_id in self._active:
            raise ValueError(f"request_id = {shown(request_id)}: a request of this name goes on; give another name")
        active = self._active[request_id] = _Active()
        try:
            order = await self._submit(request, active)
            answers = [Answer(order, index, self._text_of(order)) for index in range(order.n)]
            async for index, event in _events(active.streams):
                for message in answers[index].messages(event):
                    yield message
                if answers[index].stop_string is not None:
                    active.streams[index].cancel()  # its last event follows, when its pages are free
        finally:
            del self._active[request_id]
            active.cancel()

    async def Abort(self, request: protocol.AbortRequest) -> protocol.AbortResponse:
        """End requests by their ids; each tells its client "abort". An id that is not known has ended already."""
        for request_id in request.request_ids:
            if request_id in self._active:
                self._active[request_id].cancel()
        return protocol.AbortResponse()

    async def HealthCheck(self, request: protocol.HealthCheckRequest) -> protocol.HealthCheckResponse:
        """Say whether requests are taken."""
        if self._loop.is_closed:
            return protocol.HealthCheckResponse(healthy=False, message="the engine has ended")
        return protocol.HealthCheckResponse(healthy=True, message="ready")

    async def GetModelInfo(self, request: protocol.GetModelInfoRequest) -> protocol.GetModelInfoResponse:
        """Describe the model as a gateway needs it."""
        config = self.engine.config
        described = config.to_dict()
        knobs = {name: value for name, value in self._defaults.knobs.items() if name != "bad_words"}
        return protocol.GetModelInfoResponse(
            model_path=self.name,
            is_generation=True,
            max_context_length=self.engine.max_length,
            vocab_size=config.vocab_size,
            supports_vision=bool(self.engine.shapes.media_patches),
            served_model_name=self.name,
            tokenizer_path=self.name,
            model_type=described.get("model_type", "minimax_m3_vl"),
            architectures=described.get("architectures", ()),
            eos_token_ids=self._eos_ids,
            bos_token_id=self.tokenizer.bos_id or 0,
            max_req_input_len=self.engine.max_length - 1,
            default_sampling_params_json=json.dumps(knobs),
        )

    # How a request gets to the engine

    async def _submit(self, request: protocol.GenerateRequest, active: _Active) -> Order:
        """Read a request and hand it to the engine, on a thread: both wait, the second for the engine's round."""

        def submit() -> Order:
            order = self._reader.read(request)
            active.streams = self._loop.submit(
                order.prompt, order.params, order.media, order.guide, n=order.n, timeout=0
            )
            return order

        submitted = self._submitters.submit(submit)
        try:
            order = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(lambda _: active.cancel())  # the client has gone, and the thread goes on
            raise
        if active.is_aborted:
            active.cancel()
        return order

    def _text_of(self, order: Order) -> Any:
        return self.tokenizer.stream(skip_special_tokens=order.skip_special_tokens)


async def _events(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, TokenEvent]]:
    """Yield the events of several streams as they come, with the index of their stream, until all have ended."""
    events = [aiter(stream) for stream in streams]
    awaited = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(events)}
    try:
        while awaited:
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, event = awaited.pop(task), task.result()
                yield index, event
                if event.generation is None:
                    awaited[asyncio.ensure_future(anext(events[index]))] = index
    finally:
        for task in awaited:
            task.cancel()
