"""The engine: requests come and go, the device runs the same few programs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Unpack

import jax
from jaxtyping import PyTree

from m3jax.cache import HostMemory, PageAllocator, PageEvent
from m3jax.cache.device import page_shards
from m3jax.decoding.engine import checks
from m3jax.decoding.engine.exchange import PAGES_A_CALL, Snapshot, check_snapshot, identity
from m3jax.decoding.engine.media import FeatureRows, Media, PlacedSegment, Placer, as_media, prefix_keys
from m3jax.decoding.engine.options import EngineKnobs, Storage, Work, as_options
from m3jax.decoding.engine.report import Drafting, Timings, offload_counters
from m3jax.decoding.engine.request import (
    Generation,
    Guide,
    Params,
    PromptScores,
    Request,
    TokenEvent,
    as_prompt,
    check_guide,
    check_prompt,
)
from m3jax.decoding.engine.runner import PROGRAMS, Runner, Watch
from m3jax.decoding.engine.scheduler import Scheduler
from m3jax.decoding.engine.shapes import DRAFT_TOKENS, Shapes, prefill_chunks
from m3jax.decoding.protocols import Identity, PageContents, TargetModel, is_invariant, sees
from m3jax.decoding.sampling import HostOrDevice
from m3jax.decoding.speculation.drafter import Drafter
from m3jax.decoding.speculation.named import as_drafter
from m3jax.decoding.steering import KeyOffsets, Steer

RESULTS_KEPT = 1024  # of requests that have ended, so that what they got can still be read by handle


class Engine:
    """An engine that serves many requests with one model: continuous batching over a paged cache.

    `step` gives waiting requests a row while there are rows and pages, runs one chunk of prompts, and then a few
    decode steps of all rows whose prompt is through. Shapes are fixed at construction, so after `warmup` no mix of
    requests compiles anything. When the pages run out, the request that is last in order gives its own back and starts
    again later, from whatever of it is still in the prefix cache; its tokens do not change. A `handle` is what `add`,
    `copy` or `import_request` returned. One thread works an engine: others reach it through `EngineLoop`.

    Args:
      model: from `m3jax.load`.
      storage: where it keeps what it has computed; None if the keywords say it.
      work: how it cuts work into device calls; None if the keywords say it.
      draft: proposes tokens that the model then verifies, several in one call: "builtin", "ngram", the folder of an
        EAGLE3 draft, or a drafter (`m3jax.decoding.speculation`).
      draft_tokens: K, proposals of a round, 1 to 8.
      invariant: run the model in its invariant mode (`M3.with_invariance`): tokens and log-probabilities of a request
        are to the bit those that it has alone, whatever runs beside it, however its prompt is cut, with any draft or
        none, after a preemption or a move. A draft's proposals are accepted where they are what the model draws.
      **knobs: the attributes of `Storage` and of `Work`, in place of these objects. Of `Storage`: pages, which must be
        given, max_length, prefix_cache, kv_dtype, index_dtype, scales, device_pages, host_memory, media_tokens. Of
        `Work`: max_batch, decode_rows, prefill_chunk, prefill_rows, steps_per_call, max_stop_ids, max_biases,
        max_bad_words, max_top_logprobs, records, edits, prompt_logprobs, media_patches, dispatch_ahead.

    Attributes:
      clock: returns seconds, by which deadlines pass; who repeats the calls of another engine gives it their times.

    Raises:
      TypeError: an unknown keyword, or no `pages`.
      ValueError: a size below 1, a `max_length` beyond pages or context, a draft that does not fit the model, too few
        `device_pages` for what a step selects, or a mesh or a draft with them.
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        storage: Storage | None = None,
        work: Work | None = None,
        draft: Drafter | str | Path | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        invariant: bool = False,
        **knobs: Unpack[EngineKnobs],
    ):
        storage, work = as_options(storage, work, knobs, Engine)
        self._is_invariant = invariant or is_invariant(model)
        if self._is_invariant:
            model = checks.as_invariant(model)
        self.config = model.config
        page_size = self.config.index_block_size
        self.max_length = checks.check_max_length(storage.max_length, storage.pages, self.config)
        chunks = work.prefill_chunk
        chunks = prefill_chunks(self.max_length) if chunks is None else checks.chunk_sizes(chunks)
        batch_unit = 1 if model.mesh is None else model.mesh.shape.get("data", 1)
        self.shapes = Shapes(
            batch=math.ceil(work.max_batch / batch_unit) * batch_unit,
            prompts=work.prefill_rows,
            chunks=chunks,
            steps=work.steps_per_call,
            stop_ids=work.max_stop_ids,
            decode_rows=checks.decode_sizes(work.decode_rows, work.max_batch, model),
            biases=work.max_biases,
            bad_words=work.max_bad_words,
            top_logprobs=work.max_top_logprobs,
            records=tuple(work.records),
            edits=checks.edited_names(work.edits, model),
            prompt_logprobs=work.prompt_logprobs,
        )
        draft, device_pages = as_drafter(draft, model), storage.device_pages
        is_ahead = checks.check_dispatch_ahead(work.dispatch_ahead, device_pages)
        if draft is not None:
            checks.check_draft(draft, draft_tokens, model, device_pages)
            self.shapes = replace(self.shapes, draft_tokens=draft_tokens)
        if sees(model) or work.media_patches:
            patches, tokens = checks.media_sizes(work.media_patches, storage.media_tokens, model, self.shapes)
            self.shapes = replace(self.shapes, media_patches=patches, media_tokens=tokens)
        types = dict(kv_dtype=storage.kv_dtype, index_dtype=storage.index_dtype, scales=storage.scales)
        if device_pages is not None:
            checks.check_device_pages(device_pages, model, self.shapes)
            types["device_pages"] = device_pages
        blocks_of_row = math.ceil(self.max_length / page_size)
        cache = model.new_cache(storage.pages, self.shapes.batch, blocks_of_row, **types)
        host = None if device_pages is None else HostMemory(cache, storage.host_memory)
        cache = cache if draft is None else draft.join(model, cache)
        self._runner = Runner(model, cache, self.shapes, host, draft)
        stripes = page_shards(model.mesh)
        self._pages = PageAllocator(cache.num_pages, page_size, share=storage.prefix_cache, stripes=stripes)
        self._placer = Placer(self.config, sees(model), self.shapes.media_patches)
        self._features = FeatureRows(self.shapes.media_tokens) if self.shapes.media_patches else None
        self._scheduler = Scheduler(self._runner, self._pages, self._features, is_ahead)
        self._key_offsets = KeyOffsets()
        self.clock = perf_counter
        self._requests: dict[int, Request] = {}  # those that go on, and those whose last event was not given out yet
        self._results: dict[int, Generation] = {}  # of those that have ended, the newest last
        self._taken: dict[int, int] = {}  # new tokens that `take` has given out
        self._pending: list[TokenEvent] = []  # of rounds that `update` worked
        self._next_handle = 0

    # What a user does

    def add(
        self,
        prompt: Sequence[int] | HostOrDevice,
        params: Params,
        media: Media | None = None,
        guide: Guide | None = None,
        *,
        n: int | None = None,
        priority: int = 0,
        deadline: int | float | None = None,
        capture: Sequence[str] = (),
        edits: Mapping[str, Steer] | None = None,
    ) -> int | list[int]:
        """Queue a request, or a group of n requests of one prompt.

        A group costs one prefill: its requests share the prompt's pages, and each draws its first token by a decode
        step of its own. Requests of equal beginnings that are added one by one share them too, also while the first is
        still being computed; there each computes what is behind the last whole page that is shared, and of an equal
        prompt its last token alone.

        Args:
          prompt: token ids, at least one: a list, a tuple or a 1-D array. For each feature of an image or a video there
            is a placeholder (`m3jax.media.expand_tokens`).
          params: how it goes on. Request i of a group has the seed of `params.sampling` plus i, modulo 2^32.
          media: images and videos of the prompt; the engine keeps a copy of their patches until the request ends.
          guide: says before each new token which ones it may be, as a grammar does; None for any. A group shares it.
          n: requests of the group; more than there are rows wait for one. None makes a single request.
          priority: requests of a higher one get rows and pages first, and give them back last.
          deadline: seconds from now after which the request ends with what it has; of equal priority the earlier
            deadline is served first, and requests without one last.
          capture: names of values that come back for each new token (`Params.capture`).
          edits: by name the vectors that change values of this request, in its prompt and in its new tokens. The engine
            was made for these names (`Work.edits`); it shares no pages with requests that are changed otherwise.

        Returns:
          Its handle; with `n` a list of n handles.

        Raises:
          ValueError: what the model or the pool cannot serve, with the reason; then nothing is queued.
        """
        prompt = as_prompt(prompt)
        self.check_request(prompt, params)
        params = self._with_captures(params, capture)
        edits = checks.checked_edits(edits, self.shapes.edits, self._runner.model)
        check_guide(guide)
        checks.check_order(n, priority, deadline)
        placed = self._placer.place(prompt, media)
        deadline = None if deadline is None else self.clock() + deadline
        keys, key_offset = prefix_keys(prompt, placed), self._key_offsets.offset(edits)
        keys = (keys[0] + key_offset, *keys[1:]) if key_offset else keys
        shared = dict(keys=keys, guide=guide, priority=priority, deadline=deadline)
        shared |= dict(edits=edits, key_offset=key_offset)
        shared["prompt_scores"] = PromptScores()  # a group has them once
        if n is None:
            return self._queue(prompt, params, placed, **shared).handle
        group = self._next_handle
        of_members = (
            replace(params, sampling=replace(params.sampling, seed=seed)) for seed in _seeds(params.sampling.seed, n)
        )
        return [self._queue(prompt, of_member, placed, group=group, **shared).handle for of_member in of_members]

    def step(self) -> list[TokenEvent]:
        """Do one round of work: a chunk of prompts, then decode steps.

        Returns:
          The news of each request, in the order of their handles, that of `prefill`, `abort` and `stop` since the last
          round included. A result leaves with the last event of its request (`result`).
        """
        self.prefill()
        self._scheduler.decode()
        return self._take_events()

    def prefill(self, decode_follows: bool = True) -> bool:
        """Do only the first half of a round of work; False once every prompt that has a row is through.

        Args:
          decode_follows: whether decode steps compute a prompt's last token where it alone is not in the cache; False
            where none will be run, so that it goes through prefill as well.
        """
        self._end_late()
        self._scheduler.admit()
        self._scheduler.prefill(decode_follows)
        return bool(self._scheduler.requests_with_row(is_decoding=False))

    @property
    def prefilled(self) -> tuple[int, int]:
        """The number of prompt tokens that are through and in all, of the requests that have a row."""
        requests = [request for request in self._scheduler.request_of_row if request]
        # Of a prompt whose last token is left to a decode step all is through, as far as prefill goes.
        done = (len(r.prompt) if r.is_decoding else min(r.cached, len(r.prompt)) for r in requests)
        return sum(done), sum(len(request.prompt) for request in requests)

    def prompt_progress(self, handle: int) -> tuple[int, int]:
        """Return how much of a prompt is read: its tokens that were in the prefix cache, and those that are through.

        Raises:
          ValueError: the request is unknown, or has ended.
        """
        request = self._request(handle)
        is_through = request.is_decoding or bool(request.new)
        return request.cached_tokens, len(request.prompt) if is_through else min(request.cached, len(request.prompt))

    def prompt_logprobs(self, handle: int, first: int = 0) -> list[dict[int, float]]:
        """Return what is known by now of a prompt's tokens (`Generation.prompt_logprobs`), in order.

        Args:
          handle: of a request that goes on.
          first: leave out so many tokens at the beginning.

        Raises:
          ValueError: the request is unknown, or has ended.
        """
        return self._request(handle).prompt_scores.known[first:]

    def segments(self, handle: int) -> tuple[PlacedSegment, ...]:
        """Return the images and then the chunks of videos of a request, with the keys by which its pages are known.

        Raises:
          ValueError: the request is unknown, or has ended.
        """
        return self._request(handle).segments

    def run(self) -> dict[int, Generation]:
        """Work until every request has ended.

        Returns:
          By handle the continuation of each request that ended in this run, and of those that ended before it and can
          still be read (`result`).
        """
        results = dict(self._results)
        while True:
            events = self.step()
            results |= {event.handle: event.generation for event in events if event.generation is not None}
            if not self.busy:
                return results

    def stream(self, handle: int) -> Iterator[int]:
        """Yield the new tokens of one request as they come; the others go on as well."""
        given = 0
        while True:
            new, reason = self._tokens(handle), self.reason(handle)
            yield from new[given:]
            given = len(new)
            if reason != "unfinished":
                return
            self.step()

    def result(self, handle: int) -> Generation:
        """Return the continuation of a request so far.

        Of requests that have ended the results of the last 1,024 are kept for this; a result leaves for good with the
        last event of its request (`step`), or with what `run` returns.

        Raises:
          ValueError: an unknown handle, or a request that ended long ago.
        """
        return self._results[handle] if handle in self._results else self._request(handle).generation

    def reason(self, handle: int) -> str:
        """Return the reason for which a request ended; "unfinished" while it goes on."""
        return self._results[handle].stop_reason if handle in self._results else self._request(handle).stop_reason

    def take(self, handle: int) -> list[int]:
        """Return the new tokens of a request since the last `take`."""
        tokens, taken = self._tokens(handle), self._taken.get(handle, 0)
        self._taken[handle] = len(tokens)
        return tokens[taken:]

    def abort(self, handle: int) -> None:
        """End a request now; its tokens so far stay readable.

        Raises:
          ValueError: it is unknown, or has ended.
        """
        request = self._unfinished(handle, "abort", is_settled=False)
        self._scheduler.settle()
        if request.stop_reason == "unfinished":  # else it has ended in the call that was in flight
            self._scheduler.stop(request, "aborted")

    def stop(self, handle: int, keep: int) -> None:
        """End a request at a stop string, keeping its first `keep` new tokens.

        Args:
          keep: how many new tokens stay.
        """
        tokens = self._tokens(handle)
        if not 0 <= keep <= len(tokens):
            raise ValueError(f"keep = {keep}: request {handle} has {len(tokens)} new tokens; keep 0 to that many")
        self._scheduler.settle()
        if handle in self._results:
            self._results[handle] = self._results[handle].cut(keep, "stop_string")
            return
        request = self._request(handle)
        request.keep(keep)
        if request.stop_reason == "unfinished":
            self._scheduler.stop(request, "stop_string")
        request.stop_reason = "stop_string"

    def forget(self, handle: int) -> None:
        """Drop the result of a request that has ended, before others push it out (`result`)."""
        if self.reason(handle) == "unfinished":
            raise ValueError(f"request {handle} has not ended: abort it first")
        self._end(handle)
        del self._results[handle]
        self._scheduler.changed.pop(handle, None)
        self._taken.pop(handle, None)

    def copy(self, handle: int, params: Params | None = None) -> int:
        """Queue a request that goes on from where another one is, under its own or other params.

        Both share their pages until one of them writes. The new tokens so far count as the copy's own.

        Args:
          params: None for its own.

        Raises:
          ValueError: it is unknown or has ended, or the params do not fit.
        """
        source = self._unfinished(handle, "copy")
        params = params or source.params
        self.check_request(source.prompt, params)
        params = self._with_captures(params)
        checks.check_goes_on(source.new, params, f"request {handle}")
        copy = self._queue(
            source.prompt, params, source.segments, keys=source.prompt_keys, guide=source.guide,
            priority=source.priority, deadline=source.deadline, edits=source.edits, key_offset=source.key_offset,
        )  # fmt: skip
        if params.prompt_logprobs == source.params.prompt_logprobs:
            copy.prompt_scores = source.prompt_scores
        copy.continue_from(source.new, source.logprobs, source.top_logprobs, source.versions, source.records)
        if source.page_handle is not None and (copy.prompt_scores is source.prompt_scores or copy.has_scores):
            copy.page_handle, copy.cached = self._pages.fork(source.page_handle), source.cached
        return copy.handle

    def truncate(self, handle: int, keep: int) -> None:
        """Take a request back to its first `keep` new tokens; it goes on from there.

        Args:
          keep: how many new tokens stay.

        Raises:
          ValueError: it is unknown or has ended, or has fewer new tokens.
        """
        request = self._unfinished(handle, "truncate")
        if not 0 <= keep <= len(request.new):
            raise ValueError(f"keep = {keep}: request {handle} has {len(request.new)} new tokens; keep 0 to that many")
        request.keep(keep)
        self._taken[handle] = min(self._taken.get(handle, 0), keep)
        if request.page_handle is not None:
            request.cached = min(request.cached, request.num_tokens - 1)
            self._pages.truncate(request.page_handle, request.cached)
        if request.row is not None:
            self._scheduler.restart(request)

    def export(self, handle: int) -> Snapshot:
        """Return a request's whole state, for `import_request` of another engine; it goes on here until aborted.

        Raises:
          ValueError: it is unknown or has ended.
        """
        request = self._unfinished(handle, "export")
        if request.guide is not None:
            raise ValueError(f"request {handle} has a guide, which a snapshot cannot hold: copy or finish it here")
        if request.edits:
            raise ValueError(f"request {handle} has edits, which a snapshot cannot hold: copy or finish it here")
        page_ids = () if request.page_handle is None else self._pages.pages_of(request.page_handle)
        return Snapshot(
            prompt=request.prompt,
            new=tuple(request.new),
            logprobs=tuple(request.logprobs),
            top_logprobs=tuple(request.top_logprobs),
            prompt_logprobs=tuple(request.prompt_scores.known),
            records=request.records,
            params=request.params,
            cached=request.cached,
            pages=self._runner.read_pages(page_ids),
            identity=self.identity,
            media=as_media([placed.segment for placed in request.segments]),
        )

    def export_pages(self, handle: int, first: int = 0) -> tuple[int, PageContents | None]:
        """Return the contents of a prompt's next pages while the rest of it is still being read, without waiting.

        A page is ready when the calls that fill it were launched: a whole page of the prompt, and the last one, which
        the prompt fills in part, when all of it is through.

        Args:
          handle: of a request that goes on.
          first: index of the first page among the request's.

        Returns:
          (how many pages these are, 0 to 8; their contents as an entry of `Snapshot.pages`, whose other places mean
          nothing, on the device and on its way to the host; None for 0 pages).

        Raises:
          ValueError: it is unknown or has ended.
        """
        request = self._unfinished(handle, "export")
        if request.page_handle is None:
            return 0, None
        cached, size = min(request.cached, len(request.prompt)), self._pages.page_size
        is_through = cached == len(request.prompt)
        num_pages = math.ceil(cached / size) if is_through else cached // size
        page_ids = self._pages.pages_of(request.page_handle)[first : min(num_pages, first + PAGES_A_CALL)]
        return len(page_ids), next(iter(self._runner.read_pages(page_ids, is_awaited=False)), None)

    def known_tokens(self, prompt: Sequence[int]) -> int:
        """Return how many tokens at a text prompt's beginning are in known pages now; none of these is kept for it.

        Args:
          prompt: token ids.
        """
        return self._pages.known(as_prompt(prompt)[:-1])

    def import_request(
        self,
        snapshot: Snapshot,
        guide: Guide | None = None,
        *,
        n: int | None = None,
        cached_tokens: int | None = None,
        left_out: int = 0,
    ) -> int | list[int]:
        """Queue a request that another engine exported, or a group of them: it goes on with the same tokens.

        Args:
          snapshot: from `export`, or from bytes (`Snapshot.from_bytes`).
          guide: as in `add`: a snapshot holds none.
          n: as in `add`: requests that go on from the snapshot, of which each has a seed of its own.
          cached_tokens: of the prompt, those that the other engine had in its prefix cache
            (`Generation.cached_tokens`); None counts those that come with the snapshot.
          left_out: tokens at its beginning whose pages mean nothing in the snapshot: this engine knew them
            (`known_tokens`), and must still.

        Returns:
          Its handle; with `n` a list of n handles.

        Raises:
          ValueError: it is not whole, is of another model or cache, or does not fit; nothing was changed.
          OutOfPages: its pages do not fit at the moment; nothing was changed.
          UnknownPages: pages that were left out are known no longer; nothing was changed.
        """
        layout, sizes = self._runner.page_layout, (self._pages.page_size, self.config.vocab_size)
        check_snapshot(snapshot, self.identity, layout, *sizes)
        self.check_request(snapshot.prompt, snapshot.params)
        checks.check_goes_on(snapshot.new, snapshot.params, "the snapshot")
        check_guide(guide)
        checks.check_order(n, 0, None)
        placed = self._placer.place(snapshot.prompt, snapshot.media)
        prompt_keys = prefix_keys(snapshot.prompt, placed)
        keys = (*prompt_keys, *snapshot.new)[: snapshot.cached]
        page_handle = self._scheduler.receive(keys, snapshot.pages, left_out) if keys else None
        params = self._with_captures(snapshot.params)
        request = self._queue(snapshot.prompt, params, placed, prompt_keys, guide=guide)
        versions = [self._scheduler.version] * len(snapshot.new)
        request.continue_from(snapshot.new, snapshot.logprobs, snapshot.top_logprobs, versions, snapshot.records)
        request.prompt_scores.known = list(snapshot.prompt_logprobs)
        request.page_handle, request.cached, request.found = page_handle, len(keys), cached_tokens
        if n is None:
            return request.handle
        seeds = _seeds(params.sampling.seed, n)
        others = (replace(params, sampling=replace(params.sampling, seed=seed)) for seed in seeds[1:])
        return [request.handle, *(self.copy(request.handle, of_member) for of_member in others)]

    def update(self, model: TargetModel, live: Literal["finish", "restart", "keep"] = "finish") -> int:
        """Serve another model of the same shapes from now on, such as the next one of a training run.

        Nothing is compiled. What was computed with the old weights is dropped: known pages, and features of images. A
        draft stays as it is; tokens keep their distribution, since the new model verifies them.

        Args:
          model: its parameters have the shapes, dtypes and devices of the old one's, and it is computed in the same
            way. It is not copied: do not donate it to another function while the engine serves it.
          live: how requests go on that have not ended. "finish": they end before, under the old weights, and `step`
            gives out their events afterwards. "restart": their new tokens are dropped, and they begin again. "keep":
            they keep their new tokens, whose keys and values are computed again, and go on with the new weights.

        Returns:
          The version of the new weights: 0 at first, one more with each update; every new token carries the version
          that drew it (`Generation.versions`).

        Raises:
          ValueError: another structure, shape, dtype or way to compute, by name; then nothing is changed.
        """
        if self._is_invariant:
            model = checks.as_invariant(model)
        checks.check_same_shapes(self._runner.model, model)
        self._scheduler.settle()
        if live not in ("finish", "restart", "keep"):
            raise ValueError(f"live = {live!r}: must be 'finish', 'restart' or 'keep'")
        if live == "finish":
            events = self._take_events()
            while self.busy:
                events += self.step()
            self._pending = events
        elif live == "restart":
            for request in self._requests.values():
                if request.stop_reason == "unfinished":
                    request.keep(0)
                    self._taken.pop(request.handle, None)
        for request in self._requests.values():
            request.prompt_scores.known.clear()
        self._scheduler.drop_prefixes()
        self._runner.update(model)
        self._scheduler.version += 1
        return self._scheduler.version

    def observe_pages(self, observer: Callable[[PageEvent], None] | None) -> None:
        """Have a function called whenever a full page becomes known to later requests, or is no longer.

        Args:
          observer: gets each `m3jax.cache.PageEvent` at once, on the thread that works the engine; it must not call the
            engine. None ends that.
        """
        self._pages.observe(observer)

    @property
    def busy(self) -> bool:
        """True if some request has not ended."""
        return any(request.stop_reason == "unfinished" for request in self._requests.values())

    @property
    def load(self) -> dict[str, int]:
        """The number of requests that have a row ("running"), and of those that wait for one ("waiting")."""
        running = sum(request is not None for request in self._scheduler.request_of_row)
        return dict(running=running, waiting=len(self._scheduler.waiting))

    @property
    def identity(self) -> Identity:
        """The configuration that another engine must share with this one to exchange pages."""
        drafter = self._runner.drafter
        return identity(self.config, self._runner.state.cache) | ({} if drafter is None else drafter.identity())

    @property
    def page_layout(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of an entry of `Snapshot.pages`; the first use may run the device."""
        return self._runner.page_layout

    @property
    def served_model(self) -> TargetModel:
        """The model that is served now."""
        return self._runner.model

    @property
    def is_invariant(self) -> bool:
        """True in the invariant mode."""
        return self._is_invariant

    @property
    def timings(self) -> Timings:
        """The seconds spent so far on compiling, on prompts and on new tokens."""
        return self._scheduler.timings

    @property
    def drafting(self) -> Drafting:
        """Counters of the draft's proposals so far, and of those that were accepted."""
        return self._scheduler.drafting

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, all devices together."""
        return sum(x.nbytes for x in jax.tree.leaves(self._runner.state.cache))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of cache that one token takes, wherever they lie (`Cache.bytes_per_token`)."""
        return self._runner.state.cache.bytes_per_token

    @property
    def pages(self) -> dict[str, int]:
        """Return counters of the pool: see `PageAllocator.statistics`."""
        return self._pages.statistics()

    @property
    def offload(self) -> dict[str, int | float]:
        """Return counters of the device's pool beside host memory; a page is here the part of it that one KV head has.

        Returns:
          hits and misses (distinct pages that a layer selected in a call), hit_rate, bytes_in and bytes_out (moved to
          and from the device), device_bytes and host_bytes of keys and values; nothing without `device_pages`.
        """
        host = self._runner.host
        return {} if host is None else offload_counters(host, self._runner.state.cache.stacks)

    @property
    def media(self) -> dict[str, int]:
        """Return counters of the device's features (`FeatureRows.statistics`), and their bytes; {} for text alone."""
        return {} if self._features is None else self._features.statistics() | dict(bytes=self._runner.features.nbytes)

    def check(self) -> None:
        """Raise AssertionError if pages are lost, owned twice, not where a row's table says, or not what was written.

        "Not what was written" is tested for every page that a request or the prefix cache counts on: its tokens, and
        the features of images in place of tokens, must be those that device calls have put there.
        """
        self._scheduler.settle()
        self._scheduler.check()

    def warmup(
        self,
        watch: Watch = nullcontext,
        programs: Sequence[str] = PROGRAMS,
        longest: int | None = None,
        all_record: bool = False,
    ) -> None:
        """Compile all that any mix of requests will run, side by side; no program of the model is run.

        Args:
          watch: maps the programs' names to a context manager in which they are compiled.
          programs: a choice of them, if no others will run; one that does is compiled by its first call.
            "prefill"; "tower"; "decode", for requests of more than one new token; "pages", for `copy`, `export`,
            `import_request`, and for prompts that begin like a request of an earlier round and end within its pages.
          longest: tokens of a prompt: only its sizes of prefill calls are compiled; None is for any prompt.
          all_record: every request will ask for what the engine was made to record (`Work.records`): programs that
            record nothing, which are as many, are left to the first call that runs one.

        Raises:
          ValueError: there is no such program, or no such prompt.
        """
        checks.check_warmup(programs, longest)
        began = perf_counter()
        self._runner.warmup(programs, self.shapes.prefill_sizes(longest), watch, all_record)
        self._scheduler.timings.compile_seconds += perf_counter() - began

    def warmup_for(self, handle: int, watch: Watch = nullcontext) -> None:
        """Compile what prefill and the tower will run for a request; call this if `warmup` did not compile it.

        Args:
          handle: of a request that has not begun.
          watch: as in `warmup`; called only where something is compiled.
        """
        began, request = perf_counter(), self._request(handle)
        self._scheduler.admit()  # a request that gets a row has looked its prompt up in the prefix cache
        widths = self.shapes.prefill_sizes(request.uncached)
        sizes = {self.shapes.tower_size(len(placed.segment.patches)) for placed in request.segments}
        if self._runner.warmup_sizes(widths, sizes, watch):
            self._scheduler.timings.compile_seconds += perf_counter() - began

    # Requests

    def _queue(
        self,
        prompt: tuple[int, ...],
        params: Params,
        placed: tuple[PlacedSegment, ...],
        keys: tuple[int, ...],
        **of_request: Any,
    ) -> Request:
        """Make a request and have it wait for a row.

        Args:
          prompt, params, placed, keys: of the request; `keys` of its prompt's pages.
          **of_request: `guide`, `priority`, `deadline`, `group`, `edits`, `key_offset`, `prompt_scores` of `Request`.
        """
        request = Request(self._next_handle, prompt, params, placed, keys, **of_request)
        self._next_handle += 1
        self._requests[request.handle] = request
        self._scheduler.waiting.append(request)
        return request

    def _end_late(self) -> None:
        """End the requests whose deadline has passed."""
        now = self.clock()
        for request in [r for r in self._requests.values() if r.deadline is not None and r.deadline <= now]:
            self._scheduler.settle()
            if request.stop_reason == "unfinished":
                self._scheduler.stop(request, "deadline")

    def _take_events(self) -> list[TokenEvent]:
        """Return the news since they were taken last; who has ended leaves the engine, and its result with it."""
        events, self._pending = self._pending, []
        changed, self._scheduler.changed = self._scheduler.changed, {}
        for handle in sorted(changed):
            request = changed[handle]
            if request.handle not in self._requests and request.handle not in self._results:
                continue  # forgotten since
            events.append(request.news())
            if request.stop_reason != "unfinished":
                self._end(handle)
        return events

    def _end(self, handle: int) -> None:
        """Keep the result of a request that has ended in place of the request."""
        request = self._requests.pop(handle, None)
        if request is None:
            return
        self._results[handle] = request.generation
        while len(self._results) > RESULTS_KEPT:
            oldest = next(iter(self._results))
            del self._results[oldest]
            self._taken.pop(oldest, None)

    def _tokens(self, handle: int) -> list[int]:
        """Return the new tokens of a request, not a copy."""
        return self._results[handle].tokens if handle in self._results else self._request(handle).new

    def _request(self, handle: int) -> Request:
        if handle not in self._requests:
            raise ValueError(
                f"no request {handle!r}: use a handle that add returned, of a request that goes on or is one of the "
                f"last {RESULTS_KEPT:,} that ended"
            )
        return self._requests[handle]

    def _unfinished(self, handle: int, purpose: str, is_settled: bool = True) -> Request:
        """Return a request that goes on, after the call in flight is read if it `is_settled`."""
        if is_settled:
            self._scheduler.settle()
        reason = self.reason(handle)
        if reason != "unfinished":
            raise ValueError(f"request {handle} has ended already ({reason}): there is nothing to {purpose}")
        return self._request(handle)

    def check_request(self, prompt: tuple[int, ...], params: Params) -> None:
        """Raise ValueError if the model cannot serve a request, or this engine has no room for it.

        Args:
          prompt: token ids.
          params: as in `add`.

        Raises:
          ValueError: what `add` would refuse of these.
        """
        check_prompt(prompt, params, self.config)
        checks.check_room(prompt, params, self.max_length, self.shapes)
        checks.check_records(params.record, self._runner.model)

    def _with_captures(self, params: Params, capture: Sequence[str] = ()) -> Params:
        """Return params with the full names of the values that they capture, and of others."""
        if not params.capture and not capture:
            return params
        names = (*params.capture, *((capture,) if isinstance(capture, str) else capture))
        return replace(params, capture=checks.captured_names(tuple(dict.fromkeys(names)), self._runner.model))


def _seeds(first: int, count: int) -> list[int]:
    """Return the seeds of a group's requests: one higher for each, and 0 after the largest."""
    return [(first + i) % 2**32 for i in range(count)]
