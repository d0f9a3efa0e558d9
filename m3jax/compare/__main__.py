"""`python -m m3jax.compare A B`: find the first quantity in which two engines differ (docs/compare.md)."""

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from m3jax.cli.arguments import check_plots
from m3jax.console import Parser, run_command, run_program, token_ids, write
from m3jax.interrupts import raise_interrupts

PROG = "m3jax.compare"
DIFFER = 1
_SIDE = "a dump (a .safetensors or .npz file, or a folder of them), m3jax:FOLDER or transformers:FOLDER"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status: 0; 1 if a quantity is beyond its tolerance; else as `m3jax.console.run_command` has it.
    """
    return run_command(PROG, parser(), run, argv)


def parser() -> Parser:
    """Return the parser of the command line's arguments."""
    out = Parser(PROG, "The first quantity between tokens and logits in which B differs from A, and what comes of it.")
    out.add_argument("a", metavar="A", help=f"the reference: {_SIDE}")
    out.add_argument("b", metavar="B", help="what is in question, likewise")
    out.add_argument("--prompt-tokens", metavar="IDS", action="append", default=[], help="ids for a model that runs "
                     "live, as in 1,2,3; may be repeated (default: those of the other side's dump)")  # fmt: skip
    out.add_argument("--rtol", metavar="X", type=_tolerance, help="relative, of every number (default: by dtype)")
    out.add_argument("--atol", metavar="X", type=_tolerance, help="absolute, as a share of a quantity's "
                     "root mean square (default: by dtype)")  # fmt: skip
    out.add_argument("--map", metavar="FILE", type=Path, help="JSON: what names of a dump mean that no table knows")
    out.add_argument("--config", metavar="FOLDER", help="of the model, for two dumps with fused or flat arrays")
    out.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), default="float32",
                     help="of a model that runs live (default: float32)")  # fmt: skip
    out.add_argument("--mesh", metavar="AXES", help="devices for m3jax:FOLDER, as in expert=2,tensor=4")
    out.add_argument("--no-compile-cache", action="store_true", help="neither use nor keep compiled programs")
    out.add_argument("--html", metavar="FILE", type=Path, help="write the report with a picture to one HTML file")
    return out


def _tolerance(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text}: a number from 0 on")
    return value


def run(args: argparse.Namespace) -> int:
    """Compare what the parsed arguments ask for.

    Raises:
      ValueError: a side that cannot be read, run or aligned, or an extra that is not installed.
    """
    prompts = [token_ids(text) for text in args.prompt_tokens]
    if args.html is not None:
        check_plots("--html")
    from m3jax.cli.settings import settings
    from m3jax.compare.running import compare_sides
    from m3jax.compare.text import lines_of

    raise_interrupts()
    with settings(args, PROG):
        report = compare_sides(
            args.a, args.b, prompts, rtol=args.rtol, atol=args.atol, names=args.map, config=args.config,
            dtype=args.dtype, mesh=args.mesh,
        )  # fmt: skip
    write("\n".join(lines_of(report)) + "\n")
    if args.html is not None:
        from m3jax.compare.page import write_html

        write_html(args.html, report)
    return DIFFER if report.beyond else 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the reference; JAX_PLATFORMS=cuda runs m3jax:FOLDER on a GPU
    run_program(main)
