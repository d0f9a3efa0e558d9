"""The suite's own measure: plants one bug at a time and says which test caught it.

    python scripts/mutants.py --list                  # what is planted
    python scripts/mutants.py --only 7 --only 20-25   # some of them
    python scripts/mutants.py --group engine          # those of one room
    python scripts/mutants.py                         # all: hours on one core
    python scripts/mutants.py --draw 40 --seed 7 --group text    # 40 bugs of a room that nobody chose
    python scripts/mutants.py --draw 40 --jobs 32 --seconds 540 --limit 60 --results DIR    # what there is time for

The bugs are of the kinds that engines ship; they stand in scripts/mutants.toml, each with the file, the text that is
replaced (it occurs there once), why it is wrong, and the tests nearest to it. They are planted in a copy of the tree in
a temporary folder, and the tests run there until the first failure (mutating/running.py). A test that does not pass on
the unchanged copy is left out, and named. Every bug changes a result: one that does not, does not belong on the list.
Ends with 1 where less than 95% are caught.

With --draw they are drawn from the sources by a seed (mutating/drawn.py), and the score is of each room. One that
changes no result is left out once mutating/equivalent.toml says why. Ends with 1 where less than 90% of a room are
caught.

Bugs are taken from each room in turn, so that a run that --seconds ends has some of each. A later one with the same
--results goes on where it ended. A bug whose tests take longer than --limit has survived, unless one test hung.
"""

import argparse
import difflib
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from mutating import drawn as drawing
from mutating.drawn import ROOT, Drawn
from mutating.running import Outcome, run_all

LIST = Path(__file__).with_suffix(".toml")
ENOUGH, ENOUGH_DRAWN = 0.95, 0.9
LIMIT = 900  # seconds that the tests of a bug may take


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

    @property
    def name(self) -> str:
        """The file and what is wrong, in a line."""
        return f"{self.file}: {self.why}"

    @property
    def lines(self) -> None:
        """Its tests were chosen by hand, and run in their order."""

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
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs at once, each on a core of its own; 1")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for the tests of one bug; {LIMIT}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which the run ends; none")
    parser.add_argument("--results", type=Path, metavar="DIR", help="add to the results of earlier runs of this tree")
    args = parser.parse_args()
    if args.jobs < 1 or args.limit <= 0 or args.seconds <= 0:
        parser.error("--jobs, --limit and --seconds: give more than 0")
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
    scores = score(list(chosen.values()), args)
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
            print(f"equivalent: {mutant.group}: {mutant.name}\n            {reason}")
    chosen = [mutant for mutant in drawn if (mutant.file, mutant.before, mutant.after) not in known]
    if args.list:
        for number, mutant in enumerate(chosen, 1):
            print(f"{number:3d}  {mutant.group:10s} {mutant.name}")
        return 0
    scores = score(chosen, args)
    return 0 if all(caught >= ENOUGH_DRAWN * count for caught, count in scores.values()) else 1


def numbers(given: list[str], count: int, parser: argparse.ArgumentParser) -> set[int]:
    """The numbers of --only; all without it."""
    found = set()
    for text in given:
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", text)) or not 1 <= int(match[1]) <= count:
            parser.error(f"--only {text}: give numbers from 1 to {count}, as 7 or 20-25")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found or set(range(1, count + 1))


def score(mutants: list[Mutant | Drawn], args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Plant bugs, and print what survived and how many of each room were caught; return (caught, run) by room."""
    by_room = {room: [x for x in mutants if x.group == room] for room in dict.fromkeys(x.group for x in mutants)}
    in_turn = [mutant for mutant in chain(*zip_longest(*by_room.values())) if mutant]
    outcomes = run_all(
        in_turn,
        jobs=args.jobs,
        limit=args.limit,
        seconds=args.seconds,
        results=args.results,
        has_baseline=not args.no_baseline,
    )
    found = {outcome.name: outcome for outcome in outcomes}
    for mutant in mutants:
        if (outcome := found.get(mutant.name)) and outcome.caught_by is None:
            print_survivor(mutant, outcome)
    scores = {}
    for room, of_room in by_room.items():
        ran = [found[mutant.name] for mutant in of_room if mutant.name in found]
        scores[room] = caught, count = sum(outcome.caught_by is not None for outcome in ran), len(ran)
        unsure = sum(outcome.caught_by is None and not outcome.is_whole for outcome in ran)
        not_run = len(of_room) - count
        print(
            f"{room:10s} {caught:3d} of {count} ({caught / max(1, count):.0%})"
            + (f", {unsure} survived those of their tests that there was time for" if unsure else "")
            + (f", {not_run} not run" if not_run else "")
        )
    caught, count = (sum(numbers) for numbers in zip(*scores.values(), strict=True))
    print(f"caught {caught} of {count}: {caught / max(1, count):.0%}")
    return scores


def print_survivor(mutant: Mutant | Drawn, outcome: Outcome) -> None:
    """Print a bug that no test caught, as a difference of its file."""
    print(f"survived{'' if outcome.is_whole else ' (not all its tests ran)'}: {mutant.group}: {mutant.name}")
    before, after = (ROOT / mutant.file).read_text(encoding="utf-8"), mutant.planted(ROOT)
    difference = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    print("\n".join(f"    {line}" for line in list(difference)[2:]))


if __name__ == "__main__":
    sys.exit(main())
