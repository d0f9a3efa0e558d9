"""`python -m m3jax.plan`: what a model needs of a slice of accelerators, and how fast it could be."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.errors import JaxRuntimeError

from m3jax.config import M3Config
from m3jax.planning import M3_DRAFT, Candidate, Job, candidates, evaluate, parse_sizes, parse_slice
from m3jax.planning.compiler import check_compiler, compile_programs
from m3jax.planning.report import as_dict, as_text

PROG = "m3jax.plan"
_TRIED = 2  # meshes that are compiled at most: the second if the compiler refuses the first


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status: 0; 1 if the model does not fit; 2 after an error, which is one line on stderr.
    """
    try:
        plan = run(parser().parse_args(argv))
    except (ValueError, OSError, RuntimeError, JaxRuntimeError) as error:
        print(f"{PROG}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    return 0 if plan["fits"] else 1


def program() -> NoReturn:
    """Run the command line of this process, which needs no accelerator and takes none."""
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the arguments")


def parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    out = _Parser(prog=f"python -m {PROG}", description="Plan a MiniMax-M3 model on accelerators.", allow_abbrev=False)
    out.add_argument("--topology", metavar="SLICE", required=True, help="as in v5p:4x4x4, v6e:8x8, tpu7x:2x2x2, h200:8")
    out.add_argument("--context", metavar="N", type=int, required=True, help="tokens that every row can have")
    out.add_argument("--batch", metavar="N", type=int, default=1, help="rows that decode together (default: 1)")
    out.add_argument(
        "--model", metavar="DIR", help="a folder with a config.json (default: the full 428B configuration)"
    )
    out.add_argument("--dtype", default="bfloat16", help="of weights: bfloat16 (default), float16 or float32")
    out.add_argument("--kv-dtype", metavar="DTYPE", help="of keys and values: also float8_e4m3fn (default: --dtype)")
    out.add_argument("--index-dtype", metavar="DTYPE", help="of index keys: also float8_e4m3fn (default: --dtype)")
    out.add_argument(
        "--mesh", metavar="AXES", help="as in context=4,expert=4,tensor=4 (default: the best by arithmetic)"
    )
    out.add_argument("--prefill-chunk", metavar="N", type=int, default=2048, help="prompt tokens of a call (2048)")
    out.add_argument("--draft", action="store_true", help="plan the EAGLE3 draft of M3 too")
    out.add_argument("--no-compile", action="store_true", help="plan a TPU by arithmetic, as a GPU always is")
    out.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")
    return out


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan what the parsed arguments ask for, and print it.

    Raises:
      ValueError: an argument that cannot be, with the nearest that can; or no TPU compiler.
      RuntimeError: a compiler that ended without an answer.
    """
    config = M3Config.m3() if args.model is None else M3Config.from_pretrained(args.model)
    draft = M3_DRAFT if args.draft else None
    if draft is not None:
        draft.check_fits(config)
    job = Job(
        config=config, slice=parse_slice(args.topology), context=args.context, batch=args.batch, dtype=args.dtype,
        kv_dtype=args.kv_dtype, index_dtype=args.index_dtype, chunk=min(args.prefill_chunk, args.context), draft=draft,
    )  # fmt: skip
    compiles = job.slice.chip.kind == "tpu" and not args.no_compile
    if compiles:
        check_compiler()
    ranked = candidates(job)
    if args.mesh is None:
        tried = [candidate for candidate in ranked if candidate.memory.fits][:_TRIED] or ranked[:1]
    else:
        tried = [evaluate(job, parse_sizes(args.mesh, job))]
    plan = _compiled_plan(job, tried, ranked) if compiles else as_dict(job, tried[0], ranked, None)
    print(json.dumps(plan) if args.json else as_text(plan), flush=True)
    return plan


def _compiled_plan(job: Job, tried: list[Candidate], ranked: list[Candidate]) -> dict[str, Any]:
    """The plan of the first mesh that the compiler accepts, else of the first one."""
    plans = []
    for candidate in tried:
        plans.append(as_dict(job, candidate, ranked, compile_programs(job, candidate.sizes)))
        if plans[-1]["fits"]:
            return plans[-1]
    return plans[0]


if __name__ == "__main__":
    program()
