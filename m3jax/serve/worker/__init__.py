"""The worker: an engine behind the calls of SMG's protocol `vllm.grpc.engine`."""

from m3jax.serve.worker.worker import Worker

__all__ = ["Worker"]
