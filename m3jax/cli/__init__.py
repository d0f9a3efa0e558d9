"""The command line of `python -m m3jax.generate`: its arguments, parsed before any large import."""

import argparse
from collections.abc import Sequence

from m3jax.cli.arguments import DRAFT_TOKENS as DRAFT_TOKENS
from m3jax.cli.arguments import MAX_DRAFT_TOKENS as MAX_DRAFT_TOKENS
from m3jax.cli.arguments import add_draft, add_knobs, add_limits, add_machine, add_model, check_draft
from m3jax.console import Parser, run_command
from m3jax.hosts.arguments import add_hosts, check_hosts
from m3jax.interrupts import raise_interrupts
from m3jax.ranges import check_given

PROG = "m3jax.generate"
NEW_TOKENS = 128  # as in m3jax.text_model; a test compares them


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
    out = Parser(PROG, "Continue prompts with a MiniMax-M3 model.")
    add_model(out)
    prompt = out.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", action="append", help="may be given several times")
    prompt.add_argument("--prompt-file", metavar="F", help="the whole file is one prompt; - is standard input")
    prompt.add_argument("--prompt-tokens", metavar="IDS", action="append", help="ids, as in 1,2,3; may be repeated")
    out.add_argument("--image", metavar="F", action="append", default=[], help="an image that every prompt shows, "
                     "where it says <image>, or in front; may be repeated")  # fmt: skip
    out.add_argument("--video", metavar="F", action="append", default=[], help="the same for a video, where a prompt "
                     "says <video>")  # fmt: skip
    out.add_argument("--max-new-tokens", metavar="N", type=int, help=f"default: the model folder's, else {NEW_TOKENS}")
    add_knobs(out)
    add_limits(out)
    out.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before TEXT; may be repeated")
    out.add_argument("--seed", metavar="N", type=int, default=0, help="of every prompt (default: 0)")
    add_draft(out)
    out.add_argument("--invariant", action="store_true", help="to the bit the text that a prompt has alone, whatever "
                     "runs beside it, with any draft; slower")  # fmt: skip
    out.add_argument("--json", action="store_true", help="print one JSON object a prompt, each on its line")
    out.add_argument("--logprobs", action="store_true", help="with --json: the log-probability of each new token")
    out.add_argument("--top-logprobs", metavar="K", type=int, default=0, help="with --json: the K most probable tokens "
                     "in the place of each new one, up to 20")  # fmt: skip
    out.add_argument("--stats", action="store_true", help="print times and sizes on stderr at the end")
    add_machine(out)
    add_hosts(out)
    return out


def run(args: argparse.Namespace) -> int:
    """Generate what the parsed arguments ask for.

    Raises:
      ValueError: a bad argument, or a folder that cannot be used.
      OSError: a file that cannot be read, or stdout that cannot be written.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    if args.logprobs and not args.json:
        raise ValueError("--logprobs needs --json: plain text has no place for them")
    if args.top_logprobs and not args.json:
        raise ValueError("--top-logprobs needs --json: plain text has no place for them")
    if not all(args.stop):
        raise ValueError("--stop '': the text would end before it began; give at least one character, or no --stop")
    check_given(vars(args))
    check_draft(args)
    check_hosts(args)
    from m3jax.cli.generation import generate

    raise_interrupts()
    generate(args)
    return 0
