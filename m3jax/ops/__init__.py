"""The operations of a layer where they run: which schedule of `m3jax.msa`, or which kernel, computes a call.

Nothing else imports `pallas_kernels`. `m3jax.spec.msa` defines the operations.
"""

from m3jax.ops.attend import attend_all, attend_selected, check_schedule
from m3jax.ops.backends import BACKENDS, check_backend, check_backend_name, choose, interpret
from m3jax.ops.cases import OrderedCase, PeersCase, ProductCase
from m3jax.ops.collectives import all_gather, exchange_backend, psum, sum_of_parts
from m3jax.ops.experts import EXPERT_PATHS, experts_case, joins_shared, run_experts, sums_in_tiles
from m3jax.ops.few_tokens import add_norm, choose_experts
from m3jax.ops.insert import Heads, insert, insert_backend
from m3jax.ops.ordered import norm_rope_in_order, unembed_in_order
from m3jax.ops.project import project, project_each
from m3jax.ops.select import select

__all__ = [
    "BACKENDS",
    "EXPERT_PATHS",
    "Heads",
    "OrderedCase",
    "PeersCase",
    "ProductCase",
    "add_norm",
    "all_gather",
    "attend_all",
    "attend_selected",
    "check_backend",
    "check_backend_name",
    "check_schedule",
    "choose",
    "choose_experts",
    "exchange_backend",
    "experts_case",
    "insert",
    "insert_backend",
    "interpret",
    "joins_shared",
    "norm_rope_in_order",
    "project",
    "project_each",
    "psum",
    "run_experts",
    "select",
    "sum_of_parts",
    "sums_in_tiles",
    "unembed_in_order",
]
