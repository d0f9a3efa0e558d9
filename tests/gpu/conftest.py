"""What the tests on a GPU share: the marker `gpu`, the reason why they are skipped elsewhere, backend and seed."""

import os
import zlib
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDS_GPU = "needs a GPU: JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/gpu"


@cache
def _has_gpu() -> bool:
    """Return True if jax runs on a GPU. Where a GPU was not asked for, jax is not started to find out."""
    if os.environ["JAX_PLATFORMS"] == "cpu":
        return False
    import jax

    try:
        return jax.default_backend() == "gpu"
    except RuntimeError:  # CUDA was asked for, and is not there
        return False


# First, so that `-m gpu` finds the marker.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            # What a driver or an autotuner warns of is no fault of a kernel.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not _has_gpu():
        pytest.skip(NEEDS_GPU)


@pytest.fixture(params=["triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that has the kernels on a GPU: each takes the same tests."""
    return request.param


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number of the test's own, the same in every run."""
    return zlib.crc32(request.node.name.encode()) >> 1
