"""Capacity planning: what a slice of accelerators holds, and how fast it can be at best (docs/planning.md)."""

from m3jax.planning.arithmetic import Memory, Work
from m3jax.planning.chips import CHIPS, GIB, Chip, Slice, parse_slice
from m3jax.planning.job import M3_DRAFT, Job
from m3jax.planning.measured import MEASURED, Check, Expected, Measurement, checks, expected
from m3jax.planning.meshes import Candidate, candidates, evaluate, parse_sizes

__all__ = [
    "CHIPS",
    "GIB",
    "M3_DRAFT",
    "MEASURED",
    "Candidate",
    "Check",
    "Chip",
    "Expected",
    "Job",
    "Measurement",
    "Memory",
    "Slice",
    "Work",
    "candidates",
    "checks",
    "evaluate",
    "expected",
    "parse_sizes",
    "parse_slice",
]
