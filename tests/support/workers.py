"""One worker over the embedded model for all tests of a process, and requests for it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as protocol
from support.embedded import TOKENIZER

from m3jax.decoding import Engine, Media, Params, Sampling
from m3jax.serve.worker import Worker
from m3jax.text_model import TextModel

SHAPE = dict(
    pages=96, max_batch=4, prefill_chunk=32, steps_per_call=4, max_length=512, max_stop_ids=4, media_patches=(64,),
    media_tokens=96,
)  # fmt: skip
PROMPT = tuple(TOKENIZER.encode("class Timer:\n    def __enter__(self):\n        return"))


@cache
def text_model() -> TextModel:
    return TextModel.from_pretrained(dtype="float32", progress=False)


def new_worker(**options: Any) -> Worker:
    """Return a worker whose engine runs the programs that all others run."""
    return Worker(Engine(text_model().model, **SHAPE), text_model(), **options)


@cache
def shared_worker() -> Worker:
    return new_worker()


def generate_request(
    prompt: tuple[int, ...] | str = PROMPT, *, stream: bool = False, request_id: str = "", **sampling: Any
) -> protocol.GenerateRequest:
    """Return a request: greedy and of 8 tokens, unless it says something else."""
    params = protocol.SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | sampling)
    given = {"text": prompt} if isinstance(prompt, str) else {"tokenized": protocol.TokenizedInput(input_ids=prompt)}
    return protocol.GenerateRequest(request_id=request_id, stream=stream, sampling_params=params, **given)


async def collect(worker: Worker, request: protocol.GenerateRequest) -> list[protocol.GenerateResponse]:
    return [message async for message in worker.Generate(request)]


def answers(worker: Worker, *requests: protocol.GenerateRequest) -> list[list[protocol.GenerateComplete]]:
    """Return the last messages of requests that run side by side, in the order of their continuations."""

    async def all_of_them() -> list[list[protocol.GenerateResponse]]:
        return await asyncio.gather(*(collect(worker, request) for request in requests))

    found = asyncio.run(all_of_them())
    completes = [[each.complete for each in messages if each.HasField("complete")] for messages in found]
    return [sorted(of_request, key=lambda complete: complete.index) for of_request in completes]


def answer(worker: Worker, **request: Any) -> protocol.GenerateComplete:
    """Return the only continuation of a request."""
    ((complete,),) = answers(worker, generate_request(**request))
    return complete


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that must come."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


async def settled(worker: Worker) -> None:
    """Wait until no request goes on, and check that no page is lost."""
    while (await worker.GetServerInfo(protocol.GetServerInfoRequest())).active_requests:
        await asyncio.sleep(0.01)
    await on_engine(worker, lambda: None)
    await until(lambda: not worker.engine.busy)
    used = await on_engine(worker, lambda: (worker.engine.check(), worker.engine.pages["used"])[1])
    assert used == 0


def on_engine(worker: Worker, order: Callable[[], Any]) -> Awaitable[Any]:
    return worker._on_engine(order)


def engine_alone(worker: Worker, prompt: Sequence[int] = PROMPT, media: Media | None = None, **params: Any):
    """Return the continuation that the engine gives without the worker's layer: greedy and of 8 tokens by default."""
    asked = Params(**dict(max_new_tokens=8, sampling=Sampling(temperature=0)) | params)
    return worker._loop.submit(tuple(prompt), asked, media).result()
