"""The workers behind a gateway: one in its process or several over gRPC, and which of them a request goes to.

A request goes to the worker that served the longest beginning of its prompt before, whose pages are likely there
still, unless that worker has much more to do than the least loaded one. A worker that cannot be reached is left out
until it answers a health check again.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol, runtime_checkable

from smg_grpc_proto import vllm_engine_pb2 as pb

from m3jax.decoding import Generation
from m3jax.decoding.loop import LoopClosed, LoopFull
from m3jax.messages import printable
from m3jax.serve.gateway.errors import ApiError

_LOG = logging.getLogger("m3jax.serve")
_BLOCK = 64  # tokens; beginnings of prompts are remembered in steps of this
_MOST_BLOCKS = 65_536  # remembered of each worker: 4 million tokens
_MOST_AHEAD = 8  # requests that the worker with the prefix may have more than the least loaded one
_RETRY_SECONDS = 2.0


@runtime_checkable
class Worker(Protocol):
    """A worker as the gateway sees it: the calls of `vllm.grpc.engine` that it makes, with that protocol's messages.

    Attributes:
      name: in metrics and logs.
    """

    name: str

    def generate(
        self, request: pb.GenerateRequest, notes: dict[int, Generation] | None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Run a request. Closing the iterator ends it.

        Args:
          request: in the protocol.
          notes: filled, where the worker is in this process, with what the protocol has no place for: each continuation
            by its number, with the blocks that its tokens read. None asks for nothing.

        Raises:
          ApiError: the worker refuses it, is full, or cannot be reached.
        """
        ...

    async def call(self, method: str, request: Any) -> Any:
        """Return the answer of another of the service's calls, by its name."""
        ...

    async def progress(self, request_id: str) -> tuple[int, int, int] | None:
        """Return how much of a request's prompt is read, as `m3jax.serve.worker.Worker.prompt_progress`.

        Raises:
          ApiError: 400, the worker is in another process, whose protocol cannot tell.
        """
        ...


class LocalWorker:
    """A worker in the gateway's process, whose methods are called as they are.

    Args:
      worker: an `m3jax.serve.worker.Worker`, or what has its methods.
    """

    name = "local"

    def __init__(self, worker: Any):
        self._worker = worker

    async def generate(
        self, request: pb.GenerateRequest, notes: dict[int, Generation] | None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """As `Worker.generate`."""
        with _worker_errors():
            more = {} if notes is None else {"record": ("blocks",), "on_result": notes.__setitem__}
            async with aclosing(self._worker.Generate(request, **more)) as responses:
                async for response in responses:
                    yield response

    async def call(self, method: str, request: Any) -> Any:
        """As `Worker.call`."""
        with _worker_errors():
            return await getattr(self._worker, method)(request)

    async def progress(self, request_id: str) -> tuple[int, int, int] | None:
        """As `Worker.progress`."""
        with _worker_errors():
            return await self._worker.prompt_progress(request_id)


class RemoteWorker:
    """A worker over gRPC.

    Args:
      address: HOST:PORT.
    """

    def __init__(self, address: str):
        import grpc.aio
        from smg_grpc_proto import vllm_engine_pb2_grpc

        self.name = address
        # Patches of 200 images are larger than any message that gRPC takes by itself.
        limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(address, options=limits)
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)

    async def generate(
        self, request: pb.GenerateRequest, notes: dict[int, Generation] | None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """As `Worker.generate`; leaving it cancels the call."""
        if notes is not None:
            raise ApiError(400, "return_blocks: the worker runs apart, and its protocol has no blocks", "return_blocks")
        call = self._stub.Generate(request)
        try:
            with _grpc_errors(self.name):
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def call(self, method: str, request: Any) -> Any:
        """As `Worker.call`."""
        with _grpc_errors(self.name):
            return await getattr(self._stub, method)(request, timeout=10.0)

    async def progress(self, request_id: str) -> tuple[int, int, int] | None:
        """As `Worker.progress`: refuse."""
        message = "return_progress: the worker runs apart, and its protocol has no progress"
        raise ApiError(400, message, "return_progress")

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """Yield the messages of a call that answers with several."""
        with _grpc_errors(self.name):
            async for message in getattr(self._stub, method)(request, timeout=60.0):
                yield message

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class _worker_errors:
    """Turn what a worker in this process raises into the API's errors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, LoopFull):
            raise ApiError(429, str(error), code="queue_full", retry_after=1) from error
        if isinstance(error, LoopClosed):
            raise ApiError(503, f"the engine takes no requests: {error}", code="engine_down", retry_after=5) from error
        if isinstance(error, ValueError):
            raise _refusal(str(error)) from error


class _grpc_errors:
    """Turn the statuses of gRPC into the API's errors."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import grpc

        if not isinstance(error, grpc.aio.AioRpcError):
            return
        status, details = error.code(), error.details() or ""
        if status == grpc.StatusCode.INVALID_ARGUMENT:
            raise _refusal(details) from error
        if status == grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise ApiError(429, f"the worker is full: {details}", code="queue_full", retry_after=1) from error
        if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            message = f"the worker {self._name} was lost"
            raise ApiError(503, message, code="worker_lost", retry_after=5) from error
        raise ApiError(500, f"the worker {self._name} failed: {printable(details)}", code="worker_failed") from error


def _refusal(message: str) -> ApiError:
    """Return the error of a request that a worker refuses; its message begins with the field, if one is to blame."""
    word = message.split(" ")[0].rstrip(":,")
    return ApiError(400, message, word if word.isidentifier() and word.islower() and "_" in word else None)


class Workers:
    """All workers of a gateway, and what it remembers of each.

    Args:
      workers: at least one.
    """

    def __init__(self, workers: Sequence[Worker]):
        self.workers = list(workers)
        self.running = {worker.name: 0 for worker in self.workers}
        self.down: set[str] = set()
        self._served = {worker.name: OrderedDict() for worker in self.workers}  # hashes of beginnings, oldest first
        self._watch: asyncio.Task[None] | None = None

    async def generate(
        self, request: pb.GenerateRequest, notes: dict[int, Generation] | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Run a request on one of the workers; leaving the iterator ends it there, within one step of the engine.

        Args:
          request: with token ids.
          notes: as in `Worker.generate`.

        Raises:
          ApiError: as `Worker.generate`, or no worker is up.
        """
        worker = self._pick(request.tokenized.input_ids)
        self.running[worker.name] += 1
        try:
            async with aclosing(worker.generate(request, notes)) as responses:
                async for response in responses:
                    yield response
        except ApiError as error:
            if error.code == "worker_lost":
                self._mark_down(worker)
            raise
        finally:
            self.running[worker.name] -= 1

    async def progress(self, request_id: str) -> tuple[int, int, int] | None:
        """Return how much of a request's prompt is read, as `Worker.progress`; None where no worker has it now."""
        for worker in self.workers:
            if (found := await worker.progress(request_id)) is not None:
                return found
        return None

    async def info(self) -> tuple[pb.GetModelInfoResponse, pb.GetServerInfoResponse]:
        """Return what the first worker that answers says of its model, which all of them serve, and of itself."""
        model = await self._first("GetModelInfo", pb.GetModelInfoRequest())
        return model, await self._first("GetServerInfo", pb.GetServerInfoRequest())

    async def loads(self) -> dict[str, pb.SchedulerLoad]:
        """Return the load of each worker that answers, by its name."""
        loads = {}
        for worker in self.workers:
            with suppress(ApiError):
                answer = await worker.call("GetLoads", pb.GetLoadsRequest(include=["core"]))
                if answer.loads:
                    loads[worker.name] = answer.loads[0]
        return loads

    @property
    def is_up(self) -> bool:
        """True if at least one worker can be asked."""
        return len(self.down) < len(self.workers)

    async def close(self) -> None:
        """Stop watching, and close the channels."""
        if self._watch is not None:
            self._watch.cancel()
        for worker in self.workers:
            if isinstance(worker, RemoteWorker):
                await worker.close()

    def _pick(self, prompt: Sequence[int]) -> Worker:
        """Return the worker for a prompt, and remember that it has its beginning from now on."""
        up = [worker for worker in self.workers if worker.name not in self.down]
        if not up:
            raise ApiError(503, "no worker can be reached", code="worker_lost", retry_after=5)
        ends = range(_BLOCK, len(prompt) + 1, _BLOCK) if len(self.workers) > 1 else ()
        hashes, key = [], 0
        for end in ends:
            key = hash((key, *prompt[end - _BLOCK : end]))
            hashes.append(key)

        def cached_blocks(worker: Worker) -> int:
            served = self._served[worker.name]
            return next((index for index, key in enumerate(hashes) if key not in served), len(hashes))

        least = min(self.running[worker.name] for worker in up)
        near = [worker for worker in up if self.running[worker.name] <= least + _MOST_AHEAD]
        chosen = max(near, key=lambda worker: (cached_blocks(worker), -self.running[worker.name]))
        served = self._served[chosen.name]
        for key in hashes:
            served[key] = None
            served.move_to_end(key)
        while len(served) > _MOST_BLOCKS:
            served.popitem(last=False)
        return chosen

    async def _first(self, method: str, request: Any) -> Any:
        error = ApiError(503, "no worker can be reached", code="worker_lost", retry_after=5)
        for worker in self.workers:
            try:
                return await worker.call(method, request)
            except ApiError as failed:
                error = failed
        raise error

    def _mark_down(self, worker: Worker) -> None:
        _LOG.warning("worker %s was lost: asked again every %g s", worker.name, _RETRY_SECONDS)
        self.down.add(worker.name)
        self._served[worker.name].clear()  # a new process has none of its pages
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._take_back())

    async def _take_back(self) -> None:
        """Ask workers that are down until all are up again."""
        while self.down:
            await asyncio.sleep(_RETRY_SECONDS)
            for worker in [each for each in self.workers if each.name in self.down]:
                with suppress(ApiError):
                    if (await worker.call("HealthCheck", pb.HealthCheckRequest())).healthy:
                        _LOG.warning("worker %s is back", worker.name)
                        self.down.discard(worker.name)
