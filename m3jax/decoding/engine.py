"""The engine: requests come and go, the device runs the same few programs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import jax
import numpy as np

from m3jax.cache import HostMemory, OutOfPages, PageAllocator
from m3jax.cache.device import page_shards
from m3jax.decoding.exchange import Snapshot, check_identity, identity
from m3jax.decoding.request import Drafting, Generation, Params, Timings, check_prompt
from m3jax.decoding.runner import Runner, Shapes
from m3jax.decoding.scheduler import Entry, Scheduler
from m3jax.decoding.speculative import MAX_DRAFT_TOKENS, Drafter

PREFILL_CHUNK = 2048
DRAFT_TOKENS = 3


class Engine:
    """Serves many requests with one model: continuous batching over a paged cache.

    `step` gives waiting requests a row while there are rows and pages, runs one chunk of prompts, and then a few
    decode steps of all rows whose prompt is through. Shapes are fixed at construction, so after `warmup` no mix of
    requests compiles anything. When the pages run out, the youngest request gives its own back and starts again
    later, from whatever of it is still in the prefix cache; its tokens do not change.

    Args:
      model: from `m3jax.load`.
      pages: of the pool; a page is one block of the model.
      max_batch: rows that decode together.
      prefill_chunk: prompt tokens of a row in one device call; it bounds the memory of prefill. Of several sizes the
        smallest that holds what is left is taken, so that the end of a prompt does not cost a whole chunk.
      prefill_rows: prompts that share a call.
      max_length: tokens that one request can have; by default what the pages and the model's context allow.
      steps_per_call: decode steps in one device call. More is faster, fewer react sooner.
      max_stop_ids: of one request.
      prefix_cache: whether requests share the pages of equal beginnings.
      kv_dtype: of stored keys and values; the model's by default.
      index_dtype: of stored index keys; the model's by default.
      scales: for float8 (`m3jax.cache.measure_scales`).
      draft: proposes tokens that the model then verifies, several in one call (`m3jax.decoding.speculative`).
      draft_tokens: K, proposals of a round, 1 to 8.
      device_pages: keys and values of sparse layers are in host memory and `pages` counts those; the device has room
        for this many of them in each layer, and keeps what was used last. Index keys and dense layers stay on it.
      host_memory: "pinned_host", "numpy", or "auto": the first of them that the device has.

    Raises:
      ValueError: a size below 1, a draft that does not fit the model, too few `device_pages` for what a step selects,
        or a mesh or a draft with them.
    """

    def __init__(
        self,
        model: Any,
        *,
        pages: int,
        max_batch: int = 8,
        prefill_chunk: int | Sequence[int] = (PREFILL_CHUNK // 8, PREFILL_CHUNK),
        prefill_rows: int = 1,
        max_length: int | None = None,
        steps_per_call: int = 16,
        max_stop_ids: int = 8,
        prefix_cache: bool = True,
        kv_dtype: str | None = None,
        index_dtype: str | None = None,
        scales: Any = None,
        draft: Drafter | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        device_pages: int | None = None,
        host_memory: str = "auto",
    ):
        chunks = tuple(prefill_chunk) if isinstance(prefill_chunk, Sequence) else (prefill_chunk,)
        sizes = dict(pages=pages, max_batch=max_batch, prefill_rows=prefill_rows, steps_per_call=steps_per_call,
                     max_stop_ids=max_stop_ids)  # fmt: skip
        sizes |= {f"prefill_chunk[{i}]": chunk for i, chunk in enumerate(chunks)}
        optional = dict(max_length=max_length, device_pages=device_pages)
        _check_sizes(sizes | {name: size for name, size in optional.items() if size is not None})
        if not chunks:
            raise ValueError("prefill_chunk = (): give at least one size")
        self.config = model.config
        size = self.config.index_block_size
        limit = min(self.config.max_position_embeddings, pages * size)
        self.max_length = limit if max_length is None else min(max_length, limit)
        batch = _round_up(max_batch, 1 if model.mesh is None else model.mesh.shape.get("data", 1))
        types = dict(kv_dtype=kv_dtype, index_dtype=index_dtype, scales=scales)
        self.shapes = Shapes(batch, prefill_rows, tuple(sorted(chunks)), steps_per_call, max_stop_ids)
        if draft is not None:
            _check_draft(draft, draft_tokens, model, device_pages)
            self.shapes = replace(self.shapes, draft_tokens=draft_tokens)
        if device_pages is not None:
            _check_device_pages(device_pages, model, self.shapes)
            types["device_pages"] = device_pages
        cache = model.new_cache(pages, batch, math.ceil(self.max_length / size), **types)
        host = None if device_pages is None else HostMemory(cache, host_memory)
        cache = cache if draft is None else draft.join(model, cache)
        self._runner = Runner(model, cache, self.shapes, host, draft)
        self._pages = PageAllocator(cache.num_pages, size, share=prefix_cache, stripes=page_shards(model.mesh))
        self._scheduler = Scheduler(self._runner, self._pages)
        self._requests: dict[int, Entry] = {}
        self._next = 0

    # What a user does

    def add(self, prompt: Sequence[int], params: Params) -> int:
        """Queue a request.

        Args:
          prompt: token ids, at least one.
          params: how it goes on.

        Returns:
          Its handle.

        Raises:
          ValueError: what the model or the pool cannot serve, with the reason.
        """
        prompt = tuple(prompt)
        self._check(prompt, params)
        return self._queue(prompt, params).handle

    def step(self) -> bool:
        """Do one round of work: a chunk of prompts, then decode steps. False once nothing is left to do."""
        self.prefill()
        self._scheduler.decode()
        return self.busy

    def prefill(self) -> bool:
        """Only the first half of a round; False once every prompt that has a row is through."""
        self._scheduler.admit()
        self._scheduler.prefill()
        return bool(self._scheduler.of(running=False))

    @property
    def prefilled(self) -> tuple[int, int]:
        """Prompt tokens in the cache, and the prompt tokens of all requests that have a row."""
        rows = [r for r in self._scheduler.rows if r]
        return sum(min(r.cached, len(r.prompt)) for r in rows), sum(len(r.prompt) for r in rows)

    def run(self) -> dict[int, Generation]:
        """Work until every request has ended; what each one has, by handle."""
        while self.step():
            pass
        return {handle: self.result(handle) for handle in self._requests}

    def stream(self, handle: int) -> Iterator[int]:
        """The new tokens of one request as they come; the others go on as well."""
        given = 0
        while True:
            request = self._get(handle)
            yield from request.new[given:]
            given = len(request.new)
            if request.reason != "unfinished":
                return
            self.step()

    def result(self, handle: int) -> Generation:
        """What a request has so far."""
        r = self._get(handle)
        return Generation(list(r.new), list(r.logprobs), r.reason, len(r.prompt))

    def reason(self, handle: int) -> str:
        """Why a request ended; "unfinished" while it goes on."""
        return self._get(handle).reason

    def take(self, handle: int) -> list[int]:
        """The new tokens of a request since the last `take`."""
        request = self._get(handle)
        new, request.taken = request.new[request.taken :], len(request.new)
        return new

    def abort(self, handle: int) -> None:
        """End a request now; its tokens so far stay readable.

        Raises:
          ValueError: it is unknown, or has ended.
        """
        self._scheduler.stop(self._unfinished(handle), "aborted")

    def stop(self, handle: int, keep: int) -> None:
        """End a request at a stop string, keeping its first `keep` new tokens."""
        request = self._get(handle)
        if not 0 <= keep <= len(request.new):
            raise ValueError(f"keep = {keep}: request {handle} has {len(request.new)} new tokens; keep 0 to that many")
        del request.new[keep:], request.logprobs[keep:]
        if request.reason == "unfinished":
            self._scheduler.stop(request, "stop_string")
        request.reason = "stop_string"

    def forget(self, handle: int) -> None:
        """Drop a request that has ended, with its tokens."""
        if self._get(handle).reason == "unfinished":
            raise ValueError(f"request {handle} has not ended: abort it first")
        del self._requests[handle]

    def copy(self, handle: int, params: Params | None = None) -> int:
        """Queue a request that goes on from where another one is, under its own or other params.

        Both share their pages until one of them writes. The new tokens so far count as the copy's own.

        Raises:
          ValueError: it is unknown or has ended, or the params do not fit.
        """
        source = self._unfinished(handle)
        params = params or source.params
        self._check(source.prompt, params)
        if params.max_new_tokens <= len(source.new):
            raise ValueError(
                f"max_new_tokens = {params.max_new_tokens}: request {handle} has {len(source.new)} already"
            )
        copy = self._queue(source.prompt, params, source.new, source.logprobs)
        if source.pages is not None:
            copy.pages, copy.cached = self._pages.fork(source.pages), source.cached
        return copy.handle

    def truncate(self, handle: int, keep: int) -> None:
        """Take a request back to its first `keep` new tokens; it goes on from there.

        Raises:
          ValueError: it is unknown or has ended, or has fewer new tokens.
        """
        request = self._unfinished(handle)
        if not 0 <= keep <= len(request.new):
            raise ValueError(f"keep = {keep}: request {handle} has {len(request.new)} new tokens; keep 0 to that many")
        del request.new[keep:], request.logprobs[keep:]
        request.taken = min(request.taken, keep)
        if request.pages is not None:
            request.cached = min(request.cached, len(request.tokens) - 1)
            self._pages.truncate(request.pages, request.cached)
        if request.row is not None:
            self._scheduler.restart(request)

    def export(self, handle: int) -> Snapshot:
        """A request's whole state, for `import_request` of another engine; it goes on here until aborted.

        Raises:
          ValueError: it is unknown or has ended.
        """
        r = self._unfinished(handle)
        pages = [] if r.pages is None else self._runner.read_pages(self._pages.pages_of(r.pages))
        return Snapshot(r.prompt, tuple(r.new), tuple(r.logprobs), r.params, r.cached, pages, self._identity())

    def import_request(self, snapshot: Snapshot) -> int:
        """Queue a request that another engine exported: it goes on with the same tokens.

        Raises:
          ValueError: it is of another model or cache, or does not fit.
          OutOfPages: its pages do not fit at the moment; nothing was changed.
        """
        check_identity(snapshot, self._identity())
        self._check(snapshot.prompt, snapshot.params)
        tokens = (*snapshot.prompt, *snapshot.new)[: snapshot.cached]
        pages = None
        if tokens:
            pages, known = self._pages.add((*tokens, 0))
            try:
                self._runner.copy_pages(self._pages.extend(pages, len(tokens) - known))
            except OutOfPages:
                self._pages.release(pages)
                raise
            self._pages.commit(pages, tokens[known:])
            skip = [-1] * (known // self._pages.page_size)
            self._runner.write_pages([*skip, *self._pages.pages_of(pages)[len(skip) :]], snapshot.pages)
        request = self._queue(snapshot.prompt, snapshot.params, snapshot.new, snapshot.logprobs)
        request.pages, request.cached = pages, len(tokens)
        return request.handle

    @property
    def busy(self) -> bool:
        """Whether some request has not ended."""
        return any(r.reason == "unfinished" for r in self._requests.values())

    @property
    def timings(self) -> Timings:
        """Where the seconds went so far."""
        return self._scheduler.timings

    @property
    def drafting(self) -> Drafting:
        """What came of proposals so far."""
        return self._scheduler.drafting

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, all devices together."""
        return sum(x.nbytes for x in jax.tree.leaves(self._runner.state.cache))

    @property
    def bytes_per_token(self) -> float:
        """Bytes of cache that one token takes."""
        return self._runner.state.cache.bytes_per_token

    @property
    def pages(self) -> dict[str, int]:
        """Counters of the pool: see `PageAllocator.statistics`."""
        return self._pages.statistics()

    @property
    def offload(self) -> dict[str, int | float]:
        """What the pool on the device did so far; a page here is the part of it that one KV head has.

        Returns:
          hits and misses (distinct pages that a layer selected in a call), hit_rate, bytes_in and bytes_out (moved to
          and from the device), device_bytes and host_bytes of keys and values; nothing without `device_pages`.
        """
        host, stacks = self._runner.host, self._runner.state.cache.stacks
        if host is None:
            return {}
        own = [s for s, p in zip(stacks, host.pages, strict=True) if p is not None]
        total = lambda name: int(sum(np.asarray(getattr(s, name), np.int64).sum() for s in own))
        hits, misses = total("hits"), total("misses")
        return dict(
            hits=hits, misses=misses, hit_rate=hits / max(1, hits + misses), bytes_in=total("moved") * host.page_bytes,
            bytes_out=host.bytes_out, device_bytes=sum(s.k.nbytes + s.v.nbytes for s in own), host_bytes=host.nbytes,
        )  # fmt: skip

    def check(self) -> None:
        """Raise if pages are lost, owned twice, or not where a row's table says."""
        self._pages.check()
        for row, request in enumerate(self._scheduler.rows):
            expected = -1 if request is None else self._pages.table(request.pages, self._runner.table.shape[1])
            np.testing.assert_array_equal(self._runner.table[row], expected)

    def warmup(self) -> None:
        """Compile all that any mix of requests will run, by running it on no rows."""
        began = perf_counter()
        self._runner.warmup()
        self._scheduler.timings.compile_seconds += perf_counter() - began

    # Rounds

    def _queue(self, prompt, params: Params, new: Sequence[int] = (), logprobs: Sequence[float] = ()) -> Entry:
        request = Entry(self._next, prompt, params, list(new), list(logprobs), began=perf_counter())
        self._next += 1
        self._requests[request.handle] = request
        self._scheduler.waiting.append(request)
        return request

    def _identity(self) -> dict[str, Any]:
        own = {} if self._runner.drafter is None else self._runner.drafter.identity()
        return identity(self.config, self._runner.state.cache) | own

    def _get(self, handle: int) -> Entry:
        if handle not in self._requests:
            raise ValueError(f"no request {handle!r}: use a handle that add returned and forget did not drop")
        return self._requests[handle]

    def _unfinished(self, handle: int) -> Entry:
        request = self._get(handle)
        if request.reason != "unfinished":
            raise ValueError(f"request {handle} has ended already ({request.reason}): there is nothing to abort")
        return request

    def _check(self, prompt: tuple[int, ...], params: Params) -> None:
        check_prompt(prompt, params, self.config)
        asked = len(prompt) + params.max_new_tokens
        if asked > self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with max_new_tokens = {params.max_new_tokens} needs room for "
                f"{asked} tokens and a request of this engine can have {self.max_length}: ask for less, or make the "
                "engine with more pages or a larger max_length"
            )
        if len(params.stop_ids) > self.shapes.stop_ids:
            allowed = self.shapes.stop_ids
            raise ValueError(f"{len(params.stop_ids)} stop ids: this engine takes {allowed} (max_stop_ids)")


def _check_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} = {size!r}: must be an integer of at least 1")


def _check_draft(draft: Drafter, draft_tokens: int, model: Any, device_pages: int | None) -> None:
    _check_sizes({"draft_tokens": draft_tokens})
    if draft_tokens > MAX_DRAFT_TOKENS:
        raise ValueError(f"draft_tokens = {draft_tokens}: at most {MAX_DRAFT_TOKENS}")
    if device_pages is not None:
        raise ValueError("device_pages with a draft: the pool is for one token a row and step; leave one of them out")
    draft.check(model)


def _check_device_pages(device_pages: int, model: Any, shapes: Shapes) -> None:
    """Raise ValueError where a decode step could not have all that it selects, or a chunk not all that it writes."""
    if model.mesh is not None and model.mesh.size > 1:
        raise ValueError("device_pages on a mesh: host memory is for one device; leave device_pages out")
    size = model.config.index_block_size
    begun = lambda tokens: math.ceil((tokens - 1) / size) + 1
    step = shapes.batch * (model.config.index_topk_blocks + begun(shapes.steps) - 1)
    chunk = shapes.prompts * begun(shapes.chunks[-1]) + 1
    if device_pages < max(step, chunk):
        raise ValueError(
            f"device_pages = {device_pages}: a decode call of {shapes.batch} rows can need {step} pages at once and a "
            f"prefill call {chunk}; give {max(step, chunk)} or more, or a smaller max_batch, prefill_chunk or "
            "prefill_rows"
        )


def _round_up(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit
