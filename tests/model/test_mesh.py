"""Meshes, and what lies where on them: parameters by their logical axes, tokens by their number."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from m3jax.parallel import mesh as meshes
from m3jax.parallel.mesh import AXES, as_mesh, make_mesh, parse_mesh
from m3jax.parallel.rules import PAGE_AXES, RULES, spec
from m3jax.parallel.tokens import token_axes

pytestmark = pytest.mark.usefixtures("eight_devices")


def test_a_mesh_has_its_axes_in_order_and_no_device_more():
    assert dict(make_mesh().shape) == dict.fromkeys(AXES, 1)
    for axis in AXES:
        assert dict(make_mesh(**{axis: 2}).shape) == dict.fromkeys(AXES, 1) | {axis: 2}
    assert dict(make_mesh(1, 2, 1, 4).shape) == dict(data=1, context=2, expert=1, tensor=4)
    assert list(make_mesh(data=2, tensor=2).devices.flat) == jax.devices()[:4]
    assert dict(parse_mesh("tensor=2,data=4").shape) == dict(data=4, context=1, expert=1, tensor=2)
    assert as_mesh(None) is None and as_mesh("expert=2") == make_mesh(expert=2) == as_mesh(make_mesh(expert=2))
    needed = r"mesh data=1,context=1,expert=3,tensor=3 needs 9 devices, there are 8; .*device_count=9 to divide the CPU"
    with pytest.raises(ValueError, match=needed):
        make_mesh(expert=3, tensor=3)
    with pytest.raises(ValueError, match=r"needs 8 devices, there are 8; .* whose product is at most that$"):
        make_mesh(data=-2, context=-4)


def test_another_mesh_is_refused_with_the_nearest_one(unchecked):
    devices = np.array(jax.devices())
    other = lambda shape, names: jax.sharding.Mesh(devices[: math.prod(shape)].reshape(shape), names)
    for mesh, nearest in (
        (other((2, 2), ("dp", "model")), "make_mesh(data=2, tensor=2)"),
        (other((2, 2, 2), ("fsdp", "sp", "ep")), "make_mesh(data=2, context=2, expert=2)"),
        (other((2, 2, 2), ("batch", "cp", "tp")), "make_mesh(data=2, context=2, tensor=2)"),
        (other((2, 2), ("x", "y")), "make_mesh(tensor=4)"),
        (other((2, 4), ("data", "tensor")), "make_mesh(data=2, tensor=4)"),
    ):
        with pytest.raises(ValueError) as refused:
            as_mesh(mesh)
        assert str(refused.value).endswith(f"m3jax.{nearest} is the nearest")
    with pytest.raises(ValueError, match="mesh is a tuple: make one with"):
        as_mesh((2, 4))


def test_several_processes_take_all_devices(monkeypatch):
    monkeypatch.setattr(meshes.jax, "process_count", lambda: 2)
    assert make_mesh(tensor=8).size == 8
    with pytest.raises(
        ValueError, match=r"mesh data=1,context=1,expert=1,tensor=4 has 4 devices, the 2 processes have 8"
    ):
        make_mesh(tensor=4)


SHAPES = [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 2, 4), (1, 4, 1, 2), (8, 1, 1, 1)]


def divided(size: int, name: str | None, shape: dict[str, int]) -> tuple[str, ...] | None:
    """The axes that divide a dimension, by their definition; None where it is refused."""
    rule = RULES.get(name, ())
    axes = rule if isinstance(rule, tuple) else (rule,)
    last_ones = [axes[first:] for first in range(len(axes) + 1)]
    fits = [x for x in last_ones if size % math.prod(shape[axis] for axis in x) == 0]
    if name not in ("kv_heads", "tokens", "logits", "vision_heads", "vision_mlp") and axes not in fits:
        return None
    return fits[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_dimension_lies_over_the_axes_of_its_rule(shape):
    """Over all of them, or the last ones that divide it where the rule says so; over axes of one device it is whole."""
    mesh = make_mesh(*shape)
    for name, size in itertools.product((*RULES, None, "layers"), (1, 2, 3, 4, 6, 8, 12, 16)):
        axes = divided(size, name, dict(mesh.shape))
        if axes is None:
            with pytest.raises(ValueError, match=f"axis {name!r} of size {size} does not divide over"):
                spec((5, size), (None, name), mesh)
            continue
        parts = math.prod(mesh.shape[axis] for axis in axes)
        expected = None if parts == 1 else axes if isinstance(RULES[name], tuple) else axes[0]
        assert spec((5, size), (None, name), mesh) == P(None, expected), (name, size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_lie_over_the_axes_that_divide_them(shape):
    """From the least number on; one row's columns, several rows' rows; the stream over the tensor axis too."""
    mesh = make_mesh(*shape)
    for of_tokens in ((4,), (7,), (8,), (12,), (16,), (1, 8), (1, 12), (2, 8), (6, 4), (8, 1)):
        found = token_axes(of_tokens, mesh, least=8)
        dim = 1 if of_tokens[0] == 1 and len(of_tokens) == 2 else 0
        axes, parts = [], 1
        for axis in PAGE_AXES if math.prod(of_tokens) >= 8 else ():
            if mesh.shape[axis] > 1 and of_tokens[dim] % (parts * mesh.shape[axis]) == 0:
                axes, parts = [*axes, axis], parts * mesh.shape[axis]
        tensor = mesh.shape["tensor"]
        is_scattered = math.prod(of_tokens) >= 8 and tensor > 1 and of_tokens[dim] // parts % tensor == 0
        expected = (tuple(axes), is_scattered, dim, len(of_tokens))
        assert (found.products, found.is_scattered, found.dim, found.num_leading) == expected, of_tokens
        assert found.whole == tuple(x for x in PAGE_AXES if mesh.shape[x] > 1 and x not in axes)
        leading = [None] * len(of_tokens)
        leading[dim] = tuple(axes) or None
        assert found.of_products("tensor", None) == P(*leading, "tensor", None)
        leading[dim] = (*axes, "tensor") if is_scattered else tuple(axes) or None
        assert found.of_stream() == P(*leading)
