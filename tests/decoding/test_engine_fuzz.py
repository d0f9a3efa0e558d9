"""Some lives of scripts/fuzz_engine.py, and that it sees what is wrong."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.engines import quick

from m3jax.cache import PageAllocator
from m3jax.decoding.engine.runner import Runner

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_engine.py"


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("fuzz_engine", SCRIPT)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with quick():
        yield script
    del sys.modules[spec.name]


def test_random_lives_lose_nothing(fuzzer, unchecked):
    counts, failures = fuzzer.fuzz(("plain", "no prefix cache"), seed=0, lives=30)
    assert not failures, "\n".join(failures)
    assert {f"operation {name}" for name in fuzzer.OPERATIONS} <= counts.keys()
    for name in ("imported", "refused", "failed writes", "preemptions", "evictions", "ended by length"):
        assert counts[name] > 0, name


def unwritten_import(monkeypatch):
    monkeypatch.setattr(Runner, "write_pages", lambda *args: None)


def kept_page(monkeypatch):
    monkeypatch.setattr(PageAllocator, "_drop", lambda self, page: None)


@pytest.mark.parametrize(
    ("plant", "message"),
    [(unwritten_import, "were written into it"), (kept_page, "users and has")],
)
def test_a_planted_bug_is_a_failure(plant, message, fuzzer, unchecked, monkeypatch):
    plant(monkeypatch)
    _, failures = fuzzer.fuzz(("plain",), seed=0, lives=12)
    assert failures and all(message in failure for failure in failures), failures
