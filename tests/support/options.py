"""The defaults of a command's options, held against what its help says of them."""

import argparse
import re

_SAID = (r"default:? ([^\s;)]*[^\s;),])", r"([^\s(]+) \(default(?:\)|: the)")  # (default: 8), and 8 (default)
_NOTHING = (None, [], "", 0, float("inf"))  # defaults that set no limit and ask for nothing: help need not say them


def wrong_defaults(parser: argparse.ArgumentParser) -> list[str]:
    """Return a line for each option with another default than its help says, or with one of which help says nothing.

    An option whose default is worked out later has None, and help says in words what becomes of it.

    Args:
      parser: of a command.
    """

    def value(action: argparse.Action, text: str) -> object:
        try:
            return (action.type or str)(text)
        except (ValueError, argparse.ArgumentTypeError):  # words
            return text

    wrong = []
    for action in parser._actions:
        if action.nargs == 0 or not action.option_strings or action.default in (None, argparse.SUPPRESS):
            continue
        said = [value(action, text) for pattern in _SAID for text in re.findall(pattern, action.help or "")]
        is_one = any(type(each) is type(action.default) for each in said)
        if action.default not in said and (is_one or action.default not in _NOTHING):
            wrong.append(f"{action.option_strings[0]}: {action.default!r}, and help says {action.help!r}")
    return wrong
