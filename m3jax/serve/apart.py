"""A gateway alone, in front of workers in other processes."""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from m3jax.serve.gateway.errors import ApiError
from m3jax.serve.gateway.gateway import Gateway
from m3jax.serve.gateway.loading import open_gateway, tokenizer_folder
from m3jax.serve.gateway.server import Address, Opened, serve
from m3jax.serve.gateway.sources import Sources
from m3jax.serve.gateway.workers import RemoteWorker
from m3jax.serve.together import gateway_settings

_RETRY_SECONDS = 1.0


def serve_apart(args: argparse.Namespace, addresses: Sequence[str]) -> None:
    """Serve what the command line asks for, until the process is told to end.

    Args:
      args: of the command line.
      addresses: of the workers, HOST:PORT.

    Raises:
      ValueError: an address that is taken, or a tokenizer that cannot be read.
    """
    sources = Sources.of(args.allow_media)
    with tempfile.TemporaryDirectory() as temporary:

        async def load(gateway: Gateway) -> Opened:
            workers = [RemoteWorker(address) for address in addresses]
            while True:  # workers that load their weights answer later
                try:
                    folder = args.tokenizer or await tokenizer_folder(workers[0], Path(temporary))
                    return await open_gateway(
                        gateway, workers, folder=folder, name=args.name, sources=sources,
                        processes=args.media_processes,
                    )  # fmt: skip
                except ApiError as error:
                    if error.code != "worker_lost":
                        raise ValueError(str(error)) from None
                    await asyncio.sleep(_RETRY_SECONDS)

        asyncio.run(serve(Gateway(settings=gateway_settings(args)), Address(args.host, args.port, args.drain), load))
