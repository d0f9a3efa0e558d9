"""Makes meshes of devices, from sizes or from text."""

import math

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "context", "expert", "tensor")


def make_mesh(data: int = 1, context: int = 1, expert: int = 1, tensor: int = 1) -> Mesh:
    """Make a mesh of data x context x expert x tensor devices, the first ones that JAX lists.

    Rows lie on the data axis, experts on theirs, heads and the width of MLPs on the tensor axis. The pages of the cache
    are divided over data x context x expert, and for all but attention the tokens of a prompt over all axes. Weights
    are whole on each device of the data and context axes.

    Args:
      data, context, expert, tensor: devices along each axis.

    Raises:
      ValueError: a size below 1, or more devices than there are; with several processes, also fewer.
    """
    shape = (data, context, expert, tensor)
    needed, available = math.prod(shape), jax.devices()
    if min(shape) < 1 or needed > len(available):
        sizes = ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        remedy = "give sizes of at least 1 whose product is at most that"
        if available[0].platform == "cpu" and needed > len(available):
            remedy += f", or start with XLA_FLAGS=--xla_force_host_platform_device_count={needed} to divide the CPU"
        raise ValueError(f"mesh {sizes} needs {needed} devices, there {'is' if len(available) == 1 else 'are'} "
                         f"{len(available)}; {remedy}")  # fmt: skip
    if jax.process_count() > 1 and needed != len(available):
        sizes = ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(f"mesh {sizes} has {needed} devices, the {jax.process_count()} processes have "
                         f"{len(available)}; give sizes whose product is that")  # fmt: skip
    # The default of `axis_types` differs between versions of JAX.
    axis_types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=axis_types, devices=available[:needed])


def parse_mesh(text: str) -> Mesh:
    """Make a mesh from text.

    Args:
      text: as in "data=2,tensor=4"; axes left out have size 1.

    Raises:
      ValueError: an unknown axis, a size that is no integer, or a mesh that does not fit.
    """
    return make_mesh(**parse_axes(text))


def parse_axes(text: str) -> dict[str, int]:
    """Return the sizes of a mesh by axis, whether or not there are so many devices.

    Args:
      text: sizes as `parse_mesh` takes them, such as "data=2,tensor=4".

    Raises:
      ValueError: an unknown axis, one that is named twice, or a size that is no integer.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal():
            raise ValueError(f"mesh {text!r}: write axis=size pairs of {', '.join(AXES)}, as in data=2,tensor=4")
        sizes[name] = int(size)
    return sizes


def as_mesh(mesh: Mesh | str | None) -> Mesh | None:
    """Return a mesh that has the four axes the model needs.

    Args:
      mesh: from `make_mesh`, text as in `parse_mesh`, or None, which stays None.

    Raises:
      ValueError: a mesh whose axes are not those of `make_mesh`, with the nearest right call; text as in `parse_mesh`.
    """
    if mesh is None:
        return None
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}: make one with m3jax.make_mesh(data=1, expert=2, tensor=4)")
    if set(mesh.axis_names) == set(AXES) and set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    # What goes by another name elsewhere; whatever is left over divides heads and widths.
    also_called = {"dp": "data", "fsdp": "data", "batch": "data", "cp": "context", "sp": "context", "ep": "expert"}
    sizes = dict.fromkeys(AXES, 1)
    for name, size in mesh.shape.items():
        sizes[name if name in AXES else also_called.get(str(name), "tensor")] *= size
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    raise ValueError(
        f"a mesh with axes {dict(mesh.shape)} of types {sorted({str(kind) for kind in mesh.axis_types})}: the rules "
        f"of sharding know {', '.join(AXES)}, all of type Auto; m3jax.make_mesh({asked}) is the nearest"
    )
