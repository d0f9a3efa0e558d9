"""What the tests of each file cost: CPU seconds, user and system, of the test process and its children.

    python -m pytest --cpu-times=cpu.json tests/kernels

The clock, which `--durations` reads, says little where tests share the cores. Children count once they are waited for.
What tests share, such as a compiled function or a module's fixture, is counted for the test that came first. Imports
and collection stand in a line of their own, summed over the test processes.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that were waited for, since it began."""
    return sum(os.times()[:4])


class CpuTimes:
    """Measures each test where it runs, and prints a table of files where the run is reported.

    Attributes:
      tests: CPU seconds by test; what came before the first test as "(collection)".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: Counter[str] = Counter()
        self._started = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["collection"] = cpu_seconds()
        else:
            self.tests["(collection)"] += cpu_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._started = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            report.user_properties = [*report.user_properties, ("cpu_seconds", cpu_seconds() - self._started)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.tests[report.nodeid] += dict(report.user_properties).get("cpu_seconds", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self.tests["(collection)"] += getattr(node, "workeroutput", {}).get("collection", 0.0)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if not self.tests:
            return
        files: Counter[str] = Counter()
        for name, seconds in self.tests.items():
            files[name.split("::")[0]] += seconds
        terminalreporter.section("CPU seconds")
        for name, seconds in [*files.most_common(), ("in all", sum(files.values()))]:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        self.path.write_text(json.dumps(dict(self.tests.most_common()), indent=1), encoding="utf-8")
