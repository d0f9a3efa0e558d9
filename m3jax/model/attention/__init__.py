"""Attention of one layer: project, write, select, attend, project."""

from m3jax.model.attention.layer import Attention, attend_over_pages
from m3jax.model.attention.projections import Projections

__all__ = ["Attention", "Projections", "attend_over_pages"]
