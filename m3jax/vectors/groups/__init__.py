"""The groups of golden vectors, in the order of a layer."""

from m3jax.vectors.groups import (
    cached,
    cells,
    eagle3,
    experts,
    model,
    mxfp8,
    norm,
    rotary,
    sampling,
    selection,
    shards,
    sparse_attention,
    verification,
)

_ALL = (
    *(selection.GROUP, sparse_attention.GROUP, *cached.GROUPS, cells.GROUP, shards.GROUP, experts.GROUP, norm.GROUP),
    *(rotary.GROUP, mxfp8.GROUP, sampling.GROUP, verification.GROUP, eagle3.GROUP, model.GROUP),
)
GROUPS = {group.name: group for group in _ALL}

__all__ = ["GROUPS"]
