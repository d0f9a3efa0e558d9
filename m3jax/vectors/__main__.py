"""`python -m m3jax.vectors`: make golden vectors, or check this package against them (docs/vectors.md)."""

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from m3jax.compile_cache import why_not_kept
from m3jax.console import Parser, run_command, run_program, say, write
from m3jax.interrupts import raise_interrupts
from m3jax.progress import activity

PROG = "m3jax.vectors"
DIFFER = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status: 0; 1 if something differs from the vectors; else as `m3jax.console.run_command` has it.
    """
    return run_command(PROG, parser(), run, argv)


def parser() -> Parser:
    """Return the parser of the command line's arguments."""
    out = Parser(PROG, "Golden vectors: inputs, and the outputs that any engine must give for them.")
    commands = out.add_subparsers(
        dest="command", required=True, metavar="make|check", parser_class=argparse.ArgumentParser
    )
    make = commands.add_parser("make", help="write vectors into a folder", allow_abbrev=False)
    make.add_argument("--out", metavar="DIR", type=Path, required=True, help="a folder that holds none yet")
    make.add_argument(
        "--only", metavar="GROUP", action="append", default=[], help="this group; may stand several times"
    )
    make.add_argument("--large", action="store_true", help="M3's real head shapes, up to 8,192 keys, instead")
    check = commands.add_parser("check", help="hold this package against a folder of vectors", allow_abbrev=False)
    check.add_argument("folder", metavar="DIR", type=Path, help="that `make` wrote, such as vectors/")
    for command in (make, check):
        command.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        command.error = out.error
    return out


def run(args: argparse.Namespace) -> int:
    """Make or check vectors, as the parsed arguments ask."""
    raise_interrupts()
    if args.command == "make":
        with activity() as line:
            line.say("starting")
            from m3jax.vectors.making import make

            manifest = make(args.out, args.only, args.large)
        groups = {case["group"]: None for case in manifest["cases"]}
        write(f"{args.out}: {len(manifest['cases'])} cases of {len(groups)} groups: {', '.join(groups)}\n")
        return 0
    if reason := why_not_kept():
        say(f"{PROG}: note: compiled programs are not kept: {reason}")
    with activity() as line:
        line.say("starting")
        from m3jax.vectors.checking import check

        reports = check(args.folder)
    lines = [line for report in reports for line in report.differences]
    agreeing = sum(not report.differences for report in reports)
    compared = sum(report.compared for report in reports)
    lines.append(f"{agreeing} of {len(reports)} cases agree ({compared} outputs compared)")
    write("\n".join(lines) + "\n")
    return 0 if agreeing == len(reports) else DIFFER


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the truth is float64; JAX_PLATFORMS=cuda checks a GPU's kernels
    run_program(main)
