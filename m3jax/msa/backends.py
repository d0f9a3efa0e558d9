"""Which backend runs an op of MSA: XLA, or the kernels of `pallas_kernels` (docs/kernels.md).

The choice is made while tracing, from shapes and dtypes alone. "auto" takes kernels on a device that they are for,
wherever they can run, and XLA elsewhere; a backend that is asked for by name runs or says why it cannot.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jax.typing import DTypeLike

from m3jax.platform import platform

BACKENDS = ("auto", "xla", "triton", "mosaic_tpu")
MAX_FEW = 16  # queries a row that the decode kernels take
_PLATFORM = {"triton": "gpu", "mosaic_tpu": "tpu"}
_FOLDER = {
    "select": "index_topk", "sparse": "sparse_prefill", "dense": "dense_causal", "insert": "qk_norm_rope_insert",
}  # fmt: skip
_MAX_DECODE_BLOCKS = 1 << 16
_interpreted: ContextVar[Any] = ContextVar("interpreted", default=False)


@dataclass(frozen=True)
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
    score: str = "max"
    divided: bool = False
    pages: bool = True


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
    check_name(backend)
    if backend == "auto":
        own = next((name for name, where in _PLATFORM.items() if where == platform()), "xla")
        return own if own != "xla" and why_not(case, own) is None else "xla"
    if backend != "xla" and (reason := why_not(case, backend)):
        raise ValueError(f"backend = {backend!r} cannot run this {case.op}: {reason}; choose 'auto' or 'xla'")
    return backend


def why_not(case: Case, backend: str) -> str | None:
    """Why a backend's kernels cannot run a call; None if they can."""
    if reason := _elsewhere(backend):
        return reason
    if not _exists(case, backend):
        return f"it has no kernel for {case.op}"
    checks = (_view(case), _schedule(case), _numbers(case, backend), None if interpreted() else _sizes(case, backend))
    return next((reason for reason in checks if reason), None)


def check_backend(backend: str) -> None:
    """Refuse a backend that can run nothing here.

    Raises:
      ValueError: an unknown name, or one of kernels for another platform.
    """
    check_name(backend)
    if backend in _PLATFORM and (reason := _elsewhere(backend)):
        raise ValueError(f"backend = {backend!r}: {reason}; choose 'auto' or 'xla'")


def check_name(backend: str) -> None:
    """Raise ValueError for an unknown name."""
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: allowed are {', '.join(map(repr, BACKENDS))}")


def _elsewhere(backend: str) -> str | None:
    if platform() == _PLATFORM[backend] or interpreted():
        return None
    return f"it needs a {_PLATFORM[backend].upper()}, and JAX runs on a {platform().upper()}"


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


def few(case: Case) -> bool:
    """Whether this is a call for the decode kernels."""
    return case.queries <= MAX_FEW


def _exists(case: Case, backend: str) -> bool:
    folder = _FOLDER[case.op]
    if few(case) and case.op != "insert" and (case.op != "dense" or backend == "triton"):
        folder = "index_topk_decode" if case.op == "select" else "sparse_decode"
    return importlib.util.find_spec(f"pallas_kernels.{folder}.{backend}") is not None


def _view(case: Case) -> str | None:
    if not case.pages:
        return "it reads keys in pages or in one piece, not a pool of host memory's pages"
    if case.divided:
        return "several devices hold the keys, and it does not write the scores that they would have to join"
    if case.op == "select" and few(case) and case.num_blocks > _MAX_DECODE_BLOCKS:
        return f"there are {case.num_blocks} blocks, and it ranks up to {_MAX_DECODE_BLOCKS}"
    return None


def _schedule(case: Case) -> str | None:
    if case.op == "select":
        return None if case.score == "max" else f"it has score 'max', and this is {case.score!r}"
    if case.schedule == "auto" or (case.op == "sparse" and case.schedule == "kv_block_major" and not few(case)):
        return None
    return f"the schedule {case.schedule!r} is one of XLA's"


def _numbers(case: Case, backend: str) -> str | None:
    half = () if backend == "mosaic_tpu" else ("float16",)
    if str(case.dtype) not in ("bfloat16", "float32", *half):
        return f"it has no kernel for queries in {case.dtype}"
    small = str(case.stored) == "float8_e4m3fn"
    if case.dtype != case.stored and not (small and (few(case) or case.op == "insert")):
        return f"it does not take keys in {case.stored} for {case.queries} queries a row in {case.dtype}"
    return None


def _sizes(case: Case, backend: str) -> str | None:
    """What the kernels were written and measured for."""
    widths = (128,) if backend == "mosaic_tpu" else (64, 128)
    if case.width not in widths or case.block_size not in (64, 128):
        allowed = " or ".join(map(str, widths))
        return f"heads of {case.width} and blocks of {case.block_size} (it has {allowed}, and 64 or 128)"
    if case.op == "insert" and (case.rotated, case.width) not in ((64, 64), (64, 128), (128, 128)):
        return f"{case.rotated} of {case.width} dims are rotated (it has 64, or all)"
    if case.group > 16 or (case.op in ("select", "sparse") and not 4 <= case.slots <= 32):
        return f"groups of {case.group} heads and {case.slots} slots (it has up to 16 heads, and 4 to 32 slots)"
    return None
