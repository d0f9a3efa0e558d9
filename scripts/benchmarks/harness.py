"""Harness of `bench.py`: the command line, the environment line, the table and the file of rows of all subjects."""

import argparse
import ast
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED = ("__init__", "harness", "timing", "models", "transformers_peer")  # no subjects
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ERROR = 2
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Option:
    """A setting of a subject.

    Attributes:
      default: A bool makes a flag, a list an option of several values.
      help: A noun phrase.
      smoke: The value under `--smoke`; None leaves the default.
      choices: The allowed values, if they are few.
      type: What parses a value, unless the default's type does.
    """

    default: Any
    help: str
    smoke: Any = None
    choices: Sequence[Any] | None = None
    type: Callable[[str], Any] | None = None

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the option to a parser."""
        flag = f"--{name.replace('_', '-')}"
        if isinstance(self.default, bool):
            parser.add_argument(flag, action="store_true", default=self.default, help=self.help)
            return
        is_list = isinstance(self.default, list)
        values = self.default if is_list else [] if self.default is None else [self.default]
        shown = " ".join(map(str, values)).replace("%", "%%")
        parser.add_argument(
            flag, nargs="*" if is_list else None, type=self.type or type(values[0] if values else ""),
            choices=self.choices, default=self.default, help=f"{self.help} (default: {shown})" if shown else self.help,
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subject; return 2 after an error, which is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    subjects = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.stem not in SHARED}
    listed = "\n".join(f"  {name:16s} {_first_line(path)}" for name, path in subjects.items())
    parser = argparse.ArgumentParser(
        prog="bench.py", description="Measure one subject; `bench.py SUBJECT --help` shows its options.",
        epilog=f"subjects:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("subject", choices=subjects, metavar="SUBJECT", help="see below")
    name = parser.parse_args(words[:1]).subject
    if "--smoke" in words:  # most of its time would be LLVM's
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
    subject = importlib.import_module(f"benchmarks.{name}")
    args = parsed(subject, name, words[1:])
    try:
        if args.part:
            for row in subject.part(args):
                print(json.dumps(row), flush=True)
            return 0
        report = Report(args, environment(subject))
        for row in subject.measure(args):
            report.add(row)
    except (ValueError, ChildProcessError) as error:
        print(f"bench.py {name}: {error}", file=sys.stderr)
        return ERROR
    return 0


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]


def parsed(subject: ModuleType, name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse a subject's command line: its own options and the shared ones."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"bench.py {name}", description=subject.__doc__, formatter_class=formatter)
    for key, option in subject.OPTIONS.items():
        option.add_to(parser, key)
    if hasattr(subject, "REPEATS"):
        Option(subject.REPEATS, "Measurements of each kind, by turns", smoke=1).add_to(parser, "repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file that keeps the environment and all rows")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, to see that it runs")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    if "--smoke" in words:
        small = {key: option.smoke for key, option in subject.OPTIONS.items() if option.smoke is not None}
        parser.set_defaults(**small, **({"repeats": 1} if hasattr(subject, "REPEATS") else {}))
    args = parser.parse_args(words)
    if getattr(args, "repeats", 1) < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    args.subject, args.words = name, list(words)
    return args


def environment(subject: ModuleType) -> dict[str, Any]:
    """Return the date, the devices and the versions that figures depend on."""
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "cores": CORES}
    if getattr(subject, "USES_DEVICE", True):
        import jax

        found["devices"] = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    found["python"] = platform.python_version()
    for package in ("jax", "numpy", *getattr(subject, "PACKAGES", ())):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class Report:
    """The table on stdout, and the file of `--json`, which holds all rows so far."""

    def __init__(self, args: argparse.Namespace, about: Mapping[str, Any]):
        settings = {key: value for key, value in vars(args).items() if key not in ("words", "part", "address")}
        self._path, self._columns = args.json, ()
        self._content = {"environment": about, "settings": settings, "rows": [], "remarks": []}
        print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)

    def add(self, row: Mapping[str, Any] | str) -> None:
        """Print a row of a table, or a remark."""
        if isinstance(row, str):
            self._content["remarks"].append(row)
            print(row, flush=True)
        else:
            self._content["rows"].append(dict(row))
            widths = [
                max(len(name), 34 if isinstance(value, str) and number < 2 else 10)
                for number, (name, value) in enumerate(row.items())
            ]
            if self._columns != (columns := tuple(row)):
                self._columns = columns
                print(f"\n{_line(columns, widths, row.values())}", flush=True)
            print(_line(map(cell, row.values()), widths, row.values()), flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._content, indent=1, default=str) + "\n", encoding="utf-8")


def cell(value: Any) -> str:
    """Return a value as it stands in a table: a number with four digits at least, nothing for None."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "NO", None: ""}[value]
    if isinstance(value, float):
        digits = next((n for n, least in enumerate((1000, 100, 10, 1)) if abs(value) >= least), 4)
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _line(cells: Any, widths: Sequence[int], values: Any) -> str:
    """Join cells to a line: numbers to the right of their columns, texts to the left."""
    sides = (">" if isinstance(value, int | float | None) and not isinstance(value, bool) else "<" for value in values)
    return "  ".join(f"{c:{side}{width}}" for c, side, width in zip(cells, sides, widths, strict=True)).rstrip()


# Parts in processes of their own


def start_part(
    args: argparse.Namespace, part: str, *words: str, env: Mapping[str, str | None] | None = None
) -> subprocess.Popen:
    """Start a part of a subject, with the same options, in a process whose stdout is read here.

    Args:
      args: Command line of the subject.
      part: Name that the part's process finds in `args.part`.
      words: Further words of its command line.
      env: Changed variables of its environment, None to remove one.
    """
    command = [sys.executable, str(HERE.parent / "bench.py"), args.subject, *args.words, "--part", part, *words]
    environment = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def rows_of(process: subprocess.Popen) -> list[dict]:
    """Wait for a part and return its rows.

    Raises:
      ChildProcessError: It failed; its stderr has said why.
    """
    output = process.communicate()[0]
    if process.returncode:
        raise ChildProcessError(f"ended with status {process.returncode}: see above")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
