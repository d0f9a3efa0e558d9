"""The definition of service: who gets a row and pages, whose prompt goes on, who gives way, and in which order.

Plain Python without a device: it is told which tokens a request draws, and says when it draws them, and in which pages
they lie (`support.pool_definition`). `Engine` is held to it round by round (tests/decoding/test_engine_lives.py and
scripts/fuzz_engine.py). Left out are images (a prompt with some also waits for their features), scores of prompts (all
of such a prompt is computed), and calls that are launched ahead (they take pages for two calls at once).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.pool_definition import Pool, common_beginning

from m3jax.cache import OutOfPages
from m3jax.decoding.engine.shapes import Shapes

MOST_PASSES = 16  # a request that lacks pages is passed so often at most
LOOK_AHEAD = 8  # and only by so many of those behind it, and one more, in a round


@dataclass(eq=False)
class Served:
    """A request: what was asked, and where it is now.

    Attributes:
      handle: its number; an older request has a smaller one.
      prompt: token ids.
      limit: new tokens that it may get.
      stop_ids: it ends with the first of these.
      priority: requests of a higher one come first in the order of service.
      deadline: the time at which it ends; of one priority the earlier comes first.
      group: the first handle of the requests that were added with it as one group.
      new: its new tokens so far.
      row: its place in the batch; None while it waits.
      page_handle: the pool's handle of its pages; None while it has none.
      cached: of its tokens those in the cache.
      found: those that were known when it first got its pages; None before, and of copies and imports.
      is_decoding: whether its prompt is through; if not prefill works on it.
      passes: how often another got a row while this one lacked pages.
      preemptions: how often it gave its row back.
      end: the reason why it ended; None while it goes on.
    """

    handle: int
    prompt: tuple[int, ...]
    limit: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    deadline: float = math.inf
    group: int | None = None
    new: list[int] = field(default_factory=list)
    row: int | None = None
    page_handle: int | None = None
    cached: int = 0
    found: int | None = None
    is_decoding: bool = False
    passes: int = 0
    preemptions: int = 0
    end: str | None = None

    @property
    def order(self) -> tuple[int, float, int]:
        """The order of service: the higher priority, then the earlier deadline, then the older request."""
        return -self.priority, self.deadline, self.handle

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the new tokens."""
        return (*self.prompt, *self.new)

    @property
    def uncached(self) -> int:
        """The number of its tokens that are not in the cache."""
        return len(self.tokens) - self.cached


class Service:
    """The requests of an engine, its rows, and its pool.

    Args:
      pool: empty.
      shapes: of the engine.
      draw: returns the next tokens of a request, at most so many, as one call of the device gives them; it need not
        know where the request ends.

    Attributes:
      requests: all of them that go on, and those that have ended, by handle.
      request_of_row: the request of each row, or None.
      waiting: the requests without a row; those that lost theirs come last.
    """

    def __init__(self, pool: Pool, shapes: Shapes, draw: Callable[[Served, int], Sequence[int]]):
        self.pool, self.shapes, self.draw = pool, shapes, draw
        self.requests: dict[int, Served] = {}
        self.request_of_row: list[Served | None] = [None] * shapes.batch
        self.waiting: list[Served] = []
        self._is_turn_of_shortest = False
        self._lead = int(shapes.draft_tokens > 0)  # a draft writes the newest token too, which the target has not read

    # What is asked of an engine

    def add(self, request: Served) -> None:
        """Queue a request."""
        self.requests[request.handle] = request
        self.waiting.append(request)

    def copy(self, handle: int, copy: Served) -> None:
        """Queue a request that goes on from where another one is, in the same pages."""
        source = self.requests[handle]
        copy.new = list(source.new)
        if source.page_handle is not None:
            copy.page_handle, copy.cached = self.pool.fork(source.page_handle), source.cached
        self.add(copy)

    def truncate(self, handle: int, keep: int) -> None:
        """Take a request back to its first new tokens; of the others the last is computed again, in prefill."""
        request = self.requests[handle]
        del request.new[keep:]
        if request.page_handle is not None:
            request.cached = min(request.cached, len(request.tokens) - 1)
            self.pool.truncate(request.page_handle, request.cached)
            request.is_decoding = False

    def receive(self, tokens: Sequence[int], fails: bool = False) -> int | None:
        """Return the pool's handle of pages for the tokens that an imported request brings; those known are shared.

        Args:
          tokens: that were in the cache of the engine it comes from; without any it has no pages.
          fails: whether the device fails to write them.

        Raises:
          OutOfPages: they do not fit, or could not be written; the pages that were found count as used just now.
        """
        if not tokens:
            return None
        pages, known = self.pool.add((*tokens, 0))  # one token more: no logits are needed, so all pages may be known
        try:
            self.pool.extend(pages, len(tokens) - known)
            if fails:
                raise OutOfPages("the device failed")
        except OutOfPages:
            self.pool.release(pages)
            raise
        self.pool.commit(pages, tokens[known:])
        return pages

    def stop(self, handle: int, reason: str, keep: int | None = None) -> None:
        """End a request, with its first new tokens or all."""
        request = self.requests[handle]
        del request.new[len(request.new) if keep is None else keep :]
        if request.end is None:
            self._end(request, reason)

    def update(self, restarts: bool) -> None:
        """Forget all that old weights have computed; requests that restart lose their new tokens too."""
        if restarts:
            for request in self.requests.values():
                if request.end is None:
                    request.new = []
        for request in (*self.request_of_row, *self.waiting):
            if request is not None and request.page_handle is not None:
                self._lose(request)
        self.pool.forget()

    # A round

    def step(self, now: float) -> None:
        """Do a round: a chunk of some prompts, then decode steps of all rows whose prompt is through.

        Who waited for a beginning that this round's chunk has computed gets a row before the decode steps.
        """
        someone_waits_for_another = self.prefill(now)
        if someone_waits_for_another:
            self._admit()
            self._start()
        for request in self._with_row(is_decoding=True):
            self._reserve(request, min(self.shapes.tokens + self._lead, request.limit - len(request.new)))
        for request in self._with_row(is_decoding=True):
            self._append(request, self.draw(request, self.shapes.tokens))

    def prefill(self, now: float) -> bool:
        """End the requests that are late, give rows to those that wait, and read a chunk of some prompts.

        In turn the first prompts in the order of service go on, and those of which least is left.

        Returns:
          Whether a request waits for what another one computes.
        """
        for request in self.requests.values():
            if request.end is None and request.deadline <= now:
                self._end(request, "deadline")
        someone_waits_for_another = self._admit()
        self._start()
        chosen = self._with_row(is_decoding=False)
        if self._is_turn_of_shortest:
            chosen.sort(key=lambda request: request.uncached)
        self._is_turn_of_shortest = not self._is_turn_of_shortest
        chosen = chosen[: self.shapes.prompts]
        width = self.shapes.prefill_size(max((request.uncached for request in chosen), default=0))
        for request in chosen:
            self._reserve(request, min(width, request.uncached) + self._lead)
        chosen = [request for request in chosen if request.row is not None]
        for request in chosen:
            self._write(request, min(width, request.uncached))
            request.is_decoding = request.uncached == 0
        for request in chosen:
            if request.is_decoding:
                self._append(request, self.draw(request, 1), are_written=False)
        return someone_waits_for_another

    def _admit(self) -> bool:
        """Give rows to waiting requests in the order of service; return True if one waits for what another computes.

        Who lacks pages may be passed by some behind it that need fewer, until it was passed `MOST_PASSES` times.
        """
        someone_waits_for_another, lacks_pages, num_behind = False, None, 0
        for request in sorted(self.waiting, key=lambda request: request.order):
            if None not in self.request_of_row or num_behind > LOOK_AHEAD:
                break
            if self._awaits_another(request):
                someone_waits_for_another = True
                continue
            needed = self.pool.blocks(len(request.tokens) + 1)  # for its next token too
            if lacks_pages is not None:
                num_behind += 1
                if lacks_pages.passes >= MOST_PASSES or not self.pool.can_give(needed):
                    continue
            if request.page_handle is None:
                same = [other for other in self.request_of_row if other and self._may_share_all(request, other)]
                request.page_handle, request.cached = self.pool.add(
                    request.tokens, same[0].page_handle if same else None
                )
                request.found = request.cached if request.found is None else request.found
            missing = needed - len(self.pool.pages_of(request.page_handle))
            missing += request.cached % self.pool.page_size > 0  # what is shared in part will be copied
            if not self.pool.can_give(missing, request.page_handle) and any(self.request_of_row):
                lacks_pages = lacks_pages or request
                continue
            self.waiting.remove(request)
            request.row = self.request_of_row.index(None)
            self.request_of_row[request.row] = request
            if lacks_pages is not None:
                lacks_pages.passes += 1
        return someone_waits_for_another

    def _awaits_another(self, request: Served) -> bool:
        """Return True if prefill is computing, for a request that has a row, what this one can share."""
        if request.page_handle is not None:
            return False
        for other in self.request_of_row:
            if other is None or other.is_decoding:
                continue
            if self._may_share_all(request, other):
                return other.cached < len(request.prompt) - 1
            common = min(common_beginning(request.prompt, other.prompt), len(request.prompt) - 1)
            if self.pool.shares and other.cached < common // self.pool.page_size * self.pool.page_size:
                return True
        return False

    def _may_share_all(self, request: Served, other: Served) -> bool:
        """Return True if two requests have one prompt, and are of one group if nothing else is shared."""
        is_of_group = request.group is not None and request.group == other.group
        return request.prompt == other.prompt and (self.pool.shares or is_of_group)

    def _start(self) -> None:
        """Have the rows decode of which one token is not in the cache: a step reads it, but a draft needs prefill."""
        for request in self._with_row(is_decoding=False):
            request.is_decoding = not self._lead and request.cached > 0 and request.uncached == 1

    def _reserve(self, request: Served, count: int) -> None:
        """Find pages for more tokens; who is last in the order of service gives all of its own back, row or no row."""
        while request.row is not None:
            try:
                self.pool.extend(request.page_handle, count)
            except OutOfPages:
                having = [
                    other for other in (*self.request_of_row, *self.waiting) if other and other.page_handle is not None
                ]
                last = max(having, key=lambda other: other.order)
                last.preemptions += last.row is not None
                self._lose(last)
            else:
                return

    def _append(self, request: Served, tokens: Sequence[int], are_written: bool = True) -> None:
        """Add new tokens up to where the request ends; a decode step has written the token before each."""
        for token in tokens:
            if are_written:
                self._write(request, 1)
            request.new.append(token)
            if token in request.stop_ids or len(request.new) == request.limit:
                self._end(request, "stop_id" if token in request.stop_ids else "length")
                return

    def _write(self, request: Served, count: int) -> None:
        """Note that the next tokens of a request are in the cache."""
        self.pool.commit(request.page_handle, request.tokens[request.cached : request.cached + count])
        request.cached += count

    def _end(self, request: Served, reason: str) -> None:
        request.end = reason
        self._lose(request)
        self.waiting.remove(request)

    def _lose(self, request: Served) -> None:
        """Take the row and the pages of a request; it waits."""
        if request.row is not None:
            self.request_of_row[request.row] = None
            self.waiting.append(request)
        if request.page_handle is not None:
            self.pool.release(request.page_handle)
        request.row = request.page_handle = None
        request.cached, request.is_decoding = 0, False

    def _with_row(self, is_decoding: bool) -> list[Served]:
        """Return the requests that have a row, in the order of service: those that decode, or those in prefill."""
        having = [
            request for request in self.request_of_row if request is not None and request.is_decoding == is_decoding
        ]
        return sorted(having, key=lambda request: request.order)


def state_of(service: Any) -> dict[str, Any]:
    """Return all that later rounds depend on, but for the pool, of a `Service` or of an engine's scheduler.

    Where the two agree in it they go on alike.
    """
    requests = (*(request for request in service.request_of_row if request), *service.waiting)
    names = ("new", "page_handle", "cached", "found", "is_decoding", "passes", "preemptions")
    return dict(
        rows=[request and request.handle for request in service.request_of_row],
        waiting=[request.handle for request in service.waiting],
        requests={request.handle: {name: getattr(request, name) for name in names} for request in requests},
    )
