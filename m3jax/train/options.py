"""The options that commands of training have in common, each said once."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from m3jax.hosts.arguments import check_hosts
from m3jax.interrupts import raise_interrupts

DTYPES = ("bfloat16", "float32")
_number = dict(metavar="N", type=int)
_real = dict(metavar="X", type=float)

# As `argparse` takes them; what a command calls otherwise, it says where it adds the option.
OPTIONS: dict[str, dict[str, Any]] = {
    "--model": dict(metavar="DIR", help="a folder in the hub's layout (default: the embedded one)"),
    "--out": dict(metavar="DIR", type=Path, required=True, help="of the states, and of what was trained"),
    "--steps": dict(**_number, required=True, help="of the optimiser"),
    "--metrics": dict(metavar="FILE", help="JSON lines, one a step (default: OUT/metrics.jsonl)"),
    "--rows": dict(**_number, default=1, help="rows of a micro-batch (default: 1)"),
    "--accumulate": dict(**_number, default=1, help="micro-batches of a step (default: 1)"),
    "--learning-rate": dict(**_real, default=1e-5, help="default: 1e-5"),
    "--warmup-steps": dict(**_number, default=0, help="default: 0"),
    "--weight-decay": dict(**_real, default=0.0, help="default: 0"),
    "--clip-norm": dict(**_real, default=1.0, help="of the gradient (default: 1)"),
    "--seed": dict(**_number, default=0, help="default: 0"),
    "--dtype": dict(choices=DTYPES, default="bfloat16", help="of weights and activations in a pass; what is trained is "
                    "float32 (default: bfloat16)"),
    "--no-remat": dict(action="store_true", help="keep activations: more memory, faster"),
    "--keep-products": dict(action="store_true", help="recompute activations, but not attention and the products of "
                            "matrices: between the two in memory and time"),
    "--mesh": dict(metavar="SIZES", help="devices, as in data=2,tensor=4; axes: data, context, expert, tensor"),
    "--save-every": dict(**_number, default=100, help="steps after which the state is kept (default: 100)"),
}  # fmt: skip


def add_options(group: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add options to a parser, or to a group of its options.

    Args:
      group: that they are shown in.
      names: of `OPTIONS`.
      **changes: of all of these, such as `help`.
    """
    for name in names:
        group.add_argument(name, **OPTIONS[name] | changes)


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for a value that no command can use.

    Args:
      args: parsed.
    """
    check_hosts(args)
    if args.save_every < 1:
        raise ValueError(f"--save-every {args.save_every}: must be at least 1")
    if args.keep_products and getattr(args, "no_remat", False):  # grpo has --remat in its place
        raise ValueError("--no-remat keeps all activations, --keep-products some of them: give one of the two")


def run_on_hosts(args: argparse.Namespace, prog: str, work: Callable[[Any], None]) -> int:
    """Run a command's work on every host, with compiled programs kept, and return the exit status.

    Args:
      args: Parsed arguments, which `check_options` has seen.
      prog: The command's name.
      work: Function of the channel between the processes, None in a single one.
    """
    raise_interrupts()
    from m3jax.compile_cache import compile_cache
    from m3jax.hosts.run import on_hosts

    with compile_cache():
        on_hosts(args, prog, work)
    return 0


def remat_of(args: argparse.Namespace, is_asked: bool) -> bool | Literal["products"]:
    """Return what the backward pass recomputes.

    Args:
      args: parsed.
      is_asked: whether it recomputes anything where products need not be kept.
    """
    return "products" if args.keep_products else is_asked
