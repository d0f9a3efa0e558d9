"""The pieces of readings by themselves: plots, and edits of a few numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.pytrees import assert_settings_are_static

from m3jax import inside
from m3jax.inside.edits import Add, PatchAt, Put, WithoutBlock, WithoutExpert
from m3jax.inside.plots import draw_blocks, draw_heads, draw_patches

figure = pytest.importorskip("matplotlib.figure", reason="waits for the extra plots: pip install 'm3jax[plots]'")


def test_arrays_of_edits_are_arguments():
    assert_settings_are_static(inside)


def drawn(draw, *arguments):
    """The axes that a function drew into, and those of its scale of colours, if it has one."""
    canvas = figure.Figure()
    draw(canvas.subplots(), *arguments)
    return canvas.axes


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_heads_are_drawn_by_layer_with_zero_in_the_middle():
    values = np.float32([[1, -3, 2], [0, 1, 0.5]])
    for layers, expected in ((None, ["0", "1"]), ((4, 9), ["4", "9"])):
        axes, scale = drawn(draw_heads, values, "written by heads", layers)
        (image,) = axes.get_images()
        assert image.get_clim() == (-3, 3) and image.origin == "lower"
        np.testing.assert_array_equal(image.get_array(), values)
        assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("written by heads", "query head", "layer")
        assert axes.get_xticks().tolist() == [0, 1, 2] and axes.get_yticks().tolist() == [0, 1]
        assert labels(axes.yaxis) == expected and scale is not axes
    (image,) = drawn(draw_heads, 0 * values, "nothing")[0].get_images()
    assert image.get_clim() == (-1, 1)


def test_blocks_are_drawn_as_roots_of_shares():
    reads = np.float32([[1, 0], [0.25, 0.75]])
    (axes,) = drawn(draw_blocks, reads, "who reads whom")
    (image,) = axes.get_images()
    np.testing.assert_allclose(image.get_array(), np.sqrt(reads))
    assert image.get_clim() == (0, 1)
    assert (axes.get_title(), axes.get_xlabel()) == ("who reads whom", "block read")
    assert axes.get_ylabel() == "block of the query"
    assert all(float(tick).is_integer() for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_majorticklocs())


def test_patches_are_drawn_by_layer_and_token():
    effects = np.float32([[1, 2, 3], [4, 5, 6]])
    axes, scale = drawn(draw_patches, effects, ["a", "b", "a"], "what a patch does")
    (image,) = axes.get_images()
    np.testing.assert_array_equal(image.get_array(), effects)
    assert image.origin == "lower" and scale is not axes
    assert (axes.get_title(), axes.get_ylabel()) == ("what a patch does", "layer")
    assert axes.get_xticks().tolist() == [0, 1, 2] and axes.get_yticks().tolist() == [0, 1]
    assert labels(axes.xaxis) == ["a", "b", "a"]


def test_edits_change_what_they_name():
    value = jnp.arange(6.0).reshape(1, 3, 2)
    np.testing.assert_array_equal(Add(jnp.array([1.0, 2.0]))(value), value + jnp.array([1.0, 2.0]))
    put = Put(jnp.float32(9), jnp.array([[[True], [False], [True]]]))(value.astype(jnp.bfloat16))
    assert put.dtype == jnp.bfloat16 and put.tolist() == [[[9, 9], [2, 3], [9, 9]]]
    other = jnp.stack([value + 10, value + 20])  # of layers 0 and 1
    seen = {"positions": jnp.array([[4, 5, 6]], jnp.int32), "layer": jnp.int32(1)}
    patch = PatchAt(other, jnp.int32(1), jnp.int32(5))
    assert patch(value, seen).tolist() == [[[0, 1], [22, 23], [4, 5]]]
    assert patch(value, seen | {"layer": jnp.int32(0)}).tolist() == value.tolist()
    weights = jnp.array([[[0.25, 0.75]]])
    found = WithoutExpert(jnp.int32(3))(weights, {"expert_ids": jnp.array([[[3, 1]]], jnp.int32)})
    assert found.tolist() == [[[0, 0.75]]]
    blocks = jnp.array([[[[0, 1, 2], [0, 2, -1]], [[0, 1, 2], [0, -1, -1]]]], jnp.int32)  # [B K T J]
    found = WithoutBlock(jnp.int32(0), jnp.array([True, True]))(blocks)
    assert found.tolist() == [[[[1, 2, -1], [2, -1, -1]], [[1, 2, -1], [0, -1, -1]]]]  # the own block stays
    found = WithoutBlock(jnp.int32(2), jnp.array([False, True]))(blocks)
    assert found.tolist() == blocks.tolist()
    found = WithoutBlock(jnp.int32(1), jnp.array([False, True]))(blocks)
    assert found[0, 0].tolist() == blocks[0, 0].tolist() and found[0, 1, 0].tolist() == [0, 2, -1]
