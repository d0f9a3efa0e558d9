"""The command lines of `python -m m3jax.serve`; this module imports nothing large."""

import argparse
import math
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from m3jax.cli.arguments import WEIGHTS, add_draft, add_model, check_draft
from m3jax.console import Parser, run_command, write
from m3jax.hosts.arguments import add_hosts, check_hosts
from m3jax.interrupts import raise_interrupts

PROG = "m3jax.serve"
# What the extra `serve` brings, by the names under which it is imported.
_NEEDED = (
    "starlette",
    "uvicorn",
    "grpc",
    "smg_grpc_proto",
    "prometheus_client",
    "llguidance",
    "httptools",
    "jinja2",
    "jsonschema",
)
_ABOUT = """serve a model: OpenAI's and Anthropic's endpoints, gateway and worker in one process.
`gateway` and `worker` in front of the options run one of the two alone, `verify LOG` replays a log of requests."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status, as `m3jax.console.run_command` has it.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    part = words[0] if words else ""
    if part == "worker":
        from m3jax.serve.worker.command import main as worker_main

        return worker_main(words[1:])
    if part == "gateway":
        return run_command(f"{PROG} gateway", gateway_parser(), run_gateway, words[1:])
    if part == "verify":
        return run_command(f"{PROG} verify", verify_parser(), run_verify, words[1:])
    return run_command(PROG, parser(), run_both, words)


def check_extra() -> None:
    """Raise ValueError if something is not installed that a server needs."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ValueError(f"a server needs {missing[0]}, which is not installed: pip install 'm3jax[serve]'")


def parser() -> Parser:
    """Return the parser of gateway and worker in one process."""
    out = Parser(PROG, _ABOUT)
    out.usage = f"{out.prog} [gateway | worker | verify] [options]"
    add_model(out)
    _add_gateway(out)
    engine = out.add_argument_group("the engine")
    engine.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16 or float32")
    engine.add_argument("--weights", choices=WEIGHTS, default="dequantize", help="of a folder in MXFP8: mxfp8 keeps "
                        "them in half the memory, dequantize (default) gives them --dtype")  # fmt: skip
    engine.add_argument("--pages", metavar="N", type=int, help="of the cache (default: what --max-batch requests of "
                        "the model's context take, at most 4096)")  # fmt: skip
    engine.add_argument(
        "--max-batch", metavar="N", type=int, default=8, help="requests that decode together (default: 8)"
    )
    engine.add_argument("--prefill-chunk", metavar="N", type=int, help="tokens of a prompt in one call of the device")
    engine.add_argument(
        "--context", metavar="N", type=int, help="tokens that a request can have (default: the model's)"
    )
    add_draft(engine)
    engine.add_argument("--invariant", action="store_true", help="an answer has the same bits cached or not, alone or "
                        "under load; a header says of which weights and settings")  # fmt: skip
    engine.add_argument("--request-log", metavar="FILE", type=Path, help="with --invariant: keep each request and its "
                        "answer's bits, for `verify`")  # fmt: skip
    engine.add_argument("--no-warmup", action="store_true", help="serve before everything is compiled: the first "
                        "requests wait for what they need")  # fmt: skip
    engine.add_argument("--mesh", metavar="AXES", help="devices to shard over, as in data=1,expert=2,tensor=4")
    engine.add_argument("--no-compile-cache", action="store_true", help="neither use nor keep compiled programs")
    add_hosts(out)
    return out


def gateway_parser() -> Parser:
    """Return the parser of a gateway alone."""
    out = Parser(f"{PROG} gateway", "Serve HTTP in front of workers that run apart.")
    out.add_argument("--worker", metavar="grpc://HOST:PORT", action="append", required=True, help="may be repeated")
    out.add_argument("--tokenizer", metavar="DIR", type=Path, help="a folder with tokenizer.json and "
                     "chat_template.jinja (default: what the first worker sends)")  # fmt: skip
    _add_gateway(out)
    return out


def verify_parser() -> Parser:
    """Return the parser of the replay of a log."""
    out = Parser(f"{PROG} verify", "Replay a log of requests, and compare tokens and log-probabilities bit for bit.")
    out.add_argument("log", metavar="LOG", type=Path, help="of --request-log")
    out.add_argument("--model", metavar="DIR", type=Path, help="the model's folder (default: the embedded checkpoint)")
    out.add_argument("--request", metavar="ID", help="replay this one alone, by the id of its answer")
    return out


def _add_gateway(out: Parser) -> None:
    """Add the options of a gateway, whether it has a worker of its own or not."""
    out.add_argument("--host", default="127.0.0.1", help="127.0.0.1 (default) is this machine alone")
    out.add_argument("--port", metavar="N", type=int, default=8000, help="default: 8000; 0 takes a free one")
    out.add_argument("--name", help="of the model for clients (default: its folder's)")
    out.add_argument("--api-key", metavar="KEY", help="that each request must have")
    out.add_argument("--allow-media", metavar="HOST|DIR", action="append", default=[], help="fetch pictures from "
                     "this host, or read them from this folder; may be repeated (default: data URLs)")  # fmt: skip
    out.add_argument("--cors-origin", metavar="ORIGIN", action="append", default=[], help="of pages in browsers "
                     "that may ask; may be repeated")  # fmt: skip
    out.add_argument("--max-requests", metavar="N", type=int, default=256, help="at once; one more is answered with "
                     "429 (default: 256)")  # fmt: skip
    out.add_argument("--deadline", metavar="SECONDS", type=float, default=math.inf, help="that a request may take")
    out.add_argument("--drain", metavar="SECONDS", type=float, default=30.0, help="that requests have to end after "
                     "SIGTERM (default: 30)")  # fmt: skip
    out.add_argument("--media-processes", metavar="N", type=int, default=2, help="that decode images (default: 2)")


def run_both(args: argparse.Namespace) -> int:
    """Serve with a worker in this process.

    Raises:
      ValueError: a bad argument, a folder that cannot be used, or an address that is taken.
    """
    check_extra()
    _check(args)
    check_draft(args)
    check_hosts(args)
    if args.request_log is not None and not args.invariant:
        raise ValueError("--request-log needs --invariant: otherwise a replay would not have the same bits")
    from m3jax.compile_cache import compile_cache
    from m3jax.hosts.run import on_hosts
    from m3jax.serve.together import serve_together

    raise_interrupts()
    with compile_cache(not args.no_compile_cache):
        on_hosts(args, PROG, lambda channel: serve_together(args, channel))
    return 0


def run_gateway(args: argparse.Namespace) -> int:
    """Serve in front of other processes' workers.

    Raises:
      ValueError: a bad argument, or no worker that answers.
    """
    check_extra()
    _check(args)
    addresses = [address.removeprefix("grpc://") for address in args.worker]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"--worker {address}: give it as grpc://HOST:PORT")
    from m3jax.serve.apart import serve_apart

    raise_interrupts()
    serve_apart(args, addresses)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Replay a log; the exit status is 1 if an answer differs.

    Raises:
      ValueError: no such log, weights or settings that are not the log's, or no such request.
    """
    check_extra()
    if not args.log.is_file():
        raise ValueError(f"no such log: {args.log}; give the file of --request-log")
    from m3jax.compile_cache import compile_cache
    from m3jax.serve.together import verify_log

    raise_interrupts()
    with compile_cache():
        results = verify_log(args.log, args.model, args.request)
    for request_id, found in results:
        write(f"{request_id}: {'the same bits' if found is None else found}\n")
    return 1 if any(found is not None for _, found in results) else 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for sizes that no server can have."""
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port}: must be from 0 to 65535")
    for name in ("max_requests", "media_processes", "max_batch", "pages", "prefill_chunk", "context"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("deadline", "drain"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name} {getattr(args, name)}: must be above 0 seconds")
    if args.api_key == "":
        raise ValueError("--api-key '': a key has at least one character; leave it out to ask for none")
