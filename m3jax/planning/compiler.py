"""Compilation for a slice in separate processes: libtpu needs environment variables that this process must not have."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from typing import Any

from m3jax.planning.chips import Chip
from m3jax.planning.job import Job

PROGRAMS = ("decode", "prefill")


def check_compiler() -> None:
    """Raise ValueError, with what to do, if the TPU compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "the TPU compiler is not installed (pip install 'jax[tpu]' brings it); --no-compile plans by arithmetic"
        )


def compile_programs(
    job: Job, sizes: dict[str, int], programs: tuple[str, ...] = PROGRAMS
) -> dict[str, dict[str, Any]]:
    """Compile the engine's programs with the TPU's compiler, side by side.

    Args:
      job: the model and its requests.
      sizes: of the mesh.
      programs: of `PROGRAMS`.

    Returns:
      What `m3jax.planning.program.compile_program` returns, by program.

    Raises:
      ValueError: no compiler.
      ChildProcessError: a process that ended without an answer.
    """
    check_compiler()
    command = [sys.executable, "-m", "m3jax.planning.program"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    settings = environment(job.slice.chip)
    running = {name: subprocess.Popen(command, env=settings, **pipes) for name in programs}
    for name, process in running.items():
        process.stdin.write(pickle.dumps((job, sizes, name)))
        process.stdin.close()
    try:
        return {name: _answer(name, process) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def environment(chip: Chip) -> dict[str, str]:
    """Return the environment of a process that compiles for a chip: libtpu needs these settings without a TPU."""
    settings = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": chip.compiler_name, "TPU_WORKER_HOSTNAMES": "localhost",
    }  # fmt: skip
    return os.environ | settings


def _answer(name: str, process: subprocess.Popen) -> dict[str, Any]:
    """Return the answer that a compiling process prints; raise ChildProcessError with its last line if it fails."""
    process.stdin = None  # closed; communicate would flush it
    answer, complaint = process.communicate()
    if process.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ChildProcessError(f"compiling {name} ended with status {process.returncode}: {lines[-1]}")
    return json.loads(answer)
