"""The engine's round: who gets a row and pages (admit), what runs (prefill, decode), and who gives way.

Each of the three runs on the host around at most one call of the device (`Runner`), and tells the allocator of pages
what that call wrote.
"""

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from jaxtyping import Int32, UInt32

from m3jax.cache import OutOfPages, PageAllocator
from m3jax.cache.prefix import common_length
from m3jax.decoding import device
from m3jax.decoding.engine.exchange import PAGES_A_CALL
from m3jax.decoding.engine.media import FeatureRows
from m3jax.decoding.engine.report import Drafting, Timings
from m3jax.decoding.engine.request import Request, check_bits
from m3jax.decoding.engine.runner import PromptPart, Runner, on_host
from m3jax.decoding.protocols import PageContents

_STOP_REASONS = {
    device.LENGTH: "length",
    device.STOP_ID: "stop_id",
    device.STOP_STRING: "stop_string",
    device.BAD_LOGITS: "nan",
    device.NOTHING_ALLOWED: "no_token",
}

# A waiting request is passed so often at most by others that need fewer pages, and by the next few behind it alone.
MOST_PASSES = 16
_LOOK_AHEAD = 8


class UnknownPages(RuntimeError):
    """Raised for a snapshot without pages that this engine no longer knows; nothing was changed. Send all of them."""


@dataclass
class Flight:
    """A decode call that was launched, and whose tokens were not read yet.

    Attributes:
      new: its tokens, on the device.
      running: the requests that had a row in it.
    """

    new: device.NewTokens
    running: list[Request]


class Scheduler:
    """The rows, the pages and the queue of an engine, and the work of one round.

    Args:
      runner: the device's side.
      pages: the host's side of the cache.
      features: the host's side of images' and videos' features; None where only text is served.
      dispatch_ahead: launch a decode call before the last one's tokens are read, where that changes nothing.

    Attributes:
      request_of_row: the request of each row, or None.
      waiting: requests without a row.
      changed: requests of which there is news since `Engine.step` gave out the last, by handle.
      version: of the weights that draw tokens now.
      timings: the seconds spent on each kind of work.
      drafting: the counts of proposals and of accepted ones.
    """

    def __init__(
        self,
        runner: Runner,
        pages: PageAllocator,
        features: FeatureRows | None,
        dispatch_ahead: bool,
    ):
        self.runner, self.pages, self.shapes, self.features = runner, pages, runner.shapes, features
        self._dispatches_ahead = dispatch_ahead
        self._flight: Flight | None = None
        self.request_of_row: list[Request | None] = [None] * self.shapes.batch
        self.waiting: list[Request] = []
        self.changed: dict[int, Request] = {}
        self.version = 0
        self._is_turn_of_shortest = False
        self._has_sharers = False  # whether requests wait for what prefill computes for others
        self.timings = Timings()
        self.drafting = Drafting(self.shapes.draft_tokens)
        # A draft fills the slot of the newest token, which the target will only write in the next call.
        self._draft_lead = int(self.shapes.draft_tokens > 0)

    # A round

    def admit(self) -> None:
        """Give waiting requests a row, in their order, while their tokens find pages.

        A request that lacks pages may be passed by younger ones that fit, `MOST_PASSES` times; then all wait for it.
        One whose beginning is being computed for another request waits for that, and holds up nobody.
        """
        self._has_sharers = False
        if self.waiting:
            self.settle()
        if None not in self.request_of_row:
            return
        blocked: Request | None = None
        behind = 0  # requests looked at behind the one that lacks pages
        for request in sorted(self.waiting, key=lambda request: request.order):
            if None not in self.request_of_row or behind > _LOOK_AHEAD:
                return
            if self._is_computed_for_another(request):
                self._has_sharers = True
                continue
            if blocked is not None:
                behind += 1
                if blocked.passes >= MOST_PASSES or not self.pages.can_give(self._pages_for(request)):
                    continue
            if request.page_handle is None:
                donor = self._donor(request)
                beside = None if donor is None else donor.page_handle
                # Pages that are there say nothing of their tokens' scores.
                request.page_handle, request.cached = self.pages.add(request.keys, beside, share=request.has_scores)
                request.found = request.cached if request.found is None else request.found
            missing = self._pages_for(request) - len(self.pages.pages_of(request.page_handle))
            # The last page that is shared in part will be copied.
            missing += request.cached % self.pages.page_size != 0
            if not self.pages.can_give(missing, request.page_handle) and any(self.request_of_row):
                # It keeps the cached pages that it found, until `_reserve` has it give way. Passes are the first one's.
                blocked = request if blocked is None else blocked
                continue
            self.waiting.remove(request)
            request.common.clear()
            request.row = self.request_of_row.index(None)
            request.row_at = perf_counter() if request.row_at is None else request.row_at
            self.request_of_row[request.row] = request
            self._send_pages(request)
            if blocked is not None:
                blocked.passes += 1

    def _pages_for(self, request: Request) -> int:
        """Return the pages that the tokens of a request and the next one fill or begin."""
        return math.ceil((request.num_tokens + 1) / self.pages.page_size)

    def _is_computed_for_another(self, request: Request) -> bool:
        """Return True if prefill is about to compute, for a request that has a row, whole pages that this one needs.

        Of a request of the same prompt all of it is waited for: its last page can be shared too (`_donor`).
        """
        if request.page_handle is not None:
            return False  # it was copied or imported, or has looked its pages up already
        size = self.pages.page_size
        for other in self.request_of_row:
            if other is None or other.is_decoding:
                continue
            if not request.has_scores and other.prompt_scores is not request.prompt_scores:
                continue
            common = self._common(request, other)
            if self._has_prompt_of(request, other):
                return other.cached < len(request.prompt) - 1
            if self.pages.shares and other.cached < min(common, len(request.prompt) - 1) // size * size:
                return True
        return False

    def _donor(self, request: Request) -> Request | None:
        """Return a request whose pages hold the whole prompt of this one, the part of a page at its end too."""
        if not request.has_scores:
            return None
        others = (other for other in self.request_of_row if other is not None)
        return next((other for other in others if self._has_prompt_of(request, other)), None)

    def _has_prompt_of(self, request: Request, other: Request) -> bool:
        """Return True if two requests have the same prompt, and may share pages.

        All may, but where the prefix cache is off only those of one group.
        """
        may_share = self.pages.shares or (request.group is not None and request.group == other.group)
        return may_share and self._common(request, other) == len(request.prompt) == len(other.prompt)

    def _common(self, request: Request, other: Request) -> int:
        """Return the number of tokens with which the prompts of two requests begin alike; a few less than a page are 0.

        A waiting request is held against all that have a row in every round: what was found is kept.
        """
        if other.handle not in request.common:
            size, some, others = self.pages.page_size, request.prompt_keys, other.prompt_keys
            is_alike = some[:size] == others[:size]
            request.common[other.handle] = common_length(some, others) if is_alike else 0
        return request.common[other.handle]

    def read_media(self) -> None:
        """Run the tower on what the next chunks of prompts need and the device lacks, for the oldest prompt first.

        It reads at most as many patches as one call of the tower can have, so that other work does not wait longer. The
        features that an older prompt needs next are not dropped for a younger one.
        """
        if self.features is None:
            return
        remaining, kept = self.shapes.media_patches[-1], set()
        for request in self.requests_with_row(is_decoding=False):
            needed = request.segments_in(self._next_count(request))
            kept.update(placed.number for placed in needed)
            for placed in needed:
                if placed.number in self.features:
                    continue
                size = self.shapes.tower_size(len(placed.segment.patches))
                if size > remaining:
                    return
                rows = self.features.take(placed.number, len(placed.places), kept)
                if rows is None:
                    return
                self.runner.read_segment(placed, size, rows)
                remaining -= size

    def prefill(self, decode_follows: bool) -> None:
        """Run one chunk of some prompts; those that end in it get their first token.

        In turn the prompts that come first in order go on, and those of which least is left: so a short one waits for
        at most as many calls as the prompts have chunks that are as short or shorter, and as many again, however long
        the one before it is; and the first in order goes on in every second call. A prompt whose next chunk still lacks
        features waits, and the next one takes its place.

        Args:
          decode_follows: as in `Engine.prefill`.
        """
        began = perf_counter()
        self.read_media()
        if decode_follows:
            self._start_rows()
        can_go_on = [request for request in self.requests_with_row(is_decoding=False) if self._has_features(request)]
        if self._is_turn_of_shortest:
            can_go_on.sort(key=lambda request: request.uncached)
        self._is_turn_of_shortest = not self._is_turn_of_shortest
        chosen = can_go_on[: self.shapes.prompts]
        longest = max((request.uncached for request in chosen), default=0)
        width = self.shapes.prefill_size(longest)
        for request in chosen:
            self._reserve(request, min(width, request.uncached) + self._draft_lead)
        chosen = [request for request in chosen if request.row is not None]  # the others had to give way
        if not chosen:
            return
        counts = [min(width, request.uncached) for request in chosen]
        parts = [self._part(request, count) for request, count in zip(chosen, counts, strict=True)]
        new = self.runner.prefill(parts, width)
        is_any_through = any(count == request.uncached for request, count in zip(chosen, counts, strict=True))
        if is_any_through or new.scores is not None:
            new = on_host(new)
        for index, (request, part) in enumerate(zip(chosen, parts, strict=True)):
            if part.wants_scores:
                request.note_scores(*(values[index, : counts[index]].tolist() for values in new.scores))
        for request, count in zip(chosen, counts, strict=True):
            self.timings.prompt_tokens += count
            self._commit(request, request.cached + count)
            request.is_decoding = request.uncached == 0
        for index, request in enumerate(chosen):
            if request.is_decoding:
                first_token = int(new.tokens[index, 0])
                self.runner.start_row(request.row, int(new.stop_reasons[index]), request.cached, first_token)
                # The first token is not in the cache: the next call will write it.
                self._take_tokens(request, new, index, end=request.cached)
        self.timings.prefill_seconds += perf_counter() - began

    def _start_rows(self) -> None:
        """Have rows decode of which one token alone is not in the cache: a step computes it as it computes any other.

        That is what a copy lacks, and a request whose prompt another one has computed. A draft has to read the prompt,
        and a feature of an image stands in prefill alone: there the token goes through prefill.
        """
        if self.shapes.draft_tokens:
            return
        begun = [request for request in self.requests_with_row(is_decoding=False) if request.cached]
        starting = [request for request in begun if request.uncached == 1 and not request.segments_in(1)]
        for first in range(0, len(starting), self.shapes.prompts):
            group = starting[first : first + self.shapes.prompts]
            self.runner.start_rows([self._part(request, 1) for request in group])
            for request in group:
                request.is_decoding = True
                self.timings.prompt_tokens += 1

    def _part(self, request: Request, count: int) -> PromptPart:
        """Return what the device needs to know of a request whose next `count` tokens it is to read."""
        features = self._feature_rows(request, count)
        mask = self._mask(request) if count == request.uncached else None  # else this call draws nothing for it
        return PromptPart(
            row=request.row,
            tokens=request.token_array,
            cached=request.cached,
            params=request.params,
            new_count=len(request.new),
            feature_rows=features,
            mask=mask,
            wants_scores=not request.has_scores,
            edits=request.edits,
            key_offset=request.key_offset,
        )

    def decode(self) -> None:
        """Run a few steps of every row whose prompt is through.

        While the same rows go on, the next call is launched before the last one's tokens are read, so that the device
        does not wait for the host. Whatever changes rows otherwise reads them first (`settle`).
        """
        began = perf_counter()
        if self._may_go_ahead():
            before, self._flight = self._flight, self._launch()
            self._take_flight(before)
        else:
            self.settle()
            if self._has_sharers:  # what they wait for may be there now: they begin with the request that computed it
                self.admit()
                self._start_rows()
            for request in self.requests_with_row(is_decoding=True):
                self._reserve(request, self._most_tokens(request, calls=1))
            self._flight = self._launch()
        if not (self._dispatches_ahead and self._is_steady()):
            self.settle()
        self.timings.decode_seconds += perf_counter() - began

    def settle(self) -> None:
        """Read the tokens of a decode call that is in flight, if there is one: the host knows all rows after it."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._take_flight(flight)

    def _is_steady(self) -> bool:
        """Return True if nothing but the next tokens of the same rows is to be computed, as far as the host knows."""
        running = self.requests_with_row(is_decoding=True)
        is_guided = any(request.guide is not None for request in running)  # a mask follows from the token before it
        return bool(running) and not self.waiting and not self.requests_with_row(is_decoding=False) and not is_guided

    def _may_go_ahead(self) -> bool:
        """Return True if a call is in flight, and the next one can be launched before it is read; find its pages."""
        if self._flight is None or not self._is_steady():
            return False
        running = self.requests_with_row(is_decoding=True)
        # Each step, or round, is a token at least. A row with more to come may still end in the call in flight, if its
        # proposals are right: where all rows do, the next call finds none that is live, and is over at once.
        if all(request.new_remaining <= self.shapes.steps for request in running):
            return False  # all end in the call in flight
        try:
            for request in running:
                self.runner.copy_pages(self.pages.extend(request.page_handle, self._most_tokens(request, calls=2)))
                self._send_pages(request)
        except OutOfPages:
            return False  # who has to give way is known when the call is read
        return True

    def _most_tokens(self, request: Request, calls: int) -> int:
        """Return the most tokens that a request can have in the cache after some calls, beyond those it is known by."""
        return min(calls * self.shapes.tokens + self._draft_lead, request.new_remaining)

    def _launch(self) -> Flight | None:
        """Launch a decode call of all rows whose prompt is through; None if there are none."""
        running = self.requests_with_row(is_decoding=True)
        if not running:
            return None
        masks = {request.row: self._mask(request) for request in running if request.guide is not None}
        records = self.runner.records_of(request.params for request in running)
        edits = {request.row: request.edits for request in running if request.edits}
        rows = [request.row for request in running]
        return Flight(self.runner.launch(self.shapes.steps, masks, records, edits, rows), running)

    def _take_flight(self, flight: Flight) -> None:
        """Wait for a decode call, and give its tokens to its requests; those that ended in the call before got none."""
        new = self.runner.read(flight.new)
        for request in flight.running:
            if request.row is None:
                continue
            count = int(new.counts[request.row])
            self.timings.decoded_tokens += count - (count > 0 and not request.new)
            if new.drafting is not None:
                request.drafted += int(new.drafting.proposed[request.row])
                request.accepted += int(new.drafting.accepted[request.row].sum())
            self._take_tokens(request, new, request.row, end=request.cached + count)
        if new.drafting is not None:
            self.drafting.add(new.drafting)

    def requests_with_row(self, is_decoding: bool) -> list[Request]:
        """Return the requests that have a row, in their order: those whose prompt is through, or the others."""
        requests = (request for request in self.request_of_row if request is not None)
        return sorted((r for r in requests if r.is_decoding == is_decoding), key=lambda r: r.order)

    def check(self) -> None:
        """Raise AssertionError unless the pages, what was written into them, their requests and rows' tables agree."""
        self.pages.check()
        with_pages = [r for r in (*self.request_of_row, *self.waiting) if r and r.page_handle is not None]
        if (handles := sorted(r.page_handle for r in with_pages)) != sorted(self.pages.handles):
            raise AssertionError(f"the pool has pages of {sorted(self.pages.handles)}, and requests have {handles}")
        for page, tokens in self.pages.held():
            written = tuple(self.runner.written[page, : len(tokens)].tolist())
            if written != tokens:
                raise AssertionError(f"page {page} is known by the tokens {tokens}, and {written} were written into it")
        table = self.runner.table
        for row, request in enumerate(self.request_of_row):
            expected = -1 if request is None else self.pages.table(request.page_handle, table.shape[1])
            np.testing.assert_array_equal(table[row], expected)

    def _take_tokens(self, request: Request, new: device.NewTokens, index: int, end: int) -> None:
        """Take over a request's new tokens from what a call returned.

        Args:
          request: has a row.
          new: on the host.
          index: of the request in `new`.
          end: tokens of the request that are in the cache now.
        """
        count, stop_reason = int(new.counts[index]), int(new.stop_reasons[index])
        columns = (new.tokens, new.logprobs, new.top_ids, new.top_logprobs)
        request.append(*(values[index, :count].tolist() for values in columns), version=self.version)
        request.note_records(new.records, index, count)
        self._commit(request, end)
        if count:
            request.last_token_at = perf_counter()
            if request.first_token_at is None:
                request.first_token_at = request.last_token_at
            self.changed[request.handle] = request
        if stop_reason != device.LIVE:
            self.stop(request, _STOP_REASONS[stop_reason])

    def _mask(self, request: Request) -> UInt32[np.ndarray, " W"] | None:
        """Return the tokens that may come next in a request, as its guide says; None where all may."""
        mask = request.mask
        check_bits(mask, request.handle, self.runner.model.config.vocab_size)
        return mask

    # Images and videos

    def _next_count(self, request: Request) -> int:
        """Return the most tokens of a prompt that go into its next chunk."""
        return min(self.shapes.chunks[-1], request.uncached)

    def _has_features(self, request: Request) -> bool:
        """Return True if the device has all features that a prompt's next chunk needs."""
        return all(placed.number in self.features for placed in request.segments_in(self._next_count(request)))

    def _feature_rows(self, request: Request, count: int) -> Int32[np.ndarray, " T"]:
        """Return the row of the feature that each of a prompt's next tokens stands for; -1 for a token of text."""
        rows = np.full(count, -1, np.int32)
        for placed in request.segments_in(count):
            columns = placed.places - request.cached
            is_inside = (columns >= 0) & (columns < len(rows))
            rows[columns[is_inside]] = self.features.rows(placed.number)[is_inside]
        return rows

    # Pages

    def _reserve(self, request: Request, count: int) -> None:
        """Find pages for `count` more tokens; the last requests in order give way, this one if it is the last.

        Any request that has pages can give way: one that waits has some if it was copied or imported, or if it found
        known pages and too few others.
        """
        while request.row is not None:
            try:
                self.runner.copy_pages(self.pages.extend(request.page_handle, count))
            except OutOfPages:
                with_pages = [r for r in (*self.request_of_row, *self.waiting) if r and r.page_handle is not None]
                self._preempt(max(with_pages, key=lambda r: r.order))
            else:
                self._send_pages(request)
                return

    def _send_pages(self, request: Request) -> None:
        """Set a row of the device's page table to the allocator's pages of its request."""
        self.runner.set_pages(request.row, self.pages.table(request.page_handle, self.runner.table.shape[1]))

    def _commit(self, request: Request, end: int) -> None:
        """Tell the allocator that the device has written a request's tokens up to `end` into its pages."""
        self.pages.commit(request.page_handle, request.keys_between(request.cached, end))
        request.cached = end

    def receive(self, keys: tuple[int, ...], contents: list[PageContents], left_out: int = 0) -> int:
        """Put the pages of a request that another engine exported where this one has room.

        Args:
          keys: of all that its pages hold (`Request.keys`).
          contents: of the pages.
          left_out: tokens at the beginning that are in none of these pages, so that known ones must hold them.

        Returns:
          The allocator's handle of them.

        Raises:
          UnknownPages: pages that were left out are not known here, or no longer.
          OutOfPages: they do not fit at the moment. Whatever is raised, nothing is changed.
        """
        # `add` leaves the last token out, whose logits a prompt needs. Here no logits are: one token more, and all full
        # pages may be shared.
        page_handle, known = self.pages.add((*keys, 0))
        try:
            if known < left_out:
                raise UnknownPages(
                    f"{left_out} tokens were left out of the snapshot's pages, and {known} are known here"
                )
            self.runner.copy_pages(self.pages.extend(page_handle, len(keys) - known))
            # Pages that are known here are shared with other requests: they are not written again.
            table = self.pages.table(page_handle, math.ceil(len(keys) / self.pages.page_size))
            table[: known // self.pages.page_size] = -1
            groups = known // self.pages.page_size // PAGES_A_CALL  # of which nothing is to be written
            first = groups * PAGES_A_CALL
            self.runner.write_pages(table[first:].tolist(), contents[groups:], keys[first * self.pages.page_size :])
            self.pages.commit(page_handle, keys[known:])  # now that they are written others may find them
        except BaseException:
            self.pages.release(page_handle)
            raise
        return page_handle

    # Requests that lose their row

    def _preempt(self, request: Request) -> None:
        """Take a request's pages, and its row if it has one: it waits again, at its place in the order."""
        if request.row is not None:
            request.preemptions += 1
            self.waiting.append(request)
        self._release(request)

    def restart(self, request: Request) -> None:
        """Have prefill run the tokens of a request that are not in the cache; until then its row stands still."""
        request.is_decoding = False
        self.runner.clear_row(request.row)
        self._send_pages(request)

    def stop(self, request: Request, stop_reason: str) -> None:
        """End a request, whether it runs or waits."""
        request.stop_reason = stop_reason
        self.changed[request.handle] = request
        request.segments = ()  # nothing will ask for its patches again
        if request.row is None:
            self.waiting.remove(request)
        self._release(request)

    def drop_prefixes(self) -> None:
        """Forget all that was computed with weights that are no more: pages, known ones too, and features."""
        for request in (*self.request_of_row, *self.waiting):
            if request is not None and request.page_handle is not None:
                if request.row is not None:
                    self.waiting.append(request)
                self._release(request)
        self.pages.forget()
        if self.features is not None:
            self.features.forget()

    def _release(self, request: Request) -> None:
        """Release the row and the pages of a request; registered pages stay in the prefix cache."""
        if request.row is not None:
            self.runner.clear_row(request.row)
            self.request_of_row[request.row] = None
        if request.page_handle is not None:
            self.pages.release(request.page_handle)
        request.row = request.page_handle = None
        request.is_decoding, request.cached = False, 0
