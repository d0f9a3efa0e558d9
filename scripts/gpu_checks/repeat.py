"""The run of a kernel in every check of `gpu_check.py`: twice, each time on memory that is filled with NaN."""

import jax
import jax.numpy as jnp
import numpy as np


def poison() -> None:
    """Fill freed memory with NaN, so that a part of an output that no program writes is noticed."""
    jax.block_until_ready([jnp.full((1 << 28,), jnp.nan, jnp.float32) for _ in range(4)])


def twice(fn, *args):
    """Return the result, and True if a second run gave the same bits."""
    runs = []
    for _ in range(2):
        poison()
        runs.append([np.asarray(x) for x in jax.tree.leaves(fn(*args))])
    return runs[0], all((a.tobytes() == b.tobytes()) for a, b in zip(*runs, strict=True))
