"""Every script, and every subject of bench.py, answers --help, and does nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "scripts" / "bench.py"

# All in one process, for most of the time of each would be the import of jax.
RUN_ALL = """
import contextlib, io, json, os, runpy, sys
answers = {}
for words in json.loads(sys.argv[1]):
    out, status = io.StringIO(), "it went on"
    sys.argv, sys.path[0] = [*words, "--help"], os.path.dirname(words[0])
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    answers[" ".join([os.path.basename(words[0]), *words[1:]])] = (status, out.getvalue())
print(json.dumps(answers))
"""


def test_help_of_every_script(tmp_path):
    listed = subprocess.run([sys.executable, str(BENCH), "--help"], capture_output=True, text=True, check=True).stdout
    subjects = [line.split()[0] for line in listed.partition("subjects:\n")[2].splitlines()]
    assert {"engine", "gpu", "serve", "training"} <= set(subjects)
    commands = [[str(path)] for path in sorted((ROOT / "scripts").glob("*.py"))]
    commands += [[str(BENCH), subject] for subject in subjects]
    finished = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(commands)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    answers = json.loads(finished.stdout)
    assert len(answers) == len(commands)
    for name, (status, out) in answers.items():
        # The help alone: a script that works before it reads its arguments prints more, or ends otherwise.
        assert status == 0 and out.startswith(f"usage: {name} [-h]") and "show this help message" in out, (name, out)
    assert not list(tmp_path.iterdir())


def test_a_benchmark_prints_its_rows_and_keeps_them(tmp_path):
    kept = tmp_path / "new" / "rows.json"
    command = [sys.executable, str(BENCH), "media", "--smoke", "--seconds", "0.01", "--json", str(kept)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert kept.exists(), finished.stderr
    content = json.loads(kept.read_text())
    assert content["settings"]["seconds"] == 0.01 and {"date", "python", "jax"} <= content["environment"].keys()
    assert {row["picture"].partition(",")[0] for row in content["rows"]} == {"small"}
    about, *remarks, _, heads, first, second, third, fourth = finished.stdout.splitlines()
    assert about.startswith("date ") and heads.split()[:2] == ["picture", "ms"]
    assert remarks == content["remarks"]
    for row, line in zip(content["rows"], (first, second, third, fourth), strict=True):
        assert line.startswith(row["picture"])
        words = line.removeprefix(row["picture"]).split()
        assert float(words[0]) == pytest.approx(row["ms"], rel=1e-3)
        assert float(words[1].replace(",", "")) == pytest.approx(row["a second"], rel=1e-3)


def test_a_wrong_setting_of_a_benchmark_is_one_line():
    command = [sys.executable, str(BENCH), "media", "--seconds", "0"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert finished.returncode == 2 and finished.stderr == "bench.py media: --seconds is 0.0; it must be positive\n"
