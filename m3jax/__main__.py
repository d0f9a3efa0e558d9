"""The command `m3jax`, also `python -m m3jax`: it runs the command that its first argument names."""

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported

import argparse
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from m3jax import __version__
from m3jax.console import Parser, did_you_mean, run_command, run_program, typed, write

PROG = "m3jax"
COMMANDS = {
    "chat": "talk with a model, on a terminal or in a pipe",
    "generate": "continue prompts with a model",
    "serve": "OpenAI's and Anthropic's endpoints over HTTP, and a worker by gRPC",
    "plan": "whether a model fits a slice of accelerators, and how fast it could be",
    "train": "learn from conversations or rewards, and convert a dense model to sparse attention",
    "evaluate": "perplexity, recall, KL, caught attention, accepted drafts: figures and pictures",
    "vectors": "golden vectors: inputs, and the outputs that any engine must give for them",
    "compare": "where two engines part: the first quantity between tokens and logits that differs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default. The name of a command ends the
        process as `python -m m3jax.NAME` does, with its exit status.

    Returns:
      The exit status, as `m3jax.console.run_command` has it, where no command is named.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in COMMANDS:
        # The commands' own modules say what they set in a process of theirs, such as the device.
        sys.argv = [f"{typed(PROG)} {words[0]}", *words[1:]]
        runpy.run_module(f"{PROG}.{words[0]}", run_name="__main__")
    is_name = bool(words) and not words[0].startswith("-")
    # What follows a name that is none is not looked at: it was meant for a command.
    return run_command(PROG, parser(), run, words[:1] if is_name else words)


def parser() -> Parser:
    """Return the parser of the command line's arguments."""
    out = Parser(PROG, "MiniMax-M3 and MiniMax Sparse Attention in JAX.")
    out.formatter_class = argparse.RawDescriptionHelpFormatter
    out.usage = f"{typed(PROG)} [-h] [--version] COMMAND ..."
    out.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    out.add_argument("--version", action="store_true", help="print the version of m3jax")
    lines = [f"  {typed(PROG)} {name:<8}  {purpose}\n" for name, purpose in COMMANDS.items()]
    out.epilog = f"commands; each has --help:\n{''.join(lines)}\nFrom Python: see README.md."
    return out


def run(args: argparse.Namespace) -> int:
    """Print the version or the list of commands.

    Raises:
      ValueError: a command that is not there, or that does not come first.
    """
    if args.command in COMMANDS:
        raise ValueError(f"the command comes first: {typed(PROG)} {args.command} ...")
    if args.command is not None:
        question = did_you_mean(args.command, COMMANDS)
        raise ValueError(f"no such command: {args.command}{question}; {typed(PROG)} --help lists them")
    write(f"{PROG} {__version__}\n" if args.version else parser().format_help())
    return 0


def program() -> NoReturn:
    """Run the command line in this process, and end it: what the installed command `m3jax` calls."""
    run_program(main)


if __name__ == "__main__":
    program()
