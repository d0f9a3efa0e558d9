"""Every script answers --help, and does nothing else."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# All in one process, for most of the time of each would be the import of jax.
RUN_ALL = """
import contextlib, io, json, os, runpy, sys
answers = {}
for path in sys.argv[1:]:
    out, status = io.StringIO(), "it went on"
    sys.argv, sys.path[0] = [path, "--help"], os.path.dirname(path)
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    answers[os.path.basename(path)] = (status, out.getvalue())
print(json.dumps(answers))
"""


def test_help_of_every_script(tmp_path):
    scripts = sorted((ROOT / "scripts").glob("*.py"))
    finished = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *map(str, scripts)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    answers = json.loads(finished.stdout)
    assert answers.keys() == {path.name for path in scripts}
    for name, (status, out) in answers.items():
        # The help alone: a script that works before it reads its arguments prints more, or ends otherwise.
        assert status == 0 and out.startswith(f"usage: {name} [-h]") and "show this help message" in out, (name, out)
    assert not list(tmp_path.iterdir())
