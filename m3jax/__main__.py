"""`python -m m3jax`: which commands there are."""

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported

import argparse

from m3jax.console import Parser, run_command, run_program, write

PROG = "m3jax"
_COMMANDS = """m3jax has these commands; each has --help:

  python -m m3jax.chat       talk with a model, on a terminal or in a pipe
  python -m m3jax.generate   continue prompts with a model
  python -m m3jax.plan       whether a model fits a slice of accelerators, and how fast it could be
  python -m m3jax.evaluate   perplexity, recall, KL, caught attention, accepted drafts: figures and pictures
  python -m m3jax.vectors    golden vectors: inputs, and the outputs that any engine must give for them
  python -m m3jax.compare    where two engines part: the first quantity between tokens and logits that differs

From Python: import m3jax; model = m3jax.load(); m3jax.generate(model, ...). See README.md.
"""


def main(argv: list[str] | None = None) -> int:
    """List the commands; the exit status is 0, or 2 after an argument that the command line does not know."""
    return run_command(PROG, Parser(PROG, "List the commands of m3jax."), _list_commands, argv)


def _list_commands(_args: argparse.Namespace) -> int:
    write(_COMMANDS)
    return 0


if __name__ == "__main__":
    run_program(main)
