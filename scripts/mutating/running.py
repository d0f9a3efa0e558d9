"""Runs the tests of planted bugs, several at once: for scripts/mutants.py.

A worker has a core and a copy of the tree to itself; the programs that XLA compiled are common to all. First each file
of tests runs on the unchanged tree. A test that does not pass there, as for want of a package, would seem to catch
everything: it is left out, and named. Of the others it is then known how long they take and, from Python 3.12 on, which
lines they run: the tests that run the line of a drawn bug come first, those of the cheapest file before the others. In
both parts dear tests wait until the cheap ones have passed: a bug that a dear test catches is one that needs it. A line
that runs as its file is imported, as a default or a constant, is no test's: there all that are quick come first. Last
come the tests of other rooms that run the line, as far as this run knows them.
"""

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from mutating.drawn import ROOT

DEAR = 1.5  # seconds: tests that take as long run after those that do not, so that these catch what they can
QUICK = 0.2  # seconds: tests that take less come first of all where no test is known to run the line of a bug
SLOW = 20.0  # seconds, beside ten times those that it takes without a bug, after which a test hangs


class Bug(Protocol):
    """The parts of a bug that `run_all` reads."""

    file: str
    tests: str

    @property
    def name(self) -> str: ...

    @property
    def lines(self) -> range | None: ...

    def planted(self, root: Path) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """The verdict of the tests on a bug.

    Attributes:
      name: of the bug.
      caught_by: the test that caught it; None where none did.
      message: what that test says.
      seconds: that its tests ran.
      is_whole: False where no test caught it in the time that a bug has, and some were not run.
    """

    name: str
    caught_by: str | None
    message: str
    seconds: float
    is_whole: bool = True


@dataclass
class FileOfTests:
    """A file of tests as it ran on the unchanged tree.

    Attributes:
      file: relative to the root.
      seconds: by test that passes, in the order in which they ran.
      lines: by test that passes, by source file, a number whose bit n says that line n ran.
      left_out: by test that does not pass, why.
      has_ended: False if it took too long: of the tests behind the last one nothing is known, and they are not run.
    """

    file: str
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    has_ended: bool = True

    def that_run(self, source: str, changed: range | None) -> list[str]:
        """Return the tests that run one of the changed lines; one that runs as it is imported, any of the source."""
        of_source = self._of_source(source)
        at_import = of_source.pop("", 0)
        mask = sum(1 << number for number in changed or ())
        found = [test for test, lines in of_source.items() if lines & mask]
        return found if found or not at_import & mask else [test for test, lines in of_source.items() if lines]

    def run_at_import(self, source: str, changed: range | None) -> bool:
        """Return True if the changed lines run as the source is imported, and not in a test."""
        of_source = self._of_source(source)
        at_import = of_source.pop("", 0)
        mask = sum(1 << number for number in changed or ())
        return bool(at_import & mask) and not any(lines & mask for lines in of_source.values())

    def _of_source(self, source: str) -> dict[str, int]:
        return {test: int(lines[source], 16) for test, lines in self.lines.items() if source in lines}


def run_all(
    bugs: list[Bug], *, jobs: int, limit: float, seconds: float, results: Path | None, has_baseline: bool
) -> list[Outcome]:
    """Plant each bug in a copy of the tree, and return the outcomes of those that there was time for.

    Args:
      bugs: in the order in which they are taken.
      jobs: how many at once.
      limit: seconds that the tests of one may take; those of a file on the unchanged tree may take four times as many.
      seconds: after which all ends.
      results: a folder whose files baseline.jsonl and outcomes.jsonl this adds to; what stands there is not run again.
      has_baseline: False to run no tests on the unchanged tree.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        run = Run(Path(folder), results, bugs, limit, seconds, has_baseline)
        workers = [threading.Thread(target=run.work, args=(place, jobs)) for place in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        run.say_left_out()
        if run.error is not None:
            raise run.error
        return list(run.outcomes.values())


class Run:
    """The files of tests and the bugs that wait, what is known of those that ran, and the work of one worker."""

    def __init__(
        self, folder: Path, results: Path | None, bugs: list[Bug], limit: float, seconds: float, has_baseline: bool
    ):
        self.folder, self.limit, self.until = folder, limit, time.monotonic() + seconds
        self.error: BaseException | None = None
        keeps_results, results = results is not None, results or folder
        results.mkdir(parents=True, exist_ok=True)
        self._baseline, self._found = results / "baseline.jsonl", results / "outcomes.jsonl"
        self.known = {record["file"]: FileOfTests(**record) for record in _read(self._baseline)}
        before = {record["name"]: Outcome(**record) for record in _read(self._found)}
        self.outcomes = {bug.name: before[bug.name] for bug in bugs if bug.name in before}
        self._bugs = [bug for bug in bugs if bug.name not in before]
        named: dict[str, list[str]] = {}  # by file of tests, what the bugs name of it
        for word in (word for bug in self._bugs for word in _words(bug.tests)):
            named.setdefault(word.partition("::")[0], []).append(word)
        if not has_baseline:
            self.known |= {file: FileOfTests(file) for file in named if file not in self.known}
        # The longest would be best first; of one that never ran its size says something.
        files = sorted(
            (file for file in named if file not in self.known), key=lambda file: -(ROOT / file).stat().st_size
        )
        # What later runs read is known of whole files; for this run alone the tests that bugs name are enough.
        is_whole = lambda file: keeps_results or file in named[file]
        self._files = [(file, [file] if is_whole(file) else list(dict.fromkeys(named[file]))) for file in files]
        self._of_tests = self.known.keys() | {file for file, _ in self._files}
        self._changed = threading.Condition()

    def work(self, place: int, jobs: int) -> None:
        """Take files of tests and then bugs until there are no more, or no time."""
        try:
            if jobs > 1 and hasattr(os, "sched_setaffinity"):
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[place % len(cores)]})  # of this thread; what it starts inherits it
            tree = copy_tree(self.folder / f"worker{place}" / "tree")
            for task in self._tasks():
                task(tree)
        except BaseException as error:
            self.error = error
            self.until = 0.0  # the others end too

    def _tasks(self) -> Iterator:
        """Yield what to do next; a bug once all its files of tests are known."""
        while True:
            with self._changed:
                if time.monotonic() >= self.until or not (self._files or self._bugs):
                    return
                if self._files:
                    file, arguments = self._files.pop(0)
                    task = lambda tree, file=file, arguments=arguments: self._run_file(tree, file, arguments)
                elif bug := next((bug for bug in self._bugs if _files(bug) <= self.known.keys()), None):
                    self._bugs.remove(bug)
                    task = lambda tree, bug=bug: self._run_bug(tree, bug)
                else:
                    self._changed.wait(1.0)
                    continue
            yield task

    def _run_file(self, tree: Path, file: str, arguments: list[str]) -> None:
        """Run a file of tests, or what is named of it, on the unchanged tree."""
        record, status, output = self._pytest(tree, [*arguments, "--lines"], 4 * self.limit)
        found = FileOfTests(file, has_ended=status is not None)
        for entry in record:
            test, lines = entry["test"], entry.get("lines")
            if "began" in entry:
                found.left_out[test] = "it did not end"
            elif entry["outcome"] != "passed":
                found.left_out[test] = entry["why"]
            else:
                found.left_out.pop(test, None)
                found.lines |= {test: lines} if lines else {}
                found.seconds |= {test: entry["seconds"]} if test else {}
        if not record:
            found.left_out[file] = output.strip().splitlines()[-1][:200] if output.strip() else f"exit status {status}"
        if time.monotonic() < self.until:
            with self._changed:
                self.known[file] = found
                _append(self._baseline, asdict(found))
                self._changed.notify_all()
                counts = f"{len(found.seconds)} pass, {len(found.left_out)} left out"
                print(f"unchanged: {file}: {counts} ({sum(found.seconds.values()):.0f} s)", flush=True)

    def say_left_out(self) -> None:
        """Print what did not pass on the unchanged tree, once for each reason."""
        reasons: dict[str, list[str]] = {}
        for file in self.known.values():
            for test, reason in file.left_out.items():
                reasons.setdefault(reason, []).append(test)
        for reason, tests in reasons.items():
            others = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            print(f"left out: {tests[0]}{others}: {reason}")

    def _run_bug(self, tree: Path, bug: Bug) -> None:
        """Plant a bug, run its tests until one fails, and take it out again."""
        path = tree / bug.file
        original = path.read_bytes()
        _write(path, bug.planted(tree).encode())
        try:
            outcome = self._outcome(tree, bug)
        finally:
            _write(path, original)
        if outcome is None:
            return
        with self._changed:
            self.outcomes[bug.name] = outcome
            _append(self._found, asdict(outcome))
            if outcome.caught_by is not None:
                said = f"caught by {outcome.caught_by}\n       {outcome.message}"
            else:
                said = "SURVIVED" if outcome.is_whole else "SURVIVED those of its tests that there was time for"
            print(f"{outcome.seconds:6.0f} s  {bug.name}\n       {said}", flush=True)

    def _outcome(self, tree: Path, bug: Bug) -> Outcome | None:
        """Run the tests of the bug that is planted in a tree; None for want of tests or of time."""
        began, has_run = time.monotonic(), False
        for arguments in self._stages(bug):
            left = self.limit - (time.monotonic() - began)
            if left <= 0:
                return Outcome(bug.name, None, "", time.monotonic() - began, is_whole=False)
            record, status, output = self._pytest(tree, ["-x", *arguments], left)
            if time.monotonic() >= self.until:
                return None
            taken = time.monotonic() - began
            if failed := next((entry for entry in record if entry.get("outcome") == "failed"), None):
                return Outcome(bug.name, failed["test"], failed["why"], taken)
            if status is None:
                return self._at_limit(bug, record, taken)
            if status not in (0, 1, 5):  # 1: what pytest found wrong after the last test; 5: there was none
                return Outcome(bug.name, f"pytest, exit status {status}", output.strip()[-160:], taken)
            has_run = has_run or any(entry.get("outcome") == "passed" for entry in record)
        if not has_run:
            print(f"not run: {bug.name}: none of its tests passes on the unchanged tree", flush=True)
            return None
        return Outcome(bug.name, None, "", time.monotonic() - began)

    def _at_limit(self, bug: Bug, record: list[dict], taken: float) -> Outcome:
        """Return the outcome where the time of a bug has ended: a test that hung has caught it."""
        last = record[-1] if record else {}
        seconds = next(
            (file.seconds[last["test"]] for file in self.known.values() if last.get("test") in file.seconds), 0.0
        )
        if "began" in last and time.time() - last["began"] > SLOW + 10 * seconds:
            return Outcome(bug.name, last["test"], f"it did not end; it takes {seconds:.1f} s without the bug", taken)
        return Outcome(bug.name, None, "", taken, is_whole=False)

    def _stages(self, bug: Bug) -> Iterator[list[str]]:
        """Yield pytest's arguments: the tests that run the bug's lines, then the others; of each the dear ones last."""
        of_bug = [self.known[file] for file in dict.fromkeys(word.partition("::")[0] for word in _words(bug.tests))]
        left_out = {test for file in of_bug for test in file.left_out}
        dear = {test for file in of_bug for test, seconds in file.seconds.items() if seconds >= DEAR}
        first = {file.file: file.that_run(bug.file, bug.lines) for file in of_bug}
        first = {file: tests for file, tests in first.items() if tests}
        cost = {file.file: sum(map(file.seconds.get, first.get(file.file, ()))) for file in of_bug}
        files = sorted(first, key=cost.get)
        chosen = [test for file in files for test in first[file]]
        quick: list[str] = []
        if any(file.run_at_import(bug.file, bug.lines) for file in of_bug):
            quick = [test for file in of_bug for test, seconds in file.seconds.items() if seconds < QUICK]
            chosen = [test for test in chosen if test not in quick]
        is_dear = lambda test: test in dear
        parts = {"quick": quick, "cheap": [*itertools.filterfalse(is_dear, chosen)], "dear": [*filter(is_dear, chosen)]}
        for kind, tests in parts.items():
            if tests:
                yield self._chosen(bug, kind, tests)
        unknown = {file.file for file in of_bug if not file.has_ended}
        words = [word for word in shlex.split(bug.tests) if word.partition("::")[0] not in left_out | unknown]
        words = sorted(words, key=lambda word: word not in first) if bug.lines else words
        if any(word.startswith("tests/") for word in words):
            done = left_out | {*quick, *chosen}
            if dear - done:
                yield [*words, "--left-out", self._list(bug, "first", sorted(done | dear))]
                done |= {test for file in of_bug for test in file.seconds} - dear
            yield [*words, "--left-out", self._list(bug, "done", sorted(done))]
        if elsewhere := self._elsewhere(bug):
            yield self._chosen(bug, "elsewhere", elsewhere)

    def _elsewhere(self, bug: Bug) -> list[str]:
        """Return the tests of files that a bug does not name and that run its lines, the cheapest first."""
        with self._changed:  # a file that another worker still runs may have some
            while not self._of_tests <= self.known.keys() and time.monotonic() < self.until:
                self._changed.wait(1.0)
            others = [file for name, file in self.known.items() if name not in _files(bug)]
        others = [file for file in others if not file.run_at_import(bug.file, bug.lines)]
        seconds = {test: file.seconds[test] for file in others for test in file.that_run(bug.file, bug.lines)}
        return sorted(seconds, key=seconds.get)

    def _chosen(self, bug: Bug, kind: str, tests: list[str]) -> list[str]:
        """Return pytest's arguments for these tests alone."""
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        return [*files, "--chosen", self._list(bug, kind, tests)]

    def _list(self, bug: Bug, kind: str, tests: list[str]) -> str:
        path = self.folder / f"{kind}-{threading.get_ident()}.json"
        path.write_text(json.dumps(tests), encoding="utf-8")
        return str(path)

    def _pytest(self, tree: Path, arguments: list[str], limit: float) -> tuple[list[dict], int | None, str]:
        """Run pytest; return its record, its exit status (None where it was ended by the limit) and its output."""
        record, output = tree.parent / "record.jsonl", tree.parent / "output.txt"
        record.unlink(missing_ok=True)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                map(str, filter(None, (tree, tree / "scripts", os.environ.get("PYTHONPATH"))))
            ),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # those of another machine can fail every test
            "JAX_PLATFORMS": "cpu",
            "M3JAX_HYPOTHESIS": "first",
        }
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(self.folder / "compiled"))
        plugins = ["-p", "mutating.record", "-p", "_hypothesis_pytestplugin"]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *("-m", "not gpu and not further"),  # the tests of `make test`
            *plugins,
            "--record",
            record,
            "--basetemp",
            tree.parent / "tmp",
        ]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*map(str, command), *arguments],
                cwd=tree,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            status = None
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(max(0.0, min(limit, self.until - time.monotonic())))
            with suppress(ProcessLookupError):  # tests start processes, which outlive a test that dies
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _read(record), status, output.read_text(encoding="utf-8", errors="replace")


def copy_tree(target: Path) -> Path:
    """A copy of the files that git knows, or would take; without git's folder, of all that do not begin with a dot."""
    if not (ROOT / ".git").exists():
        return Path(shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".*", "__pycache__")))
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


def _words(tests: str) -> list[str]:
    """Return the files of tests, and tests, among pytest's arguments."""
    return [word for word in shlex.split(tests) if word.startswith("tests/")]


def _files(bug: Bug) -> set[str]:
    return {word.partition("::")[0] for word in _words(bug.tests)}


_ages = itertools.count(1)


def _write(path: Path, text: bytes) -> None:
    """Write a source file with a time of its own: Python knows a compiled one by its source's size and second."""
    seconds = 1_000_000_000 + 10 * next(_ages)
    path.write_bytes(text)
    os.utime(path, (seconds, seconds))


def _read(path: Path) -> list[dict]:
    """Return the records of a file, without a last one that is cut off."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _append(path: Path, record: dict) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
