"""`python -m m3jax.serve worker`: its arguments, parsed before any large import."""

import argparse
import asyncio
import signal
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from m3jax.cli.arguments import WEIGHTS, add_draft, check_draft
from m3jax.console import Parser, run_command, say
from m3jax.hosts.arguments import add_hosts, check_hosts
from m3jax.interrupts import raise_interrupts

if TYPE_CHECKING:
    from m3jax.hosts.channel import Channel
    from m3jax.serve.worker.worker import Worker

PROG = "m3jax.serve worker"
_PREFILL_SECONDS = 600.0  # that a worker which reads prompts gets to load its weights
_NEEDED = ("grpc", "smg_grpc_proto", "llguidance")  # of the extra `serve`


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments behind the word "worker".

    Returns:
      The exit status, as `m3jax.console.run_command` has it.
    """
    return run_command(PROG, parser(), run, argv)


def parser() -> Parser:
    """Return the parser of the command line's arguments."""
    out = Parser(PROG, "Serve a model by gRPC to gateways: the open gateway SMG, or python -m m3jax.serve gateway.")
    out.add_argument("--model", metavar="DIR", help="folder in the hub's layout; default the embedded checkpoint")
    out.add_argument("--name", help="under which clients know the model; default the folder's name")
    out.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    out.add_argument("--port", type=int, default=50051, help="port to listen on (default 50051); 0 takes a free one")
    out.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default bfloat16")
    out.add_argument("--weights", choices=WEIGHTS, default="dequantize", help="of a folder in MXFP8: mxfp8 keeps them "
                     "(default: dequantize)")  # fmt: skip
    out.add_argument("--role", choices=("both", "prefill"), default="both", help="prefill reads prompts for workers "
                     "that have --prefill-from, and answers no requests (default both)")  # fmt: skip
    out.add_argument("--prefill-from", metavar="grpc://HOST:PORT", action="append", default=[], help="have prompts "
                     "read by a worker with --role prefill; may be repeated")  # fmt: skip
    add_draft(out)
    out.add_argument("--invariant", action="store_true", help="answers are the same bits alone or under load")
    out.add_argument("--pages", type=int, help="of the pool; default as many as --max-batch requests can fill, or 4096")
    out.add_argument("--max-batch", type=int, default=8, help="requests that decode together (default 8)")
    out.add_argument("--max-length", type=int, help="tokens of a request with its answer; default the model's context")
    out.add_argument("--steps-per-call", type=int, default=4, help="tokens of a request in one device call (default 4)")
    out.add_argument("--mesh", metavar="AXES", help="devices to shard over, as in data=1,expert=2,tensor=4")
    out.add_argument("--max-requests", type=int, default=1024, help="that go on or wait at once (default 1024)")
    out.add_argument(
        "--drain", type=float, default=30.0, help="seconds for requests to end in after SIGTERM (default 30)"
    )
    add_hosts(out)
    return out


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or an interrupt.

    Args:
      args: of `parser`.

    Raises:
      ValueError: a bad argument, a folder that cannot be used, a port that is taken, or the extra is not installed.
    """
    raise_interrupts()
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ValueError(f"{missing[0]} is not installed: pip install 'm3jax[serve]'")
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port {args.port}: must be from 0 to 65535")
    check_draft(args)
    check_hosts(args)
    if args.role == "prefill" and args.prefill_from:
        raise ValueError("--prefill-from with --role prefill: a worker reads prompts, or has them read by others")
    if args.coordinator is not None and (args.role == "prefill" or args.prefill_from):
        raise ValueError(
            "--coordinator with --role prefill or --prefill-from: engines that exchange pages have one host"
        )
    args.prefill_from = [address.removeprefix("grpc://") for address in args.prefill_from]
    for address in args.prefill_from:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"--prefill-from {address}: give it as grpc://HOST:PORT")
    if args.role == "prefill":
        _read_prompts(args)
        return 0
    from m3jax.hosts.run import on_hosts

    on_hosts(args, PROG, lambda channel: _work(args, channel))
    return 0


def _knobs(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the arguments say of the engine; what they leave open is its own default."""
    names = ("dtype", "weights", "invariant", "mesh", "draft", "draft_tokens", "pages", "max_batch", "max_length")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _read_prompts(args: argparse.Namespace) -> None:
    """Read prompts for other workers until SIGTERM or an interrupt."""
    from m3jax.compile_cache import compile_cache
    from m3jax.serve.worker.worker import engine_from_pretrained
    from m3jax.transfer import Prefiller
    from m3jax.transfer.service import start

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with compile_cache():
        engine, lm = engine_from_pretrained(args.model, **_knobs(args))
        say("compiling")
        engine.warmup(programs=("prefill", "pages"))
        prefiller = Prefiller(engine, args.max_requests)
        server, port = start(prefiller, args.host, args.port)
        say(f"reading prompts for {args.name or lm.folder.name} at grpc://{args.host}:{port}")
        try:
            stopped.wait()
        finally:
            server.stop(args.drain).wait()
            prefiller.close()


def _work(args: argparse.Namespace, channel: "Channel | None") -> None:
    """Make the engine; serve it, or follow the process that does."""
    from m3jax.compile_cache import compile_cache
    from m3jax.hosts.follow import led
    from m3jax.serve.worker.worker import Worker, engine_from_pretrained
    from m3jax.transfer import PrefillClient

    with compile_cache():
        engine, lm = engine_from_pretrained(args.model, **_knobs(args), steps_per_call=args.steps_per_call)
        with led(engine, channel) as engine:
            if engine is not None:
                prefill = PrefillClient(args.prefill_from, engine) if args.prefill_from else None
                worker = Worker(engine, lm, name=args.name, max_requests=args.max_requests, prefill=prefill)
                worker.check_prefill(_PREFILL_SECONDS)
                asyncio.run(_serve(args, worker))


async def _serve(args: argparse.Namespace, worker: "Worker") -> None:
    from m3jax.serve.worker.server import start

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    server, port = await start(worker, args.host, args.port)
    say(f"listening at grpc://{args.host}:{port}; compiling")
    preparing, stopping = asyncio.create_task(worker.prepare()), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait((preparing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():
            preparing.result()  # raises what went wrong
            say(f"serving {worker.name}")
        await stopping
    finally:
        await server.stop(args.drain)
        await worker.close("abort")
