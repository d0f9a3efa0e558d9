"""The rules table: which mesh axes divide an axis of an array, by its logical name, in parameters and caches alike."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

PAGE_AXES = ("data", "context", "expert")
# The mesh axes that divide an axis of this name. An axis that is not named here, and None, is never divided.
RULES: dict[str, str | tuple[str, ...]] = {
    "batch": "data",
    "tokens": "data",
    "pages": PAGE_AXES,
    "vocab": "tensor",
    "logits": ("context", "expert", "tensor"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "vision_heads": "tensor",
    "vision_mlp": "tensor",
}
# Fewer KV heads than devices is normal (M3 has 4), and so are tokens of one prompt; a head lies over all axes that
# divide it; and the vision tower, a small part of a model, does not say over how many devices the rest may lie.
_AS_FAR_AS_EVEN = frozenset({"kv_heads", "tokens", "logits", "vision_heads", "vision_mlp"})


def spec(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh) -> PartitionSpec:
    """Return the partition of an array over a mesh, by the rules.

    A dimension is divided over all of its mesh axes, or it is an error. Those of `_AS_FAR_AS_EVEN` leave out the first
    of their axes until the others divide them; over none they are whole on each device.

    Args:
      shape: its shape.
      axes: one logical name, or None, per dimension.
      mesh: a mesh with the axes of `make_mesh`.

    Raises:
      ValueError: a dimension that its mesh axes do not divide, and have to.
    """
    partition = []
    for size, name in zip(shape, axes, strict=True):
        mesh_axes = RULES.get(name)
        names = mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,)
        count = lambda names: math.prod(mesh.shape.get(axis, 1) for axis in names)
        if name in _AS_FAR_AS_EVEN:
            while size % count(names):
                names = names[1:]
        parts = count(names)
        if size % parts:
            raise ValueError(
                f"axis {name!r} of size {size} does not divide over {parts} devices of mesh axis {mesh_axes!r}; choose "
                f"a {mesh_axes!r} size that divides {size}"
            )
        partition.append(None if parts == 1 else names if isinstance(mesh_axes, tuple) else mesh_axes)
    return PartitionSpec(*partition)


def sharding(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh | None) -> jax.sharding.Sharding:
    """Return the sharding of an array: divided over a mesh by the rules, or whole on one device.

    Args:
      shape, axes: as in `spec`.
      mesh: divides it by the rules; None puts it whole on this process's first device.
    """
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, spec(shape, axes, mesh))
