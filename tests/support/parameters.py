"""A maker of parameters that keeps what each was asked for: its shape, its logical axes, the terms of its sums."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from flax import nnx

from m3jax.make import dotted_path


@dataclass(frozen=True)
class Made:
    """What a constructor asked for; `fan_in` is None of norms and biases."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int | None


class KeepsMade:
    """A `m3jax.make.Make`, and a `MakeDraft`, of descriptions."""

    def weight(self, shape, axes, *, fan_in, dtype=None):
        return nnx.Param(Made(shape, axes, fan_in))

    def linear(self, shape, axes, *, inputs=1, outputs=1):
        first_output = len(shape) - outputs
        return self.weight(shape, axes, fan_in=math.prod(shape[first_output - inputs : first_output]))

    def norm(self, shape, *, dtype=None, start=0.0):
        return nnx.Param(Made(shape, (None,) * len(shape), None))

    def token_ids(self, count):
        return nnx.Param(Made((count,), (None,), None))


def made(module: nnx.Module) -> dict[str, Made]:
    """What a module's parameters were made from, by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(module)
    return {dotted_path(path): leaf for path, leaf in leaves}


def assert_axes_name_their_sizes(module: nnx.Module, sizes: Mapping[str, int | set[int]]) -> None:
    """Each dimension with a logical name has that name's size, and each of such a size has the name, if any has."""
    for name, parameter in made(module).items():
        assert len(parameter.axes) == len(parameter.shape), name
        for axis, size in zip(parameter.axes, parameter.shape, strict=True):
            allowed = sizes.get(axis, size)
            assert size in (allowed if isinstance(allowed, set) else {allowed}), f"{name}: {axis!r} of size {size}"
