"""The TPU kernels through the real TPU compiler, without a TPU."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "tpu_compile.py"
IN_OTHER_DTYPES = {"index_topk_decode", "sparse_decode", "query_union"}
AT_ONCE = {"dense_causal", "expert_tiles", "mxfp8_project"}
OTHERS = {"index_topk", "kv_block_major", "qk_norm_rope_insert", "mxfp8_experts"}
CHIPS = dict(v5e=IN_OTHER_DTYPES | AT_ONCE | OTHERS, tpu7x=IN_OTHER_DTYPES | AT_ONCE)


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=900)


def compiled(*args: str) -> dict[str, set[str]]:
    """Return the kernels that compile, by chip. In a process of its own: the compiler wants settings of its own.

    Fails without libtpu, and where a kernel does not compile.
    """
    done = run("--quick", *args)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert not [line for line in lines if "FAILS" in line]
    starts = [i for i, line in enumerate(lines) if not line.startswith(" ")] + [len(lines)]
    return {
        lines[first].split(":")[0]: {
            line.split()[1] for line in lines[first + 1 : stop] if line.startswith("  compiles")
        }
        for first, stop in pairwise(starts)
    }


def test_kernels_that_compile_at_once_do_for_the_oldest_generation():
    """One of pages and one of weights; the test below has the others."""
    few = {"sparse_decode", "mxfp8_project"}
    assert compiled("--chip", "v5e", "--op", *sorted(few)) == {"v5e": few}


@pytest.mark.further
def test_every_kernel_compiles_for_the_oldest_generation_and_every_dtype_for_the_newest():
    """`scripts/tpu_compile.py` alone compiles every kernel at every shape for every generation."""
    assert compiled("--chip", *CHIPS) == CHIPS
