"""Checkpoints: hub folders (BF16, MXFP8) to parameters and back, and Orbax."""

from m3jax.checkpoint.draft import load_draft, save_draft
from m3jax.checkpoint.loading import LoadReport, load, load_with_report
from m3jax.checkpoint.orbax import load_orbax, save_orbax
from m3jax.checkpoint.parameters import hub_parameters
from m3jax.checkpoint.reader import CheckpointError
from m3jax.checkpoint.saving import save

__all__ = [
    "CheckpointError",
    "LoadReport",
    "hub_parameters",
    "load",
    "load_draft",
    "load_orbax",
    "load_with_report",
    "save",
    "save_draft",
    "save_orbax",
]
