"""The choice of a backend for an operation: XLA, or the kernels of `pallas_kernels` (docs/kernels.md).

`choose` is the one answer, by a case's reasons (`m3jax.ops.cases`). The choice is made while tracing, from shapes and
dtypes alone. "auto" takes kernels on a device that they are for, wherever they can run, and XLA elsewhere. Attention,
selection and the pages' writer are asked for by name: such a backend runs or says why it cannot. Products, norms,
routers and experts are not: what a kernel cannot take, XLA computes, whatever the name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

from m3jax.platform import platform

BACKENDS = ("auto", "xla", "triton", "mosaic_tpu")
_KERNELS_OF = {"gpu": "triton", "tpu": "mosaic_tpu"}  # by platform
_PLATFORM_OF = {kernels: where for where, kernels in _KERNELS_OF.items()}
_interpreted: ContextVar[Any] = ContextVar("interpreted", default=False)


@runtime_checkable
class Case(Protocol):
    """The properties of a call that decide where it can run: one of `m3jax.ops.cases`.

    Attributes:
      op: what is computed, in a word for an error.
      is_named: True if a backend that is asked for by name and cannot run the call is an error.
    """

    op: str
    is_named: bool

    def why_not(self, backend: str) -> str | None:
        """Return why a backend's kernels cannot run the call on their platform; None if they can."""
        ...


def choose(case: Case, backend: str = "auto") -> str:
    """Return the backend that runs a call.

    Args:
      case: the call.
      backend: one of `BACKENDS`.

    Returns:
      "xla", "triton" or "mosaic_tpu".

    Raises:
      ValueError: an unknown backend, or one that is asked for by name and cannot run this, with the reason.
    """
    check_backend_name(backend)
    if case.is_named and backend != "auto":
        if backend != "xla" and (reason := why_not(case, backend)):
            raise ValueError(f"backend = {backend!r} cannot run this {case.op}: {reason}; choose 'auto' or 'xla'")
        return backend
    # Interpreted kernels are asked for by name wherever a name counts: "auto" would run them on a CPU.
    kernels = _KERNELS_OF.get(platform()) if case.is_named else kernels_here(backend)
    return kernels if kernels is not None and case.why_not(kernels) is None else "xla"


def why_not(case: Case, backend: str) -> str | None:
    """Return why a backend's kernels cannot run a call here; None if they can.

    Args:
      case: the call.
      backend: "triton" or "mosaic_tpu".
    """
    return _wrong_platform(backend) or case.why_not(backend)


def kernels_here(backend: str) -> str | None:
    """Return the kernels that "auto", or a backend by its name, means on this platform; None for XLA.

    Args:
      backend: one of `BACKENDS`.
    """
    kernels, interpret_mode = _KERNELS_OF.get(platform()), interpreted()
    if kernels is None and interpret_mode:
        kernels = "triton" if isinstance(interpret_mode, bool) else "mosaic_tpu"
    return kernels if backend in ("auto", kernels) else None


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
    """Return what kernels get as `interpret`; False outside of the context manager."""
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
