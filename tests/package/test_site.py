"""The site that `make docs` builds: what it is made of. CI builds it, and the build fails of a warning."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MATHJAX = DOCS / "_static" / "mathjax"


@pytest.fixture(autouse=True)
def in_docs(monkeypatch):
    """`docs/` is where docs/conf.py finds what the site is built with."""
    monkeypatch.syspath_prepend(str(DOCS))


# Traps


def test_every_trap_has_a_page_that_leads_to_its_tests():
    """T1 to T58: a sentence, who had it, tests that are there and name it, vectors or why there are none."""
    from sitebuild.traps import page, read_traps

    traps = read_traps(ROOT)
    assert [trap.number for trap in traps] == list(range(1, 59))
    for trap in traps:
        text = page(trap)
        assert trap.sentence in text and trap.who in text and trap.holds in text, trap.number
        links = re.findall(r"\[`(\w+)`\]\(source:([\w/.]+)#L(\d+)\)", text)
        assert len(links) == len(trap.tests) >= 1, trap.number
        for name, file, line in links:
            found = (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
            assert found.startswith(f"def {name}("), f"T{trap.number}: line {line} of {file} is {found!r}"
        for name in trap.vectors:
            assert f"`{name}`" in text and (ROOT / "vectors" / f"{name}.safetensors").is_file(), (trap.number, name)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("docs/traps.toml", "::test_causality", "::test_casualty", "T2 .*::test_casualty, which is not there"),
        (
            "docs/traps.toml",
            "tests/msa/test_nan.py",
            "tests/msa/test_nun.py",
            "T24 .*/test_nun.py::.*, which is not there",
        ),
        ("docs/traps.toml", "test_lengths_are_data", "test_all_scores_equal", "T11 .* docstring does not name T11"),
        ("docs/traps.toml", "vLLM#54597", "vLMM#54597", "T9 .* vLMM#54597 is of no project"),
        (
            "docs/traps.toml",
            "`selection/ragged`",
            "`selection/rugged`",
            "T6 .* names selection/rugged, which is not in",
        ),
        (
            "docs/traps.toml",
            'no_vector = "The vectors have no training."\n',
            "",
            "T32 .* for no case, and no_vector is ''",
        ),
        ("vectors/manifest.json", '"T7"', '"T22"', "T7 .* for no case"),
        ("docs/glossary.md", '<a id="t7">', '<a id="t70">', "has T7, which docs/glossary.md does not explain"),
    ],
)
def test_a_trap_that_leads_nowhere_is_an_error(tmp_path, file, old, new, message):
    """The message says which trap, and what it names."""
    from sitebuild.traps import read_traps

    for name in ("docs/traps.toml", "docs/glossary.md", "vectors/manifest.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_traps(tmp_path)


# The table of contents


def test_a_new_page_comes_into_the_table_of_contents_by_itself(tmp_path):
    pytest.importorskip("sphinx")
    from sitebuild.contents import FOR_NEW_PAGES, table_of_contents

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "new.md").write_text("# New\n")
    assert table_of_contents(tmp_path)[FOR_NEW_PAGES][-1] == "docs/new"


# The API reference


def test_the_reference_keeps_public_rooms_and_internal_ones_apart():
    """Each room stands in one of two tables, and the page of an internal one begins by saying so."""
    from sitebuild.reference import FOLDER, INTERNAL, KERNELS, PUBLIC, before_parsing, page, rooms

    source = [""]
    before_parsing(None, FOLDER, source)
    public, internal = (set(re.findall(r"\| \[([\w.]+)\]", part)) for part in source[0].split("## Inside"))
    assert (public, internal) == (set(PUBLIC), set(rooms()) - set(PUBLIC))
    assert {"m3jax", "m3jax.dialogue", KERNELS} <= public and {"m3jax.tiles", "m3jax.weights"} <= internal
    assert INTERNAL in page("m3jax.tiles", {}) and INTERNAL not in page("m3jax.config", {})


def test_the_reference_has_every_public_name_once():
    """Of a room that says what is public, and of one that does not; a name that two rooms export becomes a link."""
    pytest.importorskip("sphinx")
    from sitebuild.reference import page, rooms

    from m3jax import msa, parallel

    asked = (
        "m3jax",
        "m3jax.cache",
        "m3jax.decoding",
        "m3jax.msa",
        "m3jax.ops",
        "m3jax.text",
        "m3jax.train",
        "m3jax.vectors",
        "pallas_kernels",
    )
    assert set(asked) <= set(rooms())
    text = page("m3jax.msa", {})
    names = re.findall(r"^\.\. (?:auto\w+|py:data):: m3jax\.msa\.(\w+)$", text, re.M)
    assert sorted(names) == sorted(msa.__all__)
    assert ".. autofunction:: m3jax.arrays.checks\n" in page("m3jax.arrays", {})
    assert ".. autofunction:: pallas_kernels.sparse_decode.sparse_decode\n" in (kernels := page("pallas_kernels", {}))
    assert "pallas_kernels.checks" not in kernels and "triton" not in kernels
    text = page("m3jax.parallel", {id(parallel.make_mesh): "m3jax.make_mesh"})
    assert "``m3jax.parallel.make_mesh`` is :py:obj:`m3jax.make_mesh`." in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sees", "(positions: Int[Array, 'B T'], lengths: Int[Array, 'B'], key_positions: Int[Array, 'S'])"),
        ("index_topk", "index_q: Float[Array, 'B T K I']"),
        ("SelectionRules", "(top_k: int"),
        ("BlockView", ""),
    ],
)
def test_signatures_are_as_the_source_has_them(name, expected):
    """Shapes in letters, where Python's own signature has the class that jaxtyping made of them."""
    pytest.importorskip("sphinx")
    from sitebuild.reference import as_written

    from m3jax import msa

    what = "class" if isinstance(getattr(msa, name), type) else "function"
    signature, returns = as_written(None, what, name, getattr(msa, name), None, "()", None)
    assert signature.startswith(expected) if expected.startswith("(") else expected in signature, signature
    assert (returns is not None) == (what == "function")


def test_defaults_of_fields_are_those_that_a_caller_gets():
    """The reference shows the default in `field(...)`, and none of its other arguments."""
    pytest.importorskip("sphinx")
    from sitebuild.reference import fields_of

    code = (
        "@dataclass(kw_only=True)\nclass C:\n    a: int\n    b: tuple = field(default=(1, 2), compare=False)\n"
        "    c: dict = field(default_factory=dict)\n    d: int = struct.field(pytree_node=False)\n"
        "    e: ClassVar[int] = 3\n    f: Int[Array, ' B'] = None\n"
    )
    wanted = "(*, a: int, b: tuple=(1, 2), c: dict=..., d: int, f: Int[Array, 'B']=None)"
    assert fields_of(ast.parse(code).body[0]).replace(" = ", "=") == wanted


# Source files, links, and nothing from elsewhere


def test_links_to_files_lead_to_pages_that_show_them(tmp_path):
    """A small site: a link as GitHub has it, one to a line, a test of a file that is not there, an anchor in HTML."""
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    (tmp_path / "docs").mkdir()
    (tmp_path / "code.py").write_text("one = 1\n\n\ndef two():\n    return 2\n")
    (tmp_path / "README.md").write_text(
        '# Front\n\n<a id="here"></a>A place. [Code](code.py), [line](source:code.py#L4), [none](source:none.py), '
        "[page](docs/page.md#there), [nowhere](docs/page.md#nowhere)\n"
    )
    (tmp_path / "docs" / "page.md").write_text("# Page\n\n## There\n\n[Up](../README.md#here), [code](../code.py)\n")
    (tmp_path / "conf.py").write_text(
        f"import sys\n\nsys.path.insert(0, {str(DOCS)!r})\nroot_doc, myst_heading_anchors = 'README', 4\n"
        "extensions = ['myst_parser', 'sitebuild.contents', 'sitebuild.sources', 'sitebuild.check']\n"
        "myst_enable_extensions, myst_url_schemes = ['attrs_inline'], {'https': None, 'source': None}\n"
    )
    site = tmp_path / "out"
    command = [sys.executable, "-m", "sphinx", "-q", "-d", tmp_path / "trees", tmp_path, site]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "none.py is no file of the repository" in done.stderr
    assert "local id not found in doc 'docs/page': 'nowhere'" in done.stderr
    assert "README.html links to docs/page.html#nowhere, a place that docs/page.html does not have" in done.stderr
    front, page = ((site / name).read_text(encoding="utf-8") for name in ("index.html", "docs/page.html"))
    assert 'href="source/code.py.html"' in front and 'href="source/code.py.html#L4"' in front and 'id="here"' in front
    assert 'href="../source/code.py.html"' in page and 'href="../README.html#here"' in page
    shown = (site / "source" / "code.py.html").read_text(encoding="utf-8")
    assert re.search(r'<span class="linenos" id="L4">4</span>.*<span class="nf">two</span>', shown)


FINE = '<a href="b.html#x">b</a><a href="https://example.org/x">far</a><script src="_static/s.js"></script>'


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("a.html", FINE, None),
        ("a.html", '<a href="c.html">c</a>', "a.html links to c.html, which is not there"),
        ("a.html", '<a href="b.html#y">b</a>', "a.html links to b.html#y, a place that b.html does not have"),
        ("a.html", '<a href="#y">y</a>', "a.html links to #y, a place that a.html does not have"),
        ("a.html", '<img src="p.png">', "a.html loads p.png, which is not there"),
        ("a.html", '<script src="https://cdn.org/m.js"></script>', "a.html loads https://cdn.org/m.js from elsewhere"),
        ("a.html", '<link rel="stylesheet" href="//cdn.org/m.css">', "a.html loads //cdn.org/m.css from elsewhere"),
        (
            "_static/s.css",
            "@import 'https://fonts.org/f.css';",
            "_static/s.css loads https://fonts.org/f.css from elsewhere",
        ),
        ("_static/s.css", "a {src: url(f.woff)}", "_static/s.css loads f.woff, which is not there"),
        ("_static/s.js", 'import("https://cdn.org/t.js")', "_static/s.js loads https://cdn.org/t.js from elsewhere"),
    ],
)
def test_a_dead_link_and_what_is_loaded_from_elsewhere_are_found(tmp_path, file, text, problem):
    from sitebuild.check import problems

    (tmp_path / "_static").mkdir()
    for name, content in {"b.html": '<p id="x">x</p>', "_static/s.js": "", file: text}.items():
        (tmp_path / name).write_text(content)
    assert problems(tmp_path) == ([problem] if problem else [])


def test_the_formulas_use_what_mathjax_knows():
    """A command that its file does not define would stand on the page in red."""
    known = (MATHJAX / "input" / "tex.js").read_text(encoding="utf-8")
    unknown = set()
    for path in [*DOCS.glob("*.md"), *DOCS.glob("notes/*.md"), *(ROOT / "notebooks").glob("*.py")]:
        prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for formula in re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", prose, re.S):
            commands = re.findall(r"\\(?:begin\{(\w+)\*?\}|([a-zA-Z]+))", formula)
            names = {environment or command for environment, command in commands} - {"end"}
            unknown |= {f"{path.name}: {name}" for name in names if not re.search(rf'\b{name}\b["\']?:', known)}
    assert not unknown


# What is published


def test_a_wheel_and_an_sdist_carry_no_site(tmp_path):
    """Of a checkout in which `make docs` has run, as this one may or may not be."""
    pytest.importorskip("hatchling", reason="`make test` installs what builds the package on Python 3.11")
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    kept = ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "m3jax/version.py", "docs/conf.py")
    built = ("docs/_build/html/index.html", "docs/_build/doctrees/x.doctree", "docs/api/m3jax.rst", "docs/traps/t01.md")
    for name in (*kept, *built, "m3jax/__init__.py", "pallas_kernels/__init__.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text((ROOT / name).read_text(encoding="utf-8") if name in kept else "")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", out]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(out.glob("*.tar.gz"))) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    assert "docs/conf.py" in packed and not packed & set(built), packed
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        assert {name.partition("/")[0] for name in wheel.namelist()} == {
            *("m3jax", "pallas_kernels"),
            *(name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name),
        }
