"""Use of the arguments of `add_knobs`: the sampling parameters."""

import argparse

from m3jax.completion import Defaults
from m3jax.config import M3Config
from m3jax.console import say
from m3jax.decoding import Params
from m3jax.decoding.sampling import KNOBS, as_sampling
from m3jax.text_model import params_of


def asked_params(args: argparse.Namespace, prog: str, config: M3Config, defaults: Defaults) -> Params:
    """Return the parameters of generation: a flag wins over the model folder's generation_config.json.

    Args:
      args: with those of `add_knobs`, and max_new_tokens and seed; those of `add_limits`, and top_logprobs, if the
        command has them.
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
    settings = {name: getattr(args, name) for name in ("min_tokens", "ignore_eos", "top_logprobs") if name in args}
    return params_of(defaults, config, args.max_new_tokens, sampling, **settings)
