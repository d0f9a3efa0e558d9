"""The parts that a gateway begins with: the model's tokenizer and template, and its workers."""

import asyncio
import hashlib
import io
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from m3jax.serve.gateway.gateway import Gateway
from m3jax.serve.gateway.pixels import PixelPool
from m3jax.serve.gateway.prompts import Renderer
from m3jax.serve.gateway.sampling import Model
from m3jax.serve.gateway.server import Opened
from m3jax.serve.gateway.sources import Sources
from m3jax.serve.gateway.workers import RemoteWorker, Worker, Workers
from m3jax.text import ChatTemplate, Tokenizer

_MOST_BYTES = 256 << 20  # of a worker's tokenizer
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


async def open_gateway(
    gateway: Gateway,
    workers: Sequence[Worker],
    *,
    folder: Path,
    name: str | None,
    sources: Sources,
    processes: int,
    closing: Sequence[Callable[[], Awaitable[None]]] = (),
) -> Opened:
    """Give a gateway its workers and what it reads and writes text with.

    Args:
      gateway: changed in place.
      workers: that can be asked already.
      folder: with tokenizer.json and chat_template.jinja.
      name: of the model for clients; None is the workers' own.
      sources: of media.
      processes: that decode media.
      closing: awaited at the end.

    Raises:
      ValueError: a folder that lacks a file.
      ApiError: no worker answers.
    """
    opened = Workers(workers)
    model = Model.of(*await opened.info(), name)
    tokenizer = await asyncio.to_thread(Tokenizer.from_pretrained, folder)
    template = await asyncio.to_thread(ChatTemplate.from_folder, folder)
    pool = PixelPool(processes)
    gateway.workers, gateway.model = opened, model
    gateway.renderer = Renderer(tokenizer, template, pool, sources, model.can_see, model.context)
    return Opened(pool, [opened.close, *closing])


async def tokenizer_folder(worker: RemoteWorker, into: Path) -> Path:
    """Return a folder with a worker's tokenizer and template, which it sends as a zip.

    Args:
      worker: that is asked.
      into: a folder that may be written to.

    Raises:
      ValueError: what came is not what the worker says that it sent, or lacks a file.
    """
    data, digest = bytearray(), ""
    async for chunk in worker.stream("GetTokenizer", common_pb2.GetTokenizerRequest()):
        data += chunk.data
        digest = chunk.sha256 or digest
        if len(data) > _MOST_BYTES:
            raise ValueError(f"the worker {worker.name} sends a tokenizer of more than {_MOST_BYTES} bytes")
    if digest and hashlib.sha256(data).hexdigest() != digest.lower():
        raise ValueError(f"the tokenizer of the worker {worker.name} was damaged on its way: start again")
    folder = Path(tempfile.mkdtemp(dir=into))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            base = Path(name).name  # whatever folders the archive names, nothing is written elsewhere
            if base in _FILES:
                if archive.getinfo(name).file_size > _MOST_BYTES:
                    raise ValueError(f"the worker {worker.name} sends {base} of more than {_MOST_BYTES} bytes")
                (folder / base).write_bytes(archive.read(name))
    return folder
