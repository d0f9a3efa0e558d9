"""Settings that hold for every test: they are made before anything imports jax, torch or m3jax."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import hypothesis
import jaxtyping
import pytest
from support import checks

# Most of the suite's time is the compiler's, which takes two thirds without LLVM's optimizations. Users run with them,
# so `.ci/run` runs tests of the invariant mode with M3JAX_TEST_XLA=defaults too.
_QUICK_COMPILER = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # A program as one piece for LLVM: the small programs here take longer to cut in 32 than to compile.
    "--xla_cpu_parallel_codegen_split_count=1",
    # The older way to write loops compiles in half the time. Later versions have only the newer, and die of the flag.
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
)
# Eight devices on the host, for the tests of sharding; an accelerator only where the caller asks. Its programs are
# compiled as users', with all optimizations: some of its tests compare bits. A caller's flags come later and win.
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    if os.environ.get("M3JAX_TEST_XLA") != "defaults":
        _FLAGS += _QUICK_COMPILER
    os.environ["XLA_FLAGS"] = " ".join((*_FLAGS, os.environ.get("XLA_FLAGS", ""))).strip()
# Test processes share a GPU: each takes its part of the memory. Programs and CUDA graphs are the driver's, which has
# the rest.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.7 / _PROCESSES:.3f}")

# A shell's background jobs ignore interrupts, and so would all that they start, which some tests then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A lowered operation says where it comes from, ten frames deep, for profiles and compilers' messages: not read here.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Tracing makes many objects that live long. At Python's own thresholds, looking through them for garbage takes a tenth
# of the suite's time; at (10,000, 10, 10) still 3% of it, of which most is for the oldest.
gc.set_threshold(50_000, 20, 20)

# Nothing is kept in the user's own folder, and stderr is for what is wrong; tests of the two ask for them.
os.environ["M3JAX_CACHE_DIR"], os.environ["M3JAX_PROGRESS"] = "", "0"

# The model is made of plain pytrees, so it must work with NNX's tree mode alone.
os.environ.setdefault("NNX_GRAPH_MODE", "false")
os.environ.setdefault("NNX_GRAPH_UPDATES", "false")

# One thread for torch and BLAS in each test process: more would fight over the same cores.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The oracle is built from configurations: nothing may be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_FEW_SLOW_EXAMPLES = dict(
    deadline=None,
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
    ],
)
# "ci" draws the same examples on every run, "dev" draws new ones, "thorough" many of them.
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=25, **_FEW_SLOW_EXAMPLES)
hypothesis.settings.register_profile("dev", max_examples=25, **_FEW_SLOW_EXAMPLES)
hypothesis.settings.register_profile("thorough", max_examples=1000, **_FEW_SLOW_EXAMPLES)
hypothesis.settings.load_profile(os.environ.get("M3JAX_HYPOTHESIS", "ci"))

# Shapes and dtypes in annotations are checked at every call, here and nowhere else; where engines compile quickly they
# are not (support/engines.py).
checks.install("m3jax", "pallas_kernels")


# What `.ci/run` also runs under the newest jax, as the marker `core`: imports, the definitions and their schedules, the
# model, the engine's equivalences, kernels in interpret mode and as they are lowered, the command line. The rest is
# Python and numpy (text, checkpoints, planning, data), or long and of one version (notebooks, the TPU's compiler).
TESTS = Path(__file__).parent
CORE = (
    "package/test_package.py",
    "package/test_config.py",
    "package/test_cli.py",
    "package/test_console.py",
    "package/test_waiting.py",
    "msa",
    "ops/test_backends.py",
    "model",
    "cache/test_pages.py",
    "cache/test_types.py",
    "decoding/test_engine.py",
    "decoding/test_engine_equivalence.py",
    "decoding/test_generate.py",
    "decoding/test_nan.py",
    "decoding/test_sampling.py",
    "decoding/test_speculative_verify.py",
    "kernels/test_attention.py",
    "kernels/test_experts.py",
    "kernels/test_index.py",
    "kernels/test_insert.py",
    "kernels/test_lowering.py",
    "kernels/test_mosaic_registers.py",
    "kernels/test_tpu.py",
    "train/test_losses.py",
    "vision/test_attention.py",
    "vision/test_tower.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of the files and folders in CORE."""
    paths = [TESTS / name for name in CORE]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise pytest.UsageError(f"tests/conftest.py: CORE names {', '.join(missing)}, which do not exist")
    core = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    for item in items:
        if item.path in core:
            item.add_marker(pytest.mark.core)


def pytest_configure(config: pytest.Config) -> None:
    """Shares compiled functions between workers, subprocesses and runs (until `--cache-clear`)."""
    if cache := getattr(config, "cache", None):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def pytest_collection_finish() -> None:
    """Takes what was imported and collected, which stays to the end, out of the garbage collector's sight."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Turns the annotation checks off, to test the errors that a user, who has none, gets."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")  # before what a test file makes of the devices
def eight_devices() -> None:
    """Skips a test of meshes in a process that has fewer devices, as one on a single GPU."""
    import jax

    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, this process has {jax.device_count()}")


@pytest.fixture(autouse=True, scope="session")
def triton_dialect() -> None:
    """Ends a search: MLIR looks for a module of Triton's operations at each that is lowered, and jaxlib has none.

    It is a third of the time that lowering a kernel takes.
    """
    name = "jaxlib.mlir.dialects.tt"
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = ModuleType(name)


@pytest.fixture(autouse=True, scope="session")
def lowering_is_unchecked() -> Iterator[None]:
    """Turns the annotation checks off while a traced program is lowered: jax then puts no arrays into a cache."""
    from jax.stages import Traced

    lower = Traced.lower

    def lower_unchecked(*args, **options):
        before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            return lower(*args, **options)
        finally:
            jaxtyping.config.update("jaxtyping_disable", before)

    Traced.lower = lower_unchecked
    yield
    Traced.lower = lower


_PROGRAMS_OF_A_CONTEXT = 50  # what they have in common stays in it: fewer than a run's, for the memory's sake


@pytest.fixture(autouse=True, scope="session")
def contexts_are_shared() -> Iterator[None]:
    """Lowers some programs in one MLIR context: making one takes a quarter of a small program's time."""
    from jax._src.interpreters import mlir

    make, made, left = mlir.make_ir_context, None, 0

    def make_or_share():
        nonlocal made, left
        if left == 0:
            made, left = make(), _PROGRAMS_OF_A_CONTEXT
        left -= 1
        return made

    mlir.make_ir_context = make_or_share
    yield
    mlir.make_ir_context = make


_MANY_MAPS = 40_000  # a module of tests adds 11,000 at most


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """Drops compiled functions where a process has many.

    Each takes several memory maps, of which Linux allows a process 65,530; at the next one jaxlib dies. What is needed
    again is traced again, which is most of the time of a test, and comes from the compilation cache.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
