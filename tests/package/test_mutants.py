"""The list of planted bugs is up to date: each can still be planted, and its tests are there (nothing is run)."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutants.py"


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    yield script
    del sys.modules[spec.name]


def test_every_bug_can_still_be_planted(mutants):
    """Its old text stands in its file exactly once; where the code has changed, scripts/mutants.toml has to."""
    found = mutants.read_list()
    assert not mutants.problems(found), "\n".join(mutants.problems(found))
    assert len(found) >= 76
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in found}) == len(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(old="no such text"), "'no such text' occurs 0 times, not once; update mutants.toml"),
        (dict(old="weights"), "'weights' occurs"),
        (dict(old="return 1", file="m3jax/gone.py"), "m3jax/gone.py: 'return 1' occurs 0 times"),
        (dict(new="weights.astype(values.dtype)"), "is replaced by itself"),
        (dict(tests="tests/msa/test_gone.py"), "no tests tests/msa/test_gone.py"),
        (dict(tests="-k some"), "no tests '-k some'"),
    ],
)
def test_one_that_can_not_is_named(mutants, change, message):
    (first, *_) = mutants.read_list()
    assert first.old == "weights.astype(values.dtype)"
    (line,) = mutants.problems([dataclasses.replace(first, **change)])
    assert message in line


def test_the_command_line():
    run = lambda *given: subprocess.run([sys.executable, SCRIPT, *given], capture_output=True, text=True, check=False)
    listed = run("--list", "--only", "2-3")
    assert listed.returncode == 0 and [line.split()[0] for line in listed.stdout.splitlines()] == ["2", "3"]
    for given, message in (("--only", "0"), "--only 0: give numbers"), (("--group", "x"), "--group x: there are msa"):
        refused = run(*given)
        assert refused.returncode == 2 and message in refused.stderr
    assert "plants one bug at a time" in run("--help").stdout
