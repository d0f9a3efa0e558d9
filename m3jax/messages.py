"""Text from files and users as errors show it: no control characters, and no longer than a person reads."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence

MOST_CHARACTERS = 2_000  # of one message
MOST_PROBLEMS = 8  # that one message lists; the exception's notes have all of them
_LIST_CHARACTERS = 1_760  # of a list of problems: with a heading it stays below MOST_CHARACTERS
_VALUE_CHARACTERS = 80
HUB_NAME = re.compile(r"\w[\w.-]*/(\w[\w.-]*)", re.ASCII)  # ORG/NAME


def printable(text: str) -> str:
    """Return the text on one line, with escapes for control characters, direction marks and surrogates.

    Args:
      text: any string; a name from a file, say.
    """
    if text.isprintable():
        return text
    escape = lambda character: character.encode("unicode_escape").decode("ascii")
    return "".join(character if character.isprintable() else escape(character) for character in text)


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text, or its beginning and how much more there is, in at most `most` characters.

    Args:
      text: any string.
      most: at least 40.
    """
    if len(text) <= most:
        return text
    return text[: most - 32] + f"... ({len(text) - most + 32} more characters)"


def shown(value: object) -> str:
    """A value from a file as an error shows it: its `repr`, printable and short.

    Args:
      value: what a JSON file can hold.
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        return shortened(printable(repr(value)), _VALUE_CHARACTERS)
    except (ValueError, RecursionError):  # it holds an integer that Python refuses to write out, or itself
        return f"a {type(value).__name__}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, which ends in s unless the number is 1: "no tools", "1 tool", "1,200 tools".

    Args:
      number: at least 0.
      noun: for one.
    """
    return f"{f'{number:,}' if number else 'no'} {noun}{'' if number == 1 else 's'}"


def listed(problems: Sequence[str], separator: str = "; ") -> str:
    """The first 8 problems, printable, and short where they are long together, and how many more there are.

    Args:
      problems: what is wrong, a text for each.
      separator: what stands between two.
    """
    lines = [printable(problem) for problem in problems[:MOST_PROBLEMS]]
    if sum(map(len, lines)) > _LIST_CHARACTERS:
        lines = [shortened(line, _LIST_CHARACTERS // MOST_PROBLEMS) for line in lines]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"and {len(problems) - MOST_PROBLEMS} more")
    return separator.join(lines)


def note_problems(error: BaseException, problems: Iterable[str]) -> None:
    """Give an exception a note for each problem, where its message could not hold them all.

    Args:
      error: its `__notes__` become the problems, each printable and whole.
      problems: all that is wrong, also what the message says.
    """
    lines = [printable(problem) for problem in problems]
    if len(lines) > MOST_PROBLEMS or sum(map(len, lines)) > _LIST_CHARACTERS:
        for line in lines:
            error.add_note(line)


def no_model_folder(name: str) -> str:
    """The message that a model folder is not there, with the line that gets it where the name could be the hub's.

    Args:
      name: the folder that was asked for.
    """
    on_hub = HUB_NAME.fullmatch(name)
    hint = f"; a model of the hub comes with: hf download {name} --local-dir {on_hub[1]}" if on_hub else ""
    return f"no such model folder: {printable(name)}; give a folder that holds config.json{hint}"


def check_keywords(given: Iterable[str], known: Iterable[str], called: Callable) -> None:
    """Raise TypeError for the first keyword that a function does not know, with the nearest that it does.

    Args:
      given: names that came in through the function's `**knobs`.
      known: names that it takes there.
      called: the function, or the class; the keywords that it spells out itself can be the nearest too.
    """
    known = tuple(known)
    for name in given:
        if name not in known:
            own = (p.name for p in inspect.signature(called).parameters.values() if p.kind is not p.VAR_KEYWORD)
            nearest = difflib.get_close_matches(name, (*known, *own), 1, 0.0)[0]
            raise TypeError(f"{called.__name__}() has no keyword {shown(name)}; the nearest that it has is {nearest!r}")
