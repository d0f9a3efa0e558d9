"""Two processes over gRPC, one that reads prompts and one that decodes, beside one that does both."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"


@pytest.mark.further  # in one process: test_transfer.py, tests/serve/test_worker_prefill.py
def test_two_processes_answer_with_the_bits_of_one():
    """In the invariant mode, which the script holds to: else it ends with an error."""
    command = [sys.executable, str(SCRIPT), "disaggregated", "--smoke", "--invariant"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    *_, one, two, same = finished.stdout.splitlines()
    assert "2, one engine" in one and "2, two" in two
    assert same == "of 2 answers 2 have the same tokens, 2 the same bits of log-probabilities"
