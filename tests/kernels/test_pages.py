"""Pages: where blocks lie, which query counts, and what each backend can reach."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_common, triton_common
from pallas_kernels.pages import contiguous, paged, seen_positions

E4M3 = jnp.float8_e4m3fn


def array(*shape: int, dtype="float32") -> jax.Array:
    return jnp.zeros(shape, dtype)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("has_heads", [True, False])
@pytest.mark.parametrize("layer", [None, 1])
def test_a_block_is_found_in_one_piece_and_in_pages(has_heads, layer):
    """Of each row, head and block; a page outside the pool reads as page 0, and is not held."""
    batch, heads, blocks, size, width, count = 2, 3 if has_heads else 1, 3, 4, 2, 5
    of_heads = (heads,) if has_heads else ()
    stack = (2,) if layer is not None else ()
    rows = numbers(*stack, batch, *of_heads, blocks * size - 1, width)  # the last block is padded
    whole = np.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, 1), (0, 0)])
    whole = (whole if layer is None else whole[layer]).reshape(batch, heads, blocks, size, width)
    in_pages = numbers(*stack, count, *of_heads, size, width)
    of_layer = (in_pages if layer is None else in_pages[layer]).reshape(count, heads, size, width)
    table = np.array([[4, 0, -1], [5, 2, 1]], np.int32)
    own = None if layer is None else jnp.int32(layer)
    in_order = contiguous(jnp.asarray(rows), size, own)
    by_table = paged(*map(jnp.asarray, (in_pages, table)), own, num_devices=2)
    for made, devices in ((in_order, 1), (by_table, 2)):
        assert (made.block_size, made.width, made.num_blocks, made.num_devices) == (size, width, blocks, devices)
        assert made.page_bytes == size * width * 4
    assert by_table.page_count == count and in_order.page_count == rows.size // (blocks * size - 1) // width * blocks
    flat = lambda made, *at: mosaic_common.locate(made, mosaic_common.flat_finder(made, slice(None)), *at)
    for at in np.ndindex(batch, heads, blocks):
        place, entry = map(jnp.int32, at), table[at[0], at[2]]
        row, head, block = place
        for locate in (lambda made, *at: made.locate(made.finder(), *at), flat):
            page, is_held = locate(in_order, row, head, block)
            np.testing.assert_array_equal(in_order.pool[page], whole[at])
            assert is_held
            page, is_held = locate(by_table, row, head, block)
            assert bool(is_held) == (0 <= entry < count)
            np.testing.assert_array_equal(by_table.pool[page], of_layer[entry if is_held else 0, at[1]])
    assert not in_order.locate(in_order.finder(), jnp.int32(0), jnp.int32(0), jnp.int32(-1))[1]


def test_other_ranks_are_refused():
    for make in (lambda x: contiguous(x, 4), lambda x: paged(x, jnp.zeros((1, 1), jnp.int32))):
        with pytest.raises(ValueError, match=r"x has shape \(4, 4\): need"):
            make(array(4, 4))
        with pytest.raises(ValueError, match=r"x has shape \(1, 1, 1, 4, 4\): need"):
            make(array(1, 1, 1, 4, 4))


def test_padding_has_no_position():
    found = seen_positions(jnp.array([[0, 3, 4], [-1, 1, 9]], jnp.int32), jnp.array([4, 2], jnp.int32), 5)
    assert found.tolist() == [[0, 3, -1, -1, -1], [-1, 1, -1, -1, -1]]
    refs = jnp.array([[0, 3, 4], [-1, 1, 9]], jnp.int32), jnp.array([4, 2], jnp.int32)
    alone = [[int(triton_common.seen_position(*refs, row, token)) for token in range(3)] for row in range(2)]
    assert alone == [[0, 3, -1], [-1, 1, -1]]


def test_a_tpu_reads_pages_of_whole_tiles():
    """128 numbers, and 32 bytes of each of them: 8 tokens in float32, 16 in bfloat16, 32 in float8."""
    for dtype, rows in (("float32", 8), ("bfloat16", 16), (E4M3, 32)):
        made = lambda size, width, dtype=dtype: contiguous(array(1, size, width, dtype=dtype), size)
        for size in (rows, 3 * rows):
            mosaic_common.check_tiles("k", made(size, 256), False)
        mosaic_common.check_tiles("k", made(rows // 2, 64), True)  # interpreted
        for size, width in ((rows // 2, 128), (rows + 4, 128), (rows, 64), (rows, 192)):
            with pytest.raises(ValueError, match=rf"k has pages of {size} x {width} .* a multiple of {rows} tokens"):
                mosaic_common.check_tiles("k", made(size, width), False)


def test_a_pool_of_bytes_is_within_reach(unchecked):
    """Of numbers of one byte: an offset among 2 to 4 GiB of them overflows."""
    described = lambda dtype: replace(
        contiguous(array(1, 4, 8), 4), pool=jax.ShapeDtypeStruct((1 << 17, 128, 128), dtype)
    )  # 2**31 numbers
    with pytest.raises(ValueError, match="k: a pool of 2147483648 one-byte numbers: use below"):
        triton_common.check_pool("k", described(E4M3), False)
    triton_common.check_pool("k", described(jnp.bfloat16), False)
