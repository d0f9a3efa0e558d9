"""The command line of `python -m m3jax.chat`: its arguments, parsed before any large import."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from m3jax.cli.arguments import THINKING_MODES, add_knobs, add_machine, add_model
from m3jax.console import Parser, run_command
from m3jax.interrupts import raise_interrupts
from m3jax.ranges import check_given

PROG = "m3jax.chat"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status, as `m3jax.console.run_command` has it.
    """
    return run_command(PROG, parser(), run, argv)


def parser() -> Parser:
    """Return the parser of the command line's arguments."""
    out = Parser(PROG, "Talk with a MiniMax-M3 model: on a terminal, or in a pipe with one message a line.")
    add_model(out)
    out.add_argument("--tools", metavar="FILE", type=Path, help="a JSON list of the tools that the model may call; the "
                     "chat asks you for their results")  # fmt: skip
    out.add_argument("--thinking-mode", metavar="MODE", choices=THINKING_MODES, default="adaptive",
                     help="adaptive (default: the model decides), enabled or disabled")  # fmt: skip
    out.add_argument("--thinking", dest="thinking_mode", choices=THINKING_MODES, default=argparse.SUPPRESS,
                     help=argparse.SUPPRESS)  # as it was called before  # fmt: skip
    out.add_argument("--system", metavar="TEXT", help="what the model is told before the dialogue")
    out.add_argument("--template", metavar="FILE", type=Path, help="a chat template in place of the model folder's")
    out.add_argument("--context", metavar="N", type=int, help="tokens that the dialogue can have (default: the model's "
                     "context, at most 32768)")  # fmt: skip
    out.add_argument("--max-new-tokens", metavar="N", type=int, help="of an answer (default: the model folder's, else "
                     "4096, or what the context has room for)")  # fmt: skip
    add_knobs(out)
    out.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end an answer before TEXT; may be "
                     "repeated")  # fmt: skip
    out.add_argument("--seed", metavar="N", type=int, default=0, help="of every answer (default: 0)")
    out.add_argument("--json", action="store_true", help="read messages and print answers as JSON objects, one a line")
    add_machine(out)
    return out


def run(args: argparse.Namespace) -> int:
    """Hold the dialogue that the parsed arguments ask for.

    Raises:
      ValueError: a bad argument, a folder that cannot be used, or, in a pipe, a message that cannot be sent.
      OSError: a file that cannot be read, or stdout that cannot be written.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    if not all(args.stop):
        raise ValueError("--stop '': answers would end before they began; give at least one character, or no --stop")
    check_given(vars(args))
    from m3jax.cli.chat.talk import talk

    raise_interrupts()
    talk(args)
    return 0
