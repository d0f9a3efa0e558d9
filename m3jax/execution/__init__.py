"""The ways to compute a call of the model: one protocol, and its implementations beside each other."""

from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from m3jax.config import M3Config
from m3jax.execution.compute import Compute, Remat
from m3jax.execution.divided import Divided
from m3jax.execution.fast import Fast, quantises_activations
from m3jax.execution.keep import Keep, KeepBoth, KeepNamed, KeepNothing, KeepOfEach, KeepResidual, Probe
from m3jax.execution.layers import run_layers, take_apart
from m3jax.execution.named import NOTHING, Edit, Inside, Values
from m3jax.execution.ordered import Ordered, kernels_order
from m3jax.execution.projections import Projections
from m3jax.execution.protocol import Execution
from m3jax.execution.tiled import Tiled
from m3jax.execution.tiled_over_mesh import TiledOverMesh

__all__ = [
    "NOTHING",
    "Compute",
    "Divided",
    "Edit",
    "Execution",
    "Fast",
    "Inside",
    "Keep",
    "KeepBoth",
    "KeepNamed",
    "KeepNothing",
    "KeepOfEach",
    "KeepResidual",
    "Ordered",
    "Probe",
    "Projections",
    "Remat",
    "Tiled",
    "TiledOverMesh",
    "Values",
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
        # Without a cache, as in training, XLA divides a call as it likes, but for the heads of attention.
        return (Divided if compute.is_divided and has_cache else Fast)(compute, has_cache)
    if compute.is_divided:
        return TiledOverMesh(compute, has_cache)
    by_kernels = not quantises_activations(parameters) and kernels_order(config, dtype, compute.backend)
    return (Ordered if by_kernels else Tiled)(compute, has_cache)
