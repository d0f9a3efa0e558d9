"""The one answer to where a function that is being traced will run."""

import os

import jax


def platform() -> str:
    """The kind of device that the function being traced is for: "cpu", "gpu" or "tpu".

    That of the abstract mesh where one is set, as when a program is compiled for devices that are not there
    (`jax.sharding.use_abstract_mesh`); else that of JAX's default devices. Every choice between ways to compute the
    same thing asks here, while tracing.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> str | None:
    """The compute capability of JAX's first GPU, such as "9.0"; None elsewhere, or where programs are lowered alone."""
    return getattr(jax.local_devices()[0], "compute_capability", None)


def reserves_gpu_memory() -> bool:
    """True if XLA takes a GPU's memory when it starts, as by default, and no more of it while programs run.

    Of the environment variables that jax reads for it: `XLA_PYTHON_CLIENT_PREALLOCATE`, `XLA_PYTHON_CLIENT_ALLOCATOR`.
    """
    takes_all = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")
    return takes_all and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() in ("default", "bfc")
