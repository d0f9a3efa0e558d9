"""Golden vectors: made twice with the same bits, confirmed by numpy and by the package, and bad input is one line."""

import importlib
import io
import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import jax
import numpy as np
import pytest

from m3jax import progress
from m3jax.files.tensors import packed
from m3jax.vectors import checking
from m3jax.vectors.__main__ import main
from m3jax.vectors.checking import check_case
from m3jax.vectors.files import MANIFEST, read_case, read_manifest, sha256
from m3jax.vectors.groups import GROUPS, selection
from m3jax.vectors.making import made_on

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "vectors"
# Without the tests' compiler options, which give other bits than a user's command.
PLAIN = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def stored_cases(group: str | None = None) -> list[dict]:
    return [case for case in read_manifest(STORED)["cases"] if group in (None, case["group"])]


def numpy_check(*args: object) -> subprocess.CompletedProcess:
    """`vectors/check_numpy.py` as a program, in this process: numpy is imported already."""
    program, out, err = str(STORED / "check_numpy.py"), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.syspath_prepend(STORED)
        patch.setattr(sys, "argv", [program, *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(program, run_name="__main__")
    return subprocess.CompletedProcess(args, ended.value.code, out.getvalue(), err.getvalue())


def test_the_stored_set_is_whole_and_small():
    """Each group is in it, each file is named by the manifest, and a clone pays 7 MiB at most."""
    cases = stored_cases()
    assert [*dict.fromkeys(case["group"] for case in cases)] == [*GROUPS]
    files = {path.relative_to(STORED).as_posix() for path in STORED.rglob("*.safetensors")}
    named = {case["file"] for case in cases} | {
        f"{folder}/model.safetensors" for case in cases if (folder := case.get("model"))
    }
    assert files == named | {"tiny/tiny.safetensors"}
    assert sum(path.stat().st_size for path in STORED.rglob("*") if path.is_file()) <= 7 << 20
    for case in cases:
        assert sha256((STORED / case["file"]).read_bytes()) == case["sha256"], case["file"]


def test_the_selection_bites():
    """Some query of each case drops a block that it sees: else every selection would be right (T17)."""
    for case in stored_cases():
        arrays, _ = read_case(STORED, case)
        for name in (name for name in arrays if name.endswith("first_dropped") and case["group"] != "experts"):
            assert np.isfinite(arrays[name]).any(), (case["file"], name)


def test_numpy_confirms_the_stored_set_with_neither_jax_nor_m3jax_in_sight():
    """In float64, with an arithmetic of its own; none of these modules can be imported."""
    code = "import sys, runpy\nsys.modules |= dict.fromkeys(['jax', 'm3jax', 'ml_dtypes', 'safetensors'])\n"
    code += "sys.path.insert(0, sys.argv[1])\nrunpy.run_path(sys.argv[1] + '/check_numpy.py', run_name='__main__')"
    command = [sys.executable, "-EB", "-c", code, str(STORED)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    count = len(stored_cases())
    assert f"{count} of {count} cases agree" in result.stdout


def test_made_again_with_the_same_bits(tmp_path):
    """On the machine and jax that the manifest names every byte; elsewhere inputs, ids and what tolerances allow."""
    group = "mxfp8"  # which compiles least; the values of all groups are confirmed below
    command = [sys.executable, "-m", "m3jax.vectors", "make", "--out", str(tmp_path), "--only", group]
    subprocess.run(command, env=PLAIN, cwd=ROOT, check=True, capture_output=True)
    stored, made = read_manifest(STORED), read_manifest(tmp_path)
    assert [case for case in made["cases"] if case["group"] != group] == []
    for old, new in zip(stored_cases(group), made["cases"], strict=True):
        assert old | {"sha256": ""} == new | {"sha256": ""}
        if stored["made"] == made_on():
            assert old["sha256"] == new["sha256"], (
                f"{old['file']}: other bytes on the machine that made the stored ones"
            )
        (before, _), (after, _) = read_case(STORED, old), read_case(tmp_path, new)
        for name, entry in new["tensors"].items():
            if entry["role"] == "input" or entry["dtype"].startswith("I"):
                assert before[name].tobytes() == after[name].tobytes(), (old["name"], name)
    assert numpy_check(tmp_path).returncode == 0


# A case of each kind that compiles little; `python -m m3jax.vectors check vectors` runs all, in two minutes.
SMALL = [
    "selection/heads_as_queries", "experts/router_ties", "rotary/long", "mxfp8/all_scales", "sampling/knobs",
    "cells/interleaved", "experts/activation", "mxfp8/encode", "mxfp8/product", "float8/kinds",
    "experts/router_extremes", "rotary/many_rows", "norm/weights", "exchange/resharded_4_to_2",
]  # fmt: skip
# What the tests of the package itself hold against a definition too.
LARGER = [
    "sparse_attention/unused_slots", "float8/index", "verification/drafted", "eagle3/eagle31", "pages/one_token_suffix",
]  # fmt: skip


@pytest.mark.parametrize("label", [*SMALL, *(pytest.param(label, marks=pytest.mark.further) for label in LARGER)])
def test_the_package_agrees(label):
    """T41, T42, T43, T44, T45, T46, T47, T49, T57: by its definitions and by all that its users run."""
    manifest = read_manifest(STORED)
    (case,) = (case for case in manifest["cases"] if f"{case['group']}/{case['name']}" == label)
    report = check_case(STORED, case, manifest["tolerances"])
    assert report.compared and not report.differences


def test_a_bug_of_the_package_is_found(monkeypatch):
    """The maximum of the other head's scores in the place of each head's own."""
    manifest, walk = read_manifest(STORED), selection.index_topk
    (case,) = (case for case in manifest["cases"] if case["file"] == "selection/heads_as_queries.safetensors")
    swapped = lambda index_q, *rest, **options: walk(index_q[:, :, ::-1], *rest, **options)
    monkeypatch.setattr(selection, "index_topk", swapped)
    found = check_case(STORED, case, manifest["tolerances"]).differences
    labels = [f"blocks by index_topk in {dtype}: " for dtype in ("float32", "bfloat16")]
    assert len(found) == 2 and all(label in line for label, line in zip(labels, found, strict=True)), found
    assert "expected blocks [" in found[0] and "found [" in found[0]


def test_check_keeps_what_it_compiles_and_says_what_is_waited_for(tmp_path, monkeypatch, caplog):
    """A second run reads the programs of the first; on stderr and in the log stands the case."""
    monkeypatch.setenv("M3JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("M3JAX_PROGRESS", "1")
    monkeypatch.setattr(progress, "PAUSE", 0.05)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    folders, own = [], jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)

    def slow_check(folder, case, tolerances):
        folders.append(jax.config.jax_compilation_cache_dir)
        time.sleep(0.2)
        return checking.CaseReport("selection/given_scores", 1, [])

    monkeypatch.setattr(checking, "check_case", slow_check)
    (case,) = (case for case in stored_cases("selection") if case["name"] == "given_scores")
    monkeypatch.setattr(checking, "read_manifest", lambda folder: {"cases": [case], "tolerances": {}})
    with caplog.at_level(logging.INFO, "m3jax"):
        try:
            checking.check(STORED)
        finally:
            jax.config.update("jax_compilation_cache_dir", own)
    assert folders == [str(tmp_path / "compiled")]
    for said in (caplog.text, sys.stderr.getvalue()):
        assert "checking selection/given_scores, case 1 of 1" in said


def test_a_changed_file_is_a_difference(tmp_path, capsys):
    """Both checkers name the file's sum, and the number that was changed."""
    (case,) = (case for case in stored_cases("selection") if case["name"] == "given_scores")
    arrays = dict(read_case(STORED, case)[0])
    arrays["blocks"] = arrays["blocks"][..., ::-1] + (arrays["blocks"][..., ::-1] == 0)
    (tmp_path / "selection").mkdir()
    (tmp_path / case["file"]).write_bytes(packed(arrays))
    (tmp_path / MANIFEST).write_text(json.dumps(read_manifest(STORED) | {"cases": [case]}))
    assert main(["check", str(tmp_path)]) == 1
    ours, theirs = capsys.readouterr().out, numpy_check(tmp_path)
    for out in (ours, theirs.stdout):
        assert (
            "selection/given_scores: the sha256 of given_scores.safetensors" in out
            and "expected blocks" in out
            and "0 of 1 cases agree" in out
        )
    assert theirs.returncode == 1


def broken(change):
    """A folder with one case, of which something is changed."""

    def build(folder):
        (case,) = (case for case in stored_cases("selection") if case["name"] == "given_scores")
        (folder / "selection").mkdir()
        shutil.copy(STORED / case["file"], folder / case["file"])
        manifest = read_manifest(STORED) | {"cases": [case]}
        change(folder / case["file"], manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return build


BAD = {
    "no manifest": (lambda folder: None, "no manifest.json"),
    "other schema": (broken(lambda file, manifest: manifest.update(schema=2)), "schema version 2, and 1 can be read"),
    "no cases": (broken(lambda file, manifest: manifest.update(cases=[])), "names no cases"),
    "truncated": (broken(lambda file, manifest: file.write_bytes(file.read_bytes()[:900])), "no safetensors file"),
    "foreign": (broken(lambda file, manifest: file.write_bytes(b"PK\3\4 no tensors")), "no safetensors file"),
    "missing file": (broken(lambda file, manifest: file.unlink()), "not there, and manifest.json names it"),
    "missing tensor": (
        broken(lambda file, manifest: file.write_bytes(packed({"x": np.ones(2)}))),
        "no tensor 'scores'",
    ),
    "other shape": (
        broken(lambda file, manifest: manifest["cases"][0]["tensors"]["scores"].update(shape=[2, 3])),
        "manifest.json says F32 [2, 3]",
    ),
    "no role": (
        broken(lambda file, manifest: manifest["cases"][0]["tensors"].update(scores=7)),
        "make the vectors again",
    ),
    "no block size": (broken(lambda file, manifest: manifest["cases"][0]["rule"].pop("block_size")), "block_size"),
    "unknown group": (broken(lambda file, manifest: manifest["cases"][0].update(group="magic")), "magic/given_scores"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line(kind, tmp_path, capsys):
    build, words = BAD[kind]
    build(tmp_path)
    status = main(["check", str(tmp_path)])
    ours, theirs = capsys.readouterr(), numpy_check(tmp_path)
    assert (status, ours.out) == (2, "") and (theirs.returncode, theirs.stdout) == (2, "")
    for line in (ours.err, theirs.stderr):
        assert words in line and line.count("\n") == 1, line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["make", "--out", str(STORED)], "vectors are there already"),
        (["make", "--out", "x", "--only", "magic"], "no such group; there are selection"),
        (["make"], "--out"),
        (["check"], "DIR"),
        ([], "make|check"),
    ],
)
def test_bad_arguments_are_one_line(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("language", ["numpy", "torch"])
def test_a_skeleton_in_python_writes_what_agrees(language, tmp_path, monkeypatch):
    """As it stands."""
    monkeypatch.syspath_prepend(STORED)
    importlib.import_module(f"skeleton_{language}").main(STORED, tmp_path)
    agrees_with_sparse_attention(tmp_path)


@pytest.mark.further  # in numpy and torch: above
@pytest.mark.skipif(shutil.which("g++") is None, reason="the skeleton in C++ needs g++, which is not there")
def test_the_skeleton_in_cpp_writes_what_agrees(tmp_path):
    """Compiled without a warning, and run as it stands."""
    program = tmp_path / "skeleton"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", *flags, "-o", program, STORED / "skeleton.cpp"], check=True)
    subprocess.run([program, STORED, tmp_path / "mine"], check=True, capture_output=True)
    agrees_with_sparse_attention(tmp_path / "mine")


def agrees_with_sparse_attention(folder: Path) -> None:
    result = numpy_check(STORED, folder)
    assert (result.returncode, result.stderr) == (0, "")
    count, others = len(stored_cases("sparse_attention")), len(stored_cases()) - len(stored_cases("sparse_attention"))
    assert result.stdout == (
        f"{others} cases have no output of yours\n{count} of {count} cases agree ({2 * count} outputs compared)\n"
    )


def test_outputs_without_one_that_is_known(tmp_path):
    (tmp_path / "mine.safetensors").write_bytes(packed({"logits": np.ones(3)}))
    result = numpy_check(STORED, tmp_path)
    assert result.returncode == 2 and "no output in it that" in result.stderr and result.stderr.count("\n") == 1
