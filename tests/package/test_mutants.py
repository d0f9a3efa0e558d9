"""The list of planted bugs is up to date, and others can be drawn: each is another program (nothing is run)."""

import ast
import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
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
    assert len({mutant.name for mutant in found}) == len(found)  # results are found by it


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


def test_the_looks_of_a_picture_are_no_result(drawn):
    found = drawn.edits("axis.set_title(names[0], fontsize=9, alpha=1)\n")
    assert {edit.new for edit in found if edit.operator == "off by one"} == {"1", "(-1)"}


def test_the_strict_of_a_zip_only_refuses(drawn):
    found = [(edit.operator, edit.new) for edit in drawn.edits("list(zip(a, b, strict=True)), f(a, strict=True)\n")]
    assert ("swapped arguments", "zip(b, a, strict=True)") in found
    assert [new for operator, new in found if operator == "changed constant"] == ["False"]


ANY_ORDER = [
    "activity(about=(a, f(b)))", 'f(choices=("a", "b"))', "x in (*a, 'b')",
    "x in (a.b, None)", "x not in (1, 2)", "_KINDS = (1, 2)\nx in _KINDS", "min(a.b - 1, len(c), c[0] // 2)",
    "max(1, round(a / 0.5))", "jnp.minimum(a, b / 2)", "math.gcd(a, 8)", "x.swapaxes(1, 2)", "f(x).swapaxes(1, 2)",
    "def f():\n    kinds = (1, 2)\n    return x in kinds", "try:\n    pass\nexcept (OSError, np.Error):\n    pass",
]  # fmt: skip
ONE_ORDER = {
    "np.subtract(a, b)": "np.subtract(b, a)",
    "minimum(a, b)": "minimum(b, a)",
    "(a, b) in c": "(b, a)", "x in (f(), g())": "(g(), f())", "x in (a, b) == c": "(b, a)",
    "KINDS = (1, 2)\nx in KINDS": "(2, 1)", "_KINDS = (1, 2)\nx in _KINDS\nlist(_KINDS)": "(2, 1)",
    "isinstance(x, (int, str))": "isinstance((int, str), x)", "x.endswith((b, a), 1)": "x.endswith(1, (b, a))",
    "max(a, 0.5)": "max(0.5, a)", "min(a / 2, b)": "min(b, a / 2)", "max(a, g(b))": "max(g(b), a)",
    "max(1, round(a, ndigits=2))": "max(round(a, ndigits=2), 1)", "max(1, a.round())": "max(a.round(), 1)",
    "norm(a - b, 2)": "norm(2, a - b)", "f(about=(a, b))": "(b, a)",
    "min(a, b, key=f)": "min(b, a, key=f)", "np.min(a, b)": "np.min(b, a)",
}  # fmt: skip


def test_what_has_no_order_is_not_put_into_another(drawn):
    """By hand; where a value may be a fraction, be read elsewhere or be made by a call, the order stays a bug."""
    found = lambda source: [edit.new for edit in drawn.edits(source) if edit.operator in drawn.ORDERS]
    assert [found(source) for source in ANY_ORDER] == [[]] * len(ANY_ORDER)
    assert {source: found(source) for source in ONE_ORDER} == {source: [new] for source, new in ONE_ORDER.items()}


def test_a_distance_is_the_same_from_either_end(drawn):
    assert drawn.edits("x = abs(a - b)\nx = np.linalg.norm(a - b)") == []
    assert [edit.new for edit in drawn.edits("x = abs(a / b)")] == ["(b / a)"]


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


# Bugs that are run, in a tree of two functions

HAS_LINES = sys.version_info >= (3, 12)  # what records them came with it

TREE = {
    "pyproject.toml": """
[tool.pytest.ini_options]
pythonpath = ["."]
addopts = ["--import-mode=importlib"]
""",
    "room.py": """LIMIT = 3


def double(x):
    return 2 * x


def half(x):
    return x // 2
""",
    "tests/test_slow.py": """
import time
import room

def test_half():
    time.sleep(0.3)
    assert room.half(6) == 3
""",
    "tests/test_quick.py": """
import pytest
import room

def test_fails_here():
    assert room.double(2) == 5

@pytest.mark.skip(reason="no such machine")
def test_skipped():
    pass

def test_half_of_0():
    assert room.half(0) == 0

def test_half_of_2():
    assert room.half(2) == 1
""",
    "tests/test_absent.py": """
import no_such_package

def test_double():
    pass
""",
}


@dataclasses.dataclass(frozen=True)
class Toy:
    """A bug of the tree above."""

    name: str
    old: str
    new: str
    lines: range | None
    tests: str = "tests/test_slow.py tests/test_quick.py tests/test_absent.py"
    file: str = "room.py"

    def planted(self, root: Path) -> str:
        return (root / self.file).read_text(encoding="utf-8").replace(self.old, self.new)


BUGS = [
    Toy("half", "x // 2", "x // 3", range(9, 10)),
    Toy("double", "2 * x", "3 * x", range(5, 6)),
    Toy("limit", "LIMIT = 3", "LIMIT = 4", range(1, 2)),
    Toy("listed", "x // 2", "x // 3", None, "tests/test_quick.py -k half_of_2"),
    Toy("untested", "2 * x", "3 * x", None, "tests/test_absent.py tests/test_quick.py::test_fails_here"),
    Toy("import", "LIMIT = 3", "LIMIT = 1 // 0", None, "tests/test_slow.py::test_half"),
]


@pytest.mark.further
def test_bugs_are_run_side_by_side(drawn, tmp_path, monkeypatch, capsys):
    """What does not pass on the unchanged tree catches nothing, what no test sees survives.

    A later run goes on with what is left.
    """
    from mutating import running

    for name, text in TREE.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(running, "ROOT", tmp_path / "tree")
    (tmp_path / "tree" / "scripts").symlink_to(ROOT / "scripts")
    run = lambda bugs: running.run_all(
        bugs, jobs=2, limit=200.0, seconds=900.0, results=tmp_path / "results", has_baseline=True
    )
    first = run(BUGS[:1])
    # With lines it is the cheaper file's; without them those of the first file come first.
    quick_or_first = "tests/test_quick.py::test_half_of_2" if HAS_LINES else "tests/test_slow.py::test_half"
    assert [outcome.caught_by for outcome in first] == [quick_or_first]
    outcomes = {outcome.name: outcome for outcome in run(BUGS)}
    assert outcomes["half"] == first[0]
    assert {name: outcome.caught_by for name, outcome in outcomes.items()} == {
        "half": quick_or_first,
        "double": None,
        "limit": None,
        "listed": "tests/test_quick.py::test_half_of_2",
        "import": "tests/test_slow.py",
    }
    assert all(outcome.is_whole for outcome in outcomes.values())
    printed = capsys.readouterr().out
    for line in (
        "left out: tests/test_quick.py::test_fails_here: assert 4 == 5",
        "left out: tests/test_quick.py::test_skipped: Skipped: no such machine",
        "left out: tests/test_absent.py: ModuleNotFoundError: No module named 'no_such_package'",
        "not run: untested: none of its tests passes on the unchanged tree",
    ):
        assert line in printed
    assert printed.count("unchanged: tests/test_quick.py: 2 pass, 2 left out") == 1


def test_a_test_that_hangs_has_caught_its_bug(drawn, tmp_path):
    """One that is cut off for want of time has not, and its bug is not one that all tests have seen."""
    from mutating import running

    run = running.Run(tmp_path, tmp_path, [], limit=60.0, seconds=60.0, has_baseline=True)
    run.known["tests/test_x.py"] = running.FileOfTests(
        "tests/test_x.py", seconds={"test_long": 30.0, "test_short": 0.1}
    )
    at = lambda test, seconds: run._at_limit(BUGS[0], [dict(test=test, began=time.time() - seconds)], seconds)
    assert at("test_short", 25).caught_by == "test_short" and "did not end" in at("test_short", 25).message
    for outcome in (at("test_long", 25), at("test_short", 5), run._at_limit(BUGS[0], [], 60.0)):
        assert outcome.caught_by is None and not outcome.is_whole


def test_where_no_test_runs_a_line_the_quick_ones_come_first(drawn, tmp_path):
    """Line 1 runs as room.py is imported; line 5 in two tests, of which the dear one waits for the other.

    A test of another room that runs a line comes last.
    """
    from mutating import running

    run = running.Run(tmp_path, tmp_path, [], limit=60.0, seconds=60.0, has_baseline=True)
    at_import, in_double, in_half = ({"room.py": f"{1 << line:x}"} for line in (1, 5, 9))
    lines = {"": at_import, "tests/a.py::dear": in_double, "tests/a.py::cheap": in_double, "tests/a.py::other": in_half}
    seconds = {"tests/a.py::dear": 2.0, "tests/a.py::cheap": 0.5, "tests/a.py::other": 0.5}
    run.known = {
        "tests/a.py": running.FileOfTests("tests/a.py", seconds, lines),
        "tests/b.py": running.FileOfTests("tests/b.py", {"tests/b.py::quick": 0.1}, {}),
    }

    of_others = {"tests/c.py::slow": 3.0, "tests/c.py::fast": 1.0, "tests/c.py::apart": 0.1}
    lines = {"": at_import, "tests/c.py::slow": in_double, "tests/c.py::fast": in_double, "tests/c.py::apart": in_half}
    run.known["tests/c.py"] = running.FileOfTests("tests/c.py", of_others, lines)
    every = [*seconds, "tests/b.py::quick"]

    def order(line):
        found = []
        for *_, kind, path in run._stages(Toy("x", "1", "2", range(line, line + 1), "tests/a.py tests/b.py")):
            tests = json.loads(Path(path).read_text(encoding="utf-8"))
            found += (
                tests if kind == "--chosen" else [test for test in every if test not in tests and test not in found]
            )
        return found

    dear, cheap, other, quick = every
    assert order(1) == [quick, cheap, other, dear]
    assert order(5) == [cheap, dear, other, quick, "tests/c.py::fast", "tests/c.py::slow"]
