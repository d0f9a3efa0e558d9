"""The allocator of pages against its definition, and on a fake device whose free pages are poisoned."""

import copy
import zlib
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import pool_definition

from m3jax.cache.allocator import Copy, OutOfPages, PageAllocator
from m3jax.cache.prefix import Node, PageEvent, common_length

P = 4
POISON = -7
# Two tokens, so that requests often begin alike; their hashes are equal, so that only a comparison tells them apart.
TOKENS = st.lists(st.sampled_from((-1, -2)), min_size=1, max_size=8)
WHICH = st.integers(0, 5)


def contents(tokens) -> list[int]:
    """Return a number for each token in the place of keys and values: it depends on all tokens before it."""
    hashes = accumulate(enumerate(tokens), lambda before, now: zlib.crc32(repr(now).encode(), before), initial=1)
    return list(hashes)[1:]


class Defined:
    """An allocator that is held to its definition at every call: what it answers, and all pages afterwards."""

    def __init__(self, num_pages, page_size, share=True, stripes=1):
        self.allocator = PageAllocator(num_pages, page_size, share=share, stripes=stripes)
        self.definition = pool_definition.Pool(num_pages, page_size, share, stripes)

    def __getattr__(self, name):
        if name.startswith("__") or name in ("allocator", "definition"):
            raise AttributeError(name)
        found = getattr(self.allocator, name)
        if name not in ("add", "extend", "can_give", "commit", "fork", "truncate", "release", "evict", "forget"):
            return found

        def both(*args):
            defined = getattr(self.definition, name)
            try:
                answer = found(*args)
            except OutOfPages:
                with pytest.raises(OutOfPages):
                    defined(*args)
                raise
            else:
                assert defined(*args) == answer, f"{name}{args}"
                return answer
            finally:
                assert pool_definition.state_of(self.allocator) == self.definition.state(), f"after {name}{args}"

        return both


class Pool:
    """An allocator, and the device that does what it says."""

    def __init__(self, num_pages, page_size=P, **options):
        self.pages = Defined(num_pages, page_size, **options)
        self.memory = np.full((num_pages, page_size), POISON, np.int64)

    def reserve(self, handle, n):
        copies = self.pages.extend(handle, n)
        for source, target in copies:
            self.memory[target] = self.memory[source]
        return copies

    def write(self, handle, tokens, reserve=0):
        """Extend, write on the device, commit; then what could be copied."""
        copies = self.reserve(handle, len(tokens) + reserve)
        old = self.pages.tokens(handle)
        new = [*old, *tokens]
        table = self.pages.table(handle, len(self.memory))
        for i in range(len(old), len(new)):
            self.memory[table[i // self.pages.page_size], i % self.pages.page_size] = contents(new)[i]
        self.pages.commit(handle, tokens)
        return copies

    def open(self, tokens):
        """A request with all its tokens written; and how many came from the cache."""
        handle, cached = self.pages.add(tokens)
        self.write(handle, tokens[cached:])
        return handle, cached

    def leave(self, tokens):
        """A request that came and went."""
        self.pages.release(self.open(tokens)[0])

    def read(self, handle, length):
        table = self.pages.table(handle, len(self.memory))
        slots = np.arange(length)
        return self.memory[table[slots // self.pages.page_size], slots % self.pages.page_size].tolist()

    def verify(self, requests):
        """Poison what is free; then everything that live requests and the prefix index hold must still be there."""
        self.pages.check()
        self.memory[list(self.pages.free)] = POISON
        for handle, tokens in requests.items():
            assert self.pages.tokens(handle) == tuple(tokens)
            assert self.read(handle, len(tokens)) == contents(tokens)
        for chain, page in self.state()["known"].items():
            assert self.memory[page].tolist() == contents(chain)[-self.pages.page_size :]

    def state(self):
        return pool_definition.state_of(self.pages.allocator)

    def snapshot(self):
        """All that a call which fails must leave as it was."""
        return self.pages.statistics(), copy.deepcopy(self.state())

    def hits(self, tokens):
        """Return how many tokens of a prompt are in the cache; asking counts as a use of their pages."""
        handle, cached = self.pages.add(tokens)
        self.pages.release(handle)
        return cached


@pytest.mark.parametrize("p", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("suffix", [1, 2, 4, 7])
def test_prefix_hit_is_every_full_page_before_the_last_token(p, suffix):
    pool = Pool(9)
    pool.leave([1] * p + [2] * 3)
    prompt = [1] * p + [3] * suffix
    handle, cached = pool.open(prompt)
    assert cached == p // P * P
    pool.verify({handle: prompt})
    # The same prompt again: one token at least is left to compute.
    again, cached = pool.open(prompt)
    assert cached == (len(prompt) - 1) // P * P
    pool.verify({handle: prompt, again: prompt})
    s = pool.pages.statistics()
    hits = p // P * P + cached
    assert (s["hit_tokens"], s["missed_tokens"]) == (hits, (p + 3) + 2 * len(prompt) - hits)


@pytest.mark.parametrize("a, b", [(-1, -2), (5, 5 + 2**61 - 1)])
def test_equal_hashes_of_different_tokens_share_nothing(a, b):
    assert a != b and hash((a,) * P) == hash((b,) * P)
    pool = Pool(9)
    first, second = pool.open([a] * P + [0])[0], pool.open([b] * P + [0])[0]
    pool.verify({first: [a] * P + [0], second: [b] * P + [0]})
    assert pool.pages.statistics()["hit_tokens"] == 0
    assert pool.hits([a] * P + [0]) == pool.hits([b] * P + [0]) == P


def test_eviction_takes_the_least_recently_used_chain_from_its_end():
    pool, a, b = Pool(9), [1] * 12, [2] * 8
    pool.leave(a)
    pool.leave(b)
    for left in [(8, 8), (4, 8), (0, 8), (0, 4), (0, 0)]:
        assert pool.pages.evict(1) == 1
        look = copy.deepcopy(pool)  # because looking is using
        assert (look.hits([*a, 0]), look.hits([*b, 0])) == left
    assert pool.pages.evict(3) == 0
    assert pool.pages.statistics() == pool.pages.statistics() | {"cached": 0, "free": 9, "evictions": 5}


def test_use_makes_a_chain_recent_and_shared_beginnings_go_last():
    pool, a, b = Pool(9), [1] * 4 + [2] * 4, [1] * 4 + [3] * 4
    pool.leave(a)
    pool.leave(b)
    assert pool.hits([*a, 0]) == 8  # a is the more recent one now
    pool.pages.evict(1)
    assert pool.hits([*b, 0]) == 4 and pool.hits([*a, 0]) == 8
    pool.pages.evict(1)
    assert pool.hits([*a, 0]) == 4


def test_out_of_pages_changes_nothing():
    pool = Pool(5)
    pool.leave([7] * 5)
    a, b = pool.open([1] * 6)[0], pool.open([2] * 4)[0]
    fork = pool.pages.fork(a)
    before = pool.snapshot()
    assert before[0]["free"] == before[0]["cached"] == 1
    for handle, n in ((a, 7), (fork, 10), (b, 9)):
        with pytest.raises(OutOfPages, match="2 of 5 are free or cached: release a request"):
            pool.pages.extend(handle, n)
        assert pool.snapshot() == before
        pool.verify({a: [1] * 6, fork: [1] * 6, b: [2] * 4})
    pool.pages.release(b)
    assert len(pool.reserve(a, 7)) == 1


@pytest.mark.parametrize("length", [5, 8])
def test_a_request_alone_can_always_fill_the_pool(length):
    pool = Pool(2)
    handle, _ = pool.open([1] * 8)
    pool.pages.truncate(handle, 6)
    with pytest.raises(OutOfPages):
        pool.pages.extend(handle, 1)
    pool.pages.release(handle)
    handle, cached = pool.open([1] * length)
    assert cached == 4
    if length < 8:
        pool.write(handle, [2] * (8 - length))
    pool.verify({handle: [1] * length + [2] * (8 - length)})


def test_a_page_written_again_after_a_preemption_takes_the_place_of_its_unused_copy():
    pool = Pool(8)
    pool.leave([1] * 8)
    handle, cached = pool.open([1] * 8)
    s = pool.pages.statistics()
    assert (cached, s["cached"], s["used"], s["free"]) == (4, 0, 2, 6)
    pool.write(handle, [2] * 4)  # goes on being shared
    assert pool.hits([1] * 8 + [2] * 4 + [0]) == 12


def test_a_page_that_equals_one_in_use_stays_private():
    pool, tokens = Pool(8), [1] * 8
    handles = [pool.pages.add(tokens)[0] for _ in range(2)]
    for handle in handles:
        pool.write(handle, tokens)
    pool.pages.release(handles[1])
    assert pool.pages.statistics()["cached"] == 0
    pool.verify({handles[0]: tokens})


def test_a_request_beside_one_that_has_no_more_takes_the_known_pages():
    """What begins alike may hold private copies of them, which go with it; of the known ones there is one of each."""
    pool, tokens = Pool(8), [1] * 8
    handles = [pool.pages.add(tokens)[0] for _ in range(2)]
    for handle in handles:
        pool.write(handle, tokens)
    known, private = (pool.pages.table(handle, 2).tolist() for handle in handles)
    for asked, cached, pages in (
        ([*tokens[:4], 2], 4, known[:1]), ([*tokens, 2], 8, known), ([*tokens[:6], 2], 6, [private[0], private[1]]),
    ):  # fmt: skip
        handle, found = pool.pages.add(asked, handles[1])
        assert (found, pool.pages.table(handle, len(pages)).tolist()) == (cached, pages), asked
        pool.pages.release(handle)


def test_the_first_page_is_on_the_device_from_which_all_can_be_dealt():
    """Of three devices of two pages: before the one that has the most to give."""
    pool = pool_definition.Pool(6, 2, True, 3)
    for taken, count, dealt in (
        ((), 4, [0, 1, 2, 0]), ((0,), 2, [1, 2]), ((0, 1), 2, [1, 2]), ((2, 3), 3, None), ((0, 2), 4, [2, 0, 1, 2]),
        ((4, 0, 1), 2, [1, 2]), ((0, 3, 4, 5), 2, [0, 1]), ((0, 1, 5), 3, None), ((0, 1, 5), 2, [1, 2]),
        ((2, 3, 5), 2, [2, 0]), ((2, 5), 3, [0, 1, 2]),
    ):  # fmt: skip
        pool.free = [page for page in range(6) if page not in taken]
        found = pool.dealt([], count)
        left = [sum(page // 2 == device for page in pool.free) for device in range(3)]
        fits = lambda first, n=count, left=left: all(
            sum((first + i) % 3 == device for i in range(n)) <= left[device] for device in range(3)
        )
        assert fits(found[0]) == any(map(fits, range(3))), taken
        assert dealt is None or found == dealt, (taken, found)


def test_fork_shares_until_the_first_write():
    pool, tokens = Pool(6), [1] * 6
    a, _ = pool.open(tokens)
    pool.reserve(a, 6)
    b = pool.pages.fork(a)
    table = lambda handle: pool.pages.table(handle, 6).tolist()
    assert table(b) == [*table(a)[:2], -1, -1, -1, -1]  # what is only reserved stays with the first
    source = table(a)[1]
    assert pool.reserve(a, 0) == [] and pool.write(a, [2]) == [Copy(source, table(a)[1])]
    assert table(b)[1] == source != table(a)[1]
    assert pool.write(b, [3]) == []  # alone on it now
    pool.verify({a: [*tokens, 2], b: [*tokens, 3]})


def test_truncate_gives_pages_back_and_a_registered_page_is_copied_before_a_write():
    pool, tokens = Pool(6), list(range(12))
    handle, _ = pool.open(tokens)
    pool.reserve(handle, 4)
    pool.pages.truncate(handle, 12)
    assert pool.pages.statistics()["used"] == 3
    pool.pages.truncate(handle, 6)
    assert pool.pages.statistics()["used"] == 2 and pool.pages.statistics()["cached"] == 1
    assert len(pool.write(handle, [50, 51])) == 1
    new = [*tokens[:6], 50, 51]
    pool.verify({handle: new})
    assert pool.hits([*tokens, 0]) == 12 and pool.hits([*new, 0]) == 8
    pool.pages.truncate(handle, 0)
    assert pool.pages.pages_of(handle) == () and pool.write(handle, [9]) == []
    pool.verify({handle: [9]})


def test_reserving_twice_takes_pages_once():
    pool = Pool(6)
    handle, _ = pool.open([1] * 3)
    for _ in range(3):
        assert pool.reserve(handle, 5) == []
    assert pool.pages.statistics()["used"] == 2
    assert len(pool.pages.pages_of(handle)) == 1
    assert pool.pages.table(handle, 4).dtype == np.int32
    pool.pages.commit(handle, [])
    pool.write(handle, [1] * 5)
    pool.verify({handle: [1] * 8})


def test_without_sharing_nothing_is_kept():
    pool = Pool(4, share=False)
    pool.leave([1] * 9)
    assert pool.hits([1] * 9) == 0
    assert pool.pages.statistics() == dict(free=4, cached=0, used=0, hit_tokens=0, missed_tokens=18, evictions=0)


def test_pages_of_a_request_lie_on_the_devices_in_turn():
    pool = Pool(12, stripes=3)  # devices hold pages 0-3, 4-7 and 8-11
    rows = [pool.open([number] * 6)[0] for number in range(3)]  # two pages each
    assert [pool.pages.pages_of(handle) for handle in rows] == [(0, 4), (8, 1), (5, 9)]  # devices 0 1, 2 0 and 1 2
    copy = pool.pages.fork(rows[1])
    pool.write(rows[1], [7] * 8)
    pool.write(copy, [8] * 8)  # writes into page 1 itself: the other has copied it to page 2, on the same device
    assert (pool.pages.pages_of(rows[1]), pool.pages.pages_of(copy)) == ((8, 2, 6, 10), (8, 1, 7, 11))
    pool.verify({rows[1]: [1] * 6 + [7] * 8, copy: [1] * 6 + [8] * 8})


def test_a_device_can_be_out_of_pages_while_another_has_some():
    pool = Pool(6, stripes=3)
    first, _ = pool.open([1] * 4)  # page 0; then pages 2, 4 and 1 (the device in turn has two)
    others = [pool.open([number] * 4)[0] for number in (2, 3, 4)]
    assert [pool.pages.pages_of(handle) for handle in others] == [(2,), (4,), (1,)]
    before = pool.snapshot()
    assert pool.pages.can_give(2, first) and not pool.pages.can_give(3, first) and pool.pages.can_give(2)
    with pytest.raises(OutOfPages, match="3 pages are needed and 2 of 6 are free or cached, on 3 devices in turn"):
        pool.pages.extend(first, 12)  # devices 1, 2 and 0
    assert pool.snapshot() == before
    pool.pages.release(others[2])
    pool.write(first, [5] * 12)  # the page that device 0 lacks is a cached one
    assert pool.pages.pages_of(first) == (0, 3, 5, 1) and pool.hits([4] * 4 + [0]) == 0


def test_a_first_page_that_is_known_on_another_device_stays_there():
    """Else the known pages behind it would follow a page of the wrong device."""
    pool = Pool(6, stripes=3)
    pool.leave([1] * 12)  # pages 0, 2 and 4
    handle, cached = pool.pages.add([1] * 4)
    assert cached == 0
    blocker, _ = pool.pages.add([9])
    pool.write(blocker, [9])
    pool.write(handle, [1] * 4)
    assert pool.pages.pages_of(handle) == (3,) and pool.hits([1] * 12 + [0]) == 12
    pool.pages.release(handle)
    pool.verify({blocker: [9]})


@pytest.mark.parametrize("share", [True, False])
def test_pages_that_are_held_are_named_with_their_tokens(share):
    """Registered ones, one that is cached among them, and each block of each request, not what is only reserved."""
    pool = Pool(9, share=share)
    pool.leave([9] * 4)
    tokens = [1, 2, 3, 4, 5, 6]
    handle, _ = pool.open(tokens)
    pool.reserve(handle, 5)
    pool.pages.fork(handle)
    first, second = pool.pages.pages_of(handle)
    known = [(page, (9,) * 4) for page in pool.state()["cached"]] + [(first, (1, 2, 3, 4))] if share else []
    assert len(known) == 2 * share
    assert sorted(pool.pages.held()) == sorted([*known, *[(first, (1, 2, 3, 4)), (second, (5, 6))] * 2])


def test_an_observer_hears_of_every_page_that_is_known_and_no_longer():
    """Under a number that is never given twice, with that of the page before it; nothing once it is taken off."""
    pool, heard = Pool(9), []
    pool.leave([7] * 4)  # nobody listens yet
    pool.pages.observe(heard.append)
    pool.leave([1, 2, 3, 4, 5, 6, 7, 8, 9])
    pool.leave([1, 2, 3, 4, 8, 8, 8, 8])
    stored = [
        PageEvent("stored", 1, None, (1, 2, 3, 4)), PageEvent("stored", 2, 1, (5, 6, 7, 8)),
        PageEvent("stored", 3, 1, (8, 8, 8, 8)),
    ]  # fmt: skip
    assert heard == stored
    assert pool.pages.evict(2) == 2
    assert heard[3:] == [PageEvent("evicted", 0), PageEvent("evicted", 2)]
    pool.pages.forget()
    assert heard[5:] == [PageEvent("cleared")]
    pool.pages.observe(None)
    pool.leave([1, 2, 3, 4])
    assert len(heard) == 6


BAD = {
    "page_size = 2.0: must be": lambda p: PageAllocator(4, 2.0),
    "num_pages = 10 over 3 devices: must be a multiple": lambda p: PageAllocator(10, 4, stripes=3),
    "stripes = True: must be": lambda p: PageAllocator(4, 4, stripes=True),
    "add got 0 tokens: give at least one": lambda p: p.add([]),
    "tokens are float64 of shape .2,.: give one list of integers": lambda p: p.add([1.0, 2.0]),
    r"int64 of shape \(1, 2\)": lambda p: p.add([[1, 2]]),
    "25 tokens needs 7 pages and the pool has 6 of 4": lambda p: p.add([1] * 25),
    "n = -1: must be an integer of at least 0": lambda p: p.extend(0, -1),
    "26 tokens needs 7 pages": lambda p: p.extend(0, 20),
    "n = 0: must be an integer of at least 1": lambda p: p.evict(0),
    "no request 7: use a handle": lambda p: p.extend(7, 1),
    "no request 1: use a handle that add or fork returned and that is not released": lambda p: p.release(1),
    "no request '0'": lambda p: p.table("0", 6),
    "length = 7: request 0 has 6 tokens; truncate it to 0 to 6": lambda p: p.truncate(0, 7),
    "width = 1: request 0 has 2 pages; give at least": lambda p: p.table(0, 1),
    "3 tokens committed to request 0, which has room for 2: extend it": lambda p: p.commit(0, [1, 2, 3]),
    "1 tokens committed to request 2, which has room for 0": lambda p: p.commit(2, [1]),
    "1 tokens committed to request 4, which has room for 0": lambda p: p.commit(4, [1]),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.usefixtures("unchecked")
def test_bad_input(message):
    pool, held = Pool(6), {0: [1] * 6, 2: [2] * 5, 3: [2] * 5, 4: [3] * 4}
    pool.open(held[0])
    pool.leave([5])  # handle 1 is released
    pool.open(held[2])
    pool.pages.fork(2)  # its last page is shared now
    pool.open(held[4])  # its only page is full
    before = pool.snapshot()
    with pytest.raises(ValueError, match=message):
        BAD[message](pool.pages)
    assert pool.snapshot() == before
    pool.verify(held)


class Parts:
    """The lists of an allocator that its check compares: there is no public way to break one."""

    def __init__(self, allocator):
        self.allocator, self.free, self.users = allocator, allocator._free, allocator._users
        self.prefix, self.sequences = allocator._prefix, allocator._sequences
        self.drop, self.open = allocator._drop, allocator._open


# Pages 0 and 1 and half of 2 belong to request 0, of them 0 and 1 are registered; 3 and 4 are cached, 5 is free.
BROKEN = {
    "page 2 counts 2 users and has 1": lambda p: p.users.__setitem__(2, 2),
    "page 0 is 1 times free, 0 cached, 1 used": lambda p: p.free[0].append(0),
    "page 5 is 0 times free, 0 cached, 0 used": lambda p: p.free[0].remove(5),
    "page 5 is 2 times free": lambda p: p.free[0].append(5),
    "pages .6. are not in the pool": lambda p: p.free[0].append(6),
    "devices have .2. unused pages, and .1. are counted": lambda p: p.prefix.num_unused.__setitem__(0, 1),
    "page 5 is free and registered": lambda p: p.prefix.nodes.__setitem__(5, p.prefix.nodes[4]),
    "page 4 is cached and not registered": lambda p: p.prefix.nodes.pop(4),
    "page 3 is registered as page 4": lambda p: p.prefix.nodes.__setitem__(3, p.prefix.nodes[4]),
    "registered page 1 has 2 tokens": lambda p: setattr(p.prefix.nodes[1], "tokens", (1, 1)),
    "page 1 cannot be found from its parent": lambda p: setattr(p.prefix.nodes[1], "tokens", (1, 2, 3, 4)),
    "4 pages can be found and 3 are registered": lambda p: p.prefix.nodes.pop(1),
    "page 1 has lost its parent: the chain has a hole": lambda p: p.prefix.nodes.pop(0) and move(p, 0, 5),
    "page 1 has users that its parent lacks": lambda p: move(p, 0, 5),
    "page 4 would be evicted after its parent": lambda p: p.prefix.unused.move_to_end(4),
    "request 0 has 2 pages and needs 3": lambda p: p.drop(p.sequences[0].pages.pop()),
    "page 5, reserved by request 0, is shared": lambda p: [move(p, None, 5), p.open([5], [1])],
    "request 0 has a page twice": lambda p: move(p, None, 2),
    "page 1 is registered with tokens of another request": lambda p: p.sequences[0].tokens.__setitem__(5, 9),
    "page 1 follows 5 in request 0 only": lambda p: [move(p, 0, 5), p.allocator.add([1] * 5)],
}


def move(p, old, new):
    """Request 0 has another page in the place of one, or one more; all counts are right."""
    pages = p.sequences[0].pages
    if old is None:
        pages.append(new)
    else:
        pages[pages.index(old)] = new
        p.drop(old)
    if new in p.free[0]:
        p.free[0].remove(new)
    p.users[new] += 1


@pytest.mark.parametrize("message", BROKEN)
def test_check_names_what_is_broken(message):
    pool = Pool(6)
    pool.open([1] * 10)
    pool.leave([2] * 8)
    assert pool.pages.pages_of(0) == (0, 1, 2) and pool.state()["cached"] == [4, 3]
    pool.pages.check()
    BROKEN[message](Parts(pool.pages.allocator))
    with pytest.raises(AssertionError, match=message):
        pool.pages.check()


# Of two pages a device, request 0 has full ones on devices 0 and 1, and request 1 has others on devices 2 and 0.
OUT_OF_TURN = {
    "page 5 is free on device 0, which does not hold it": lambda p: [p.free[2].remove(5), p.free[0].append(5)],
    "page 3, number 1 of request 1, is on device 1, out of turn": lambda p: [
        p.free[1].remove(3), p.sequences[1].pages.__setitem__(1, 3), p.users.__setitem__(3, 1),
        p.users.__setitem__(1, 0), p.free[0].append(1),
    ],
    "page 5 is not on the device behind its parent's": lambda p: [
        p.free[2].remove(5), p.users.__setitem__(5, 1), p.open([0, 5], [1] * 8), p.users.__setitem__(5, 1),
        p.prefix.nodes[0].children.__setitem__((2,) * 4, Node(5, (2,) * 4, p.prefix.nodes[0])),
        p.prefix.nodes.__setitem__(5, p.prefix.nodes[0].children[(2,) * 4]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", OUT_OF_TURN)
def test_check_names_what_lies_on_the_wrong_device(message):
    pool = Pool(6, stripes=3)
    pool.open([1] * 8)
    pool.open([3] * 6)
    assert (pool.pages.pages_of(0), pool.pages.pages_of(1)) == ((0, 2), (4, 1))
    pool.pages.check()
    OUT_OF_TURN[message](Parts(pool.pages.allocator))
    with pytest.raises(AssertionError, match=message):
        pool.pages.check()


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


class Machine(RuleBasedStateMachine):
    """Random requests; `model` has what each one's pages must hold. It stands last: red, it shrinks for minutes.

    Which pages they are, and which go first, the definition says at every call (`Defined`).
    """

    past = Bundle("past")  # tokens of requests, for others that begin alike

    @initialize(
        pages=st.sampled_from((12, 20, 7, 3)),
        size=st.sampled_from((3, 4, 2, 1)),
        share=st.integers(0, 4),
        stripes=st.sampled_from((1, 3, 2)),
        prompts=st.lists(TOKENS, min_size=3, max_size=3),
    )
    def start(self, pages, size, share, stripes, prompts):
        pages = -(-pages // stripes) * stripes
        self.pool = Pool(pages, size, share=share < 4, stripes=stripes)
        self.pages, self.model = self.pool.pages, {}
        self.limit, self.asked = pages * size, 0
        for tokens in prompts:
            self.open(tokens)

    def pick(self, which):
        return list(self.model)[which % len(self.model)]

    def extend(self, handle, tokens, reserve=0):
        """Write tokens; as in an engine, the youngest of the others give way while there is no room."""
        had = len(self.model[handle])
        tokens = tokens[: self.limit - had]
        reserve = min(reserve, self.limit - had - len(tokens))
        while tokens:
            try:
                self.pool.write(handle, tokens, reserve)
            except OutOfPages:
                if len(self.model) == 1:
                    return
                self.close(max(self.model.keys() - {handle}))
            else:
                self.model[handle] += tokens
                return

    def open(self, tokens, beside=None, share=True):
        tokens = tokens[: self.limit]
        handle, cached = self.pages.add(tokens, beside, share)
        assert cached < len(tokens)
        self.asked += len(tokens)
        self.model[handle] = tokens[:cached]
        self.extend(handle, tokens[cached:])

    def close(self, handle):
        self.pages.release(handle)
        return self.model.pop(handle)

    @rule(target=past, tokens=TOKENS)
    def add(self, tokens):
        self.open(tokens)
        return tokens

    @rule(begin=past, cut=st.integers(1, 20), tokens=TOKENS, share=st.sampled_from((True, True, False)))
    def add_alike(self, begin, cut, tokens, share):
        self.open(begin[:cut] + tokens, share=share)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, cut=st.integers(1, 20), tokens=TOKENS)
    def add_beside(self, which, cut, tokens):
        beside = self.pick(which)
        self.open(self.model[beside][:cut] + tokens, beside)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, tokens=TOKENS, reserve=st.integers(0, 4))
    def write(self, which, tokens, reserve):
        self.extend(self.pick(which), tokens, reserve)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, tokens=TOKENS, writer=st.sampled_from(("old", "new")))
    def fork(self, which, tokens, writer):
        old = self.pick(which)
        new = self.pages.fork(old)
        self.model[new] = list(self.model[old])
        self.extend({"old": old, "new": new}[writer], tokens)

    @precondition(lambda self: self.model)
    @rule(which=WHICH, dropped=st.integers(1, 5), tokens=st.just([]) | TOKENS)
    def truncate(self, which, dropped, tokens):
        handle = self.pick(which)
        length = max(0, len(self.model[handle]) - dropped)
        self.pages.truncate(handle, length)
        del self.model[handle][length:]
        self.extend(handle, tokens)

    @precondition(lambda self: self.model)
    @rule(target=past, which=WHICH)
    def release(self, which):
        return self.close(self.pick(which))

    @precondition(lambda self: self.model)
    @rule(which=WHICH)
    def preempt_and_resume(self, which):
        if tokens := self.close(self.pick(which)):
            self.open(tokens)

    @precondition(lambda self: self.pages.statistics()["cached"])
    @rule(n=st.integers(1, 3))
    def evict(self, n):
        self.pages.evict(n)

    @rule(when=st.integers(0, 3))
    def forget(self, when):
        """New weights, now and then: what is known is known no more, and requests keep what they have."""
        if when == 3:
            self.pages.forget()

    @invariant()
    def device_holds_the_model_and_counters_add_up(self):
        self.pool.verify(self.model)

        s = self.pages.statistics()
        assert s["hit_tokens"] + s["missed_tokens"] == self.asked


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=40)
