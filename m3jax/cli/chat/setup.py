"""Commands that change what the next answers go by: sampling, thinking, the system message, the tools."""

from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from typing import Any

from m3jax.cli.arguments import THINKING_MODES, bad_words, biases
from m3jax.decoding.sampling import KNOBS
from m3jax.dialogue import Dialogue
from m3jax.files import read_json_list
from m3jax.messages import printable
from m3jax.text import OutputParser
from m3jax.text.chat import ordered_tools

SETTINGS = (*KNOBS, "seed", "max_new_tokens", "thinking_mode")
_OLD_NAMES = {"thinking": "thinking_mode"}
_REQUIRED = ("temperature", "seed")  # the others can be off
_LISTS = {"logit_bias": biases, "bad_words": bad_words}  # written as on the command line


def set_value(dialogue: Dialogue, argument: str) -> str:
    """Change a setting of the answers to come.

    Args:
      dialogue: its settings are changed.
      argument: a name of `SETTINGS` and a value; "off" turns off what can be; empty for the values in force.

    Returns:
      A line with all values.

    Raises:
      ValueError: an unknown name, or a value outside its range; nothing was changed.
    """
    name, _, text = argument.strip().partition(" ")
    name, text = _OLD_NAMES.get(name, name), text.strip()
    if name and (name not in SETTINGS or not text):
        raise ValueError(f"/set takes a name and a value; the names are {', '.join(SETTINGS)}")
    if name == "thinking_mode":
        if text not in THINKING_MODES:
            raise ValueError(f"thinking_mode {printable(text)}: give {', '.join(THINKING_MODES)}")
        dialogue.thinking_mode = text
    elif name == "max_new_tokens":
        limit = _value(name, text)
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"max_new_tokens {printable(text)}: give a whole number of at least 1, or off")
        dialogue.max_new_tokens = limit
    elif name:
        dialogue.sampling = replace(dialogue.sampling, **{name: _value(name, text)})
    values = {name: getattr(dialogue.sampling, name) for name in (*KNOBS, "seed")} | {
        "max_new_tokens": dialogue.max_new_tokens, "thinking_mode": dialogue.thinking_mode,
    }  # fmt: skip
    return ", ".join(f"{name} {'off' if values[name] is None else values[name]}" for name in SETTINGS)


def _value(name: str, text: str) -> Any:
    """Return the value in a text, or None for "off" where that is one."""
    if text == "off" and name not in _REQUIRED:
        return None
    if name in _LISTS:
        try:
            return _LISTS[name](text)
        except ArgumentTypeError as error:
            raise ValueError(f"{name} {error}, or off") from None
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    raise ValueError(f"{name} {printable(text)}: give a number{'' if name in _REQUIRED else ', or off'}")


def set_system(dialogue: Dialogue, argument: str) -> str:
    """Replace the system message in front of the dialogue.

    Args:
      dialogue: its first message is changed, and all after it is kept.
      argument: the text; two quotes for none; empty for the text in force.

    Returns:
      A line with the text.
    """
    has_system = bool(dialogue.messages) and dialogue.messages[0]["role"] == "system"
    if text := argument.strip():
        new = [] if text in ('""', "''") else [{"role": "system", "content": text}]
        dialogue.messages = [*new, *dialogue.messages[has_system:]]
        has_system = bool(new)
    return f"system message: {dialogue.messages[0]['content']}" if has_system else "no system message"


def set_tools(dialogue: Dialogue, argument: str) -> str:
    """Replace the tools that the model may call.

    Args:
      dialogue: its tools are changed.
      argument: the name of a file with a JSON list of tools, as --tools takes it; empty for the tools in force.

    Returns:
      A line with their names.

    Raises:
      ValueError: a file that holds no tools; nothing was changed.
      OSError: a file that cannot be read.
    """
    if name := argument.strip():
        tools = read_json_list(Path(name).expanduser(), called="a file of tools")
        OutputParser(tools=tools, thinking_mode=dialogue.thinking_mode)  # raises ValueError for bad tools
        dialogue.tools = tools
    names = [printable(tool["function"]["name"]) for tool in ordered_tools(dialogue.tools)]
    return f"tools: {', '.join(names)}" if names else "no tools; /tools FILE reads some"
