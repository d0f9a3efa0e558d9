"""The part that all command lines share: streams, signals, one-line errors, and the exit status."""

import argparse
import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from m3jax.interrupts import INTERRUPTED, end_at_interrupts
from m3jax.messages import MOST_CHARACTERS, printable, shortened

ERROR, CLOSED_PIPE = 2, 141


class Parser(argparse.ArgumentParser):
    """Arguments whose errors are a ValueError, and whose help says so if it cannot be written."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=typed(prog), description=description, allow_abbrev=False)
        self.add_argument("--verbose", action="store_true", help="print the whole of an error, however long")

    def parse_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        """Parse arguments as argparse does, and keep them for what an error says."""
        self._given = sys.argv[1:] if args is None else list(args)
        return super().parse_args(self._given, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the arguments: an unknown option before what may be missing because of it."""
        known = _options(self)
        names = {word: word.partition("=")[0] for word in takewhile(lambda word: word != "--", self._given)}
        # A word with a space in it is a text, as argparse reads it, whatever it begins with.
        unknown = [word for word, name in names.items() if word[:2] == "--" and " " not in word and name not in known]
        if unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(names[unknown[0]], known)}"
        # Of a value that is wrong the message says more than the help does.
        hint = "" if ";" in message else "; --help lists the arguments"
        raise ValueError(f"{message}{hint}")

    def print_help(self, file: object = None) -> None:
        """Write the help to stdout."""
        write(self.format_help())


def typed(prog: str) -> str:
    """Return the words that run a program: `m3jax generate` where the command m3jax does, else python -m and its name.

    Args:
      prog: the program's name, such as m3jax.generate.
    """
    begun = sys.argv[0]  # of a program that m3jax/__main__.py runs: the words that were typed
    if prog == "m3jax":
        return prog if Path(begun).stem == prog else f"python -m {prog}"
    return begun if begun.endswith(prog.replace(".", " ")) else f"python -m {prog}"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return a question in parentheses, to follow an unknown word, if one of the names is near it."""
    near = difflib.get_close_matches(word, names, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser and of those of its subcommands."""
    subcommands = [action.choices.values() for action in parser._actions if isinstance(action.choices, dict)]
    return set(parser._option_string_actions).union(*map(_options, (each for some in subcommands for each in some)))


def run_command(
    prog: str, parser: Parser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None
) -> int:
    """Parse arguments and run what they ask for.

    Args:
      prog: the name that an error begins with.
      parser: of the arguments.
      run: takes the parsed arguments and returns the exit status.
      argv: arguments without the program's name; those of the process by default.

    Returns:
      The exit status: that of `run`; 2 after an error, which is one line on stderr; 130 after an interrupt; 141 if the
      reader of stdout went away.
    """
    verbose = False
    try:
        _check_stdout()
        args = parser.parse_args(argv)
        verbose = args.verbose
        return run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return CLOSED_PIPE
    except Exception as error:
        if not is_the_users(error):
            raise
        print_error(prog, error, verbose)
        return ERROR


def token_ids(text: str) -> list[int]:
    """The ids in an argument like "1,2,3".

    Raises:
      ValueError: it is none.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--prompt-tokens {text!r}: write token ids with commas between them, as in 1,2,3") from None


def write(text: str) -> None:
    """Write text to stdout now.

    Raises:
      BrokenPipeError: nobody reads it any more.
      OSError: it cannot be written; names where stdout leads.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is left in the buffer would fail once more, when the process ends.
        name = _stdout_name()
        _forget_stdout()
        raise OSError(error.errno, error.strerror, name) from error


def say(text: str) -> None:
    """Print a line on stderr now, if anybody can read it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _forget(sys.stderr)


def print_error(prog: str, error: BaseException, verbose: bool = False) -> None:
    """Print an error as one line of at most 2,000 characters, or with all its notes, each on its line."""
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        message = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    line = f"{prog}: error: {printable(message) or type(error).__name__}"
    notes = [printable(note) for note in getattr(error, "__notes__", ())]
    if verbose:
        say("\n  ".join([line, *notes]))
        return
    hint = "; --verbose prints all of it" if notes or len(line) > MOST_CHARACTERS else ""
    say(shortened(line, MOST_CHARACTERS - len(hint)) + hint)


def is_the_users(error: Exception) -> bool:
    """Return True if an error comes from the user's request or the machine, not from a bug in the program."""
    jax = sys.modules.get("jax")
    of_device = () if jax is None else (jax.errors.JaxRuntimeError,)
    return isinstance(error, (ValueError, OSError, FloatingPointError, MemoryError, *of_device))


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a command line in this process, and end it.

    Until `m3jax.interrupts.raise_interrupts` is called, Ctrl-C ends the process there and then.

    Args:
      main: returns the exit status.
    """
    end_at_interrupts()
    _make_streams_usable()
    status = main()
    end_at_interrupts()
    if status == INTERRUPTED:
        # The device may be at work still, and the interpreter's own way out can crash under it.
        os._exit(status)
    sys.exit(status)


def _make_streams_usable() -> None:
    """Escape what stdout cannot encode; make up for standard streams that are closed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: no file of ours may become a standard stream
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is not None and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _check_stdout() -> None:
    """Raise OSError where stdout is closed: what is asked for would be lost."""
    if sys.stdout is None:
        reason = "it is closed, and the result would be lost; open it, as in > FILE"
        raise OSError(errno.EBADF, reason, "standard output")


def _stdout_name() -> str:
    """Return a name of stdout for errors, with the file or device behind it where the system tells."""
    try:
        return f"standard output ({os.readlink('/proc/self/fd/1')})"
    except OSError:
        return "standard output"


def _forget_stdout() -> None:
    _forget(sys.stdout)


def _forget(stream) -> None:
    """Redirect a stream that nobody can read to nowhere, so that the interpreter's last flush does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
