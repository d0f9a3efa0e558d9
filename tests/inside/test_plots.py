"""Plots of readings: what is drawn, and how it is named."""

import numpy as np
import pytest

from m3jax.inside.plots import draw_blocks, draw_heads, draw_patches

figure = pytest.importorskip("matplotlib.figure", reason="waits for the extra plots: pip install 'm3jax[plots]'")


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
