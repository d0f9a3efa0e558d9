"""The documents: their Python runs, their commands exist, their links and the names in them lead somewhere."""

import ast
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from m3jax import cli, plan

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
WITH_PYTHON = ("README.md", "docs/msa.md")
GENERATE = "python -m m3jax.generate "
PLAN = "python -m m3jax.plan "


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


@pytest.mark.parametrize("document", WITH_PYTHON)
def test_python_runs(document, capsys):
    """The blocks run one after the other, as a reader would paste them."""
    blocks = code(document, "python")
    assert blocks
    names = {"__name__": document}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{document}, block {number}", "exec"), names)
    if document == "README.md":
        assert "lantern" in capsys.readouterr().out


@pytest.mark.parametrize("line", [line for line in README_COMMANDS if line.startswith(GENERATE)])
def test_generate_commands_run(line, capsys):
    assert cli.main(shlex.split(line.removeprefix(GENERATE))) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", [line for line in README_COMMANDS if line.startswith(PLAN)])
def test_plan_commands_run(line, capsys):
    """Plans are made by arithmetic here; tests/planning/test_plan.py has the compiler."""
    assert plan.main([*shlex.split(line.removeprefix(PLAN)), "--no-compile"]) == 0
    assert "HBM" in capsys.readouterr().out


def test_readme_has_no_command_that_nobody_checks():
    known = [GENERATE, PLAN, "make ", "pip install "]
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
def test_links_lead_to_files(document):
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)[^)]*\)", text(document))
    missing = [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
    assert not missing


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
