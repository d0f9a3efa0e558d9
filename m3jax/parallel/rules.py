"""Logical axis names -> mesh axes, for parameters and caches alike."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

# An axis that is not named here, and None, is never divided.
PAGE_AXES = ("data", "context", "expert")
RULES: dict[str, str | tuple[str, ...]] = {
    "batch": "data",
    "tokens": "data",
    "pages": PAGE_AXES,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
}
# Fewer KV heads than devices is normal (M3 has 4), and so are tokens of one prompt: then each device has them all.
_REPLICATED_IF_UNEVEN = frozenset({"kv_heads", "tokens"})


def spec(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh) -> PartitionSpec:
    """The partition of one array.

    Args:
      shape: its shape.
      axes: one logical name, or None, per dimension.
      mesh: a mesh with the axes of `make_mesh`.

    Raises:
      ValueError: a dimension that its mesh axis does not divide.
    """
    return PartitionSpec(*(_mesh_axis(size, name, mesh) for size, name in zip(shape, axes, strict=True)))


def _mesh_axis(size: int, name: str | None, mesh: Mesh) -> str | tuple[str, ...] | None:
    axis = RULES.get(name)
    parts = math.prod(mesh.shape.get(a, 1) for a in (axis if isinstance(axis, tuple) else (axis,)))
    if parts == 1:
        return None
    if size % parts:
        if name in _REPLICATED_IF_UNEVEN:
            return None
        raise ValueError(
            f"axis {name!r} of size {size} does not divide over {parts} devices of mesh axis {axis!r}; choose a "
            f"{axis!r} size that divides {size}"
        )
    return axis


def sharding(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh | None) -> jax.sharding.Sharding:
    """Where an array lives: divided over a mesh by the rules, or whole on the first device without one."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, spec(shape, axes, mesh))
