"""The cache on the device: places of tokens, contents of pages, and where the arrays lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import tiny
from support.pytrees import assert_settings_are_static

from m3jax import cache as cache_package
from m3jax.cache import Cache, CallPages, LayerCall, Places, Scales, StackCache
from m3jax.cache.device import page_shards, pages_of_rows
from m3jax.cache.storage import held_page
from m3jax.parallel import make_mesh

SIZE = 8  # tokens of a page in `tiny.config`


def ints(*values: object) -> jax.Array:
    return jnp.array(values, jnp.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def test_settings_of_caches_are_no_arrays():
    assert_settings_are_static(cache_package)


def test_a_token_lies_in_the_page_of_its_block_and_padding_nowhere():
    """At the first and last token of a page and of a row; behind the keys, behind the table, and before 0."""
    memory, ones = jnp.zeros((1, 9, 1, SIZE, 2)), jnp.ones((1, 1))
    pool = StackCache(memory, memory, None, Scales(ones, ones, ones[0]))
    cache = Cache((pool,), ints([4, 7], [2, 0]))
    assert (cache.max_length, cache.num_pages, cache.page_size) == (16, 9, 8)
    assert cache.bytes_per_token == 16 and cache.nbytes == 2 * 9 * 8 * 2 * 4 + 3 * 4 + 4 * 4
    places = cache.places(ints([0, 7, 8, 15, 16], [-1, 3, 4, 12, 5]), ints(17, 5))
    assert places.page.tolist() == [[4, 4, 7, 7, -1], [-1, 2, 2, -1, -1]]
    assert places.offset[0].tolist() == [0, 7, 0, 7, 0] and places.offset[1].tolist()[1:3] == [3, 4]
    assert places.table is cache.table and places.share is None and places.host is None
    pages = ints([-1, 0, 8, 9, 10], [0, 1, 2, 3, 4])
    assert held_page(places.replace(page=pages), 9).tolist() == [[9, 0, 8, 9, 9], [0, 1, 2, 3, 4]]
    nowhere = Places.nowhere(ints([0, 1], [0, 1]))
    assert nowhere.table.shape == (2, 0) and nowhere.page.tolist() == nowhere.offset.tolist() == [[-1, -1]] * 2


def test_each_device_holds_every_nth_block_of_a_row_from_its_first_page_on():
    """Three devices with four pages each; rows that begin on the second, on the first, and one without pages."""
    table = ints([5, 8, 1, 6], [3, 4, 9, 0], [-1, -1, -1, -1])
    places = Places(table, ints([5, 1], [9, 0], [-1, -1]), ints([0, 1], [2, 3], [0, 0]))
    alone = places.on_this_device

    def on_device(_):
        found = places.on_this_device(("context",), 4, SIZE)
        return found.table, found.page, found.share.first

    assert jax.vmap(lambda _: jnp.int32(alone(("context",), 12, SIZE) is places), axis_name="context")(ints(0)) == 1
    tables, pages, firsts = jax.vmap(on_device, axis_name="context")(jnp.arange(3))
    assert firsts.tolist() == [[2, 0, 0], [0, 1, 1], [1, 2, 2]]
    for device in range(3):
        for row, begins_on in ((0, 1), (1, 0)):
            own = range((device - begins_on) % 3, 4, 3)
            held = [int(table[row, block]) - 4 * device for block in own]
            found = tables[device, row].tolist()
            assert found[: len(held)] == held and all(0 <= page < 4 for page in held)
            assert all(not 0 <= page < 4 for page in found[len(held) :])
        assert all(not 0 <= page < 4 for page in tables[device, 2].tolist())
        np.testing.assert_array_equal(pages[device], np.asarray(places.page) - 4 * device)


@pytest.mark.usefixtures("eight_devices")
def test_rows_have_room_on_every_device_wherever_they_begin():
    assert pages_of_rows([5, 1, 6], 1) == 12 and pages_of_rows([5, 1, 6], 3) == 3 * (2 + 1 + 2)
    assert page_shards(None) == 1 and page_shards(make_mesh(2, 1, 2, 2)) == 4
    config = tiny.config("dM")
    cache = Cache.init(config, 3, 5 * SIZE, mesh=make_mesh(context=2, expert=2))
    table, of_device = np.asarray(cache.table), cache.num_pages // 4
    assert len(set(table.ravel())) == 15 and table.max() < cache.num_pages == 4 * 2 * 3
    for row, pages in enumerate(table):  # in turn, those of row b from device b on
        assert (pages // of_device).tolist() == [(row + block) % 4 for block in range(5)]


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_pool_has_at_least_one_of_each(counts):
    with pytest.raises(ValueError, match=r"pages = {}, batch = {}, blocks = {}: each must".format(*counts)):
        Cache.pool(tiny.config("d"), *counts)


def test_pages_are_copied_read_and_written_whole():
    """In every layer; the first and the last page too, and a target below 0 or behind the last page is dropped."""
    k, v, index_k = normal(2, 4, 2, SIZE, 3), normal(2, 4, 2, SIZE, 3, seed=1), normal(2, 4, SIZE, 5)
    one = Scales(jnp.ones((2, 2)), jnp.ones((2, 2)), jnp.ones(2))
    sparse, dense = (StackCache(*map(jnp.asarray, (k, v)), index, one) for index in (jnp.asarray(index_k), None))
    source, target = ints(3, 1, 2, 1), ints(0, 3, -1, 4)
    for stack, given in ((sparse, (k, v, index_k)), (dense, (k, v))):
        cache = Cache((stack,), ints([0]))
        copied = cache.copy_pages(source, target).stacks[0]
        for found, before in zip((copied.k, copied.v, copied.index_k)[: len(given)], given, strict=True):
            expected = before.copy()
            expected[:, [0, 3]] = before[:, [3, 1]]
            np.testing.assert_array_equal(found, expected)
        contents = cache.read_pages(ints(2, 0))
        for found, before in zip(contents[0], given, strict=False):
            np.testing.assert_array_equal(found, before[:, [2, 0]])
        assert (contents[0][2] is None) == (stack is dense)
        back = copied.write_pages(ints(0, 3), cache.stacks[0].read_pages(ints(0, 3)))
        for found, before in zip(jax.tree.leaves(back), jax.tree.leaves(stack), strict=True):
            np.testing.assert_array_equal(found, before)


def test_new_tokens_are_written_to_their_places_alone():
    memory = jnp.zeros((2, 3, 2, 4, 3))
    stack = StackCache(memory, memory, jnp.zeros((2, 3, 4, 5)), Scales(jnp.ones((2, 2)), jnp.ones((2, 2)), jnp.ones(2)))
    k, v, index_k = normal(2, 2, 2, 3), normal(2, 2, 2, 3, seed=1), normal(2, 2, 5)  # [B T K H], [B T I]
    places = Places(ints([0], [0]), ints([2, 2], [-1, 0]), ints([1, 3], [2, 0]))
    call = LayerCall(jnp.int32(1), places, ints([17, 19], [-1, 0]), ints(20, 1))
    found = stack.write(call, *map(jnp.asarray, (k, v, index_k)))
    for memory, new, has_heads in ((found.k, k, True), (found.v, v, True), (found.index_k, index_k, False)):
        expected = np.zeros(memory.shape, np.float32)
        for row, token, page, offset in ((0, 0, 2, 1), (0, 1, 2, 3), (1, 1, 0, 0)):
            expected[(1, page, slice(None), offset) if has_heads else (1, page, offset)] = new[row, token]
        np.testing.assert_array_equal(memory, expected)


def test_a_call_without_a_cache_reads_what_its_layer_has_just_written():
    """For that layer alone. What a program is compiled for, such as the schedule, is none of a call's arrays."""
    k, v, index_k = normal(2, 5, 1, 3), normal(2, 5, 1, 3, seed=1), normal(2, 5, 4)  # [B T K H], [B T I]
    places = Places.nowhere(ints(range(5), range(5)))
    call = LayerCall(jnp.int32(1), places, ints(range(5), range(5)), ints(5, 5), schedule="blockwise", backend="xla")
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(call))
    empty = CallPages(block_size=4)
    pages = empty.write(call, *map(jnp.asarray, (k, v, index_k)))
    assert len(jax.tree.leaves(pages)) == 3 and jax.tree.leaves(empty) == []
    view, index = pages.view(call.layer, places, jnp.float32), pages.index_view(call.layer, places, jnp.float32)
    assert (view.block_size, view.num_blocks, index.block_size, index.num_blocks) == (4, 2, 4, 2)
    for found, new in zip(view.run(0, 2), (k, v), strict=True):
        np.testing.assert_array_equal(found[:, :, :5], np.moveaxis(new, 2, 1))
    np.testing.assert_array_equal(index.run(0, 2)[:, :5], index_k)
    assert jax.tree.structure(pages.after_layer()) == jax.tree.structure(empty)
    assert pages.insert_backend(call, jnp.asarray(k), 2, jnp.float32) == "xla"


@pytest.mark.usefixtures("eight_devices")
def test_arrays_of_pages_lie_where_their_axes_say():
    mesh = make_mesh(2, 1, 2, 2)
    cache = Cache.pool(tiny.config("M"), 8, 1, 2, mesh=mesh)
    pages = ("data", "context", "expert")
    expected = [P(None, pages, "tensor", None, None)] * 2 + [P(None, pages, None, None)]
    expected += [P(None, "tensor"), P(None, "tensor"), P(None)]
    assert cache.stacks[0].partition_specs(mesh) == expected
    for array, spec in zip(jax.tree.leaves(cache), [*expected, P(None, None)], strict=True):  # the table is everywhere
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    alone = jax.tree.leaves(Cache.pool(tiny.config("M"), 8, 1, 2))
    assert all(array.committed and len(array.sharding.device_set) == 1 for array in alone)
