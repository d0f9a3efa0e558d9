"""Use of the arguments of `add_knobs` and `add_machine`: the process's settings and the sampling parameters."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from m3jax.compile_cache import compile_cache, why_not_kept
from m3jax.completion import Defaults
from m3jax.config import M3Config
from m3jax.console import say
from m3jax.decoding import Params
from m3jax.decoding.sampling import KNOBS, as_sampling
from m3jax.text_model import params_of


@contextmanager
def settings(args: argparse.Namespace, prog: str) -> Iterator[None]:
    """Apply the process's settings that the arguments ask for: the cache of compiled programs, and float64.

    Args:
      args: with those of `add_machine`.
      prog: the command's name, which a note begins with.
    """
    if not args.no_compile_cache and (reason := why_not_kept()):
        say(f"{prog}: note: compiled programs are not kept: {reason}")
    is_float64 = args.dtype == "float64" or jax.config.jax_enable_x64
    with compile_cache(not args.no_compile_cache), jax.enable_x64(is_float64):
        yield


def asked_params(args: argparse.Namespace, prog: str, config: M3Config, defaults: Defaults) -> Params:
    """Return the parameters of generation: a flag wins over the model folder's generation_config.json.

    Args:
      args: with those of `add_knobs`, and max_new_tokens and seed.
      prog: the command's name, which a note begins with.
      config: of the model.
      defaults: of its folder.

    Raises:
      ValueError: a knob outside its range.
    """
    given = {name: getattr(args, name) for name in KNOBS if getattr(args, name) is not None}
    if defaults.ignored:
        say(f"{prog}: note: generation_config.json: not supported and left out: {', '.join(defaults.ignored)}")
    if given and "temperature" not in given and defaults.knobs.get("temperature") == 0:
        say(f"{prog}: note: generation_config.json asks for greedy decoding; give --temperature to sample")
    sampling = as_sampling(None, {**given, "seed": args.seed}, called=asked_params, defaults=defaults.knobs)
    return params_of(defaults, config, args.max_new_tokens, sampling)
