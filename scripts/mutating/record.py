"""A pytest plugin for scripts/mutants.py: which tests pass, how long they take and which lines they run.

    python -m pytest -p mutating.record --record FILE [--lines] [--chosen FILE] [--left-out FILE] ...

Writes a JSON object a line: of each test that begins, {"test", "began"}; of each that ended, {"test", "seconds",
"outcome", "why"} and, with --lines, "lines": those of the tree that it ran, by file. What ran before the first test, as
an import does, is that of the test "". A program that JAX has compiled is not traced again, so the lines of a traced
function are of the first test that called it. Needs nothing but pytest.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write a line for each test that begins or ended")
    parser.addoption("--lines", action="store_true", help="also record which lines each test runs (Python 3.12)")
    parser.addoption("--chosen", type=Path, metavar="FILE", help="run these tests alone, in their order; JSON")
    parser.addoption("--left-out", type=Path, metavar="FILE", help="do not run these tests; JSON")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--record"):
        config.pluginmanager.register(Record(path, config.rootpath, config.getoption("--lines")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if path := config.getoption("--chosen"):
        order = {name: place for place, name in enumerate(json.loads(path.read_text(encoding="utf-8")))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    if path := config.getoption("--left-out"):
        left_out = set(json.loads(path.read_text(encoding="utf-8")))
        items[:] = [item for item in items if item.nodeid not in left_out]


class Record:
    """Writes the record while tests run, so that it is there up to the moment at which a process is killed."""

    def __init__(self, path: Path, root: Path, has_lines: bool):
        self._file = path.open("w", encoding="utf-8")
        self._root, self._tests = f"{root}/", f"{root}/tests/"
        self._began, self._outcome, self._why = 0.0, "passed", ""
        self._lines: dict[str, int] = defaultdict(int)  # bit n: line n
        self._has_lines = has_lines and sys.version_info >= (3, 12)
        if self._has_lines:
            monitoring = sys.monitoring
            monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
            monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._at_line)
            monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def _at_line(self, code, number: int) -> Any:
        name = code.co_filename
        if name.startswith(self._root) and not name.startswith(self._tests):
            self._lines[name[len(self._root) :]] |= 1 << number
        return sys.monitoring.DISABLE  # until the next test begins: once for each line

    def _write(self, **record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _take_lines(self) -> dict[str, str]:
        taken = {file: f"{lines:x}" for file, lines in self._lines.items()}
        self._lines.clear()
        return taken

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write(test=report.nodeid, seconds=0.0, outcome=report.outcome, why=_reason(report), lines={})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._has_lines:
            if not self._began:
                self._write(test="", seconds=0.0, outcome="passed", why="", lines=self._take_lines())
            sys.monitoring.restart_events()
        self._began, self._outcome, self._why = time.time(), "passed", ""
        self._write(test=nodeid, began=self._began)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._outcome != "failed" and not hasattr(report, "wasxfail"):
            self._outcome, self._why = report.outcome, _reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = round(time.time() - self._began, 3)
        lines = self._take_lines()
        self._write(test=nodeid, seconds=seconds, outcome=self._outcome, why=self._why, lines=lines)


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return why a test was skipped or failed, in a line."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return (lines or [str(report.longrepr).strip().splitlines()[-1] if report.longrepr else report.outcome])[0][:200]
