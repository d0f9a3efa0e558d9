"""The pieces of a cache by themselves: places of tokens, contents of pages, host memory, a draft's single tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import tiny
from support.pytrees import assert_settings_are_static

from m3jax import cache as cache_package
from m3jax.cache import Cache, LayerCall
from m3jax.cache.device import page_shards, pages_of_rows
from m3jax.cache.device_pages import StackCache
from m3jax.cache.drafted import AfterFirst, DraftedCache
from m3jax.cache.layer_pages import CallPages
from m3jax.cache.offload.host import HostMemory, NumpyPages
from m3jax.cache.prefix import common_length
from m3jax.cache.scales import measure_scales
from m3jax.cache.storage import Places, Scales, held_page, stored
from m3jax.msa.share import Share
from m3jax.msa.views import Paged
from m3jax.parallel import make_mesh

SIZE = 8  # tokens of a page in `tiny.config`


def ints(*values: object) -> jax.Array:
    return jnp.array(values, jnp.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def test_settings_of_caches_are_no_arrays():
    assert_settings_are_static(cache_package)


# Places


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


# Contents of pages


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


def test_what_is_stored_in_float8_is_scaled_and_cut_off():
    x = jnp.array([1.0, -3.0, 1000.0, -1000.0, jnp.nan])
    found = stored(x, jnp.dtype("float8_e4m3fn"), jnp.float32(2.0)).astype(jnp.float32)
    np.testing.assert_array_equal(found, [0.5, -1.5, 448, -448, np.nan])
    assert stored(x, jnp.bfloat16, jnp.float32(2.0)).tolist()[:2] == [1, -3]


def test_scales_fit_the_largest_number_and_no_smaller_headroom():
    class Probed(nnx.Module):
        def trunk(self, tokens, *, probe):
            # [B T K H]; a layer without an index branch, and one that has one
            values = {"k": jnp.array([[[[1.0], [0.0]], [[-4.0], [0.0]]]]), "v": jnp.full((1, 2, 2, 1), -2.0)}
            sparse = values | {"index_k": jnp.array([[[1.0, 0.0, -6.0], [5.0, 0.0, 0.0]]]) + 0.0 / (tokens[0, 0] - 9)}
            stacks = [jax.tree.map(lambda x: x[None], probe(of_stack, None)) for of_stack in (values, sparse)]
            return jnp.zeros((1, 2, 1)), None, stacks

    model = Probed()
    scales, sparse = measure_scales(model, ints([1, 2]), headroom=1.0)
    np.testing.assert_allclose(sparse.index_k, [6 / 448])
    np.testing.assert_array_equal(sparse.k, scales.k)
    with pytest.raises(ValueError, match="keys or values are not finite on these tokens: check the checkpoint"):
        measure_scales(model, ints([9, 2]))
    np.testing.assert_allclose(scales.k, [[4 / 448, 1]])
    np.testing.assert_allclose(scales.v, [[2 / 448, 2 / 448]])
    assert scales.index_k.tolist() == [1]
    wide, _ = measure_scales(model, ints([1, 2]))
    np.testing.assert_allclose(wide.v, 2 * scales.v)
    with pytest.raises(ValueError, match=r"headroom = 0.99: must be at least 1"):
        measure_scales(model, ints([1, 2]), headroom=0.99)


# Host memory


@pytest.fixture(scope="module")
def memory():
    """Eleven pages of a sparse stack of two layers with two KV heads in host memory, and what they hold."""
    config = tiny.config("MM", num_key_value_heads=2, index_n_heads=2, head_dim=4, rotary_dim=4, index_head_dim=4)
    host = HostMemory(Cache.pool(config, 11, 1, 2, "float32", device_pages=2), "numpy")
    kv = host.pages[0].kv
    assert kv.shape == (2, 22, 2, SIZE, 4) and host.nbytes == kv.nbytes == 44 * host.page_bytes
    return host


def test_pages_of_the_host_are_copied_read_and_written(memory):
    """More than go with one call; to the first page and to the last, which is no page -1."""
    kv = memory.pages[0].kv
    kv[:] = normal(*kv.shape)
    before = kv.reshape(2, 11, 2, 2, SIZE, 4).copy()  # [L X K 2 P H]
    pairs = [(10, 0), (9, 1), (8, 2), (7, 3), (6, 4), (5, -1), (1, 5), (2, 6), (3, 7), (4, 10)]
    memory.copy(pairs[:1])
    expected = before.copy()
    expected[:, 0] = before[:, 10]
    np.testing.assert_array_equal(memory.pages[0].kv.reshape(before.shape), expected)
    kv[:] = before.reshape(kv.shape)
    memory.copy([(source, target) for source, target in pairs if source > 7 or target < 0])
    expected[:, [1, 2]] = before[:, [9, 8]]
    np.testing.assert_array_equal(memory.pages[0].kv.reshape(before.shape), expected)
    k, v = memory.read(np.array([10, 0, 3], np.int32))[0]
    np.testing.assert_array_equal(k, expected[:, [10, 0, 3]][:, :, :, 0])
    np.testing.assert_array_equal(v, expected[:, [10, 0, 3]][:, :, :, 1])
    pages = np.array([0, 10, -1, *range(1, 9)], np.int32)
    contents = [(normal(2, 11, 2, SIZE, 4, seed=2), normal(2, 11, 2, SIZE, 4, seed=3), None)]
    memory.write(pages, contents)
    expected[:, pages[pages >= 0]] = np.stack(contents[0][:2], axis=3)[:, pages >= 0]
    np.testing.assert_array_equal(memory.pages[0].kv.reshape(before.shape), expected)


def test_a_page_that_begins_in_a_call_is_not_copied_from_the_host(memory):
    """Nothing of it is there; one that an earlier call began is brought in first, all heads of it."""
    config = tiny.config("MM", num_key_value_heads=2, index_n_heads=2, head_dim=4, rotary_dim=4, index_head_dim=4)
    stack = Cache.pool(config, 11, 1, 2, "float32", device_pages=2).stacks[0]
    assert stack.virtual_page_ids(ints(2, -1, 0)).tolist() == [4, 5, -1, -1, 0, 1]
    kv = memory.pages[0].kv
    kv[:] = normal(*kv.shape)
    k, v, index_k = normal(1, 2, 2, 4), normal(1, 2, 2, 4, seed=1), normal(1, 2, 4)  # [B T K H], [B T I]

    @jax.jit
    def write(stack, offset):
        places = Places(ints([3, 5]), ints([3, 3]), offset + ints([0, 1]), memory.pages[0])
        call = LayerCall(jnp.int32(1), places, offset + ints([0, 1]), ints(16))
        return stack.write(call, *map(jnp.asarray, (k, v, index_k)))

    for offset, is_copied in ((0, False), (3, True)):
        found = write(stack, jnp.int32(offset))
        moved, slots = np.asarray(found.moved), np.asarray(found.slots.slot_of)[1, 6:8]  # of page 3's two heads
        assert moved[0] == 0 and (moved[1] > 0) == is_copied and (slots >= 0).all()
        for head, slot in enumerate(slots):
            for x, new, part in ((found.k, k, 0), (found.v, v, 1)):
                expected = np.where(is_copied, kv[1, 6 + head, part], 0)
                expected[offset : offset + 2] = new[0, :, head]
                np.testing.assert_array_equal(x[1, slot], expected)


def test_a_page_of_the_host_is_read_within_a_program():
    kv = normal(2, 6, 2, SIZE, 3)
    found = jax.jit(lambda layer, pages: NumpyPages(kv).read(layer, pages))(jnp.int32(1), ints(5, 0))
    np.testing.assert_array_equal(found, kv[1, [5, 0]])


# Prefixes


@pytest.mark.parametrize(
    ("some", "others", "length"),
    [
        ((), (1,), 0),
        ((1, 2), (1, 2), 2),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2, 3), (1, 9, 3), 1),
        ((4,), (5,), 0),
        ((1,), (1, 2), 1),
    ],
)
def test_tokens_with_which_both_begin(some, others, length):
    assert common_length(some, others) == common_length(list(others), list(some)) == length
    assert common_length(some, some) == len(some)


# A draft's pages


def draft_pages(num_pages=3, share=None):
    """A view of two rows, their keys and values [2 B K S H], and the pages that they have."""
    k, v = normal(2, 2, num_pages + 2, 2, 4, 3)  # [L X K P H]
    table = np.array([np.random.default_rng(row).permutation(num_pages + 2)[:num_pages] for row in range(2)], np.int32)
    view = AfterFirst(Paged(jnp.asarray(k), jnp.asarray(v), None, 1, jnp.asarray(table), jnp.float32, share))
    rows = [np.moveaxis(x[1][table], 2, 1).reshape(2, 2, -1, 3) for x in (k, v)]
    return view, rows, table


def test_single_tokens_are_read_wherever_they_stand():
    view, rows, _ = draft_pages()
    assert (view.block_size, view.num_blocks, view.num_heads, view.width, view.share) == (1, 12, 2, 3, None)
    tokens = ints([0, 3, 4, 11], [5, 7, 8, 1])
    found = view.blocks(jnp.arange(2, dtype=jnp.int32)[:, None], jnp.int32(1), tokens)
    for x, row in zip(found, rows, strict=True):
        np.testing.assert_array_equal(x[:, :, 0], np.take_along_axis(row[:, 1], np.asarray(tokens)[..., None], axis=1))


def test_the_first_slot_of_a_row_has_no_key():
    """Of a device that holds the row's second block first, its own slot 0 has one."""
    view, _, table = draft_pages()
    assert view.present(0, 3).tolist() == [[False, True, True]] * 2
    assert view.present(3, 6).tolist() == [[True] * 6] * 2
    lacking = view.replace(pages=view.pages.replace(table=jnp.asarray(np.where([[0, 1, 0]], -1, table))))
    assert lacking.present(3, 6).tolist() == [[True, False, False, False, False, True]] * 2
    shared, *_ = draft_pages(share=Share(ints(1, 0), 4, 2, ("context",)))
    assert shared.present(0, 2).tolist() == [[True, True], [False, True]]
    assert view.of_row(jnp.int32(1), 8).pages.table.tolist() == [[*table[1].tolist(), -1]]
    assert view.of_row(jnp.int32(0), 6).pages.table.shape == (1, 3) and view.of_row(jnp.int32(0)).num_blocks == 12


def test_a_page_keeps_the_feature_of_its_last_token():
    """And lends it to the first slot of the page behind it; copied, read and written with its page."""
    cache, layer = Cache.pool(tiny.config("d"), 5, 2, 3), tiny.config("d", hidden_size=6, num_hidden_layers=1)
    cache = DraftedCache.join(cache.replace(table=ints([4, 0, 2], [1, 3, -1])), layer, "float32", None)
    assert cache.edges.shape == (5, 6) and cache.draft.k.shape == (1, 5, 4, SIZE, 16) and cache.draft.index_k is None
    of_target = 2 * 4 * 16 * 2
    assert cache.bytes_per_token == of_target + 2 * 4 * 16 * 4 + 6 * 4 / SIZE
    features = normal(2, 3, 6)
    places = cache.places(ints([6, 7, 15], [7, 8, -1]), ints(16, 9))
    cache = cache.with_edges(jnp.asarray(features), places)
    expected = np.zeros((5, 6), np.float32)
    expected[[4, 0, 1]] = features[0, 1], features[0, 2], features[1, 0]
    np.testing.assert_array_equal(cache.edges, expected)
    np.testing.assert_array_equal(cache.edge(ints(8, 15)), expected[[4, 1]])
    np.testing.assert_array_equal(cache.edge(ints(16, 8)), expected[[0, 1]])
    copied = cache.copy_pages(ints(4, 0, 1), ints(0, -1, 2))
    expected[[0, 2]] = expected[[4, 1]]
    np.testing.assert_array_equal(copied.edges, expected)
    target, (k, v, edges) = copied.read_pages(ints(2, 4))
    np.testing.assert_array_equal(edges, expected[[2, 4]])
    back = copied.write_pages(ints(3, -1), (target, (k + 1, v + 2, edges + 3)))
    expected[3] = expected[2] + 3
    np.testing.assert_allclose(back.edges, expected)
    assert float(back.draft.k[0, 3].min()) == 1 and float(back.draft.v[0, 3].min()) == 2
    assert not back.draft.k[0, :3].any() and not back.draft.v[0, 4].any()


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
