"""The calls of the protocol `vllm.grpc.engine`, carried out by an engine; this file knows no gRPC."""

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from smg_grpc_proto import vllm_engine_pb2 as protocol
from smg_grpc_proto.generated import common_pb2

from m3jax.cache import OutOfPages
from m3jax.console import say
from m3jax.decoding import Engine, EngineLoop, Generation, Params, RequestStream, TokenEvent
from m3jax.decoding.builder import page_types
from m3jax.decoding.engine import DRAFT_TOKENS, UnknownPages
from m3jax.decoding.engine.options import EngineKnobs, Work
from m3jax.decoding.loop import LoopClosed
from m3jax.media import PlaceholderIds
from m3jax.messages import shown
from m3jax.platform import platform
from m3jax.serve.constraints import Constraints
from m3jax.serve.worker.answers import Answer
from m3jax.serve.worker.kv_events import KvEvents
from m3jax.serve.worker.orders import Order, OrderReader, in_protocol_names
from m3jax.serve.worker.tensors import MediaReader
from m3jax.serve.worker.tokenizer_files import pieces, tokenizer_archive
from m3jax.text import TextStream
from m3jax.text_model import TextModel
from m3jax.transfer import PrefillClient, TransferError
from m3jax.version import VERSION

MAX_REQUESTS = 1024  # that go on or wait, where the caller does not say
_MOST_PAGES = 4096  # of a pool, likewise
_POLL_SECONDS, _THROUGHPUT_SECONDS = 0.02, 10.0
_SUBMITTERS = 32  # threads in which requests are read and handed to the engine


@dataclass(eq=False)
class _Active:
    """A request that has not ended: its streams, once the engine has it."""

    streams: list[RequestStream] = field(default_factory=list)
    prompt_tokens: int = 0
    has_begun: bool = False  # whether it has had news
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
      lm: the model, its tokenizer, and its folder, whose defaults tell the EOS ids.
      name: under which clients know the model; None is the folder's.
      max_requests: that go on or wait at once.
      prefill: other processes' engines, which read the prompts for this one; None reads them here.

    Example:
      worker = Worker.from_pretrained()
      async for message in worker.Generate(request):
          print(message.WhichOneof("response"))
    """

    def __init__(
        self,
        engine: Engine,
        lm: TextModel,
        *,
        name: str | None = None,
        max_requests: int = MAX_REQUESTS,
        prefill: PrefillClient | None = None,
    ):
        self.engine, self.tokenizer, self.folder = engine, lm.tokenizer, lm.folder
        self.name = lm.folder.name if name is None else name
        self._lm = lm
        eos_ids = engine.config.eos_token_id if lm.defaults.stop_ids is None else lm.defaults.stop_ids
        self._eos_ids = tuple(eos_ids)
        self.constraints = Constraints(lm.tokenizer, engine.config.vocab_size, self._eos_ids)
        placeholders = PlaceholderIds.of_config(engine.config) if engine.shapes.media_patches else None
        media = MediaReader({} if placeholders is None else dict(image=placeholders.image, video=placeholders.video))
        self._reader = OrderReader(
            lm.tokenizer, self._eos_ids, engine.max_length, engine.shapes.stop_ids, self.constraints, media
        )
        self._pages = KvEvents(engine.config.index_block_size)
        engine.observe_pages(self._pages.note)
        self._prefill = prefill
        self._loop = EngineLoop(engine, max_requests)
        self._submitters = ThreadPoolExecutor(_SUBMITTERS, thread_name_prefix="m3jax submit")
        # Apart from the others, which must not wait for a prompt that is read elsewhere.
        self._fetchers = ThreadPoolExecutor(_SUBMITTERS, thread_name_prefix="m3jax fetch")
        self._active: dict[str, _Active] = {}
        self._is_preparing = False
        self._began = time.time()
        self._received = 0.0  # when the last request came, in seconds since 1970
        self._drawn: deque[tuple[float, int]] = deque()  # (when, new tokens) of the last seconds

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path | None = None,
        *,
        name: str | None = None,
        dtype: DTypeLike = "bfloat16",
        invariant: bool = False,
        max_requests: int = MAX_REQUESTS,
        draft: str | Path | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        prefill_from: Sequence[str] = (),
        mesh: Mesh | str | None = None,
        weights: str = "dequantize",
        **knobs: Unpack[EngineKnobs],
    ) -> "Worker":
        """Read a folder in the hub's layout and make an engine for it.

        Args:
          folder: None is the embedded checkpoint.
          name: as in the class.
          dtype: of the parameters, as in `m3jax.load`.
          invariant: as in `Engine`.
          max_requests: as in the class.
          draft: what proposes tokens, as in `Engine`: "builtin", "ngram", or the folder of an EAGLE3 draft.
          draft_tokens: as in `Engine`.
          prefill_from: addresses, HOST:PORT, of other processes' engines that read the prompts (`PrefillClient`).
          mesh: devices to shard over, as in `m3jax.load`.
          weights: the form of MXFP8 weights, as in `m3jax.load`.
          **knobs: of `Engine`; without `pages` there are as many as `max_batch` requests of the model's context take,
            and at most 4,096.

        Raises:
          ValueError: a folder that cannot be used, or a bad knob.
        """
        how = dict(dtype=dtype, invariant=invariant, mesh=mesh, draft=draft, draft_tokens=draft_tokens, weights=weights)
        engine, lm = engine_from_pretrained(folder, **how, **knobs)
        prefill = PrefillClient(prefill_from, engine) if prefill_from else None
        return cls(engine, lm, name=name, max_requests=max_requests, prefill=prefill)

    def check_prefill(self, wait_seconds: int | float) -> None:
        """Ask the engines that read the prompts, if there are any, what they are.

        Args:
          wait_seconds: that they get to answer.

        Raises:
          ValueError: one does not answer, or has pages of another model or cache.
        """
        if self._prefill is not None:
            try:
                self._prefill.check(wait_seconds)
            except TransferError as error:
                raise ValueError(str(error)) from None

    async def prepare(self, programs: Sequence[str] = ("prefill", "decode", "pages")) -> None:
        """Compile what requests will run, and read the vocabulary for constraints; `HealthCheck` waits for it.

        Requests that come meanwhile wait too. What is left out is compiled by the first request that needs it.

        Args:
          programs: as in `Engine.warmup`; "tower" reads pictures.
        """
        self._is_preparing = True
        try:
            await self._on_engine(lambda: self.engine.warmup(programs=programs))
            # A vocabulary that grammars cannot use is no hindrance: a request with a constraint is then refused.
            with suppress(ValueError):
                await asyncio.get_running_loop().run_in_executor(self._submitters, self.constraints.prepare)
        finally:
            self._is_preparing = False

    async def close(self, pending: Literal["finish", "abort"] = "finish") -> None:
        """End the engine's thread; nothing can be asked of the worker then.

        Args:
          pending: "finish" lets requests that go on end first, "abort" ends them now.
        """
        await asyncio.to_thread(self._loop.close, pending)
        self._submitters.shutdown(wait=False)
        self._fetchers.shutdown(wait=False)
        if self._prefill is not None:
            self._prefill.close()

    # The calls of the service, by its names

    async def Generate(
        self,
        request: protocol.GenerateRequest,
        *,
        record: tuple[str, ...] = (),
        on_result: Callable[[int, Generation], None] | None = None,
    ) -> AsyncIterator[protocol.GenerateResponse]:
        """Continue a prompt.

        A client that goes away closes the iterator, or cancels the task that reads it: the engine then ends the request
        before its next step, and its pages are free.

        Args:
          request: of the protocol.
          record: choices of the layers that are recorded, as in `Params.record`. The protocol has no place for them, so
            they are only for a gateway in the same process.
          on_result: called with the number of a continuation and all of it, records included, before its `complete`.

        Yields:
          Where `stream` is set a chunk whenever there are new tokens; at the end of each of the `n` continuations,
          which come mixed and are told apart by `index`, a `complete` with all of its ids. Ids include the one that
          stopped. `cached_tokens` is told with both, the prompt's log-probabilities with the first chunk.

        Raises:
          ValueError: what cannot be carried out, with the field's name.
          LoopFull: there are `max_requests` already.
          LoopClosed: the engine failed, or the worker was closed.
          TransferError: the prompt was to be read elsewhere, and its pages did not come whole.
        """
        self._received = time.time()
        request_id = request.request_id or uuid.uuid4().hex
        if request_id in self._active:
            raise ValueError(f"request_id = {shown(request_id)}: a request of this name goes on; give another name")
        active = self._active[request_id] = _Active()
        try:
            order = await self._submit(request, active, record)
            answers = [Answer(order, index, self._text_of(order)) for index in range(order.n)]
            async for index, event in _events(active.streams):
                active.has_begun = True
                self._note_drawn(len(event.tokens))
                if on_result is not None and event.generation is not None:
                    on_result(index, event.generation)
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
        if self._is_preparing:
            return protocol.HealthCheckResponse(healthy=False, message="compiling")
        return protocol.HealthCheckResponse(healthy=True, message="ready")

    async def GetModelInfo(self, request: protocol.GetModelInfoRequest) -> protocol.GetModelInfoResponse:
        """Describe the model as a gateway needs it."""
        config = self.engine.config
        described = config.to_dict()
        knobs = {name: value for name, value in self._lm.defaults.knobs.items() if name != "bad_words"}
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

    async def GetServerInfo(self, request: protocol.GetServerInfoRequest) -> protocol.GetServerInfoResponse:
        """Describe the server as a gateway needs it: how large it is, and how pictures are to come."""
        return protocol.GetServerInfoResponse(
            active_requests=len(self._active),
            last_receive_timestamp=self._received,
            uptime_seconds=time.time() - self._began,
            server_type="vllm-grpc",  # whose protocol this is
            data_parallel_size=1,
            block_size=self.engine.config.index_block_size,
            model_dtype=str(np.dtype(self._lm.model.dtype)),
            max_num_seqs=self.engine.shapes.batch,
            multimodal_encoder_dtype="float32",
            engine_reasoning_parser="minimax_m3",
            constrained_decoding_start="after_reasoning",
        )

    async def GetLoads(self, request: protocol.GetLoadsRequest) -> protocol.GetLoadsResponse:
        """Tell the engine's load.

        Raises:
          ValueError: a rank other than 0.
        """
        if request.dp_rank:
            raise ValueError(f"dp_rank = {request.dp_rank}: this worker has rank 0 alone")
        load, pages = await self._on_engine(lambda: (self.engine.load, self.engine.pages))
        page_size, num_pages = (
            self.engine.config.index_block_size,
            sum(pages[kind] for kind in ("free", "cached", "used")),
        )
        looked_up = pages["hit_tokens"] + pages["missed_tokens"]
        running, waiting = load["running"], load["waiting"]
        of_rank = protocol.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=pages["used"] * page_size,
            max_total_num_tokens=num_pages * page_size,
            token_usage=pages["used"] / num_pages,
            gen_throughput=self._throughput(),
            cache_hit_rate=pages["hit_tokens"] / looked_up if looked_up else 0.0,
            utilization=running / self.engine.shapes.batch,
            max_running_requests=self.engine.shapes.batch,
            num_waiting_uncached_tokens=sum(
                active.prompt_tokens for active in self._active.values() if not active.has_begun
            ),
        )
        now = datetime.now(UTC).isoformat()
        return protocol.GetLoadsResponse(timestamp=now, version=VERSION, dp_rank_count=1, loads=[of_rank])

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Yield the tokenizer's files as a zip in pieces of 64 KiB, the last one with the SHA-256 of all."""
        archive = await asyncio.to_thread(tokenizer_archive, self.folder)
        for piece in pieces(archive):
            yield piece

    async def FlushCache(self, request: common_pb2.FlushCacheRequest) -> common_pb2.FlushCacheResponse:
        """Forget known pages and features of pictures, once no request goes on; it waits for that up to `timeout_s`."""
        deadline = time.monotonic() + request.timeout_s

        def flush() -> bool:
            if self.engine.busy:
                return False
            self.engine.update(self._lm.model)  # the same weights: all that was computed with them is dropped
            return True

        while not await self._on_engine(flush):
            if time.monotonic() >= deadline:
                message = f"{len(self._active)} requests go on: try again"
                return common_pb2.FlushCacheResponse(success=False, message=message)
            await asyncio.sleep(_POLL_SECONDS)
        return common_pb2.FlushCacheResponse(success=True, message="known pages and features are forgotten")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Yield which pages are known, and then each change (`m3jax.serve.worker.kv_events`)."""
        async for batch in self._pages.subscribe(request.start_sequence_number):
            yield batch

    async def prompt_progress(self, request_id: str) -> tuple[int, int, int] | None:
        """Return how much of a request's prompt is read, which the protocol has no place for.

        Args:
          request_id: of it.

        Returns:
          (tokens of its prompt; of these, those that were in the prefix cache; those that are through, these
          included); None before the engine has it and after it has ended.
        """
        active = self._active.get(request_id)
        if active is None or not active.streams:
            return None
        try:
            cached, read = await self._on_engine(lambda: self.engine.prompt_progress(active.streams[0].handle))
        except ValueError:  # it has ended
            return None
        return active.prompt_tokens, cached, read

    # How a request gets to the engine

    async def _submit(self, request: protocol.GenerateRequest, active: _Active, record: tuple[str, ...]) -> Order:
        """Read a request and hand it to the engine, on a thread: both wait, the second for the engine's round."""

        def submit() -> Order:
            order = self._reader.read(request)
            active.prompt_tokens = len(order.prompt)
            params = replace(order.params, record=record)

            def add() -> list[RequestStream]:
                return self._loop.submit(order.prompt, params, order.media, order.guide, n=order.n, timeout=0)

            def add_with_media() -> list[RequestStream]:
                # In one order, so that no page is stored before its pictures have names.
                streams = add()
                self._pages.note_media(self.engine.segments(streams[0].handle), order.sent_media)
                return streams

            try:
                known = self._known_part(order, params)
                if known is not None:
                    active.streams = self._fetch(order, params, known, active)
                else:
                    active.streams = self._loop.call(add_with_media) if order.media else add()
            except ValueError as error:
                raise in_protocol_names(error) from error
            return order

        self._check_open()
        submitted = (self._submitters if self._prefill is None else self._fetchers).submit(submit)
        try:
            order = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(lambda _: active.cancel())  # the client has gone, and the thread goes on
            raise
        if active.is_aborted:
            active.cancel()
        return order

    def _known_part(self, order: Order, params: Params) -> int | None:
        """Return the tokens at the beginning of a prompt that is to be read elsewhere whose pages are known here.

        None is a prompt that is read here: one of which no more than a page is unknown, and one with pictures, whose
        names for KV events travel with no page. Where the scores of its tokens are asked for it has to be read whole,
        whatever is known of it; here that is done where the other engine would have no room for the last token.
        """
        is_scored = order.params.prompt_logprobs is not None
        if self._prefill is None or order.media or (is_scored and len(order.prompt) + 2 > self.engine.max_length):
            return None

        def look_up() -> int:
            self.engine.check_request(order.prompt, params)  # what is refused is refused before a prompt is read for it
            return self.engine.known_tokens(order.prompt)

        known = self._loop.call(look_up)
        num_read = len(order.prompt) - (0 if is_scored else known)
        return known if num_read > self.engine.config.index_block_size else None

    def _fetch(self, order: Order, params: Params, known: int, active: _Active) -> list[RequestStream]:
        """Have a request's prompt read elsewhere, and hand it with its pages to the engine once they have room."""
        is_stopped = lambda: active.is_aborted or self._loop.is_closed
        fetched = self._prefill.fetch(order.prompt, params, is_stopped, known)
        say(f"prefill: {fetched}")
        while True:
            # A prompt whose scores are asked for is computed whole, whatever is known of its pages.
            known_here = fetched.left_out if params.prompt_logprobs is None else 0
            cached_tokens = max(fetched.cached_tokens, known_here)
            shared = dict(timeout=0, cached_tokens=cached_tokens, left_out=fetched.left_out)
            try:
                return self._loop.submit_snapshot(fetched.snapshot, order.guide, n=order.n, **shared)
            except UnknownPages:  # other requests took them meanwhile
                fetched = self._prefill.fetch(order.prompt, params, is_stopped)
                say(f"prefill: {fetched}")
            except OutOfPages:
                if active.is_aborted or not self._loop.call(lambda: self.engine.busy):
                    raise
                time.sleep(_POLL_SECONDS)  # requests that go on will give pages back

    async def _on_engine(self, order: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread between two rounds, and return what it returns."""
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._submitters, self._loop.call, order)

    def _check_open(self) -> None:
        if self._loop.is_closed:
            raise LoopClosed("the worker takes no more requests: its engine has ended")

    def _text_of(self, order: Order) -> TextStream:
        return self.tokenizer.stream(skip_special_tokens=order.skip_special_tokens)

    def _note_drawn(self, count: int) -> None:
        """Note new tokens, and forget those of more than some seconds ago."""
        now = time.monotonic()
        self._drawn.append((now, count))
        while self._drawn[0][0] < now - _THROUGHPUT_SECONDS:
            self._drawn.popleft()

    def _throughput(self) -> float:
        """Return the new tokens a second of the last seconds."""
        since = time.monotonic() - _THROUGHPUT_SECONDS
        return sum(count for when, count in self._drawn if when >= since) / _THROUGHPUT_SECONDS


def engine_from_pretrained(
    folder: str | Path | None = None,
    *,
    dtype: DTypeLike = "bfloat16",
    invariant: bool = False,
    draft: str | Path | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    mesh: Mesh | str | None = None,
    weights: str = "dequantize",
    **knobs: Unpack[EngineKnobs],
) -> tuple[Engine, TextModel]:
    """Read a folder in the hub's layout and make an engine for it; the arguments are `Worker.from_pretrained`'s.

    On a CPU, on which a decode step costs what its rows cost, fewer requests than `max_batch` decode in smaller calls.
    """
    lm = TextModel.from_pretrained(folder, dtype=dtype, mesh=mesh, weights=weights)
    lm = replace(lm, model=lm.model.with_invariance(invariant))
    blocks = -(-lm.model.config.max_position_embeddings // lm.model.config.index_block_size)
    max_batch = knobs.get("max_batch", Work.max_batch)
    defaults: EngineKnobs = {"pages": min(_MOST_PAGES, blocks * max_batch)}
    if platform() == "cpu" and lm.model.mesh is None and not invariant:  # an invariant step has one width on a CPU
        defaults["decode_rows"] = decode_rows(max_batch)
    knobs = defaults | page_types(lm.model) | knobs
    return Engine(lm.model, draft=draft, draft_tokens=draft_tokens, **knobs), lm


def decode_rows(max_batch: int) -> tuple[int, ...]:
    """Return the rows of smaller decode calls: each about three times those before, all below half of `max_batch`."""
    return tuple(takewhile(lambda rows: 2 * rows < max_batch, (3**power for power in count())))


async def _events(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, TokenEvent]]:
    """Yield the events of several streams as they come, with the index of their stream, until all have ended."""
    if len(streams) == 1:  # nothing to choose from, so no task for each event
        async for event in streams[0]:
            yield 0, event
        return
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
