"""The definition of the pool: which pages a request takes and shares, which are known, and which are evicted first.

Plain Python that looks through everything at every call and keeps nothing that can be derived. `PageAllocator` is a
fast form of it: the same calls give the same pages, in the same order (tests/cache/test_pages.py, and with an engine
around it tests/decoding/test_engine_lives.py).
"""

from collections.abc import Sequence
from typing import Any

from m3jax.cache.allocator import Copy, OutOfPages, PageAllocator


class Pool:
    """Pages, each free, used by requests, or cached: known by its tokens and used by nobody.

    Args:
      num_pages: there are the pages 0 to num_pages - 1.
      page_size: P, tokens of a page.
      shares: whether full pages become known, so that later requests find them.
      stripes: n, devices that divide the pool evenly, each a run of neighbouring pages. The pages of a request lie on
        the devices in turn, and the first on any one.

    Attributes:
      free: the free pages; the last of the list is taken first, and what is given back becomes the last.
      known: the page that holds the last P of some tokens and follows the pages of those before, by all these tokens.
      left_at: the time at which a page was last given back by its last request; a later one is larger.
      pages: the pages of each request in order, reserved ones too, by its handle.
      tokens: the tokens that are written into them.
      evicted: pages that were forgotten so that others could have them.
    """

    def __init__(self, num_pages: int, page_size: int, shares: bool, stripes: int):
        self.page_size, self.shares, self.stripes, self.stripe_size = page_size, shares, stripes, num_pages // stripes
        self.free = list(range(num_pages))[::-1]
        self.known: dict[tuple[int, ...], int] = {}
        self.left_at: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.evicted = self.num_opened = self.now = 0

    def state(self) -> dict[str, Any]:
        """Return all that later calls depend on, in the form of `state_of`."""
        free = [[page for page in self.free if self.stripe(page) == stripe] for stripe in range(self.stripes)]
        lists = dict(free=free, cached=self.cached, known=self.known, pages=self.pages, tokens=self.tokens)
        return lists | dict(evictions=self.evicted)

    # Who has a page

    def users(self, page: int) -> int:
        """Return the number of requests that have a page."""
        return sum(page in pages for pages in self.pages.values())

    def is_read_only(self, page: int) -> bool:
        """Return True if a second request has the page, or a later one could find it."""
        return self.users(page) > 1 or page in self.known.values()

    @property
    def cached(self) -> list[int]:
        """The known pages that nobody uses, in the order in which they would be evicted: the first to be left first."""
        return sorted(
            (page for page in self.known.values() if not self.users(page)), key=lambda page: self.left_at[page]
        )

    @property
    def available(self) -> int:
        """The number of pages that `extend` can give."""
        return len(self.free) + len(self.cached)

    def stripe(self, page: int) -> int:
        """Return the device that holds a page."""
        return page // self.stripe_size

    def available_on(self, stripe: int) -> int:
        """Return the number of pages that a device can give."""
        return sum(self.stripe(page) == stripe for page in self.free + self.cached)

    def have(self, stripes: Sequence[int]) -> bool:
        """Return True if each device can give as many pages as it is named."""
        return all(stripes.count(stripe) <= self.available_on(stripe) for stripe in stripes)

    def dealt(self, pages: Sequence[int], count: int) -> list[int]:
        """Return the devices of `count` pages that follow those of a request: in turn behind the last page's.

        The first page is on the device that has the most to give, of those from which the pages can be dealt if there
        are any; of equal ones on that with more free pages, then the lower one.
        """
        from_device = lambda first: [(first + i) % self.stripes for i in range(count)]
        if pages:
            return from_device(self.stripe(pages[-1]) + 1)

        def preference(first):
            num_free = sum(self.stripe(page) == first for page in self.free)
            return self.have(from_device(first)), self.available_on(first), num_free, -first

        return from_device(max(range(self.stripes), key=preference))

    def can_give(self, count: int, handle: int | None = None) -> bool:
        """Return True if a request could get so many pages behind those that it has."""
        return self.have(self.dealt([] if handle is None else self.pages[handle], count))

    def blocks(self, num_tokens: int) -> int:
        """Return the number of pages that so many tokens fill or begin."""
        return -(-num_tokens // self.page_size)

    def pages_of(self, handle: int) -> list[int]:
        """Return the pages that hold a request's tokens, without reserved ones."""
        return self.pages[handle][: self.blocks(len(self.tokens[handle]))]

    # The life of a request, as `PageAllocator` says

    def add(self, tokens: Sequence[int], beside: int | None = None, share: bool = True) -> tuple[int, int]:
        """Open a request with the pages that hold its beginning: whole ones, or more of them if they are `beside`'s.

        The last token is never found: its logits are needed. Without `share` what is known is not looked at.
        """
        tokens, pages = tuple(tokens), []
        for end in range(self.page_size, len(tokens) if share else 0, self.page_size):
            if tokens[:end] not in self.known:
                break
            pages.append(self.known[tokens[:end]])
        num_cached = len(pages) * self.page_size
        if beside is not None:
            common = common_beginning(self.tokens[beside], tokens[:-1])
            if common > num_cached:
                num_cached, pages = common, self.pages[beside][: self.blocks(common)]
        return self._open(pages, tokens[:num_cached]), num_cached

    def extend(self, handle: int, count: int) -> list[Copy]:
        """Give a request pages for `count` more tokens, all or none, and a copy of a read-only page they begin in."""
        pages, written = self.pages[handle], len(self.tokens[handle])
        block = written // self.page_size
        copies_page = count > 0 and block < len(pages) and self.is_read_only(pages[block])
        wanted = self.dealt(pages, max(0, self.blocks(written + count) - len(pages)))
        wanted += [self.stripe(pages[block])] if copies_page else []  # on the copied page's own device
        if not self.have(wanted):
            raise OutOfPages(f"{len(wanted)} pages are needed and {self.available} are free or cached")
        taken = []
        while any(wanted.count(s) > sum(self.stripe(page) == s for page in self.free) for s in wanted):
            self.evict(1)
        for stripe in wanted:
            taken.append(next(page for page in reversed(self.free) if self.stripe(page) == stripe))
            self.free.remove(taken[-1])
        if not copies_page:
            pages += taken
            return []
        copied, pages[block] = pages[block], taken.pop()
        self._leave(copied)
        pages += taken
        return [Copy(copied, pages[block])]

    def commit(self, handle: int, tokens: Sequence[int]) -> None:
        """Write tokens; each page that they fill becomes known, if the one before it is known and no other is used.

        A first page that is known on another device stays so: those that follow it are in turn behind it.
        """
        pages, written = self.pages[handle], self.tokens[handle]
        first_block = len(written) // self.page_size
        written += tokens
        for block in range(first_block, len(written) // self.page_size):
            chain = tuple(written[: (block + 1) * self.page_size])
            is_chained = block == 0 or self.known.get(chain[: -self.page_size]) == pages[block - 1]
            other = self.known.get(chain)
            if not self.shares or not is_chained or other == pages[block]:
                continue
            if other is not None:
                if self.users(other) or self.stripe(other) != self.stripe(pages[block]):
                    continue
                self.free.append(other)
            self.known[chain] = pages[block]

    def fork(self, handle: int) -> int:
        """Open a second request with the same tokens in the same pages."""
        return self._open(self.pages_of(handle), self.tokens[handle])

    def truncate(self, handle: int, length: int) -> None:
        """Keep the first tokens of a request; pages that hold none of them are given back, the last one first."""
        del self.tokens[handle][length:]
        while len(self.pages[handle]) > self.blocks(length):
            self._leave(self.pages[handle].pop())

    def release(self, handle: int) -> None:
        """Give back all pages of a request."""
        self.truncate(handle, 0)
        del self.pages[handle], self.tokens[handle]

    def evict(self, count: int) -> int:
        """Forget the cached pages that were left first, `count` of them or all, and return how many."""
        evicted = self.cached[: max(count, 0)]
        self.known = {tokens: page for tokens, page in self.known.items() if page not in evicted}
        self.free += evicted
        self.evicted += len(evicted)
        return len(evicted)

    def forget(self) -> None:
        """Forget what is known: new weights would compute other keys and values."""
        self.free += self.cached
        self.known = {}

    def _open(self, pages: Sequence[int], tokens: Sequence[int]) -> int:
        handle, self.num_opened = self.num_opened, self.num_opened + 1
        self.pages[handle], self.tokens[handle] = list(pages), list(tokens)
        return handle

    def _leave(self, page: int) -> None:
        """Note that a request has given a page back."""
        self.left_at[page] = self.now = self.now + 1
        if not self.users(page) and page not in self.known.values():
            self.free.append(page)


def common_beginning(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of tokens with which both begin alike."""
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


def state_of(pages: PageAllocator) -> dict[str, Any]:
    """Return the state of an allocator as `Pool.state` gives it: equal states go on alike."""
    known = {}
    for page, node in pages._prefix.nodes.items():
        chain = ()
        while node.parent is not None:
            chain, node = node.tokens + chain, node.parent
        known[chain] = page
    return dict(
        free=pages._free,
        cached=list(pages._prefix.unused),
        known=known,
        pages={handle: sequence.pages for handle, sequence in pages._sequences.items()},
        tokens={handle: sequence.tokens for handle, sequence in pages._sequences.items()},
        evictions=pages.statistics()["evictions"],
    )
