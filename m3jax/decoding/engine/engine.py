"""The engine: requests come and go, the device runs the same few programs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import jax
import numpy as np

from m3jax.cache import HostMemory, OutOfPages, PageAllocator, Scales
from m3jax.cache.device import page_shards
from m3jax.decoding.engine.exchange import Snapshot, check_identity, identity
from m3jax.decoding.engine.report import Drafting, Timings
from m3jax.decoding.engine.request import Generation, Params, Request, check_prompt
from m3jax.decoding.engine.runner import Runner, Shapes
from m3jax.decoding.engine.scheduler import Scheduler
from m3jax.decoding.protocols import Identity, TargetModel
from m3jax.decoding.speculation.drafter import MAX_DRAFT_TOKENS, Drafter

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
      draft: proposes tokens that the model then verifies, several in one call (`m3jax.decoding.speculation`).
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
        model: TargetModel,
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
        scales: tuple[Scales, ...] | None = None,
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
        page_size = self.config.index_block_size
        longest = min(self.config.max_position_embeddings, pages * page_size)
        self.max_length = longest if max_length is None else min(max_length, longest)
        batch_unit = 1 if model.mesh is None else model.mesh.shape.get("data", 1)
        self.shapes = Shapes(
            batch=math.ceil(max_batch / batch_unit) * batch_unit,
            prompts=prefill_rows,
            chunks=tuple(sorted(chunks)),
            steps=steps_per_call,
            stop_ids=max_stop_ids,
        )
        storage = dict(kv_dtype=kv_dtype, index_dtype=index_dtype, scales=scales)
        if draft is not None:
            _check_draft(draft, draft_tokens, model, device_pages)
            self.shapes = replace(self.shapes, draft_tokens=draft_tokens)
        if device_pages is not None:
            _check_device_pages(device_pages, model, self.shapes)
            storage["device_pages"] = device_pages
        cache = model.new_cache(pages, self.shapes.batch, math.ceil(self.max_length / page_size), **storage)
        host = None if device_pages is None else HostMemory(cache, host_memory)
        cache = cache if draft is None else draft.join(model, cache)
        self._runner = Runner(model, cache, self.shapes, host, draft)
        self._pages = PageAllocator(cache.num_pages, page_size, share=prefix_cache, stripes=page_shards(model.mesh))
        self._scheduler = Scheduler(self._runner, self._pages)
        self._requests: dict[int, Request] = {}
        self._next_handle = 0

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
        self._check_request(prompt, params)
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
        return bool(self._scheduler.requests_with_row(is_decoding=False))

    @property
    def prefilled(self) -> tuple[int, int]:
        """Prompt tokens in the cache, and the prompt tokens of all requests that have a row."""
        requests = [request for request in self._scheduler.request_of_row if request]
        done = sum(min(request.cached, len(request.prompt)) for request in requests)
        return done, sum(len(request.prompt) for request in requests)

    def run(self) -> dict[int, Generation]:
        """Work until every request has ended; what each one has, by handle."""
        while self.step():
            pass
        return {handle: self.result(handle) for handle in self._requests}

    def stream(self, handle: int) -> Iterator[int]:
        """The new tokens of one request as they come; the others go on as well."""
        given = 0
        while True:
            request = self._request(handle)
            yield from request.new[given:]
            given = len(request.new)
            if request.stop_reason != "unfinished":
                return
            self.step()

    def result(self, handle: int) -> Generation:
        """What a request has so far."""
        request = self._request(handle)
        return Generation(list(request.new), list(request.logprobs), request.stop_reason, len(request.prompt))

    def reason(self, handle: int) -> str:
        """Why a request ended; "unfinished" while it goes on."""
        return self._request(handle).stop_reason

    def take(self, handle: int) -> list[int]:
        """The new tokens of a request since the last `take`."""
        request = self._request(handle)
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
        request = self._request(handle)
        if not 0 <= keep <= len(request.new):
            raise ValueError(f"keep = {keep}: request {handle} has {len(request.new)} new tokens; keep 0 to that many")
        del request.new[keep:], request.logprobs[keep:]
        if request.stop_reason == "unfinished":
            self._scheduler.stop(request, "stop_string")
        request.stop_reason = "stop_string"

    def forget(self, handle: int) -> None:
        """Drop a request that has ended, with its tokens."""
        if self._request(handle).stop_reason == "unfinished":
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
        self._check_request(source.prompt, params)
        if params.max_new_tokens <= len(source.new):
            raise ValueError(
                f"max_new_tokens = {params.max_new_tokens}: request {handle} has {len(source.new)} already"
            )
        copy = self._queue(source.prompt, params, source.new, source.logprobs)
        if source.page_handle is not None:
            copy.page_handle, copy.cached = self._pages.fork(source.page_handle), source.cached
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
        if request.page_handle is not None:
            request.cached = min(request.cached, len(request.tokens) - 1)
            self._pages.truncate(request.page_handle, request.cached)
        if request.row is not None:
            self._scheduler.restart(request)

    def export(self, handle: int) -> Snapshot:
        """A request's whole state, for `import_request` of another engine; it goes on here until aborted.

        Raises:
          ValueError: it is unknown or has ended.
        """
        request = self._unfinished(handle)
        page_ids = () if request.page_handle is None else self._pages.pages_of(request.page_handle)
        return Snapshot(
            prompt=request.prompt,
            new=tuple(request.new),
            logprobs=tuple(request.logprobs),
            params=request.params,
            cached=request.cached,
            pages=self._runner.read_pages(page_ids),
            identity=self._identity(),
        )

    def import_request(self, snapshot: Snapshot) -> int:
        """Queue a request that another engine exported: it goes on with the same tokens.

        Raises:
          ValueError: it is of another model or cache, or does not fit.
          OutOfPages: its pages do not fit at the moment; nothing was changed.
        """
        check_identity(snapshot, self._identity())
        self._check_request(snapshot.prompt, snapshot.params)
        tokens = (*snapshot.prompt, *snapshot.new)[: snapshot.cached]
        page_handle = None
        if tokens:
            # With a token more, all pages of the cached ones may be shared: none has to be computed for its logits.
            page_handle, known = self._pages.add((*tokens, 0))
            try:
                self._runner.copy_pages(self._pages.extend(page_handle, len(tokens) - known))
            except OutOfPages:
                self._pages.release(page_handle)
                raise
            self._pages.commit(page_handle, tokens[known:])
            # Pages that are known here are shared with other requests: they are not written again.
            known_pages = known // self._pages.page_size
            new_page_ids = self._pages.pages_of(page_handle)[known_pages:]
            self._runner.write_pages([-1] * known_pages + list(new_page_ids), snapshot.pages)
        request = self._queue(snapshot.prompt, snapshot.params, snapshot.new, snapshot.logprobs)
        request.page_handle, request.cached = page_handle, len(tokens)
        return request.handle

    @property
    def busy(self) -> bool:
        """Whether some request has not ended."""
        return any(request.stop_reason == "unfinished" for request in self._requests.values())

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
        """Bytes of cache that one token takes, wherever they lie (`Cache.bytes_per_token`)."""
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
        offloaded = [stack for stack, pages in zip(stacks, host.pages, strict=True) if pages is not None]
        total = lambda name: int(sum(np.asarray(getattr(stack, name), np.int64).sum() for stack in offloaded))
        hits, misses = total("hits"), total("misses")
        return dict(
            hits=hits,
            misses=misses,
            hit_rate=hits / max(1, hits + misses),
            bytes_in=total("moved") * host.page_bytes,
            bytes_out=host.bytes_out,
            device_bytes=sum(stack.k.nbytes + stack.v.nbytes for stack in offloaded),
            host_bytes=host.nbytes,
        )

    def check(self) -> None:
        """Raise if pages are lost, owned twice, or not where a row's table says."""
        self._pages.check()
        table = self._runner.table
        for row, request in enumerate(self._scheduler.request_of_row):
            expected = -1 if request is None else self._pages.table(request.page_handle, table.shape[1])
            np.testing.assert_array_equal(table[row], expected)

    def warmup(self) -> None:
        """Compile all that any mix of requests will run, by running it on no rows."""
        began = perf_counter()
        self._runner.warmup()
        self._scheduler.timings.compile_seconds += perf_counter() - began

    # Requests

    def _queue(
        self, prompt: tuple[int, ...], params: Params, new: Sequence[int] = (), logprobs: Sequence[float] = ()
    ) -> Request:
        """Make a request, with what it has already, and have it wait for a row."""
        request = Request(self._next_handle, prompt, params, list(new), list(logprobs), added_at=perf_counter())
        self._next_handle += 1
        self._requests[request.handle] = request
        self._scheduler.waiting.append(request)
        return request

    def _identity(self) -> Identity:
        """What another engine must share with this one to exchange pages."""
        drafter = self._runner.drafter
        return identity(self.config, self._runner.state.cache) | ({} if drafter is None else drafter.identity())

    def _request(self, handle: int) -> Request:
        if handle not in self._requests:
            raise ValueError(f"no request {handle!r}: use a handle that add returned and forget did not drop")
        return self._requests[handle]

    def _unfinished(self, handle: int) -> Request:
        request = self._request(handle)
        if request.stop_reason != "unfinished":
            raise ValueError(f"request {handle} has ended already ({request.stop_reason}): there is nothing to abort")
        return request

    def _check_request(self, prompt: tuple[int, ...], params: Params) -> None:
        """Raise ValueError where the model cannot serve a request, or this engine has no room for it."""
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


def _check_draft(draft: Drafter, draft_tokens: int, model: TargetModel, device_pages: int | None) -> None:
    _check_sizes({"draft_tokens": draft_tokens})
    if draft_tokens > MAX_DRAFT_TOKENS:
        raise ValueError(f"draft_tokens = {draft_tokens}: at most {MAX_DRAFT_TOKENS}")
    if device_pages is not None:
        raise ValueError("device_pages with a draft: the pool is for one token a row and step; leave one of them out")
    draft.check(model)


def _check_device_pages(device_pages: int, model: TargetModel, shapes: Shapes) -> None:
    """Raise ValueError where a decode step could not have all that it selects, or a chunk not all that it writes."""
    if model.mesh is not None and model.mesh.size > 1:
        raise ValueError("device_pages on a mesh: host memory is for one device; leave device_pages out")
    page_size = model.config.index_block_size
    touched = lambda tokens: math.ceil((tokens - 1) / page_size) + 1  # pages that so many tokens lie in, at most
    decode_needs = shapes.batch * (model.config.index_topk_blocks + touched(shapes.steps) - 1)
    prefill_needs = shapes.prompts * touched(shapes.chunks[-1]) + 1
    if device_pages < max(decode_needs, prefill_needs):
        raise ValueError(
            f"device_pages = {device_pages}: a decode call of {shapes.batch} rows can need {decode_needs} pages at "
            f"once and a prefill call {prefill_needs}; give {max(decode_needs, prefill_needs)} or more, or a smaller "
            "max_batch, prefill_chunk or prefill_rows"
        )
