"""The ways to compute a call of the model: one protocol, and its implementations beside each other."""

from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from m3jax.config import M3Config
from m3jax.execution.compute import Compute, Remat
from m3jax.execution.divided import Divided
from m3jax.execution.fast import Fast, quantises_activations
from m3jax.execution.layers import run_layers, take_apart
from m3jax.execution.ordered import Ordered, kernels_order
from m3jax.execution.over_mesh import OverMesh
from m3jax.execution.projections import Projections
from m3jax.execution.protocol import Execution
from m3jax.execution.tap import NO_TAPS, Edit, Probe, Tap, Taps
from m3jax.execution.tiled import Tiled
from m3jax.execution.tiled_over_mesh import TiledOverMesh

__all__ = [
    "NO_TAPS",
    "Compute",
    "Divided",
    "Edit",
    "Execution",
    "Fast",
    "Ordered",
    "OverMesh",
    "Probe",
    "Projections",
    "Remat",
    "Tap",
    "Taps",
    "Tiled",
    "TiledOverMesh",
    "execution_of",
    "run_layers",
    "take_apart",
]


def execution_of(
    compute: Compute, config: M3Config, dtype: DTypeLike, parameters: PyTree[Array], has_cache: bool
) -> Execution:
    """Return the implementation that runs a model's calls on the platform that a program is traced for.

    Args:
      compute: the model's settings.
      config: the model's.
      dtype: of the activations.
      parameters: of the layers.
      has_cache: whether the calls have a cache.
    """
    if not compute.invariant:
        if not compute.is_divided:
            return Fast(compute, has_cache)
        return (Divided if has_cache else OverMesh)(compute, has_cache)
    if compute.is_divided:
        return TiledOverMesh(compute, has_cache)
    by_kernels = not quantises_activations(parameters) and kernels_order(config, dtype, compute.backend)
    return (Ordered if by_kernels else Tiled)(compute, has_cache)
