"""The notebooks: they run from top to bottom, and each is the same as its script."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_NEEDS = "needs the extra 'test'"
nbformat = pytest.importorskip("nbformat", reason=f"reading notebooks {_NEEDS}")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PLANNING = "04_capacity_planning"
FIRST = "01_msa_from_scratch"
CHEAPEST = "08_scale"
SECONDS_A_CELL = 300  # on a busy machine most of it is compilation
# Before a notebook: no name of the one before it is left, and garbage is looked for as seldom as by the suite itself.
BEGINNING = "%reset -f\nimport gc\n\ngc.set_threshold(50_000, 20, 20)"


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def pictures(notebook) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def test_every_notebook_has_a_script():
    assert NOTEBOOKS == sorted(path.stem for path in FOLDER.glob("*.py")) != []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_and_script_agree(name):
    jupytext = pytest.importorskip("jupytext", reason=f"comparing a notebook with its script {_NEEDS}")
    notebook = read(name)
    assert notebook.metadata.jupytext.formats == "ipynb,py:percent"
    assert cells(jupytext.read(FOLDER / f"{name}.py")) == cells(notebook)


@pytest.fixture(scope="module")
def kernel() -> Iterator:
    """One kernel for all notebooks: each begins without names, but finds imported and compiled what others needed."""
    jupyter_client = pytest.importorskip("jupyter_client", reason=f"running a notebook {_NEEDS}")
    manager = jupyter_client.KernelManager(kernel_name="python3")  # the first notebook starts it
    yield manager
    if manager.has_kernel:
        manager.shutdown_kernel(now=True)


def execute(notebook, kernel):
    nbclient = pytest.importorskip("nbclient", reason=f"running a notebook {_NEEDS}")
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BEGINNING))
    client = nbclient.NotebookClient(notebook, km=kernel, timeout=SECONDS_A_CELL)
    try:
        client.execute()
    finally:
        if client.kc is not None:  # as after a signal, of which nbclient ends the kernel
            client.kc.stop_channels()
    # What a library warns of goes to stderr, and into the page.
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]


further = pytest.mark.further
# The cheapest shows that notebooks can run; what the others call, the rooms' own tests call too.
RUN = [pytest.param(name, marks=() if name == CHEAPEST else further) for name in NOTEBOOKS if name != PLANNING]


@pytest.mark.parametrize("name", RUN)
def test_notebook_runs(name, kernel):
    notebook, stored = read(name), read(name)
    execute(notebook, kernel)
    assert pictures(notebook) == pictures(stored)


@pytest.mark.further  # the plans themselves: tests/planning
def test_planning_runs_without_the_tpu_compiler_and_with_it(kernel):
    """From top to bottom where libtpu is hidden, as the extra 'notebooks' leaves it; then the last cell with libtpu."""
    notebook, stored = read(PLANNING), read(PLANNING)
    code = lambda source: nbformat.v4.new_code_cell(f"import sys\n{source}")
    last = nbformat.v4.new_code_cell(notebook.cells[-1].source)
    shown = code('del sys.modules["libtpu"]')
    notebook.cells = [code('sys.modules["libtpu"] = None'), *notebook.cells, shown, last]
    execute(notebook, kernel)
    assert pictures(notebook) == pictures(stored)
    without, compiled = ("".join(output.text for output in cell.outputs) for cell in (notebook.cells[-3], last))
    assert "left out" in without and "compiled:" not in without, without
    assert "left out" not in compiled and "compiled:" in compiled, compiled


def test_first_notebook_imports_what_the_documents_name():
    """It is what a reader opens first: nothing in it has to be looked up in the sources."""
    root = FOLDER.parent
    pages = [page.read_text(encoding="utf-8") for page in (root / "README.md", *(root / "docs").rglob("*.md"))]
    fenced = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)]
    documented = {name for page in pages for name in re.findall(r"\[`(\w+)`\]\([^)]+\.py\)", page)}
    documented |= {name for source in fenced for _, name in imported(source)}
    script = (FOLDER / f"{FIRST}.py").read_text(encoding="utf-8")
    missing = [f"{name} of {module}" for module, name in imported(script) if name not in documented]
    assert not missing, f"imported by the first notebook, but in no document: {', '.join(missing)}"


def imported(source: str) -> list[tuple[str, str]]:
    """(module, name) of what Python code takes from this package."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return [(n.module, alias.name) for n in nodes if n.module.split(".")[0] == "m3jax" for alias in n.names]
