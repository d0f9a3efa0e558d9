"""The command line of `python -m m3jax.generate`: its arguments, which are read before anything large is imported."""

import argparse
from collections.abc import Sequence

from m3jax.console import Parser, run_command
from m3jax.interrupts import raise_interrupts

PROG = "m3jax.generate"
# As in m3jax.text_model, .ops, .decoding.engine and .decoding.speculation; a test compares them.
NEW_TOKENS = 128
BACKENDS = ("auto", "xla", "triton", "mosaic_tpu")
DRAFT_TOKENS, MAX_DRAFT_TOKENS = 3, 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status, as `m3jax.console.run_command` has it.
    """
    return run_command(PROG, parser(), run, argv)


def parser() -> Parser:
    """The arguments of the command line."""
    out = Parser(PROG, "Continue prompts with a MiniMax-M3 model.")
    out.add_argument("--model", metavar="DIR", help="a folder in the hub's layout (default: the embedded checkpoint)")
    prompt = out.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", action="append", help="may be given several times")
    prompt.add_argument("--prompt-file", metavar="F", help="the whole file is one prompt; - is standard input")
    prompt.add_argument("--prompt-tokens", metavar="IDS", action="append", help="ids, as in 1,2,3; may be repeated")
    out.add_argument("--max-new-tokens", metavar="N", type=int, help=f"default: the model folder's, else {NEW_TOKENS}")
    out.add_argument("--temperature", metavar="X", type=float, help="0 is greedy")
    out.add_argument("--top-k", metavar="K", type=int, help="keep the K most probable tokens; 0 is off")
    out.add_argument("--top-p", metavar="P", type=float, help="keep the fewest tokens of total probability P; 1 is off")
    out.add_argument("--min-p", metavar="P", type=float, help="drop tokens below P times the best one; 0 is off")
    out.add_argument("--repetition-penalty", metavar="X", type=float, help="1 is off")
    out.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before TEXT; may be repeated")
    out.add_argument("--seed", metavar="N", type=int, default=0, help="of every prompt (default: 0)")
    out.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16, float32 or float64")
    out.add_argument("--draft", metavar="DIR", help="draft tokens with an EAGLE3 model: its folder, or builtin for the "
                     "embedded checkpoint's; ngram looks for them in the text so far")  # fmt: skip
    out.add_argument("--draft-tokens", metavar="K", type=int, default=DRAFT_TOKENS, help=f"1 to {MAX_DRAFT_TOKENS} in "
                     f"one verification (default: {DRAFT_TOKENS})")  # fmt: skip
    out.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="auto (default) takes kernels where they can run"
    )
    out.add_argument("--mesh", metavar="AXES", help="devices to shard over, as in data=1,expert=2,tensor=4")
    out.add_argument("--json", action="store_true", help="print one JSON object a prompt, each on its line")
    out.add_argument("--logprobs", action="store_true", help="with --json: the log-probability of each new token")
    out.add_argument("--stats", action="store_true", help="print times and sizes on stderr at the end")
    out.add_argument("--no-compile-cache", action="store_true", help="neither use nor keep compiled programs; they are "
                     "kept in M3JAX_CACHE_DIR, else ~/.cache/m3jax")  # fmt: skip
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
    if not all(args.stop):
        raise ValueError("--stop '': the text would end before it began; give at least one character, or no --stop")
    if not 1 <= args.draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--draft-tokens {args.draft_tokens}: give 1 to {MAX_DRAFT_TOKENS}")
    from m3jax.cli.generation import generate

    raise_interrupts()
    generate(args)
    return 0
