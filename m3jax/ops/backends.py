"""Which backend runs an operation: XLA, or the kernels of `pallas_kernels` (docs/kernels.md).

The choice is made while tracing, from shapes and dtypes alone. "auto" takes kernels on a device that they are for,
wherever they can run, and XLA elsewhere; a backend that is asked for by name runs or says why it cannot. A model that
asks for kernels leaves to XLA what has none: experts and dense layers on a TPU, selection over several devices,
attention over host memory.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jax.typing import DTypeLike

from m3jax.msa.rules import Score
from m3jax.platform import platform

BACKENDS = ("auto", "xla", "triton", "mosaic_tpu")
MAX_DECODE_QUERIES = 16  # queries a row that the decode kernels take
_PLATFORM_OF = {"triton": "gpu", "mosaic_tpu": "tpu"}
_PREFILL_FOLDER = {
    "select": "index_topk", "sparse": "sparse_prefill", "dense": "dense_causal", "insert": "qk_norm_rope_insert",
}  # fmt: skip
_DECODE_FOLDER = {"select": "index_topk_decode", "sparse": "sparse_decode", "dense": "dense_decode"}
_MAX_DECODE_BLOCKS = 1 << 16
_interpreted: ContextVar[Any] = ContextVar("interpreted", default=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What of a call decides where it can run.

    Attributes:
      op: "select", "sparse", "dense" or "insert".
      queries: T.
      dtype: of the queries.
      stored: dtype of the keys in memory.
      width: H, of keys, or of index keys.
      block_size: P.
      num_blocks: M.
      group: query heads of a KV head; 1 for "select".
      slots: J; 0 for "dense" and "insert".
      rotated: dims of a head that the rotary embedding turns, for "insert".
      schedule: of attention.
      score: of "select".
      divided: whether several devices hold the keys, and their scores have to be joined.
      pages: whether the view is one that kernels can read.
    """

    op: str
    queries: int
    dtype: DTypeLike
    stored: DTypeLike
    width: int
    block_size: int
    num_blocks: int
    group: int = 1
    slots: int = 0
    rotated: int = 0
    schedule: str = "auto"
    score: Score = "max"
    divided: bool = False
    pages: bool = True

    @property
    def is_decode(self) -> bool:
        """Whether the decode kernels are for it: few queries a row, or any number of them in the invariant mode."""
        return self.queries <= MAX_DECODE_QUERIES or self.schedule == "invariant"

    @property
    def folder(self) -> str:
        """The folder of `pallas_kernels` whose kernels are for it."""
        folders = _PREFILL_FOLDER | _DECODE_FOLDER if self.is_decode else _PREFILL_FOLDER
        return folders[self.op]


def choose(case: Case, backend: str = "auto") -> str:
    """The backend that runs a call.

    Args:
      case: the call.
      backend: one of `BACKENDS`.

    Returns:
      "xla", "triton" or "mosaic_tpu".

    Raises:
      ValueError: an unknown backend, or one that is asked for and cannot run this, with the reason.
    """
    check_backend_name(backend)
    if backend == "auto":
        of_platform = next((name for name, where in _PLATFORM_OF.items() if where == platform()), "xla")
        return of_platform if of_platform != "xla" and why_not(case, of_platform) is None else "xla"
    if backend != "xla" and (reason := why_not(case, backend)):
        raise ValueError(f"backend = {backend!r} cannot run this {case.op}: {reason}; choose 'auto' or 'xla'")
    return backend


def why_not(case: Case, backend: str) -> str | None:
    """Why a backend's kernels cannot run a call; None if they can."""
    if reason := _wrong_platform(backend):
        return reason
    if not _has_kernel(case.folder, backend):
        return f"it has no kernel for {case.op}"
    reasons = [_why_not_memory(case), _why_not_schedule(case, backend), _why_not_dtypes(case, backend)]
    if not interpreted():
        reasons.append(_why_not_sizes(case, backend))
    return next((reason for reason in reasons if reason), None)


def kernel_name(backend: str) -> str | None:
    """The kernels that "auto", or a backend by its name, means on this platform; None for XLA.

    Args:
      backend: one of `BACKENDS`.
    """
    of_platform = next((name for name, where in _PLATFORM_OF.items() if where == platform()), None)
    if of_platform is None and interpreted():
        of_platform = "triton" if isinstance(interpreted(), bool) else "mosaic_tpu"
    return of_platform if backend in ("auto", of_platform) else None


def check_backend(backend: str) -> None:
    """Refuse a backend that can run nothing here.

    Args:
      backend: one of `BACKENDS`.

    Raises:
      ValueError: an unknown name, or one of kernels for another platform.
    """
    check_backend_name(backend)
    if backend in _PLATFORM_OF and (reason := _wrong_platform(backend)):
        raise ValueError(f"backend = {backend!r}: {reason}; choose 'auto' or 'xla'")


def check_backend_name(backend: str) -> None:
    """Raise ValueError for a name that is none of `BACKENDS`.

    Args:
      backend: the name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: allowed are {', '.join(map(repr, BACKENDS))}")


def interpreted() -> Any:
    """What kernels get as `interpret`; False outside of the context manager."""
    return _interpreted.get()


@contextmanager
def interpret(how: Any = True) -> Iterator[None]:
    """Have whatever is traced inside run kernels in Pallas's interpret mode, on any device: slow, for tests.

    Args:
      how: True, or for TPU kernels `pltpu.InterpretParams`.
    """
    token = _interpreted.set(how)
    try:
        yield
    finally:
        _interpreted.reset(token)


def _wrong_platform(backend: str) -> str | None:
    if platform() == _PLATFORM_OF[backend] or interpreted():
        return None
    return f"it needs a {_PLATFORM_OF[backend].upper()}, and JAX runs on a {platform().upper()}"


def _has_kernel(folder: str, backend: str) -> bool:
    """Whether an op's folder has one of the backend's name; nothing is imported but the op's own package."""
    return importlib.util.find_spec(f"pallas_kernels.{folder}.{backend}") is not None


def _why_not_memory(case: Case) -> str | None:
    if not case.pages:
        return "it reads keys in pages or in one piece, not a pool of host memory's pages"
    if case.divided:
        return "several devices hold the keys, and it does not write the scores that they would have to join"
    if case.op == "select" and case.is_decode and case.num_blocks > _MAX_DECODE_BLOCKS:
        return f"there are {case.num_blocks} blocks, and it ranks up to {_MAX_DECODE_BLOCKS}"
    return None


def _why_not_schedule(case: Case, backend: str) -> str | None:
    if case.schedule == "invariant" and backend != "triton":
        return "in the invariant mode it has no schedule"
    if case.op == "select":
        return None if case.score == "max" else f"it has score 'max', and this is {case.score!r}"
    is_blockwise = case.op == "sparse" and case.schedule == "kv_block_major" and not case.is_decode
    if case.schedule in ("auto", "invariant") or is_blockwise:
        return None
    return f"the schedule {case.schedule!r} is one of XLA's"


def _why_not_dtypes(case: Case, backend: str) -> str | None:
    halves = ("bfloat16",) if backend == "mosaic_tpu" else ("bfloat16", "float16")
    if str(case.dtype) not in (*halves, "float32"):
        return f"it has no kernel for queries in {case.dtype}"
    reads_float8 = str(case.stored) == "float8_e4m3fn" and (case.is_decode or case.op == "insert")
    if case.dtype != case.stored and not reads_float8:
        return f"it does not take keys in {case.stored} for {case.queries} queries a row in {case.dtype}"
    return None


def _why_not_sizes(case: Case, backend: str) -> str | None:
    """Why a size is none of those that the kernels were written and measured for."""
    widths = (128,) if backend == "mosaic_tpu" else (64, 128)
    if case.width not in widths or case.block_size not in (64, 128):
        allowed = " or ".join(map(str, widths))
        return f"heads of {case.width} and blocks of {case.block_size} (it has {allowed}, and 64 or 128)"
    if case.op == "insert" and (case.rotated, case.width) not in ((64, 64), (64, 128), (128, 128)):
        return f"{case.rotated} of {case.width} dims are rotated (it has 64, or all)"
    if case.group > 16 or (case.op in ("select", "sparse") and not 4 <= case.slots <= 32):
        return f"groups of {case.group} heads and {case.slots} slots (it has up to 16 heads, and 4 to 32 slots)"
    return None
