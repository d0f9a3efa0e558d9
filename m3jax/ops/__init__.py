"""The operations of a layer where they run: which schedule of `m3jax.msa`, or which kernel, computes a call.

Nothing else imports `pallas_kernels`. What an operation means stands in `m3jax.msa.definition`.
"""

from m3jax.ops.attend import attend_all, attend_selected, check_schedule
from m3jax.ops.backends import BACKENDS, check_backend, check_backend_name, interpret
from m3jax.ops.experts import EXPERT_PATHS, run_experts
from m3jax.ops.insert import Heads, insert, insert_backend
from m3jax.ops.project import kernel_reads, project, project_each
from m3jax.ops.select import select

__all__ = [
    "BACKENDS",
    "EXPERT_PATHS",
    "Heads",
    "attend_all",
    "attend_selected",
    "check_backend",
    "check_backend_name",
    "check_schedule",
    "insert",
    "insert_backend",
    "interpret",
    "kernel_reads",
    "project",
    "project_each",
    "run_experts",
    "select",
]
