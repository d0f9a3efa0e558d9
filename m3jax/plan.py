"""`python -m m3jax.plan`: what a model needs of a slice of accelerators, and how fast it could be."""

if __name__ == "__main__":
    from m3jax.interrupts import end_at_interrupts

    end_at_interrupts()  # before the rest is imported

import argparse
import os
from collections.abc import Sequence

from m3jax.cli.arguments import model_folder
from m3jax.console import Parser, run_command, run_program
from m3jax.interrupts import raise_interrupts

PROG = "m3jax.plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status: 0; 1 if the model does not fit; else as `m3jax.console.run_command` has it.
    """
    return run_command(PROG, parser(), run, argv)


def parser() -> Parser:
    """The arguments of the command line."""
    out = Parser(PROG, "Plan a MiniMax-M3 model on accelerators.")
    out.add_argument("--topology", metavar="SLICE", required=True, help="as in v5p:4x4x4, v6e:8x8, tpu7x:2x2x2, h200:8")
    out.add_argument("--context", metavar="N", type=int, required=True, help="tokens that every row can have")
    out.add_argument("--batch", metavar="N", type=int, default=1, help="rows that decode together (default: 1)")
    out.add_argument("--model", metavar="DIR", type=model_folder, help="a folder with a config.json (default: the full "
                     "428B configuration)")  # fmt: skip
    out.add_argument("--dtype", default="bfloat16", help="of weights: bfloat16 (default), float16 or float32")
    out.add_argument("--weights", default="dequantize", help="mxfp8 keeps the linear layers' in MXFP8; dequantize "
                     "(default) has all in --dtype")  # fmt: skip
    out.add_argument("--kv-dtype", metavar="DTYPE", help="of keys and values: also float8_e4m3fn (default: --dtype)")
    out.add_argument("--index-dtype", metavar="DTYPE", help="of index keys: also float8_e4m3fn (default: --dtype)")
    out.add_argument(
        "--mesh", metavar="AXES", help="as in context=4,expert=4,tensor=4 (default: the best by arithmetic)"
    )
    out.add_argument("--prefill-chunk", metavar="N", type=int, help="prompt tokens of a call (default: 8192 on a GPU, "
                     "2048 on a TPU)")  # fmt: skip
    out.add_argument("--draft", action="store_true", help="plan the EAGLE3 draft of M3 too")
    out.add_argument("--images", metavar="N", type=int, default=0, help="go through the vision tower at once (0)")
    out.add_argument("--image-tokens", metavar="N", type=int, default=576, help="of each image (default: 576)")
    out.add_argument("--compile", action=argparse.BooleanOptionalAction, help="ask a TPU's compiler, or plan by "
                     "arithmetic, as a GPU always is (default: ask it where it is installed)")  # fmt: skip
    out.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")
    return out


def run(args: argparse.Namespace) -> int:
    """Print the plan that the parsed arguments ask for; see `m3jax.cli.planning.plan`."""
    from m3jax.cli.planning import plan

    raise_interrupts()
    return plan(args)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # it needs no accelerator and takes none
    run_program(main)
