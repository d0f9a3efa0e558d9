"""Who gets a row and pages, and when: the rounds of the engine."""

import math
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import jax

from m3jax.cache import OutOfPages, PageAllocator
from m3jax.decoding import device
from m3jax.decoding.request import Drafting, Params, Timings
from m3jax.decoding.runner import Part, Runner

_REASONS = {
    device.LENGTH: "length",
    device.STOP_ID: "stop_id",
    device.STOP_STRING: "stop_string",
    device.BAD_LOGITS: "nan",
}


@dataclass(eq=False)
class Entry:
    """A request on the host. Its tokens are the prompt and what was generated; the last one is not in the cache."""

    handle: int
    prompt: tuple[int, ...]
    params: Params
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    row: int | None = None
    pages: Any = None  # the allocator's handle while it has a row
    cached: int = 0  # tokens of it in the cache
    running: bool = False  # its prompt is through
    reason: str = "unfinished"
    taken: int = 0
    preempted: int = 0
    began: float = 0.0
    first_token_at: float | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.new)

    @property
    def left(self) -> int:
        """New tokens it may still get."""
        return self.params.max_new_tokens - len(self.new)

    @property
    def left_to_cache(self) -> int:
        """Tokens whose keys are not in the cache yet."""
        return len(self.tokens) - self.cached


class Scheduler:
    """Rows, pages and the queue.

    Args:
      runner: the device's side.
      pages: the host's side of the cache.

    Attributes:
      rows: the request of each row, or None.
      waiting: requests without a row, oldest first.
      timings: where the seconds went.
      drafting: what came of proposals.
    """

    def __init__(self, runner: Runner, pages: PageAllocator):
        self.runner, self.pages, self.shapes = runner, pages, runner.shapes
        self.rows: list[Entry | None] = [None] * self.shapes.batch
        self.waiting: list[Entry] = []
        self.timings = Timings()
        self.drafting = Drafting(self.shapes.draft_tokens)
        # A draft fills the slot of the newest token, which the target will only write in the next call.
        self._ahead = int(self.shapes.draft_tokens > 0)

    def of(self, running: bool) -> list[Entry]:
        """Requests that have a row, oldest first."""
        rows = [r for r in self.rows if r is not None and r.running == running]
        return sorted(rows, key=lambda r: r.handle)

    def admit(self) -> None:
        """Give waiting requests a row, the oldest first, while their tokens find pages."""
        while self.waiting and None in self.rows:
            request = self.waiting[0]
            if request.pages is None:
                request.pages, request.cached = self.pages.add(request.tokens)
            needed = math.ceil((len(request.tokens) + 1) / self.pages.page_size)
            if self.pages.available < needed - len(self.pages.pages_of(request.pages)) and any(self.rows):
                return  # it keeps the known pages that it found, until somebody needs them more
            del self.waiting[0]
            request.row = self.rows.index(None)
            self.rows[request.row] = request
            self._place(request)

    def prefill(self) -> None:
        """One chunk of the prompts that came first."""
        began = perf_counter()
        chosen = self.of(running=False)[: self.shapes.prompts]
        width = self._width(max((r.left_to_cache for r in chosen), default=0))
        for request in chosen:
            self._reserve(request, min(width, request.left_to_cache) + self._ahead)
        chosen = [r for r in chosen if r.row is not None]
        if not chosen:
            return
        new = self.runner.prefill([Part(r.row, r.tokens, r.cached, r.params, len(r.new)) for r in chosen], width)
        for request in chosen:
            count = min(width, request.left_to_cache)
            self.timings.prompt_tokens += count
            self._written(request, request.cached + count)
            request.running = request.left_to_cache == 0
        if any(r.running for r in chosen):
            new = jax.device_get(new)
        for i, request in enumerate(chosen):
            if request.running:
                self.runner.started(request.row, int(new.reasons[i]))
                self._append(request, new, i)
        self.timings.prefill_seconds += perf_counter() - began

    def _width(self, left: int) -> int:
        """The smallest chunk that holds so many tokens, else the largest."""
        return next((width for width in self.shapes.chunks if width >= left), self.shapes.chunks[-1])

    def decode(self) -> None:
        """A few steps of every row whose prompt is through."""
        began = perf_counter()
        for request in self.of(running=True):
            self._reserve(request, min(self.shapes.tokens + self._ahead, request.left))
        running = self.of(running=True)
        if not running:
            return
        new = self.runner.decode(self.shapes.steps)
        for request in running:
            count, row = int(new.counts[request.row]), request.row
            self._append(request, new, row, written=request.cached + count)
            self.timings.decoded_tokens += count
        if new.rounds is not None:
            self.drafting.add(new.rounds)
        self.timings.decode_seconds += perf_counter() - began

    def _reserve(self, request: Entry, count: int) -> None:
        """Pages for `count` more tokens; the youngest requests give way, the request itself if it is the youngest."""
        while request.row is not None:
            try:
                self.runner.copy_pages(self.pages.extend(request.pages, count))
            except OutOfPages:
                self._give_up(max(self._holders(), key=lambda r: r.handle))
            else:
                self._place(request)
                return

    def _place(self, request: Entry) -> None:
        self.runner.place(request.row, self.pages.table(request.pages, self.runner.table.shape[1]))

    def _holders(self) -> list[Entry]:
        """All who have pages; a request that waits has some if it was copied or imported."""
        return [r for r in (*self.rows, *self.waiting) if r is not None and r.pages is not None]

    def _give_up(self, request: Entry) -> None:
        """Take a request's pages, and its row if it has one: it waits again, before all younger ones."""
        if request.row is not None:
            request.preempted += 1
            self.waiting.append(request)
            self.waiting.sort(key=lambda r: r.handle)
        self._leave(request)

    def restart(self, request: Entry) -> None:
        """Have prefill run what of a request is not in the cache; until then its row stands still."""
        request.running = False
        self.runner.clear(request.row)
        self._place(request)

    def stop(self, request: Entry, reason: str) -> None:
        request.reason = reason
        if request.row is None:
            self.waiting.remove(request)
        self._leave(request)

    def _leave(self, request: Entry) -> None:
        """Release what a request has; known pages stay in the prefix cache."""
        if request.row is not None:
            self.runner.clear(request.row)
            self.rows[request.row] = None
        if request.pages is not None:
            self.pages.release(request.pages)
        request.row = request.pages = None
        request.running, request.cached = False, 0

    def _append(self, request: Entry, new: device.New, at: int, written: int | None = None) -> None:
        """Take over a request's new tokens from what a call returned, and what that call put into the cache."""
        count, reason = int(new.counts[at]), int(new.reasons[at])
        request.new += new.tokens[at, :count].tolist()
        request.logprobs += new.logprobs[at, :count].tolist()
        if written is not None:
            self._written(request, written)
        if request.first_token_at is None and count:
            request.first_token_at = perf_counter()
        if reason != device.LIVE:
            self.stop(request, _REASONS[reason])

    def _written(self, request: Entry, end: int) -> None:
        """Tell the allocator what the device has just put into the pages."""
        self.pages.commit(request.pages, request.tokens[request.cached : end])
        request.cached = end
