"""The host side of the cache, which gives pages to requests. Nothing here touches a device."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from m3jax.cache.prefix import PageEvent, PrefixIndex, common_length


class OutOfPages(RuntimeError):
    """Raised when too few pages are free or cached; nothing was changed. Release a request, then try again."""


class Copy(NamedTuple):
    """An order to the device: copy page `source` to page `target` in every layer."""

    source: int
    target: int


@dataclass(eq=False)
class _Sequence:
    """The pages of a request, and the tokens that the device has written into them, from position 0 on."""

    pages: list[int]
    tokens: list[int]

    @property
    def length(self) -> int:
        return len(self.tokens)


class PageAllocator:
    """The pool of pages: it gives pages to requests, shares those of equal beginnings, and caches released ones.

    The order of calls is `add`; then `extend`, the device's copies and writes, `commit`, again and again; then
    `release`. A page is free, used (by one request or several), or cached: full, registered under its tokens, and used
    by nobody. Cached pages are given away when no page is free, the least recently used first. Registered pages and
    pages of several requests are read-only: `extend` orders a copy before a request writes into one.

    Where n devices divide the pool, each has a run of neighbouring pages, its stripe. A request begins on the device
    that has the most to give, and its pages lie on the devices in turn: of any n in a row a device holds one, so that
    it finds its part of a row without a search, and has an equal part of the work. Requests that share pages share the
    first one, and so the device where they begin.

    Args:
      num_pages: of the devices' pool; their ids are 0 to num_pages - 1.
      page_size: P, tokens of a page.
      share: whether full pages are registered, so that later requests can use them.
      stripes: n, devices that divide the pool.

    Raises:
      ValueError: a size below 1, or pages that the devices do not divide evenly.
    """

    def __init__(self, num_pages: int, page_size: int, *, share: bool = True, stripes: int = 1):
        self.num_pages = _count("num_pages", num_pages)
        self.page_size = _count("page_size", page_size)
        self._share = share
        self.stripes = _count("stripes", stripes)
        if self.num_pages % self.stripes:
            raise ValueError(
                f"num_pages = {num_pages} over {stripes} devices: must be a multiple, as the cache rounds it up to"
            )
        self._stripe_size = self.num_pages // self.stripes
        # Free pages by device; they are taken from a list's end.
        self._free = [
            list(range(first, first + self._stripe_size))[::-1] for first in range(0, num_pages, self._stripe_size)
        ]
        self._users = [0] * num_pages
        self._prefix = PrefixIndex(page_size, self._stripe_size, self.stripes)
        self._sequences: dict[int, _Sequence] = {}
        self._next_handle = 0
        self._hit_tokens = self._missed_tokens = self._evictions = 0

    # The life of a request

    def add(self, tokens: Sequence[int] | np.ndarray, beside: int | None = None, share: bool = True) -> tuple[int, int]:
        """Open a request, with the registered pages that hold its beginning. No page is taken yet.

        Whole pages are reused, and only those that end before the last token, which must be computed in any case for
        its logits. To share a part of a page means a copy, and a request that fills the pool has no page for it: that
        is done with the pages of a live request alone, whose prompt is the same.

        Args:
          tokens: all tokens known so far (the prompt; after a preemption also what was generated), at least one. A
            position that stands for an image needs a number of that image here, or equal prompts share its pages.
          beside: handle of a request that begins alike; its pages are shared, the last one in part, where they hold
            more of these tokens than the registered ones.
          share: whether registered pages may be used; without, all of its tokens are to be computed.

        Returns:
          Its handle, and how many of its tokens are in the cache: the device goes on from there.

        Raises:
          ValueError: no tokens, more than the pool holds, or an unknown handle.
        """
        tokens = _integers(tokens)
        if not tokens:
            raise ValueError("add got 0 tokens: give at least one")
        self._check_fits(len(tokens))
        pages = self._prefix.match(tokens[:-1]) if share else []
        cached = len(pages) * self.page_size
        if beside is not None:
            donor = self._sequence(beside)
            common = common_length(donor.tokens, tokens[:-1])
            if common > cached:
                pages, cached = donor.pages[: self._blocks(common)], common
        self._hit_tokens += cached
        self._missed_tokens += len(tokens) - cached
        return self._open(pages, tokens[:cached]), cached

    def known(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Return how many tokens at the beginning of some are in registered pages now; none of these is kept for it."""
        return len(self._prefix.match(_integers(tokens))) * self.page_size

    def extend(self, handle: int, n: int) -> list[Copy]:
        """Make room for n tokens after those committed; pages reserved before and not yet filled count.

        Args:
          handle: from `add` or `fork`.
          n: at least 0.

        Returns:
          Copies for the device to make before anything else happens to the cache: one if the first of the n tokens
          goes into a read-only page, else none. `table` has the new pages.

        Raises:
          OutOfPages: too few pages are free or cached on some device. Nothing was changed. A request that is alone gets
            this only for a copy after `truncate`, and no more once it is released and added again.
          ValueError: an unknown handle, n below 0, or a request that would be longer than the pool.
        """
        sequence = self._sequence(handle)
        end = sequence.length + _count("n", n, least=0)
        self._check_fits(end)
        pages, next_block = sequence.pages, sequence.length // self.page_size
        needs_copy = n > 0 and next_block < len(pages) and not self._writable(pages[next_block])
        count = max(0, self._blocks(end) - len(pages))
        first_stripe = self._next_stripe(pages, count)
        # All pages are taken at once, or none: a request that waits for more would keep what others wait for.
        stripes = [(first_stripe + i) % self.stripes for i in range(count)]
        copy_stripe = [self._stripe(pages[next_block])] if needs_copy else []  # a page is copied on its own device
        new_pages = self._take(stripes + copy_stripe)
        copies = []
        if needs_copy:
            copies.append(Copy(pages[next_block], new_pages.pop()))
            self._drop(pages[next_block])
            pages[next_block] = copies[0].target
        pages += new_pages
        return copies

    def can_give(self, count: int, handle: int | None = None) -> bool:
        """Return True if a request could get so many pages behind those that it has.

        Args:
          count: pages.
          handle: from `add` or `fork`; None for a request that has no page yet.
        """
        pages = [] if handle is None else self._sequence(handle).pages
        return self._has_room(self._next_stripe(pages, count), count)

    def commit(self, handle: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Note that the device has written these tokens, which come after those committed; full pages are registered.

        Args:
          handle: from `add` or `fork`.
          tokens: at most as many as `extend` made room for; with speculation only those that were accepted.

        Raises:
          ValueError: an unknown handle, or tokens that there is no room for.
        """
        sequence, tokens = self._sequence(handle), _integers(tokens)
        # What may be written now: up to the end of the reserved pages, if the next one is the request's own.
        next_block = sequence.length // self.page_size
        room = len(sequence.pages) * self.page_size - sequence.length
        if room and not self._writable(sequence.pages[next_block]):
            room = 0
        if len(tokens) > room:
            raise ValueError(
                f"{len(tokens)} tokens committed to request {handle}, which has room for {room}: extend it before the "
                "device writes"
            )
        sequence.tokens += tokens
        for block in range(next_block, sequence.length // self.page_size):
            self._register(sequence, block)

    def fork(self, handle: int) -> int:
        """Open a second request with the same tokens in the same pages; the first of the two to write copies.

        Raises:
          ValueError: an unknown handle.
        """
        # Pages that are only reserved stay with the first request.
        return self._open(list(self.pages_of(handle)), list(self.tokens(handle)))

    def truncate(self, handle: int, length: int) -> None:
        """Keep the first `length` tokens; pages that hold none of them go back, reserved ones too.

        Raises:
          ValueError: an unknown handle, or a length outside 0 to the number of tokens committed.
        """
        sequence = self._sequence(handle)
        if not _is_integer(length) or not 0 <= length <= sequence.length:
            raise ValueError(
                f"length = {length!r}: request {handle} has {sequence.length} tokens; truncate it to 0 to "
                f"{sequence.length}"
            )
        del sequence.tokens[length:]
        while len(sequence.pages) > self._blocks(length):
            self._drop(sequence.pages.pop())

    def release(self, handle: int) -> None:
        """End a request (or preempt it: `add` all its tokens later). Its registered pages stay as cached ones.

        Raises:
          ValueError: an unknown handle, or one that was released before.
        """
        self.truncate(handle, 0)
        del self._sequences[handle]

    def forget(self) -> None:
        """Forget every registered page, as new weights need it: cached pages are free, those in use stay in use."""
        for page in self._prefix.clear():
            self._free[self._stripe(page)].append(page)

    def observe(self, observer: Callable[[PageEvent], None] | None) -> None:
        """Have a function called whenever a page becomes known to later requests, or is no longer; None ends that."""
        self._prefix.observer = observer

    def evict(self, n: int) -> int:
        """Forget up to n cached pages, the least recently used first and the end of a chain before its beginning.

        Returns:
          How many there were.

        Raises:
          ValueError: n below 1.
        """
        count = min(_count("n", n), len(self._prefix.unused))
        for _ in range(count):
            page = self._prefix.evict()
            self._free[self._stripe(page)].append(page)
        self._evictions += count
        return count

    # Pages and counters

    def table(self, handle: int, width: int) -> Int32[np.ndarray, " M"]:
        """Return the pages of a request in order, reserved ones too.

        Args:
          handle: from `add` or `fork`.
          width: M, blocks that a row of the device's table has.

        Returns:
          Int32 [M], after the last page -1.

        Raises:
          ValueError: an unknown handle, or a width below the request's pages.
        """
        pages = self._sequence(handle).pages
        if not _is_integer(width) or width < len(pages):
            raise ValueError(f"width = {width!r}: request {handle} has {len(pages)} pages; give at least that many")
        return np.array(pages + [-1] * (width - len(pages)), np.int32)

    def tokens(self, handle: int) -> tuple[int, ...]:
        """Return the tokens that a request's pages hold."""
        return tuple(self._sequence(handle).tokens)

    def pages_of(self, handle: int) -> tuple[int, ...]:
        """Return the pages that hold a request's tokens, in order, without reserved ones."""
        sequence = self._sequence(handle)
        return tuple(sequence.pages[: self._blocks(sequence.length)])

    @property
    def handles(self) -> frozenset[int]:
        """The handles of the requests that are open."""
        return frozenset(self._sequences)

    def held(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (page, tokens) for every page whose contents a request or the index of registered pages counts on."""
        yield from ((page, node.tokens) for page, node in self._prefix.nodes.items())
        for sequence in self._sequences.values():
            for block, page in enumerate(sequence.pages[: self._blocks(sequence.length)]):
                yield page, tuple(sequence.tokens[block * self.page_size : (block + 1) * self.page_size])

    @property
    def shares(self) -> bool:
        """True if later requests can use the full pages of earlier ones."""
        return self._share

    @property
    def free(self) -> frozenset[int]:
        """The free pages, whose contents no request and no later prompt needs."""
        return frozenset(chain.from_iterable(self._free))

    @property
    def available(self) -> int:
        """Pages that `extend` can give, on all devices: free and cached ones."""
        return sum(map(len, self._free)) + len(self._prefix.unused)

    def statistics(self) -> dict[str, int]:
        """Return counters of the pool's pages and of the tokens found in it.

        Returns:
          free, cached, used: pages now, together all of them. hit_tokens, missed_tokens: of all that `add` got, those
          found in the cache and the others. evictions: cached pages given away.
        """
        return {
            "free": sum(map(len, self._free)),
            "cached": len(self._prefix.unused),
            "used": self.num_pages - self.available,
            "hit_tokens": self._hit_tokens,
            "missed_tokens": self._missed_tokens,
            "evictions": self._evictions,
        }

    def check(self) -> None:
        """Verify that every page is in exactly one state, and that nobody can write what another reads.

        Raises:
          AssertionError: what is broken, with the page or the handle.
        """
        of_sequences = (self._broken_sequence(handle, sequence) for handle, sequence in self._sequences.items())
        first = next(chain(self._broken_pages(), self._prefix.broken(self._users), *of_sequences), None)
        if first:
            raise AssertionError(first)

    # Pages

    def _open(self, pages: list[int], tokens: list[int]) -> int:
        """Open a request with these pages, which others may have too, and return its handle."""
        for page in pages:
            self._users[page] += 1
            self._prefix.use(page)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._sequences[handle] = _Sequence(pages, tokens)
        return handle

    def _stripe(self, page: int) -> int:
        """Return the device that holds a page."""
        return page // self._stripe_size

    def _on_device(self, stripe: int) -> int:
        """Return the number of pages that a device can give: free and cached ones."""
        return len(self._free[stripe]) + self._prefix.num_unused[stripe]

    def _next_stripe(self, pages: Sequence[int], count: int) -> int:
        """Return the device from which a request's next `count` pages are dealt.

        It comes behind the device of the request's last page. The first page is on that which has the most to give, if
        any can be the first: of equal ones that with more free pages, then the lower one.
        """
        if pages:
            return (self._stripe(pages[-1]) + 1) % self.stripes
        return max(
            range(self.stripes),
            key=lambda stripe: (
                self._has_room(stripe, count), self._on_device(stripe), len(self._free[stripe]), -stripe
            ),
        )  # fmt: skip

    def _has_room(self, first_stripe: int, count: int) -> bool:
        """Return True if `count` pages can be dealt, one from each device in turn."""
        rounds, rest = divmod(count, self.stripes)
        places = range(self.stripes if rounds else rest)
        return all(self._on_device((first_stripe + i) % self.stripes) >= rounds + (i < rest) for i in places)

    def _take(self, stripes: Sequence[int]) -> list[int]:
        """Take a page of each of these devices for one request, which may write into them.

        Where a device has too few free ones, cached pages are forgotten, of whichever device: the least recently used
        first, so that the end of a chain goes before its beginning.
        """
        needed = Counter(stripes)
        if any(count > self._on_device(stripe) for stripe, count in needed.items()):
            where = "free or cached" if self.stripes == 1 else f"free or cached, on {self.stripes} devices in turn"
            raise OutOfPages(
                f"{len(stripes)} pages are needed and {self.available} of {self.num_pages} are {where}: release a "
                "request, or make the pool larger"
            )
        while missing := sum(max(0, count - len(self._free[stripe])) for stripe, count in needed.items()):
            self.evict(missing)  # no more than needed, and too few where they are other devices'
        pages = [self._free[stripe].pop() for stripe in stripes]
        for page in pages:
            self._users[page] = 1
        return pages

    def _drop(self, page: int) -> None:
        """Take a page from a request; a registered page that no request uses any more stays cached."""
        self._users[page] -= 1
        if self._users[page]:
            return
        if page in self._prefix.nodes:  # a later request may begin with its tokens
            self._prefix.leave(page)
        else:
            self._free[self._stripe(page)].append(page)

    def _register(self, sequence: _Sequence, block: int) -> None:
        """Make a full page known, so that later requests find it."""
        if not self._share:
            return
        tokens = sequence.tokens[block * self.page_size : (block + 1) * self.page_size]
        previous = sequence.pages[block - 1] if block else None
        replaced = self._prefix.register(sequence.pages[block], tokens, previous)
        if replaced is not None:
            self._free[self._stripe(replaced)].append(replaced)

    def _writable(self, page: int) -> bool:
        """Return True if only one request has the page, and no later one can find it."""
        return self._users[page] == 1 and page not in self._prefix.nodes

    def _blocks(self, length: int) -> int:
        """Return the number of pages that so many tokens fill or begin."""
        return -(-length // self.page_size)

    # Errors

    def _sequence(self, handle: int) -> _Sequence:
        if handle not in self._sequences:
            raise ValueError(f"no request {handle!r}: use a handle that add or fork returned and that is not released")
        return self._sequences[handle]

    def _check_fits(self, length: int) -> None:
        if length > self.num_pages * self.page_size:
            raise ValueError(
                f"a request of {length} tokens needs {self._blocks(length)} pages and the pool has {self.num_pages} of "
                f"{self.page_size} tokens: ask for less, or make the pool larger"
            )

    # Invariants

    def _broken_pages(self) -> Iterator[str]:
        users = Counter(page for sequence in self._sequences.values() for page in sequence.pages)
        nodes, unused = self._prefix.nodes, self._prefix.unused
        times_free = Counter(chain.from_iterable(self._free))
        for stripe, free in enumerate(self._free):
            if strangers := [page for page in free if page in range(self.num_pages) and self._stripe(page) != stripe]:
                yield f"page {strangers[0]} is free on device {stripe}, which does not hold it"
        for page, counted in enumerate(self._users):
            num_users, is_cached = users[page], int(page in unused)
            if counted != num_users:
                yield f"page {page} counts {counted} users and has {num_users}"
            if times_free[page] + is_cached + (num_users > 0) != 1:
                yield f"page {page} is {times_free[page]} times free, {is_cached} cached, {num_users} used"
            if times_free[page] and page in nodes:
                yield f"page {page} is free and registered"
            if is_cached and page not in nodes:
                yield f"page {page} is cached and not registered"
        if stray := {*users, *times_free, *nodes} - set(range(self.num_pages)):
            yield f"pages {sorted(stray)} are not in the pool"

    def _broken_sequence(self, handle: int, sequence: _Sequence) -> Iterator[str]:
        pages, size, written = sequence.pages, self.page_size, self._blocks(sequence.length)
        if len(pages) < written:
            yield f"request {handle} has {len(pages)} pages and needs {written}"
        if len(set(pages)) < len(pages):
            yield f"request {handle} has a page twice"
        for block, page in enumerate(pages):
            if (self._stripe(page) - self._stripe(pages[0]) - block) % self.stripes:
                yield f"page {page}, number {block} of request {handle}, is on device {self._stripe(page)}, out of turn"
        for page in pages[written:]:
            if not self._writable(page):
                yield f"page {page}, reserved by request {handle}, is shared or registered"
        for block, (previous, page) in enumerate(zip([-1, *pages], pages[:written], strict=False)):
            node = self._prefix.nodes.get(page)
            block_tokens = tuple(sequence.tokens[block * size : (block + 1) * size])
            if node and node.tokens[: len(block_tokens)] != block_tokens:
                yield f"page {page} is registered with tokens of another request"
            if node and node.parent.page != previous:
                yield f"page {page} follows {previous} in request {handle} only"


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _count(name: str, value: int, least: int = 1) -> int:
    if not _is_integer(value) or value < least:
        raise ValueError(f"{name} = {value!r}: must be an integer of at least {least}")
    return int(value)


def _integers(tokens: Sequence[int] | np.ndarray) -> list[int]:
    if isinstance(tokens, list | tuple) and set(map(type, tokens)) <= {int}:  # as an array it would take thrice as long
        return list(tokens)
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"tokens are {array.dtype} of shape {array.shape}: give one list of integers")
    return array.tolist()
