"""An index of full pages by the tokens that lead to them, so that requests which begin alike share their pages."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(eq=False, repr=False)
class Node:
    """A registered page: its tokens follow those of its parents."""

    page: int
    tokens: tuple[int, ...]
    parent: "Node | None" = None
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    number: int | None = None  # as in `PageEvent`; the root has none


@dataclass(frozen=True)
class PageEvent:
    """A page that later requests can find from now on, or no longer.

    Attributes:
      what: "stored", "evicted", or "cleared", which stands for all pages at once.
      number: of the stored contents, never given twice; None for "cleared".
      parent: number of the page before it; None for the first of its request, and where nothing was stored.
      tokens: the P tokens that the page holds, with the keys of features in place of placeholders; () where nothing was
        stored.
    """

    what: Literal["stored", "evicted", "cleared"]
    number: int | None = None
    parent: int | None = None
    tokens: tuple[int, ...] = ()


class PrefixIndex:
    """The tree of registered pages.

    A page's key is its tokens, under its parent. A dictionary hashes them and then compares them, so different tokens
    with equal hashes are never mistaken for each other.

    A request that uses a page uses its parents too, and gives its pages back last one first. So in `unused` a page
    always comes before its parent, and evicting in that order never leaves a hole in a chain.

    The pages of a chain lie on the devices in turn: the children of a page are on the device behind its own
    (`m3jax.cache.PageAllocator`).

    Args:
      page_size: P, tokens of a page.
      stripe_size: pages of a device.
      stripes: devices that divide the pool.

    Attributes:
      observer: called with a `PageEvent` whenever what can be found has changed; None for nobody.
      num_unused: of the registered pages that no request uses, how many lie on each device.
    """

    def __init__(self, page_size: int, stripe_size: int, stripes: int = 1):
        self.page_size, self._stripe_size = page_size, stripe_size
        self.num_unused = [0] * stripes
        self.observer: Callable[[PageEvent], None] | None = None
        self._next_number = 0
        self.root = Node(-1, ())
        self.nodes: dict[int, Node] = {}  # by page id
        self.unused: OrderedDict[int, Node] = OrderedDict()  # of `nodes` those that no request uses, oldest first

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest registered beginning of `tokens`, in order."""
        node, pages, size = self.root, [], self.page_size
        for start in range(0, len(tokens) - size + 1, size):
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            pages.append(node.page)
        return pages

    def register(self, page: int, tokens: Sequence[int], previous: int | None) -> int | None:
        """Register a full page that a request has written.

        Nothing happens if the page before it is not registered, or if another request uses a page of the same
        tokens: otherwise a chain could lose its beginning while a request still needs its end. Nor does it if the known
        page is on another device, as a first one can be: those that follow it would no longer be in turn.

        Args:
          page: its id.
          tokens: the P tokens it holds.
          previous: the page before it in its request, None for the first.

        Returns:
          A page of the same tokens that no request uses, which this one has replaced; it is free now.
        """
        parent = self.root if previous is None else self.nodes.get(previous)
        if parent is None:
            return None
        key = tuple(tokens)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(page, key, parent, number=self._next_number)
            self._next_number += 1
            self._tell("stored", node.number, parent.number, key)
        replaced = None if node.page == page else node.page
        if replaced is not None:
            is_in_turn = replaced // self._stripe_size == page // self._stripe_size
            if replaced not in self.unused or not is_in_turn:
                return None
            self.use(replaced)
            del self.nodes[replaced]
            node.page = page
        self.nodes[page] = node
        return replaced

    def use(self, page: int) -> None:
        """Note that a request begins to use a page; an unregistered one is ignored."""
        if self.unused.pop(page, None) is not None:
            self.num_unused[page // self._stripe_size] -= 1

    def leave(self, page: int) -> None:
        """Note that the last request that used a page has given it back."""
        self.unused[page] = self.nodes[page]
        self.num_unused[page // self._stripe_size] += 1

    def evict(self) -> int:
        """Forget the page that has been unused for longest, and return it."""
        # Released pages were added from the end of a chain to its beginning, so none goes before those behind it.
        page, node = next(iter(self.unused.items()))
        self.use(page)
        del self.nodes[page], node.parent.children[node.tokens]
        self._tell("evicted", node.number)
        return page

    def clear(self) -> list[int]:
        """Forget every page: no later request finds one. Pages in use stay their requests' own.

        Returns:
          The pages that no request uses; they are free now.
        """
        unused = list(self.unused)
        self.root = Node(-1, ())
        self.nodes.clear()
        self.unused.clear()
        self.num_unused = [0] * len(self.num_unused)
        self._tell("cleared")
        return unused

    def _tell(self, *event: object) -> None:
        if self.observer is not None:
            self.observer(PageEvent(*event))

    def broken(self, users: Sequence[int]) -> Iterator[str]:
        """Yield a message for everything in the index that is not as it must be, with the page.

        Args:
          users: requests that use each page, by page id.
        """
        order = {page: i for i, page in enumerate(self.unused)}
        of_device = Counter(page // self._stripe_size for page in self.unused)
        if self.num_unused != (counted := [of_device[stripe] for stripe in range(len(self.num_unused))]):
            yield f"devices have {counted} unused pages, and {self.num_unused} are counted"
        for page, node in self.nodes.items():
            parent = node.parent
            if node.page != page:
                yield f"page {page} is registered as page {node.page}"
            if len(node.tokens) != self.page_size:
                yield f"registered page {page} has {len(node.tokens)} tokens"
            if parent.children.get(node.tokens) is not node:
                yield f"page {page} cannot be found from its parent"
            if parent is self.root:
                continue
            if self.nodes.get(parent.page) is not parent:
                yield f"page {page} has lost its parent: the chain has a hole"
            if (page // self._stripe_size - parent.page // self._stripe_size - 1) % len(self.num_unused):
                yield f"page {page} is not on the device behind its parent's"
            # Else an unused page could have used ones after it, and could not be evicted.
            if users[parent.page] < users[page]:
                yield f"page {page} has users that its parent lacks"
            if parent.page in order and order[page] > order[parent.page]:
                yield f"page {page} would be evicted after its parent"
        links = sum(len(node.children) for node in (self.root, *self.nodes.values()))
        if links != len(self.nodes):
            yield f"{links} pages can be found and {len(self.nodes)} are registered"


def common_length(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of tokens with which both begin alike."""
    start, end = 0, min(len(some), len(others))
    while start < end:  # the first `start` tokens are alike, and no more than `end`
        middle = (start + end + 1) // 2
        if some[start:middle] == others[start:middle]:
            start = middle
        else:
            end = middle - 1
    return start
