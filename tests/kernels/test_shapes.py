"""The named shapes of kernels."""

from dataclasses import replace

from pallas_kernels.shapes import Shape


def test_figures_of_a_shape_count_what_any_method_needs():
    """Two rows whose last three of seven tokens are queries, in blocks of four, of which one is kept."""
    shape = Shape("small", 2, 3, 7, heads=6, kv_heads=2, width=5, block_size=4, top_k=1)
    pairs = 2 * (5 + 6 + 7)
    assert (shape.blocks, shape.index_flops, shape.dense_flops) == (2, 2 * 5 * 2 * pairs, 4 * 5 * 6 * pairs)
    assert shape.attention_flops == 4 * 2 * 6 * 5 * 3 * 4
    assert (shape.index_bytes, shape.dense_bytes) == (2 * 2 * 7 * 5, 2 * 2 * 2 * 2 * 7 * 5)
    assert shape.selected_bytes == 2 * 2 * 2 * 2 * 4 * 5
    assert replace(shape, top_k=9).selected_bytes == 2 * shape.selected_bytes  # no more than there are
