"""Makes meshes of devices, from sizes or from text."""

import math

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "context", "expert", "tensor")


def make_mesh(data: int = 1, context: int = 1, expert: int = 1, tensor: int = 1) -> Mesh:
    """Make a mesh of data x context x expert x tensor devices, the first ones that JAX lists.

    Rows lie on the data axis, experts on theirs, heads and the width of MLPs on the tensor axis. The pages of the cache
    are divided over data x context x expert. Weights are whole on each device of the context axis, which shares out
    what the routed experts have to compute.

    Raises:
      ValueError: a size below 1, or more devices than there are.
    """
    shape = (data, context, expert, tensor)
    needed, available = math.prod(shape), jax.devices()
    if min(shape) < 1 or needed > len(available):
        sizes = ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(f"mesh {sizes} needs {needed} devices, there are {len(available)}; "
                         "give sizes of at least 1 whose product is at most that")  # fmt: skip
    # The default of `axis_types` differs between versions of JAX.
    axis_types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=axis_types, devices=available[:needed])


def parse_mesh(text: str) -> Mesh:
    """Make a mesh from text like "data=2,tensor=4"; axes left out have size 1.

    Raises:
      ValueError: an unknown axis, a size that is no integer, or a mesh that does not fit.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal():
            raise ValueError(f"mesh {text!r}: write axis=size pairs of {', '.join(AXES)}, as in data=2,tensor=4")
        sizes[name] = int(size)
    return make_mesh(**sizes)
