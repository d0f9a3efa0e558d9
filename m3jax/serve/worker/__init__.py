"""The worker: an engine behind the calls of SMG's protocol `vllm.grpc.engine`."""

from importlib import import_module

from m3jax.serve.worker.command import main

TYPE_CHECKING = False  # as in m3jax/__init__.py
if TYPE_CHECKING:
    from m3jax.serve.worker.server import serve
    from m3jax.serve.worker.worker import Worker

__all__ = ["Worker", "main", "serve"]

# Imported when it is first asked for: a command line whose arguments are wrong answers without jax.
_HOMES = {"Worker": "m3jax.serve.worker.worker", "serve": "m3jax.serve.worker.server"}


def __getattr__(name: str) -> object:
    """A public name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
