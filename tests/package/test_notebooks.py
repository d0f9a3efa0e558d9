"""The notebooks: they run from top to bottom, and each is the same as its script."""

import os
from pathlib import Path

import pytest

_NEEDS = "needs the extra 'test'"
nbformat = pytest.importorskip("nbformat", reason=f"reading notebooks {_NEEDS}")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MOST_BYTES = 1 << 20
SECONDS_A_CELL = 300  # on a busy machine most of it is compilation


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


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_notebook_is_valid_and_small(name):
    nbformat.validate(read(name))
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES
    assert pictures(read(name)), "run it and save it: a reader on the web sees the stored pictures"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason=f"running a notebook {_NEEDS}")
    # Of a notebook's time more is its programs' than the compiler's: here LLVM's first optimizations pay.
    level = "--xla_backend_optimization_level="
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(f"{level}0", f"{level}1", 1))
    notebook, stored = read(name), read(name)
    nbclient.NotebookClient(notebook, timeout=SECONDS_A_CELL, kernel_name="python3").execute()
    assert pictures(notebook) == pictures(stored)
    # What a library warns of goes to stderr, and into the page.
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
