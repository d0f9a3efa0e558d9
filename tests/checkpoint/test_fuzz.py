"""Fifty cases of each fuzzer in scripts/: whatever is damaged, reading gives a value or a usable error."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def scripts():
    """The fuzzers as modules; the second imports the first, as a script does."""
    modules = {}
    for name in ("fuzz_config", "fuzz_checkpoint"):
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        modules[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    yield modules
    for name in modules:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["fuzz_config", "fuzz_checkpoint"])
def test_damage_is_a_usable_error(name, scripts, unchecked, capfd):
    counts, failures = scripts["fuzz_config"].fuzz(scripts[name].CASES, seed=20, count=50)
    capfd.readouterr()
    assert not failures, "\n".join(failures)
    assert sum(n for (_, outcome), n in counts.items() if outcome == "ValueError") > 8


def test_a_failure_is_counted(scripts, capfd):
    """A fuzzer that calls everything fine would pass as well."""

    def fails(error):
        def make(draw, folder):
            def read():
                raise error

            return read

        return make

    usable = {"value": ValueError("a b"), "os": FileNotFoundError(2, "No such file", "x")}
    errors = {"key": KeyError("x"), "bare": ValueError(), "long": ValueError("x" * 2001), "raw": ValueError("\x1b")}
    errors |= {"panic": type("PanicException", (BaseException,), {})(), "recursion": RecursionError("deep")}
    cases = {kind: fails(error) for kind, error in (usable | errors).items()}
    counts, failures = scripts["fuzz_config"].fuzz(cases, seed=0, count=200)
    failed = {kind for kind, outcome in counts if outcome == "failure"}
    assert failed == set(errors) and len(failures) == sum(counts[kind, "failure"] for kind in errors)
