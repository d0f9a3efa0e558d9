"""The work of `python -m m3jax.chat` after its arguments are parsed: it loads the model and holds the dialogue."""

import argparse
import sys
from pathlib import Path

from m3jax.assets import embedded_path
from m3jax.checkpoint import load
from m3jax.cli.chat.pipe import answer_lines
from m3jax.cli.chat.terminal import EXAMPLES, Terminal
from m3jax.cli.knobs import asked_params
from m3jax.cli.settings import settings
from m3jax.completion import Defaults
from m3jax.config import M3Config
from m3jax.dialogue import Dialogue
from m3jax.files import read_json_list
from m3jax.messages import counted
from m3jax.ops import check_backend
from m3jax.parallel import parse_mesh
from m3jax.text import ChatTemplate, OutputParser, Tokenizer

PROG = "m3jax.chat"


def talk(args: argparse.Namespace) -> None:
    """Hold the dialogue that the parsed arguments ask for, until its input ends.

    Args:
      args: of `m3jax.cli.chat.parser`.

    Raises:
      ValueError: a bad argument, a folder that cannot be used, or, in a pipe, a message that cannot be sent.
      OSError: a file that cannot be read, or stdout that cannot be written.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    is_terminal = not args.json and all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
    with settings(args, PROG):
        dialogue, title = _begin(args)
        if is_terminal:
            Terminal(dialogue, title, EXAMPLES if args.model is None and not dialogue.tools else ()).run()
        else:
            answer_lines(dialogue, is_json=args.json)


def _begin(args: argparse.Namespace) -> tuple[Dialogue, str]:
    """Return the dialogue and a line that describes the model; check the arguments before the weights are read."""
    folder = embedded_path() if args.model is None else Path(args.model)
    config, tokenizer = M3Config.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    template = ChatTemplate.from_folder(folder) if args.template is None else ChatTemplate.from_file(args.template)
    tools = None if args.tools is None else read_json_list(args.tools, called="a file of tools")
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    OutputParser(tools=tools, thinking_mode=args.thinking_mode)
    template.render([*messages, {"role": "user", "content": "?"}], tools=tools, thinking_mode=args.thinking_mode)
    defaults = Defaults.from_pretrained(folder)
    params = asked_params(args, PROG, config, defaults)
    if args.context is not None and not 1 <= args.context <= config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(f"--context {args.context}: give 1 to {limit}, the model's context")
    mesh = None if args.mesh is None else parse_mesh(args.mesh)
    check_backend(args.backend)
    model = load(args.model, dtype=args.dtype, mesh=mesh, weights=args.weights).with_backend(args.backend)
    dialogue = Dialogue(
        model, tokenizer, template=template, tools=tools, thinking_mode=args.thinking_mode, messages=messages,
        max_new_tokens=defaults.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens,
        sampling=params.sampling, stop=args.stop, stop_at=params.stop_ids, context=args.context,
    )  # fmt: skip
    name = "the embedded model" if args.model is None else str(args.model)
    title = f"{name}: room for {dialogue.context:,} tokens, thinking {args.thinking_mode}, "
    title += counted(len(tools or ()), "tool")
    title += ", sees images and videos" if dialogue.can_see else ""
    return dialogue, title
