"""Arguments that several command lines share; this module imports nothing large."""

import argparse
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from m3jax.console import Parser
from m3jax.messages import HUB_NAME, no_model_folder, printable

# As in m3jax.decoding.engine and .decoding.speculation; a test compares them.
DRAFT_TOKENS, MAX_DRAFT_TOKENS = 3, 8

# As m3jax.ops, m3jax.model.build and m3jax.text have them; tests compare.
BACKENDS = ("auto", "xla", "triton", "mosaic_tpu")
WEIGHTS = ("dequantize", "mxfp8")
THINKING_MODES = ("adaptive", "enabled", "disabled")


def add_model(out: Parser) -> None:
    """Add the argument that names the model."""
    out.add_argument("--model", metavar="DIR", type=model_folder, help="a folder in the hub's layout, or ORG/NAME that "
                     "the hub's cache holds (default: the embedded checkpoint)")  # fmt: skip


def model_folder(name: str) -> str:
    """Return a model's folder for argparse: the one of this name, or what the hub's cache holds of ORG/NAME.

    Args:
      name: what was given.

    Raises:
      argparse.ArgumentTypeError: there is neither; nothing is downloaded.
    """
    if Path(name).is_dir():
        return name
    if HUB_NAME.fullmatch(name):
        from huggingface_hub import try_to_load_from_cache  # takes half a second

        with suppress(ValueError):  # no name that the hub would give
            if isinstance(config := try_to_load_from_cache(name, "config.json"), str):
                return str(Path(config).parent)
    raise argparse.ArgumentTypeError(no_model_folder(name))


def add_knobs(out: Parser) -> None:
    """Add the arguments that say how tokens are sampled."""
    out.add_argument("--temperature", metavar="X", type=float, help="0 is greedy")
    out.add_argument("--top-k", metavar="K", type=int, help="keep the K most probable tokens; 0 is off")
    out.add_argument("--top-p", metavar="P", type=float, help="keep the fewest tokens of total probability P; 1 is off")
    out.add_argument("--min-p", metavar="P", type=float, help="drop tokens below P times the best one; 0 is off")
    out.add_argument("--repetition-penalty", metavar="X", type=float, help="1 is off")
    out.add_argument("--presence-penalty", metavar="X", type=float, help="subtracted from the logits of tokens that "
                     "the continuation has, -2 to 2; 0 is off")  # fmt: skip
    out.add_argument("--frequency-penalty", metavar="X", type=float, help="subtracted as often as the continuation has "
                     "the token, -2 to 2; 0 is off")  # fmt: skip
    out.add_argument("--logit-bias", metavar="ID=NUMBER", type=biases, help="added to the logits of tokens, -100 to "
                     "100, as in 1234=-5,17=2.5")  # fmt: skip
    out.add_argument("--bad-words", metavar="IDS", type=bad_words, help="token ids that the text shall not have one "
                     "after the other; several, parted by commas, as in '12 7,9'")  # fmt: skip


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Return what "ID=NUMBER,ID=NUMBER" says, as `Sampling.logit_bias` takes it.

    Raises:
      argparse.ArgumentTypeError: it is written otherwise.
    """
    try:
        pairs = (entry.split("=") for entry in text.split(","))
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{printable(text)}: write ID=NUMBER, as in 1234=-5,17=2.5") from None


def bad_words(text: str) -> tuple[tuple[int, ...], ...]:
    """Return what "ID ID,ID" says, two words here, as `Sampling.bad_words` takes it.

    Raises:
      argparse.ArgumentTypeError: it is written otherwise.
    """
    try:
        return tuple(tuple(map(int, word.split())) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{printable(text)}: write token ids, as in '12 7,9'") from None


def add_limits(out: Parser) -> None:
    """Add the arguments that say how soon a continuation may end."""
    out.add_argument("--min-tokens", metavar="N", type=int, default=0, help="no EOS before so many new tokens")
    out.add_argument("--ignore-eos", action="store_true", help="go on after an EOS, up to --max-new-tokens")


def add_machine(out: Parser) -> None:
    """Add the arguments that say on which devices and in which dtype the model runs."""
    out.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16, float32 or float64")
    out.add_argument("--weights", choices=WEIGHTS, default="dequantize", help="of a folder in MXFP8: mxfp8 keeps them "
                     "in half the memory, dequantize (default) gives them --dtype")  # fmt: skip
    out.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="auto (default) takes kernels where they can run"
    )
    out.add_argument("--mesh", metavar="AXES", help="devices to shard over, as in data=1,expert=2,tensor=4")
    out.add_argument("--no-compile-cache", action="store_true", help="neither use nor keep compiled programs; they are "
                     "kept in M3JAX_CACHE_DIR, else ~/.cache/m3jax")  # fmt: skip


def check_plots(option: str) -> None:
    """Raise ValueError if matplotlib is not installed, so that this is known before any work is done.

    Args:
      option: what needs it for its picture, such as --html.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib for its picture: pip install 'm3jax[plots]'")


def add_draft(out: argparse._ActionsContainer) -> None:
    """Add the options of a draft."""
    out.add_argument("--draft", metavar="DIR", help="draft tokens with an EAGLE3 model: its folder, or builtin for the "
                     "embedded checkpoint's; ngram looks for them in the text so far")  # fmt: skip
    out.add_argument("--draft-tokens", metavar="K", type=int, help=f"1 to {MAX_DRAFT_TOKENS} in one verification "
                     f"(default: {DRAFT_TOKENS})")  # fmt: skip


def check_draft(args: argparse.Namespace) -> None:
    """Raise ValueError for a number of draft tokens that no engine has; where none is given it is the default."""
    if args.draft_tokens is not None and args.draft is None:
        raise ValueError("--draft-tokens needs --draft: name what proposes them (a folder, builtin or ngram)")
    if args.draft_tokens is None:
        args.draft_tokens = DRAFT_TOKENS
    if not 1 <= args.draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--draft-tokens {args.draft_tokens}: give 1 to {MAX_DRAFT_TOKENS}")
