"""Keys and values in host memory: the same blocks and tokens as on the device, and only selected pages move."""

from collections.abc import Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.compilations import compilations
from support.engines import CONFIG, SIZE, engine, finish, params, preemptions, prompt, quick, runner_of, serve

import m3jax
from m3jax.cache import Cache, HostMemory, LayerCall
from m3jax.cache.offload import host
from m3jax.cache.offload.host import NumpyPages
from m3jax.cache.offload.pool import GROUP, Slots
from m3jax.cache.storage import Places
from m3jax.parallel import parse_mesh

HEADS, TOP_K = CONFIG.num_key_value_heads, CONFIG.index_topk_blocks
WORK = [
    (prompt(90, 1), params(20)),
    (prompt(13, 2), params(20, temperature=0.8, seed=3)),
    (prompt(60, 3), params(20)),
    (prompt(100, 4), params(12)),
]
# One row whose chunks select from more pages than the pool has.
NARROW = dict(max_batch=1, prefill_rows=1, prefill_chunk=64, pages=16, prefix_cache=False)


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick():
        yield


@cache
def model():
    return tiny.model(CONFIG)


@cache
def offloaded():
    """Compiled once; a request that has ended leaves pages in the pool and the prefix cache, which is part of it."""
    served = engine(model(), pages=24, device_pages=16, host_memory="pinned_host", prefix_cache=False)
    served.warmup()
    return served


@cache
def narrow():
    return engine(model(), **NARROW, device_pages=10, host_memory="numpy")


@cache
def resident():
    return serve(engine(model(), prefix_cache=False), *WORK)


def assert_same(got, expected, tolerance):
    assert [x.tokens for x in got] == [x.tokens for x in expected]
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=tolerance)


def test_offloaded_tokens_are_the_resident_ones():
    """Two programs for one sum, which another CPU may compile apart: its log-probabilities agree within 1e-6.

    Bits across programs are what the invariant mode promises, and what `model/test_invariance.py` asks of this pool.
    Most tests below have host memory of the other kind, numpy's.
    """
    served = offloaded()
    with compilations() as seen:
        got = serve(served, *WORK)
    assert not seen
    assert_same(got, resident(), 1e-6)
    assert preemptions(served) > 0
    report = served.offload
    assert report["misses"] > 0 and 0.5 < report["hit_rate"] < 1
    assert report["host_bytes"] == 24 / 16 * report["device_bytes"]
    written = sum(len(p) + q.max_new_tokens for p, q in WORK)
    page = 2 * SIZE * HEADS * CONFIG.head_dim * 4
    assert report["bytes_out"] >= written // SIZE * page


@pytest.mark.further  # the passes of a chunk: test_passes_pass_checks
def test_a_chunk_that_selects_more_than_fits_takes_passes():
    work = [(prompt(120, 7), params(8))]
    assert_same(serve(narrow(), *work), serve(engine(model(), prefix_cache=False), *work), 1e-5)


def test_passes_pass_checks():
    """A pass attends to a part of a selection; `checks()` would refuse it as a selection without the own block.

    All passes together give what one call without a cache does.
    """
    cache = Cache.pool(CONFIG, 12, 1, 12, "float32", device_pages=8)
    memory = HostMemory(cache, "numpy")
    cache = cache.replace(table=jnp.arange(12, dtype=jnp.int32)[None], host=memory.pages)
    tokens = np.asarray(prompt(96, 5), np.int32)[None]
    logits = []
    with m3jax.checks():
        for start in (0, 48):  # 6 pages are written at a time, and 8 fit
            places = np.arange(start, start + 48, dtype=np.int32)[None]
            lengths = np.array([start + 48], np.int32)
            new, cache = model()(tokens[:, start : start + 48], cache=cache, positions=places, lengths=lengths)
            cache = memory.flush(cache).replace(host=memory.pages)
            logits.append(new)
    selected_pages = np.asarray(cache.stacks[1].hits + cache.stacks[1].misses)
    assert (selected_pages > 8 * HEADS).all(), selected_pages  # in both calls; else one pass was enough
    np.testing.assert_allclose(np.concatenate(logits, axis=1), model()(tokens), rtol=0, atol=1e-4)


def test_the_invariant_schedule_reads_every_selected_block_however_few_fit():
    """Each comes from host memory into the copy that attention reads, in passes where the pool has no room for all."""
    rng = np.random.default_rng(8)
    cache = Cache.pool(CONFIG, 12, 1, 12, "float32", device_pages=8)
    memory = HostMemory(cache, "numpy")
    layers, virtual_pages, _, size, width = memory.pages[1].kv.shape
    assert size != width, "else a swap of the two is not seen"
    memory.pages[1].kv[:] = rng.standard_normal((layers, virtual_pages, 2, size, width))
    order = rng.permutation(12)  # the page of each block
    places = Places.nowhere(jnp.zeros((1, 1), jnp.int32))
    places = places.replace(table=jnp.asarray(order, jnp.int32)[None], host=memory.pages[1])
    blocks = rng.permuted(np.broadcast_to(np.arange(12), (3, HEADS, 1, 12)), axis=-1)[..., :6].astype(
        np.int32
    )  # [C K 1 J]
    blocks[0, :, :, 4:] = -1
    assert len({(head, b) for head in range(HEADS) for b in blocks[:, head].ravel() if b >= 0}) > 8
    read = partial(cache.stacks[1].read_invariant, layer=jnp.int32(0), places=places, dtype=jnp.float32)
    _, keys, values = read(cache.stacks[1], jnp.zeros(3, jnp.int32), jnp.asarray(blocks))
    for query, head, slot in np.argwhere(blocks[:, :, 0] >= 0):
        page = order[blocks[query, head, 0, slot]] * HEADS + head
        for got, expected in zip((keys, values), memory.pages[1].kv[0, page], strict=True):
            np.testing.assert_array_equal(got[query, head, 0, slot], expected)


def test_only_selected_pages_move():
    """A decode step brings in what the selection has and the pool has not, never a row's other pages."""
    served = offloaded()
    rows = [served.add(prompt(length, 5), params(12)) for length in (90, 60)]  # more pages than the pool has
    while served.prefill():
        pass
    layers = sum(stack.num_layers for stack in CONFIG.stacks if stack.is_sparse)
    seen = []
    for _ in range(10):
        before = served.offload
        runner_of(served).read(runner_of(served).launch(1))
        now = served.offload
        misses, moved = (now[name] - before[name] for name in ("misses", "bytes_in"))
        chosen = misses + now["hits"] - before["hits"]
        assert 2 * HEADS * layers <= chosen <= 2 * HEADS * TOP_K * layers
        page = runner_of(served).host.page_bytes
        assert misses * page <= moved <= misses * GROUP * page
        seen.append(misses)
    assert 0 < sum(seen) < 10 * HEADS * TOP_K * layers  # the pool keeps what was used last
    for handle in rows:
        served.abort(handle)


@pytest.mark.further
def test_host_memory_is_where_it_is_read_from():
    """Overwritten pages change what comes out, but those that nobody selects do not."""
    served = engine(model(), **NARROW, device_pages=10, host_memory="numpy")  # the programs of `narrow`
    memory = next(pages.kv for pages in runner_of(served).host.pages if pages is not None)
    memory[:] = np.nan
    (clean,) = serve(served, (prompt(100, 5), params(12)))
    assert np.isfinite(clean.logprobs).all()
    handle = served.add(prompt(100, 5), params(12))
    while served.prefill():
        pass
    memory[:] = 50.0
    finish(served)
    assert served.result(handle).logprobs != clean.logprobs


def test_copied_truncated_and_moved_requests_go_on_as_before():
    """T16: index keys on the device and pages in host memory travel together."""
    served, expected = offloaded(), resident()[2]
    handle = served.add(*WORK[2])
    for _ in range(8):
        served.step()
    assert 4 < len(served.result(handle).tokens) < 20
    copy, snapshot = served.copy(handle), served.export(handle)
    served.truncate(handle, 3)
    moved = served.import_request(snapshot)
    target = engine(model(), prefix_cache=False)
    elsewhere = target.import_request(snapshot)
    finish(served)
    finish(target)
    for tokens in [served.result(h).tokens for h in (handle, copy, moved)] + [target.result(elsewhere).tokens]:
        assert tokens == expected.tokens


def test_the_first_import_compiles_nothing():
    """After `warmup`: pages from a snapshot are put by the program that puts those of a flush."""
    source = engine(model(), prefix_cache=False)
    handle = source.add(*WORK[2])
    for _ in range(7):
        source.step()
    snapshot = source.export(handle)
    host._pinned_put.clear_cache()  # what another test compiled would hide it
    target = engine(model(), pages=24, device_pages=16, host_memory="pinned_host", prefix_cache=False)
    target.warmup()
    with compilations() as seen:
        moved = target.import_request(snapshot)
        finish(target)
    assert seen == []
    assert_same([target.result(moved)], resident()[2:3], 1e-5)


def test_a_prefix_hit_reads_host_memory():
    served = engine(model(), pages=24, device_pages=16, host_memory="pinned_host")
    first = serve(served, (prompt(90, 1), params(20)))[0]
    before = served.timings.prompt_tokens
    again = serve(served, (prompt(90, 1), params(20)))[0]
    assert served.timings.prompt_tokens - before < SIZE
    assert_same([again], [first], 1e-5)


assign = jax.jit(Slots.assign)


@given(st.integers(0, 10**6))
def test_slots_keep_what_was_used_last(seed):
    """Against a dictionary: wanted pages stay or come, dirty ones stay, the least recently used leave first."""
    rng = np.random.default_rng(seed)
    slots, used, dirty, layer = Slots.empty(2, 20, 6), {}, set(), 1
    for now in range(12):
        wanted = rng.random(20) < rng.choice([0.1, 0.3, 0.6])
        slots, pages, _, count = assign(slots, jnp.int32(layer), jnp.asarray(wanted), jnp.int32(now))
        assert (np.asarray(slots.slot_of[0]) < 0).all()  # of the other layer
        where, page_of = np.asarray(slots.slot_of[layer]), np.asarray(slots.page_of[layer])
        found = {page for page in range(20) if where[page] >= 0}
        assert {page_of[where[page]] for page in found} == found == set(page_of[page_of >= 0])
        arriving = np.asarray(pages)[: int(count)].tolist()
        missing = [page for page in np.flatnonzero(wanted).tolist() if page not in used]
        givable = {page for page in used if not wanted[page]} - dirty
        free = 6 - len(used)
        assert arriving == missing[: free + len(givable)] and found >= set(arriving)
        gone = used.keys() - found
        assert gone <= givable and len(gone) == max(0, len(arriving) - free)
        assert max((used[p] for p in gone), default=-1) <= min((used[p] for p in givable - gone), default=now)
        used = {page: now if wanted[page] else used[page] for page in found}
        if len(dirty) < 3:
            dirty = set(page_of[rng.random(6) < 0.2].tolist()) & found
        slots = slots.replace(dirty=slots.dirty.at[layer].set(np.isin(page_of, list(dirty))))


def test_a_copy_onto_a_page_that_is_here_forgets_it():
    """Else what the slot holds of the page's last owner is read in the place of the copy, which is in host memory."""
    cache = Cache.pool(CONFIG, 6, 1, 2, "float32", device_pages=6)
    stack = next(stack for stack in cache.stacks if hasattr(stack, "slots"))
    pages = jnp.array([2, 4])
    wanted = jnp.zeros(6 * HEADS, bool).at[stack.virtual_page_ids(pages)].set(True)
    stack = stack.give_slots(jnp.int32(0), wanted)
    stack = stack.replace(index_k=stack.index_k.at[:, 2].set(7.0))
    copied = stack.copy_pages(jnp.array([2, 0]), jnp.array([4, -1]))
    slots = np.asarray(copied.slots.slot_of[0]).reshape(6, HEADS) >= 0
    assert slots.any(1).tolist() == [False, False, True, False, False, False], "pages whose slots are believed"
    assert (np.asarray(copied.index_k[:, 4]) == 7.0).all() and not np.asarray(copied.index_k[:, 3]).any()


def ints(*values: object) -> jax.Array:
    return jnp.array(values, jnp.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


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


def test_forgotten_pages_are_read_again():
    slots, *_ = Slots.empty(2, 8, 4).assign(jnp.int32(1), jnp.arange(8) < 3, jnp.int32(1))
    forget = jax.jit(Slots.forget)
    slots = forget(slots, jnp.array([1, -1, 7]))
    assert slots.slot_of[1, 0] == 0, "the first slot is one too"
    assert slots.here(jnp.int32(1)).tolist() == [True, False, True] + [False] * 5
    assert not slots.here(jnp.int32(0)).any()
    assert sorted(np.asarray(slots.page_of[1]).tolist()) == [-1, -1, 0, 2]
    # The first page and the last are pages too, and what is outside of the pages, on either side, is none of them.
    before = slots.replace(dirty=slots.page_of >= 0)
    for page, left in ((0, {2}), (2, {0}), (7, {0, 2})):
        after = forget(before, jnp.array([-1, page, 8]))
        page_of, slot_of = np.asarray(after.page_of[1]), np.asarray(after.slot_of[1])
        assert set(page_of.tolist()) - {-1} == left == set(np.flatnonzero(slot_of >= 0).tolist()), page
        assert set(page_of[np.asarray(after.dirty[1])].tolist()) == left
    last, *_ = Slots.empty(2, 8, 4).assign(jnp.int32(1), jnp.arange(8) == 7, jnp.int32(1))
    assert set(np.asarray(forget(last, jnp.array([-1, 8, 9])).page_of[1]).tolist()) == {-1, 7}


def test_errors():
    with pytest.raises(ValueError, match=r"device_pages = 5: .* give 16 or more"):
        engine(model(), device_pages=5)
    with pytest.raises(ValueError, match="host_memory = 'disk': this device has numpy, pinned_host"):
        engine(model(), device_pages=16, host_memory="disk")
    with pytest.raises(ValueError, match="device_pages on a mesh"):
        mesh = parse_mesh("tensor=2")
        engine(tiny.model(CONFIG, mesh=mesh), device_pages=16)
    dense = tiny.config("dd")
    with pytest.raises(ValueError, match="no layer of this model is sparse"):
        HostMemory(Cache.pool(dense, 4, 1, 4, "float32", device_pages=2))
    served = engine(model().with_schedule("mask"), device_pages=16)
    with pytest.raises(ValueError, match="schedule 'mask' reads all blocks"):
        served.warmup()
