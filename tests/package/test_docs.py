"""The documents: their Python runs, their commands exist, their links and the names in them lead somewhere."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# docs/traps and docs/_build are written by `make docs`.
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for folder in ("docs", "docs/notes") for path in ROOT.glob(f"{folder}/*.md")
)
DOCUMENTS = ["CONTRIBUTING.md", "README.md", "vectors/README.md", *PAGES]
WITH_PYTHON = ("cache", "chat_output", "media")
COMPILING = ("chat", "engine", "inside", "msa", "sampling", "vision")  # ten seconds each or more
GENERATE = "m3jax generate "
PLAN = "m3jax plan "


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def code(document: str, language: str) -> list[str]:
    """The fenced code blocks of a document that are in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(document), re.M | re.S)


def commands(document: str) -> list[str]:
    """The lines of a document's shell blocks, without remarks."""
    lines = "\n".join(code(document, "sh")).splitlines()
    return [re.sub(r"\s{2,}#.*", "", line).strip() for line in lines if line.strip()]


README_COMMANDS = commands("README.md")


@pytest.mark.parametrize("page", [*WITH_PYTHON, *(pytest.param(page, marks=pytest.mark.further) for page in COMPILING)])
def test_python_runs(page):
    """The blocks run one after the other, as a reader would paste them."""
    document = f"docs/{page}.md"
    blocks = code(document, "python")
    assert blocks
    names = {"__name__": document}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{document}, block {number}", "exec"), names)


def run_as_installed(*args: Path | str) -> subprocess.CompletedProcess:
    """Run what a file holds where only the documented install was made (`support/documented_install.py`)."""
    program = ROOT / "tests" / "support" / "documented_install.py"
    done = subprocess.run([sys.executable, program, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "== all ran" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@pytest.mark.further  # compiles what README shows; that its Python and its commands are checked: the tests below
def test_readme_runs_where_only_the_documented_install_was_made():
    """Its Python and its commands, without anything that only tests or notebooks bring: no libtpu, no matplotlib."""
    done = run_as_installed(ROOT / "README.md")
    started = re.findall(r"^== (?:block \d+|m3jax \S+)", done.stdout, re.M)
    blocks, shown = code("README.md", "python"), code("README.md", "text")
    commands = [line for line in README_COMMANDS if line.startswith("m3jax ")]
    assert len(started) == len(blocks) + len(commands) >= 9
    assert len(shown) == sum("print(" in block for block in blocks)
    assert "HBM" in done.stdout
    assert not [output for output in shown if output not in done.stdout], "what a block prints is what README shows"
    assert "Traceback" not in done.stderr and "planned by arithmetic" in done.stdout + done.stderr


def test_the_demo_finds_all_it_needs_where_make_demo_installed_it():
    """A template needs jinja2, a picture Pillow: extras, which the tests have and a first `make demo` may not."""
    [extras] = re.findall(r'^\t.*--editable "\.\[(.*)\]"$', text("Makefile"), re.M)
    run_as_installed(ROOT / "scripts" / "demo.py", extras)


def test_readme_has_no_command_that_nobody_checks():
    known = [GENERATE, PLAN, "make ", "pip install ", "source .venv/bin/activate"]
    assert not [line for line in README_COMMANDS if not line.startswith(tuple(known))]
    assert all(any(line.startswith(start) for line in README_COMMANDS) for start in known)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document):
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.M))
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text(document), re.M | re.S))
    for line in re.findall(r"^make (.+)", fenced, re.M) + re.findall(r"`make ([^`\n]+)`", text(document)):
        assert shlex.split(line, comments=True)[0] in targets, line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_extras_exist(document):
    extras = set(tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"])
    named = re.findall(r"(?:\.|m3jax)\[([\w,]+)\]", text(document))
    assert {name for group in named for name in group.split(",")} <= extras


@pytest.mark.parametrize("document", DOCUMENTS)
def test_linked_names_are_defined(document):
    """A link [`name`](file.py) says that the file defines the name."""
    for name, link in re.findall(r"\[`([\w.]+)`\]\(([^)#\s]+\.py)\)", text(document)):
        assert name.split(".")[-1] in defined((ROOT / document).parent.joinpath(link).resolve()), (name, link)


@cache
def defined(path: Path) -> set[str]:
    """Functions, classes, methods and module constants of a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
