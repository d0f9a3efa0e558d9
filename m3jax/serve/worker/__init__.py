"""The worker: an engine behind the calls of SMG's protocol `vllm.grpc.engine`."""

from m3jax.serve.worker.command import main

TYPE_CHECKING = False  # as in m3jax/__init__.py
if TYPE_CHECKING:
    from m3jax.serve.worker.worker import Worker

__all__ = ["Worker", "main"]


def __getattr__(name: str) -> object:
    """A public name at its first use: a command line whose arguments are wrong answers without jax."""
    if name == "Worker":
        from m3jax.serve.worker.worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
