"""The list of planted bugs is up to date, and others can be drawn: each is another program (nothing is run)."""

import ast
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mutants.py"


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    yield script
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def drawn(mutants) -> ModuleType:
    return mutants.drawing


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


# Bugs that are drawn

SOURCE = '''
"""A page of 16, and 3 < 4."""
import numpy as np


def half(x: "Float[Array, '2']", size: int = 7) -> tuple[int, str]:
    """Not 2 < 3."""
    if size < 5 or x is None:
        raise ValueError(f"{size + 1} is below {5 - 1}", 3 - 2)
    if not size:
        return 0
    note(size)
    size += 4
    return np.sum(x - size, axis=-1), f"{size % 2}", 0.5, True
'''
EXPECTED = {
    "comparison": ["((size) <= (5))", "((x) is not (None))", "(not (size < 5 or x is None))", "(not (not size))"],
    "off by one": ["8", "6", "6", "4", "1", "(-1)", "5", "3", "2", "0"],
    "swapped operands": ["(size - x)"],
    "dropped line": ["pass", "pass", "pass"],
    "changed constant": ["1.0", "False"],
    "swapped arguments": [],
}


@pytest.mark.parametrize("operator", ["swapped axes", *EXPECTED])
def test_an_operator_changes_what_is_computed_and_nothing_else(drawn, operator):
    """By hand; no docstring, annotation, import, or what an exception says."""
    edits = [edit for edit in drawn.edits(SOURCE) if edit.operator == operator]
    if operator == "swapped axes":
        whole = "np.sum(x - size, axis=-1)", "f'{size % 2}'", "0.5", "True"
        orders = ((1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2))
        assert [edit.new for edit in edits if edit.new != "-2"] == [
            f"({', '.join(whole[i] for i in order)})" for order in orders
        ]
    else:
        assert sorted(edit.new for edit in edits) == sorted(EXPECTED[operator])
    for edit in edits:
        assert drawn.is_another_program(edit, SOURCE), edit
        changed = edit.applied(SOURCE.encode())
        assert len(changed) - len(SOURCE) == len(edit.new.encode()) - (edit.stop - edit.start)


def test_arguments_are_swapped_in_pairs(drawn):
    source = "f(a, b, *c)\ng(a, a, b, k=1)  # é\nx = 'é'; h(1.5, y)\n"
    edits = [edit for edit in drawn.edits(source) if edit.operator == "swapped arguments"]
    assert [edit.new for edit in edits] == ["g(a, b, a, k=1)", "h(y, 1.5)"]
    assert edits[1].applied(source.encode()) == source.replace("h(1.5, y)", "h(y, 1.5)")  # columns are of bytes


def test_a_draw_is_its_seeds(drawn):
    """Every operator has its part; another seed draws others; a longer draw begins with the shorter."""
    assert drawn.OPERATORS.keys() == {"swapped axes", *EXPECTED}
    found = drawn.draw("planning", 21, seed=1)
    assert found == drawn.draw("planning", 21, seed=1) and found[:9] == drawn.draw("planning", 9, seed=1)
    others = drawn.draw("planning", 21, seed=2)
    assert len({(mutant.file, mutant.edit) for mutant in (*found, *others)}) > 35
    for operator in drawn.OPERATORS:
        assert sum(mutant.edit.operator == operator for mutant in found) == 3
    for mutant in found:
        source, changed = (ROOT / mutant.file).read_text(encoding="utf-8"), mutant.planted(ROOT)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        line = source.splitlines()[mutant.line - 1]
        assert " ".join(line.split()) == mutant.before[: len(" ".join(line.split()))]
    with pytest.raises(ValueError, match="room 'x': there are msa"):
        drawn.draw("x", 1, seed=0)


def test_tests_that_import_the_module_come_first(drawn):
    first, *others = drawn.tests_of("sampling", "m3jax/decoding/speculation/verify.py", ROOT).split()
    assert first == "tests/decoding/test_speculative_verify.py" and len(others) == 4
    for _, tests in drawn.ROOMS.values():
        assert not [path for path in tests.split() if not (ROOT / path).exists()]


def test_what_is_marked_as_equivalent_still_stands_there(drawn):
    """Else the mark of a line that is gone could hide another."""
    for (file, before, after), reason in drawn.equivalent().items():
        assert before in " ".join((ROOT / file).read_text(encoding="utf-8").split()), (file, before)
        assert before != after and len(reason) > 20, (file, before)
