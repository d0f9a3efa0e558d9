"""The suite's own measure: plants one bug at a time and says which test caught it.

    python scripts/mutants.py --list                  # what is planted
    python scripts/mutants.py --only 7 --only 20-25   # some of them
    python scripts/mutants.py --group engine          # those of one room
    python scripts/mutants.py                         # all: about an hour on two cores
    python scripts/mutants.py --draw 40 --seed 7 --group text    # 40 bugs of a room that nobody chose

The bugs are of the kinds that engines ship; they stand in scripts/mutants.toml, each with the file, the text that is
replaced (it occurs there once), why it is wrong, and the tests nearest to it. They are planted in a copy of the tree in
a temporary folder, and the tests run there until the first failure. Each named test first has to pass on the unchanged
copy. Every bug changes a result: one that does not, does not belong on the list. Ends with 1 where less than 95% are
caught.

With --draw they are drawn from the sources by a seed (mutating/drawn.py), and the score is of each room. One that
changes no result is left out once mutating/equivalent.toml says why. Ends with 1 where less than 90% of a room are
caught.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mutating import drawn as drawing
from mutating.drawn import Drawn

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
ENOUGH, ENOUGH_DRAWN = 0.95, 0.9
LIMIT = 900  # seconds that a run of tests may take; a bug that makes one hang is caught by it


@dataclass(frozen=True)
class Mutant:
    """A planted bug: the file, the text that is replaced, and the text that replaces it.

    Attributes:
      group: the room it is planted in.
      file: relative to the root.
      old: text that occurs in the file once.
      new: what stands there instead.
      why: what is wrong then.
      tests: arguments of pytest: the tests nearest to it.
    """

    group: str
    file: str
    old: str
    new: str
    why: str
    tests: str

    def planted(self, root: Path) -> str:
        """The file's text with the bug in it.

        Raises:
          ValueError: the old text does not occur exactly once, or nothing changes.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.file}: {self.old!r} occurs {count} times, not once; update {LIST.name} ({self.why})"
            )
        if self.old == self.new:
            raise ValueError(f"{self.file}: {self.old!r} is replaced by itself; update {LIST.name} ({self.why})")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """The outcome of the tests under a planted bug: the test that caught it, or None, and its message."""

    caught_by: str | None
    message: str
    seconds: float


def read_list() -> list[Mutant]:
    """Return all bugs, in the order of the list."""
    groups = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutant(group=group, **entry) for group, entries in groups.items() for entry in entries]


def problems(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """A line for each bug that can no longer be planted, or whose tests are not there."""
    lines = []
    for mutant in mutants:
        try:
            mutant.planted(root)
        except ValueError as error:
            lines.append(str(error))
        named = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
        missing = [word for word in named if not (root / word.split("::")[0]).exists()]
        if missing or not named:
            lines.append(f"{mutant.file}: no tests {', '.join(missing) or repr(mutant.tests)} ({mutant.why})")
    return lines


def main() -> int:
    """Plant, run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the bugs, and run nothing")
    parser.add_argument("--only", action="append", default=[], metavar="N[-M]", help="their numbers; may be repeated")
    parser.add_argument("--group", action="append", default=[], help="a room; may be repeated")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests on the unchanged tree first")
    parser.add_argument("--draw", type=int, metavar="N", help="draw so many bugs of each room in place of the list's")
    parser.add_argument("--seed", type=int, default=0, help="of --draw; 0")
    args = parser.parse_args()
    if args.draw is not None:
        return draw(args, parser)
    mutants = dict(enumerate(read_list(), 1))
    if wrong := problems(list(mutants.values())):
        parser.error("\n".join(wrong))
    if unknown := set(args.group) - {mutant.group for mutant in mutants.values()}:
        parser.error(f"--group {', '.join(unknown)}: there are {', '.join({m.group: 0 for m in mutants.values()})}")
    wanted = numbers(args.only, len(mutants), parser)
    chosen = {n: m for n, m in mutants.items() if n in wanted and (not args.group or m.group in args.group)}
    if args.list:
        for number, mutant in chosen.items():
            print(f"{number:3d}  {mutant.group:9s} {mutant.file}: {mutant.why}")
        return 0
    scores = score(chosen, outcomes_of(chosen, [mutant.tests for mutant in chosen.values()], not args.no_baseline))
    caught, count = (sum(numbers) for numbers in zip(*scores.values(), strict=True))
    return 0 if caught >= ENOUGH * count else 1


def draw(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Draw bugs of rooms, plant them, and print each room's score and what survived."""
    rooms = args.group or list(drawing.ROOMS)
    if unknown := set(rooms) - drawing.ROOMS.keys():
        parser.error(f"--group {', '.join(unknown)}: --draw has {', '.join(drawing.ROOMS)}")
    if args.draw < 1 or args.only:
        parser.error("--draw: give 1 or more, without --only")
    drawn = [mutant for room in rooms for mutant in drawing.draw(room, args.draw, args.seed)]
    known = drawing.equivalent()
    for mutant in drawn:
        if reason := known.get((mutant.file, mutant.before, mutant.after)):
            print(f"equivalent: {mutant.file}: {mutant.why}\n            {reason}")
    chosen = {n: m for n, m in enumerate(drawn, 1) if (m.file, m.before, m.after) not in known}
    if args.list:
        for number, mutant in chosen.items():
            print(f"{number:3d}  {mutant.group:10s} {mutant.file}: {mutant.why}")
        return 0
    outcomes = outcomes_of(chosen, [drawing.ROOMS[room][1] for room in rooms], not args.no_baseline)
    survivors = [chosen[number] for number, outcome in outcomes.items() if outcome.caught_by is None]
    for mutant in survivors:
        print(f"survived: {mutant.file}: {mutant.why}")
    scores = score(chosen, outcomes)
    return 0 if all(caught >= ENOUGH_DRAWN * count for caught, count in scores.values()) else 1


def numbers(given: list[str], count: int, parser: argparse.ArgumentParser) -> set[int]:
    """The numbers of --only; all without it."""
    found = set()
    for text in given:
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", text)) or not 1 <= int(match[1]) <= count:
            parser.error(f"--only {text}: give numbers from 1 to {count}, as 7 or 20-25")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found or set(range(1, count + 1))


def copy_tree(target: Path) -> Path:
    """A copy of the files that git knows, or would take."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


def outcomes_of(mutants: dict[int, Mutant | Drawn], tests_of_all: list[str], has_baseline: bool) -> dict[int, Outcome]:
    """Plant each bug in a copy of the tree, whose tests pass without any if that is looked at first."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_tree(Path(folder) / "tree")
        if has_baseline:
            check_baseline(tree, tests_of_all)
        return run_all(tree, mutants)


def check_baseline(tree: Path, tests_of_all: list[str]) -> None:
    """Exit where a named test fails without any bug: it would seem to catch everything."""
    for tests in dict.fromkeys(tests_of_all):
        outcome = run_tests(tree, tests)
        print(f"unchanged: {tests} {'passes' if outcome.caught_by is None else 'FAILS'} ({outcome.seconds:.0f} s)")
        if outcome.caught_by is not None:
            sys.exit(f"{outcome.caught_by} fails on the unchanged tree: {outcome.message}")


def run_all(tree: Path, mutants: dict[int, Mutant | Drawn]) -> dict[int, Outcome]:
    """Plant each bug, print a line for it, and return the outcomes by number."""
    outcomes = {}
    for number, mutant in mutants.items():
        path = tree / mutant.file
        original = path.read_text(encoding="utf-8")
        write(path, mutant.planted(tree), age=number)
        try:
            outcomes[number] = outcome = run_tests(tree, mutant.tests)
        finally:
            write(path, original, age=0)
        print(f"{number:3d}  {outcome.seconds:4.0f} s  {mutant.file}: {mutant.why}")
        is_caught = outcome.caught_by is not None
        print(
            f"       caught by {outcome.caught_by}\n       {outcome.message}" if is_caught else "       SURVIVED",
            flush=True,
        )
    return outcomes


def score(mutants: dict[int, Mutant | Drawn], outcomes: dict[int, Outcome]) -> dict[str, tuple[int, int]]:
    """Print how many bugs of each room were caught, and of all; return (caught, planted) by room."""
    scores = {}
    for group in dict.fromkeys(mutant.group for mutant in mutants.values()):
        of_group = [outcomes[n].caught_by is not None for n, mutant in mutants.items() if mutant.group == group]
        scores[group] = sum(of_group), len(of_group)
        print(f"{group:10s} {sum(of_group):3d} of {len(of_group)}")
    caught = sum(outcome.caught_by is not None for outcome in outcomes.values())
    print(f"caught {caught} of {len(outcomes)}: {caught / max(1, len(outcomes)):.0%}")
    return scores


def write(path: Path, text: str, age: int) -> None:
    """Write a source file with a time of its own: Python knows a compiled one by its source's size and second."""
    path.write_text(text, encoding="utf-8")
    seconds = 1_000_000_000 + 10 * age
    os.utime(path, (seconds, seconds))


def run_tests(tree: Path, tests: str) -> Outcome:
    """Run tests in the copy until the first failure."""
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "M3JAX_HYPOTHESIS": "first"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", *shlex.split(tests)]
    began = time.perf_counter()
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return Outcome("the limit of time", f"no result in {LIMIT} s", time.perf_counter() - began)
    seconds = time.perf_counter() - began
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    # 1 without a test that failed is what pytest found wrong after the last one: no test has caught anything.
    if run.returncode == 0 or (run.returncode == 1 and not failed):
        return Outcome(None, "", seconds)
    message = re.search(r"^E   +(\S.*)", run.stdout, re.MULTILINE)
    name = failed[1] if failed else f"pytest, exit status {run.returncode}"
    return Outcome(name, message[1][:160] if message else (run.stdout or run.stderr).strip()[-160:], seconds)


if __name__ == "__main__":
    sys.exit(main())
