"""`python -m m3jax.evaluate`: measure a model, in figures and pictures (docs/evaluate.md)."""

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from m3jax.cli import DRAFT_TOKENS
from m3jax.cli.arguments import check_plots, model_folder
from m3jax.console import Parser, run_command, run_program
from m3jax.hosts.arguments import add_hosts, check_hosts
from m3jax.interrupts import raise_interrupts

PROG = "m3jax.evaluate"
TASKS = ("perplexity", "recall", "kl", "caught", "acceptance")
# The options that only some tasks take, with the default in each of these tasks; None is worked out from the model.
OPTIONS: dict[str, dict[str, object]] = {
    "text": dict.fromkeys(TASKS, ()),
    "tokens": {"perplexity": 16_384},
    "context": dict.fromkeys(("perplexity", "kl", "caught", "acceptance")),
    "skip": {"perplexity": None, "kl": None, "caught": None},
    "prompts": {"kl": 8, "caught": 2, "acceptance": 8},
    "lengths": {"recall": (256, 512, 1024, 2048)},
    "depths": {"recall": (0.0, 0.25, 0.5, 0.75, 1.0)},
    "repeats": {"recall": 2},
    "kinds": {"recall": ("needle", "several", "chain")},
    "seed": {"recall": 0, "acceptance": 0},
    "reference": {"kl": None},
    "write_reference": {"kl": None},
    "draft": {"acceptance": None},
    "draft_tokens": {"acceptance": DRAFT_TOKENS},
    "temperatures": {"acceptance": (0.0, 0.7)},
    "max_new_tokens": {"acceptance": 64},
}


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
    out = Parser(PROG, "Measure a model: figures as a table, and with --out as JSON and a picture.")
    out.add_argument("--task", choices=TASKS, required=True)
    out.add_argument(
        "--model", metavar="DIR", type=_folder, help="a folder in the hub's layout (default: the embedded one)"
    )
    out.add_argument("--against", metavar="DIR", type=_folder, help="another model, side by side with the first")
    out.add_argument("--out", metavar="DIR", type=Path, help="write TASK.json and TASK.png into this folder")
    out.add_argument("--text", metavar="FILE", action="append", help="UTF-8 text; may be repeated (default: files "
                     "of the running Python's library that the embedded model has not seen)")  # fmt: skip
    ways = out.add_argument_group("how models are computed; several names with commas between them are all measured")
    ways.add_argument(
        "--dtype", metavar="NAMES", default="bfloat16", help="bfloat16 (default), float32, float16, float64"
    )
    ways.add_argument("--cache-dtype", metavar="NAMES", default="model", help="of cached keys and values: model "
                      "(default), float8_e4m3fn, or one of those")  # fmt: skip
    ways.add_argument("--index-dtype", metavar="NAMES", default="model", help="of cached index keys (default: model)")
    ways.add_argument("--backend", metavar="NAMES", default="auto", help="auto (default), xla, triton, mosaic_tpu")
    ways.add_argument("--mesh", metavar="AXES", help="devices to shard over, as in data=1,expert=2,tensor=4")
    ways.add_argument("--batch", metavar="N", type=int, default=4, help="rows that are read together (default: 4)")
    ways.add_argument("--chunk", metavar="N", type=int, default=512, help="tokens of a row in one call (default: 512)")
    ways.add_argument("--no-compile-cache", action="store_true", help="neither use nor keep compiled programs")
    some = out.add_argument_group("sizes; a task says if it does not take one")
    some.add_argument("--tokens", metavar="N", type=int, help=f"perplexity: of all texts ({_default('tokens')})")
    some.add_argument("--context", metavar="N", type=int, help="tokens of a window, of a reference's prompt, of a row, "
                      "or before a draft begins")  # fmt: skip
    some.add_argument("--skip", metavar="N", type=int, help="tokens at the start of these that are context alone")
    some.add_argument("--prompts", metavar="N", type=int, help="kl --write-reference, caught, acceptance: how many")
    some.add_argument("--lengths", metavar="N,N", type=_numbers(int), help=f"recall ({_default('lengths')})")
    some.add_argument("--depths", metavar="X,X", type=_numbers(float), help=f"recall: 0 to 1 ({_default('depths')})")
    some.add_argument("--repeats", metavar="N", type=int, help=f"recall: prompts a cell ({_default('repeats')})")
    some.add_argument("--kinds", metavar="K,K", type=_numbers(str), help=f"recall ({_default('kinds')})")
    some.add_argument("--seed", metavar="N", type=int, help="recall, acceptance: of prompts and draws (0)")
    some.add_argument("--reference", metavar="DIR", type=Path, help="kl: logits to compare with")
    some.add_argument("--write-reference", metavar="DIR", type=Path, help="kl: write the model's logits there, no more")
    some.add_argument("--draft", metavar="DIR", help="acceptance: an EAGLE3 draft's folder, builtin for the embedded "
                      "model's (its default), or ngram")  # fmt: skip
    some.add_argument("--draft-tokens", metavar="K", type=int, help=f"acceptance ({DRAFT_TOKENS})")
    some.add_argument("--temperatures", metavar="X,X", type=_numbers(float), help="acceptance; 0 is greedy (0,0.7)")
    some.add_argument("--max-new-tokens", metavar="N", type=int, help=f"acceptance ({_default('max_new_tokens')})")
    add_hosts(out)
    return out


def _folder(name: str) -> Path:
    return Path(model_folder(name))


def _default(option: str) -> str:
    """Return the default of an option that only one task has, as the help shows it."""
    (value,) = OPTIONS[option].values()
    return (
        ",".join(f"{x:g}" if isinstance(x, float) else str(x) for x in value)
        if isinstance(value, tuple)
        else str(value)
    )


def _numbers(kind: Callable[[str], object]) -> Callable[[str], tuple]:
    """Return a parser of values with commas between them, for argparse."""

    def values(text: str) -> tuple:
        return tuple(kind(part) for part in text.split(","))

    values.__name__ = "list"  # argparse says: invalid list value
    return values


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the task's defaults filled in.

    Raises:
      ValueError: an argument that the task does not take, or a size below 1.
    """
    args = argparse.Namespace(**vars(args))
    for option, defaults in OPTIONS.items():
        value, name = getattr(args, option), f"--{option.replace('_', '-')}"
        if value is not None and args.task not in defaults:
            raise ValueError(f"{name} is for --task {' and '.join(defaults)}, not {args.task}; leave it out")
        if value is None:
            setattr(args, option, defaults.get(args.task))
        elif isinstance(value, int) and value < (0 if option in ("skip", "seed") else 1):
            raise ValueError(f"{name} {value}: too small")
    for name in ("batch", "chunk"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: too small")
    if args.task == "kl" and (args.reference is None) == (args.write_reference is None):
        raise ValueError("--task kl compares with logits: write them once with --write-reference DIR (--dtype float32, "
                         "say), then give --reference DIR, not both at a time")  # fmt: skip
    if args.write_reference is not None and (args.out is not None or args.against is not None):
        raise ValueError("--write-reference writes logits and no figures: leave --out and --against out")
    return args


def run(args: argparse.Namespace) -> int:
    """Measure what the parsed arguments ask for.

    Raises:
      ValueError: a bad argument, a folder or file that cannot be used, or an extra that is not installed.
      OSError: a file that cannot be written.
      FloatingPointError: logits that are no numbers.
    """
    args = with_defaults(args)
    check_hosts(args)
    if args.out is not None:
        check_plots("--out")
    from m3jax.evaluate.command import evaluate

    raise_interrupts()
    evaluate(args)
    return 0


if __name__ == "__main__":
    run_program(main)
