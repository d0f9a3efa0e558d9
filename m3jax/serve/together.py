"""Gateway and worker in one process."""

import argparse
import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from m3jax.assets import embedded_path
from m3jax.hosts.channel import Channel
from m3jax.hosts.follow import led, release
from m3jax.serve.gateway.gateway import Gateway, Settings
from m3jax.serve.gateway.journal import Journal
from m3jax.serve.gateway.loading import open_gateway
from m3jax.serve.gateway.server import Address, Opened, serve
from m3jax.serve.gateway.sources import Sources
from m3jax.serve.gateway.workers import LocalWorker
from m3jax.serve.replay import identity, identity_header, logged, verify
from m3jax.serve.worker import Worker
from m3jax.serve.worker.worker import engine_from_pretrained

_STEPS_PER_CALL = 4  # of a decode call: new tokens come in fours, and the engine looks at new requests so often


def gateway_settings(args: argparse.Namespace) -> Settings:
    """Return the settings that a command line asks for."""
    return Settings(
        api_key=args.api_key,
        max_requests=args.max_requests,
        deadline_seconds=args.deadline,
        origins=tuple(args.cors_origin),
    )


def serve_together(args: argparse.Namespace, channel: Channel | None = None) -> None:
    """Serve what the command line asks for, until the process is told to end.

    Args:
      args: of the command line.
      channel: of a run on several hosts, of which process 0 serves; None for one process.

    Raises:
      ValueError: a folder that cannot be used, a bad size, or an address that is taken.
    """
    folder = embedded_path() if args.model is None else Path(args.model)
    sources = Sources.of(args.allow_media)
    engine = {
        "dtype": args.dtype,
        "invariant": args.invariant,
        "weights": None if args.weights == "dequantize" else args.weights,
        "max_batch": args.max_batch,
        "pages": args.pages,
        "prefill_chunk": args.prefill_chunk,
        "max_length": args.context,
        "steps_per_call": _STEPS_PER_CALL,
    }
    engine = {name: value for name, value in engine.items() if value is not None}
    # A draft is no setting of an answer: with --invariant the bits are the same with any draft or none.
    draft = {"draft": args.draft, "draft_tokens": args.draft_tokens}
    make_engine = partial(engine_from_pretrained, folder, mesh=args.mesh, **draft, **engine)
    if channel is not None and not channel.is_sender:
        with led(make_engine()[0], channel):  # until process 0 ends
            return
    leading, has_led = ExitStack(), False

    async def load(gateway: Gateway) -> Opened:
        # The engine's first compilation and the reading of weights take seconds to minutes, on a thread.
        nonlocal has_led
        own_engine, lm = await asyncio.to_thread(make_engine)
        has_led = True
        worker = Worker(leading.enter_context(led(own_engine, channel)), lm, name=args.name)
        if not args.no_warmup:
            await worker.prepare()
        if args.invariant:
            found = await asyncio.to_thread(identity, folder, engine)
            gateway.headers = {"X-M3JAX-Invariant": identity_header(found)}
            gateway.journal = None if args.request_log is None else Journal(args.request_log, found)

        async def close() -> None:
            await worker.close("abort")
            leading.close()
            if gateway.journal is not None:
                gateway.journal.close()

        return await open_gateway(
            gateway, [LocalWorker(worker)], folder=folder, name=args.name, sources=sources,
            processes=args.media_processes, closing=[close],
        )  # fmt: skip

    gateway = Gateway(settings=gateway_settings(args))
    asyncio.run(serve(gateway, Address(args.host, args.port, args.drain), load))
    # Told to end before all was loaded, nothing was closed, and the others wait to follow, or follow.
    leading.close()
    if channel is not None and not has_led:
        release(channel)


def verify_log(path: Path, model: Path | None, request_id: str | None) -> list[tuple[str, str | None]]:
    """Replay a log's requests.

    Args:
      path: of the log.
      model: the folder of the weights; None is the embedded checkpoint.
      request_id: of the only request that is replayed; None is all.

    Returns:
      For each request its id, and where its answer differs, None where it is the same to the bit.

    Raises:
      ValueError: no request, weights that are not the log's, or settings that this machine does not have.
    """
    folder = embedded_path() if model is None else model
    server: Mapping[str, Any] | None = None
    requests: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in logged(path):
        if "server" in line:
            if server is not None and line["server"] != server:
                raise ValueError(f"{path}, line {number}: another server wrote from here on: cut the log in two")
            server = line["server"]
        elif request_id in (None, line["id"]):
            requests.append((number, line))
    if server is None or not requests:
        raise ValueError(f"{path} has no {'request' if request_id is None else request_id}")
    own = ("m3jax", "jax", "device")
    engine = {name: value for name, value in server["settings"].items() if name not in own}
    found = identity(folder, engine)
    if found["weights"] != server["weights"]:
        raise ValueError(
            f"{folder} has the weights {found['weights'][:16]}, the log {server['weights'][:16]}: give --model"
        )
    for name in own:
        if found["settings"][name] != server["settings"][name]:
            raise ValueError(
                f"the log was written with {name} {server['settings'][name]}, this is {found['settings'][name]}: other "
                "bits may come of that; replay it on the same"
            )

    async def run() -> list[tuple[int, str | None]]:
        worker = Worker.from_pretrained(folder, **engine)
        try:
            return await verify(worker, requests)
        finally:
            await worker.close("abort")

    ids = {number: line["id"] for number, line in requests}
    return [(ids[number], found) for number, found in asyncio.run(run())]
