"""A page for each trap: the bug, who had it, what must hold, and the tests and vectors that find it.

The sentence of the bug is that of docs/glossary.md, the rest stands in docs/traps.toml; what a test or a vector is for
is read from its own docstring or its entry in the manifest. Needs no Sphinx but in `setup`.
"""

import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sitebuild.writing import write_folder

FOLDER = "docs/traps"
INDEX = "docs/traps"
GLOSSARY_ROW = re.compile(r'^\| <a id="t(\d+)"></a>T\d+ \| (.+) \|$', re.M)


class Test(NamedTuple):
    """A test: its file, name and first line, and its docstring in one line."""

    file: str
    name: str
    line: int
    says: str


class Trap(NamedTuple):
    """All that a page says of a trap, T`number`.

    Attributes:
      title: a few words.
      sentence: what went wrong.
      who: who had it, in Markdown with links.
      holds: what must be so instead.
      tests: that were made for it.
      vectors: cases that find it, with what they are.
      no_vector: why there is none; "" where there is one.
    """

    number: int
    title: str
    sentence: str
    who: str
    holds: str
    tests: list[Test]
    vectors: dict[str, str]
    no_vector: str


def read_traps(root: Path) -> list[Trap]:
    """The traps of a checkout, in order.

    Raises:
      ValueError: a test that is not there or does not name its trap, a vector that is not there, a trap that the
        glossary lacks, or one that has neither a vector nor a reason for having none, or both.
    """
    data = tomllib.loads((root / "docs" / "traps.toml").read_text(encoding="utf-8"))
    sentences = dict(GLOSSARY_ROW.findall((root / "docs" / "glossary.md").read_text(encoding="utf-8")))
    manifest = json.loads((root / "vectors" / "manifest.json").read_text(encoding="utf-8"))
    cases = {f"{case['group']}/{case['name']}": case for case in manifest["cases"]}
    traps = []
    for entry in data["trap"]:
        number = entry["number"]
        vectors = {name: case["what"] for name, case in cases.items() if f"T{number}" in case["traps"]}
        no_vector = entry.get("no_vector", "")
        if str(number) not in sentences:
            raise ValueError(f"docs/traps.toml has T{number}, which docs/glossary.md does not explain")
        if bool(vectors) == bool(no_vector):
            raise ValueError(
                f"T{number} of docs/traps.toml: vectors/manifest.json names it for {', '.join(vectors) or 'no case'}, "
                f"and no_vector is {no_vector!r}: a trap has either vectors or a reason for having none"
            )
        for name in re.findall(r"`(\w+/\w+)`", no_vector):
            if name not in cases:
                raise ValueError(f"T{number} of docs/traps.toml names {name}, which is not in vectors/manifest.json")
        traps.append(
            Trap(
                number=number,
                title=entry["title"],
                sentence=sentences[str(number)],
                who=with_links(entry["who"], data["projects"], number),
                holds=entry["holds"],
                tests=[find_test(root, name, number) for name in entry["tests"]],
                vectors=vectors,
                no_vector=no_vector,
            )
        )
    return traps


def find_test(root: Path, name: str, trap: int) -> Test:
    """The test "file::function", which must name the trap in its docstring."""
    file, _, function = name.partition("::")
    found = tests_of(root / file).get(function) if (root / file).is_file() else None
    if found is None:
        raise ValueError(f"T{trap} of docs/traps.toml names {name}, which is not there")
    line, docstring = found
    if not re.search(rf"\bT{trap}\b", docstring):
        raise ValueError(f"T{trap} of docs/traps.toml names {name}, whose docstring does not name T{trap}")
    says = re.sub(r"^T\d+(, T\d+)*( for the|[.:, ]*)", "", docstring)
    return Test(file, function, line, says[:1].upper() + says[1:])


@cache
def tests_of(file: Path) -> dict[str, tuple[int, str]]:
    """The functions of a file: line and docstring, in one line, of each."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    functions = (node for node in body if isinstance(node, ast.FunctionDef))
    return {node.name: (node.lineno, " ".join((ast.get_docstring(node) or "").split())) for node in functions}


def with_links(text: str, projects: dict[str, str], trap: int) -> str:
    """A text in which each NAME#123 leads to that issue or pull request of a project."""

    def link(found: re.Match) -> str:
        name, number = found.groups()
        if name not in projects:
            raise ValueError(f"T{trap} of docs/traps.toml: {name}#{number} is of no project in its table")
        return f"[{name} #{number}](https://github.com/{projects[name]}/issues/{number})"

    return re.sub(r"([\w.-]+)#(\d+)", link, text)


def page(trap: Trap) -> str:
    """The page of a trap, in Markdown."""
    tests = "\n".join(test_line(test) for test in trap.tests)
    if trap.vectors:
        vectors = (
            "".join(f"- `{name}`: {plain(what)}.\n" for name, what in trap.vectors.items()) + "\n"
            "They lie in [vectors/](../../vectors/README.md), which says how to read them. "
            "With your outputs in a folder `mine`:\n\n```sh\npython vectors/check_numpy.py vectors mine\n```\n"
        )
    else:
        vectors = f"None. {trap.no_vector}\n"
    return (
        f"# T{trap.number}: {trap.title}\n\n{trap.sentence}\n\n"
        f"**What must hold.** {trap.holds}\n\n"
        f"**Who had it.** {trap.who}\n\n"
        f"## Tests that find it\n\n{tests}\n\n"
        f"## Vectors that find it\n\n{vectors}\n"
        f"[All traps](../traps.md)\n"
    )


def test_line(test: Test) -> str:
    """An entry of a list: a test's name, which leads to its line, its file, and what it says of itself."""
    link = f"[`{test.name}`](source:{test.file}#L{test.line})"
    return f"- {link} in {test.file}" + (f": {plain(test.says)}" if test.says else "")


def plain(text: str) -> str:
    """A text that may have signs of Markdown in it, as it stands."""
    return re.sub(r"([\\|$*_<\[])", r"\\\1", text)


def overview(traps: list[Trap]) -> str:
    """Add a table of all traps to docs/traps.md."""
    rows = "\n".join(
        f"| [T{trap.number}](traps/{name(trap)}) | {trap.title} | {len(trap.tests)} | {len(trap.vectors) or ''} |"
        for trap in traps
    )
    table = f"\n| | trap | tests | vectors |\n|---|---|---|---|\n{rows}\n"
    return table + "\n```{toctree}\n:hidden:\n:glob:\n\ntraps/*\n```\n"


def name(trap: Trap) -> str:
    """The file of a trap's page."""
    return f"t{trap.number:02}.md"


def write_pages(app) -> None:
    """Writes the pages, before Sphinx looks for pages."""
    root = Path(app.srcdir)
    write_folder(root / FOLDER, {name(trap): page(trap) for trap in read_traps(root)})


def before_parsing(app, docname: str, source: list[str]) -> None:
    """The overview gets its table; in the glossary each trap's number leads to its page."""
    if docname == INDEX:
        source[0] += overview(read_traps(Path(app.srcdir)))
    if docname == "docs/glossary":
        source[0] = GLOSSARY_ROW.sub(
            lambda row: row[0].replace(f"</a>T{row[1]}", f"</a>[T{row[1]}](traps/t{int(row[1]):02}.md)"), source[0]
        )


def setup(app) -> dict:
    """Register the pages of traps with Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", before_parsing, priority=400)  # before anchors are rewritten
    return {"parallel_read_safe": True, "parallel_write_safe": True}
