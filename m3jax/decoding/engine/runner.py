"""The device's state, and the host's copies of what it needs to know of it: page table, stop reasons, shapes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, Int32, PyTree, UInt32

from m3jax.cache import HostMemory
from m3jax.decoding import device
from m3jax.decoding.engine.compiling import compile_all
from m3jax.decoding.engine.exchange import PAGES_A_CALL, page_layout
from m3jax.decoding.engine.media import PlacedSegment
from m3jax.decoding.engine.request import Params
from m3jax.decoding.engine.shapes import Shapes
from m3jax.decoding.protocols import RECORDS, HostStacks, PageContents, PagedCache, TargetModel, is_invariant
from m3jax.decoding.sampling import MASK_BITS, WORD_TOKENS, Sampling, SamplingParams, count_uses
from m3jax.decoding.speculation.drafter import Drafter, PromptContext
from m3jax.decoding.steering import Steer, Steering, steering_of
from m3jax.media.packing import Segment, pack
from m3jax.media.sizes import MERGE
from m3jax.parallel import put, sharding
from m3jax.platform import platform

PROGRAMS = ("prefill", "tower", "decode", "pages")
_Tree = TypeVar("_Tree")
RowEdits = Mapping[int, Mapping[str, Steer]]  # of the rows that are steered, by the names of values
RowMasks = Mapping[int, UInt32[np.ndarray, " W"] | None]  # the tokens that may come next in rows with a guide
Watch = Callable[[str], AbstractContextManager]  # maps names of programs to the context in which they are compiled


@dataclass(frozen=True)
class PromptPart:
    """The part of a request that goes into a prefill call.

    Attributes:
      row: its place in the decode batch.
      tokens: all of its tokens.
      cached: how many of them are in the cache already.
      params: how it goes on.
      new_count: new tokens among its tokens; of a request that was preempted.
      feature_rows: the row of the feature that each token of the piece stands for, -1 for a token of text.
      mask: the tokens that may come after its last one, as `Guide.bits` gives them; None where all may.
      wants_scores: whether the log-probabilities of its prompt's tokens are wanted.
      edits: how values are changed in it, by name; None for not at all.
      key_offset: of the key of its first token (`m3jax.decoding.steering.KeyOffsets`).
    """

    row: int
    tokens: Int32[np.ndarray, " N"]
    cached: int
    params: Params
    new_count: int
    feature_rows: Int32[np.ndarray, " T"]
    mask: UInt32[np.ndarray, " W"] | None
    wants_scores: bool
    edits: Mapping[str, Steer] | None
    key_offset: int


class Runner:
    """The device side of an engine: it runs the device calls and keeps their state.

    Args:
      model: from `m3jax.load`.
      cache: empty.
      shapes: fixed from here on.
      host: the cache's host memory, if it is offloaded.
      drafter: proposes tokens, if there is one (`m3jax.decoding.speculation`).

    Attributes:
      table: the pages of each row, as the device will know them from the next call on.
      state: what lives on the device.
      written: the token, or the key of the feature, that calls have written into each slot of each page, -1 before;
        what the device did, to be compared with what the allocator believes (`Engine.check`).
      features: of images and videos, on the device; None where only text is served.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: PagedCache,
        shapes: Shapes,
        host: HostMemory | None = None,
        drafter: Drafter | None = None,
    ):
        self.model, self.shapes, self.host, self.drafter = _committed(model), shapes, host, drafter
        self.table = np.array(cache.table)
        self._stop_reasons = np.full(shapes.batch, device.IDLE, np.int32)
        self._table_is_stale = self._stops_are_stale = False  # whether the device's are older than the host's
        self._unread = 0  # calls of `launch` whose tokens were not read yet
        self.written = np.full((cache.num_pages, cache.page_size), -1, np.int64)
        self._lengths, self._newest_token = [0] * shapes.batch, [0] * shapes.batch  # as in `state`, of rows that decode
        self._page_layout: PyTree[jax.ShapeDtypeStruct] | None = None
        self._max_length = cache.table.shape[1] * model.config.index_block_size

        def place(array):
            return put(array, sharding(array.shape, ("batch",) + (None,) * (array.ndim - 1), model.mesh))

        # Committed to their devices, as the results of a call are: otherwise the second call would compile anew.
        cache = _committed(cache)
        memory = None if drafter is None else drafter.begin(model, shapes.batch, self._max_length)
        self.state = device.State(
            cache=cache,
            continuations=jax.tree.map(place, self.continuations([], shapes.batch)),
            lengths=place(np.zeros(shapes.batch, np.int32)),
            newest_token=place(np.zeros(shapes.batch, np.int32)),
            stop_reasons=place(self._stop_reasons),
            draft_memory=jax.tree.map(place, memory),
        )
        self._no_masks = self._masks_on_device({}, shapes.batch)
        self._no_prompt_masks = self._masks_on_device({}, shapes.prompts)
        self._steered: dict[int, tuple[dict[int, Mapping[str, Steer]], dict[str, Steering]]] = {}
        self.features, self._features_layout = None, None
        self._feature_keys = np.full(shapes.media_tokens, -1, np.int64)
        self._compiled_widths: set[int] = set()  # of calls of prefill
        self._compiled_sizes: set[int] = set()  # of the tower's calls
        if shapes.media_patches:
            found = jax.eval_shape(lambda model, media: model.features(media), model, pack((), shapes.media_patches[0]))
            layout = sharding((shapes.media_tokens, found.shape[1]), (None, None), model.mesh)
            self.features = put(np.zeros((shapes.media_tokens, found.shape[1]), found.dtype), layout)
            self._features_layout = None if model.mesh is None else (layout,)
        self._types = type(model), type(drafter), type(cache)
        mode = _mode(model)
        self._programs = {name: device.program(name, platform(), mode) for name in device.PROGRAMS}
        self._layout = self._cache_layout = None
        if model.mesh is not None:
            self._layout = tuple(leaf.sharding for leaf in jax.tree.leaves(self.state))
            self._cache_layout = self._layout[: len(jax.tree.leaves(cache))]

    def warmup(
        self, programs: Sequence[str], widths: Sequence[int], watch: Watch = nullcontext, all_record: bool = False
    ) -> None:
        """Compile programs, those of prefill for some widths, all inside what `watch` makes of their names.

        Args:
          programs, watch, all_record: as in `Engine.warmup`.
          widths: of prefill calls.
        """
        sizes = self.shapes.media_patches if "tower" in programs else ()
        calls, names = self._sized_calls(widths if "prefill" in programs else (), sizes, all_record)
        if "decode" in programs:
            calls += [
                partial(self._decode_call, 0, {}, records, rows=range(size))
                for size in (*self.shapes.decode_rows, self.shapes.batch)
                for records in self._recordings(all_record)
            ]
            calls.append(lambda: self._start_call(()))
            names.append(f"decode of {self.shapes.steps} {'steps' if self.drafter is None else 'rounds'}")
        if "pages" in programs:
            names.append("copies of pages")
        with watch(", ".join(names)):
            compile_all((call() for call in calls), meanwhile=self._move_no_pages if "pages" in programs else None)
            if self.host is not None:
                self._replace_cache(self.host.warmup(self.state.cache))
            jax.block_until_ready(self.state.lengths)

    def warmup_sizes(self, widths: Iterable[int], sizes: Iterable[int], watch: Watch = nullcontext) -> bool:
        """Compile prefill and the tower for calls of some sizes, if they are not, inside what `watch` makes of names.

        Returns:
          Whether there was any to compile.
        """
        calls, names = self._sized_calls(
            sorted(set(widths) - self._compiled_widths), sorted(set(sizes) - self._compiled_sizes), all_record=False
        )
        if calls:
            with watch(", ".join(names)):
                compile_all(call() for call in calls)
        return bool(calls)

    def _recordings(self, all_record: bool) -> list[tuple[str, ...]]:
        """Return what calls record: nothing, unless every request records, and what requests will ask for."""
        return sorted({self.shapes.records} if all_record else {(), self.shapes.records})

    def _sized_calls(
        self, widths: Sequence[int], sizes: Sequence[int], all_record: bool
    ) -> tuple[list[Callable[[], partial[Any]]], list[str]]:
        """Return functions that each make an empty call of the tower or of prefill, and the names of the programs.

        The tower's calls come first: they are quick to trace, and compile while those of prefill are traced.
        """
        calls = [partial(self._empty_tower_call, size) for size in sizes]
        of_scores = {False, self.shapes.prompt_logprobs}
        calls += [
            partial(self._prefill_call, (), width, records, has_scores)
            for width in widths
            for records in self._recordings(all_record)
            for has_scores in sorted(of_scores)
        ]
        names = [f"prefill of {self.shapes.prompts} x {_listed(widths)} tokens"] if widths else []
        names += [f"vision tower for {_listed(sizes)} patches"] if sizes else []
        self._compiled_widths.update(widths)
        self._compiled_sizes.update(sizes)
        return calls, names

    def _move_no_pages(self) -> None:
        """Compile the programs that copy, read and write pages by running them on no page: they are small."""
        self._copy_group([])
        contents = self.read_pages([0])
        self._page_layout = page_layout(contents)
        self.write_pages([-1], contents, ())

    def update(self, model: TargetModel) -> None:
        """Run another model from now on, whose parameters have the shapes and places of the old one's."""
        self.model = _committed(model)

    # Calls

    def read_segment(self, placed: PlacedSegment, size: int, rows: Int32[np.ndarray, " F"]) -> None:
        """Run the tower on a segment, filled up to `size` patches, and keep its features in some rows."""
        self.features = self._tower_call((placed.segment,), size, rows)()
        self._feature_keys[rows] = placed.keys
        self._compiled_sizes.add(size)

    def _empty_tower_call(self, size: int) -> partial[Float[Array, "F D"]]:
        """Return the tower's call for no segment: its program is that of a call for any segment that fits the size."""
        return self._tower_call((), size, np.zeros(0, np.int32))

    def _tower_call(
        self, segments: Sequence[Segment], size: int, rows: Int32[np.ndarray, " F"]
    ) -> partial[Float[Array, "F D"]]:
        """Return the tower's call for some segments, whose features go to `rows`; those of padding are dropped."""
        padded_rows = np.full(size // MERGE**2, -1, np.int32)
        padded_rows[: len(rows)] = rows
        media, shared = pack(segments, size), dict(layout=self._features_layout, types=self._types)
        return partial(self._programs["read_media"], self.model, self.features, media, padded_rows, **shared)

    def prefill(self, parts: Sequence[PromptPart], width: int) -> device.NewTokens:
        """Run a chunk of `width` tokens of some prompts; row i of the result is that of part i, still on the device."""
        for part in parts:
            piece = part.tokens[part.cached : part.cached + width]
            self._note_written(part.row, part.cached, piece, part.feature_rows, part.key_offset)
        self._send_changes()
        records, has_scores = self.records_of(part.params for part in parts), any(part.wants_scores for part in parts)
        self.state, new = self._prefill_call(parts, width, records, has_scores)()
        self._compiled_widths.add(width)
        self._flush_host()
        return new

    def records_of(self, params: Iterable[Params]) -> tuple[str, ...]:
        """Return the choices that a call records for requests of these parameters: all that any of them asks for.

        Where one asks, what `warmup` compiled for is recorded too, so that the call runs that program.
        """
        asked = {name for of_request in params for name in of_request.recorded}
        asked |= set(self.shapes.records) if asked else set()
        return (*(name for name in RECORDS if name in asked), *sorted(asked.difference(RECORDS)))

    def _prefill_call(
        self, parts: Sequence[PromptPart], width: int, records: tuple[str, ...], has_scores: bool
    ) -> partial[tuple[device.State, device.NewTokens]]:
        """Return the device's call for a chunk of `width` tokens of some prompts."""
        count = self.shapes.prompts
        rows = np.full(count, self.shapes.batch, np.int32)
        start, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        tokens = np.zeros((count, width), np.int32)
        feature_rows, targets = np.full((count, width), -1, np.int32), np.full((count, width), -1, np.int32)
        for index, part in enumerate(parts):
            piece = part.tokens[part.cached : part.cached + width]
            tokens[index, : len(piece)] = piece
            feature_rows[index, : len(piece)] = part.feature_rows
            rows[index], start[index], lengths[index] = part.row, part.cached, len(part.tokens)
            if part.wants_scores:
                following = part.tokens[part.cached + 1 : part.cached + width + 1]
                targets[index, : len(following)] = following
        media = None if self.features is None else device.PlacedFeatures(self.features, feature_rows)
        continuations, context = self.continuations(parts, count), self._context(parts, width)
        chunk = device.Chunk(rows, tokens, start, lengths, continuations, context, media)
        chunk = replace(chunk, targets=targets if has_scores else None)
        masks = {index: part.mask for index, part in enumerate(parts) if part.mask is not None}
        return partial(
            self._programs["prefill"],
            self.model,
            self.state,
            self._sent(chunk),
            host=self._host_pages,
            drafter=self.drafter,
            masks=self._masks_on_device(masks, count) if masks else self._no_prompt_masks,
            edits=self._steering({index: part.edits for index, part in enumerate(parts) if part.edits}, count),
            num_top=self.shapes.top_logprobs,
            records=records,
            layout=self._layout,
            types=self._types,
        )

    def _sent(self, tree: _Tree) -> device.Parcel[_Tree]:
        """Return the parcel of a call's arrays, whole on every device: left open, the compiler might divide it."""
        parcel, mesh = device.Parcel.of(tree), self.model.mesh
        return replace(parcel, words=put(parcel.words, sharding(parcel.words.shape, (None,), mesh)))

    def launch(
        self,
        steps: int,
        masks: RowMasks | None = None,
        records: tuple[str, ...] = (),
        edits: RowEdits | None = None,
        rows: Sequence[int] | None = None,
    ) -> device.NewTokens:
        """Begin decode steps of all live rows, or rounds with a drafter; `read` waits for the new tokens.

        The next call may be launched before: rows that end in this one do nothing in it. Between the two the host may
        give rows more pages and clear those that it has read the end of, and nothing else.

        Args:
          steps: at most.
          masks: the tokens that may come next in rows that have a guide, as `Guide.bits` gives them. These rows get one
            token. None is for no row.
          records: names of choices and other values to record.
          edits: how values are changed in rows that are steered.
          rows: that may be live; None is all.

        Returns:
          The new tokens of all rows, still on the device.
        """
        self._send_changes()
        self.state, new = self._decode_call(steps, masks or {}, records, edits or {}, rows)()
        self._flush_host()
        self._unread += 1
        return new

    def read(self, new: device.NewTokens) -> device.NewTokens:
        """Wait for the oldest call of `launch` that was not read; return its tokens on the host, and note them.

        Records are large and wait for nobody: they stay on the device, on their way to the host.
        """
        new = on_host(new)
        self._unread -= 1
        self._stop_reasons = np.array(new.stop_reasons)
        for row in np.flatnonzero(new.counts).tolist():
            # A step writes the token before the one that it draws: the newest one is in no page yet.
            tokens = [self._newest_token[row], *new.tokens[row, : new.counts[row]].tolist()]
            self._note_written(row, self._lengths[row], tokens[:-1])
            self._lengths[row] += len(tokens) - 1
            self._newest_token[row] = tokens[-1]
        return new

    def _decode_call(
        self,
        steps: int,
        masks: RowMasks,
        records: tuple[str, ...] = (),
        edits: RowEdits = MappingProxyType({}),
        rows: Sequence[int] | None = None,
    ) -> partial[tuple[device.State, device.NewTokens]]:
        """Return the device's call for decode steps, or for rounds with a drafter: the smallest that holds the rows."""
        steps_of_row = np.full(self.shapes.batch, steps, np.int32)
        shared = dict(host=self._host_pages, num_top=self.shapes.top_logprobs, layout=self._layout, types=self._types)
        shared["records"] = records
        size = self.shapes.batch if rows is None else self.shapes.decode_size(len(rows))
        if size < self.shapes.batch:
            shared["rows"] = np.full(size, self.shapes.batch, np.int32)
            shared["rows"][: len(rows)] = sorted(rows)
        shared["edits"] = self._steering(edits, self.shapes.batch)
        shared["masks"] = self._masks_on_device(masks, self.shapes.batch) if masks else self._no_masks
        if self.drafter is None:
            return partial(
                self._programs["decode"], self.model, self.state, steps_of_row, max_steps=self.shapes.steps, **shared
            )
        return partial(
            self._programs["decode_in_rounds"],
            self.model,
            self.drafter,
            self.state,
            steps_of_row,
            draft_tokens=self.shapes.draft_tokens,
            max_rounds=self.shapes.steps,
            **shared,
        )

    def _note_written(
        self,
        row: int,
        start: int,
        tokens: Sequence[int] | Int32[np.ndarray, " T"],
        feature_rows: Int32[np.ndarray, " T"] | None = None,
        key_offset: int = 0,
    ) -> None:
        """Note the tokens, and features in their place, that a call writes into a row's pages from a position on."""
        slots = np.arange(start, start + len(tokens))
        page_size = self.written.shape[1]
        keys = np.array(tokens, np.int64)
        if feature_rows is not None:
            is_feature = feature_rows >= 0
            keys[is_feature] = self._feature_keys[feature_rows[is_feature]]
        if start == 0:
            keys[:1] += key_offset
        self.written[self.table[row][slots // page_size], slots % page_size] = keys

    def continuations(self, parts: Sequence[PromptPart], count: int) -> device.Continuations:
        """Return the settings and progress of some requests as arrays, padded to `count` rows."""
        config = self.model.config
        stop_ids = np.full((count, self.shapes.stop_ids), -1, np.int32)
        limits, min_tokens, top_logprobs, counts = (np.zeros(count, np.int32) for _ in range(4))
        uses = np.zeros((count, config.vocab_size), np.int32)
        recent = np.full((count, WORD_TOKENS - 1), -1, np.int32)
        for index, part in enumerate(parts):
            params, prompt_length = part.params, len(part.tokens) - part.new_count
            stops = params.stops(config.eos_token_id)
            stop_ids[index, : len(stops)] = stops
            limits[index], min_tokens[index] = params.max_new_tokens, params.min_tokens
            top_logprobs[index], counts[index] = params.top_logprobs, part.new_count
            uses[index] = count_uses(part.tokens[:prompt_length], part.tokens[prompt_length:], config.vocab_size)
            last_tokens = part.tokens[-recent.shape[1] :]
            recent[index, recent.shape[1] - len(last_tokens) :] = last_tokens
        sampling = [part.params.sampling for part in parts] + [Sampling.greedy()] * (count - len(parts))
        return device.Continuations(
            sampling=SamplingParams.stack(sampling, self.shapes.biases, self.shapes.bad_words),
            stop_ids=stop_ids,
            limits=limits,
            min_tokens=min_tokens,
            top_logprobs=top_logprobs,
            counts=counts,
            uses=uses,
            recent=recent,
        )

    def _masks_on_device(self, masks: RowMasks, count: int) -> device.Masks:
        """Return masks of some of `count` rows; placed as those of no row are, so that both run one program."""
        is_masked = np.isin(np.arange(count), list(masks))
        bits = np.full((count, -(-self.model.config.vocab_size // MASK_BITS)), 2**32 - 1, np.uint32)
        for row, mask in masks.items():
            if mask is not None:
                bits[row] = mask
        place = lambda x: put(x, sharding(x.shape, (None,) * x.ndim, self.model.mesh))
        return device.Masks(place(is_masked), place(bits))

    def _steering(self, edits: RowEdits, count: int) -> dict[str, Steering] | None:
        """Return the vectors of some of `count` rows on the device; None in an engine that steers no request.

        Those of the last call of as many rows are kept: from step to step they are the same.
        """
        if not self.shapes.edits:
            return None
        known, on_device = self._steered.get(count, (None, None))
        if known is None or known != dict(edits):
            of_rows = [edits.get(row) for row in range(count)]
            width, mode = self.model.config.hidden_size, is_invariant(self.model)
            place = lambda x: put(x, sharding(x.shape, (None,) * x.ndim, self.model.mesh))
            on_device = jax.tree.map(place, steering_of(of_rows, self.shapes.edits, width, mode))
            self._steered[count] = dict(edits), on_device
        return on_device

    def _context(self, parts: Sequence[PromptPart], width: int) -> PromptContext | None:
        """Return what a drafter reads of prompts beyond a piece of `width` tokens; None without a drafter."""
        if self.drafter is None:
            return None
        following = np.zeros(self.shapes.prompts, np.int32)
        for index, part in enumerate(parts):
            following[index] = next(iter(part.tokens[part.cached + width :]), 0)
        if not self.drafter.reads_tokens:
            return PromptContext(following)
        all_tokens = np.zeros((self.shapes.prompts, self._max_length), np.int32)
        for index, part in enumerate(parts):
            all_tokens[index, : len(part.tokens)] = part.tokens
        return PromptContext(following, all_tokens)

    # Rows

    def start_row(self, row: int, stop_reason: int, length: int, newest_token: int) -> None:
        """Note the state of a row after prefill on the host: the device has it already."""
        self._stop_reasons[row] = stop_reason
        self._lengths[row], self._newest_token[row] = length, newest_token

    def start_rows(self, parts: Sequence[PromptPart]) -> None:
        """Have rows decode from their last token on, which alone is not in the cache; at most `prompts` of them."""
        self._send_changes()
        self.state = self._start_call(parts)()
        for part in parts:
            self.start_row(part.row, device.LIVE, part.cached, int(part.tokens[-1]))

    def _start_call(self, parts: Sequence[PromptPart]) -> partial[device.State]:
        """Return the device's call that starts some rows."""
        count = self.shapes.prompts
        rows = np.full(count, self.shapes.batch, np.int32)
        last_token, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for index, part in enumerate(parts):
            rows[index], last_token[index], lengths[index] = part.row, part.tokens[-1], part.cached
        continuations = self.continuations(parts, count)
        shared = dict(layout=self._layout, types=self._types)
        return partial(device.start_rows, self.state, rows, last_token, lengths, continuations, **shared)

    def set_pages(self, row: int, page_ids: Int32[np.ndarray, "M"]) -> None:
        """Give a row its pages."""
        if (self.table[row] != page_ids).any():
            self.table[row], self._table_is_stale = page_ids, True

    def clear_row(self, row: int) -> None:
        """Stop a row and take its pages away."""
        self.table[row], self._table_is_stale = -1, True
        self._stops_are_stale |= self._stop_reasons[row] == device.LIVE  # else it has stopped on the device
        self._stop_reasons[row] = device.IDLE

    def _send_changes(self) -> None:
        """Send table and stop reasons if the host changed them; they are plain transfers, nothing is compiled."""
        send = lambda new, old: put(new.copy(), old.sharding)
        if self._table_is_stale:
            cache = self.state.cache.replace(table=send(self.table, self.state.cache.table))
            self.state = replace(self.state, cache=cache)
        if self._stops_are_stale:
            # A row that ends in a call that was not read would live again.
            assert not self._unread, "a row was stopped before a call in flight was read"
            self.state = replace(self.state, stop_reasons=send(self._stop_reasons, self.state.stop_reasons))
        self._table_is_stale = self._stops_are_stale = False

    # Pages

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target), all layers."""
        for first in range(0, len(copies), PAGES_A_CALL):
            self._copy_group(copies[first : first + PAGES_A_CALL])

    def _copy_group(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy at most `PAGES_A_CALL` pages; the rest of the group copies page 0 to nowhere."""
        pairs = np.array([*copies, *[(0, -1)] * (PAGES_A_CALL - len(copies))], np.int32)
        source, target = pairs[:, 0], pairs[:, 1]
        self._replace_cache(device.copy_pages(self.state.cache, source, target, layout=self._cache_layout))
        if self.host is not None:
            self.host.copy(copies)
        for source, target in copies:
            self.written[target] = self.written[source]

    def read_pages(self, page_ids: Sequence[int], is_awaited: bool = True) -> list[PageContents]:
        """Return the contents of pages in groups of `PAGES_A_CALL`; the last repeats its first page.

        Args:
          page_ids: of the pool.
          is_awaited: whether this waits until they are on the host; if not they are on their way there, and behind
            whatever calls were launched before.
        """
        groups = []
        for ids in _padded_groups(page_ids):
            ids = np.where(ids < 0, ids[0], ids)
            contents = device.read_pages(self.state.cache, ids, layout=self._cache_layout)
            if is_awaited:
                contents = jax.device_get(contents)
            else:
                jax.tree.map(lambda x: x.copy_to_host_async(), contents)
            if self.host is not None:
                # Per stack of layers (k, v, index_k): keys and values of an offloaded one are in host memory.
                stacks = zip(contents, self.host.read(ids), strict=True)
                contents = [stack if kv is None else (*kv, stack[2]) for stack, kv in stacks]
            groups.append(contents)
        return groups

    @property
    def page_layout(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of a group of pages as `read_pages` gives it; the first use may read a group."""
        if self._page_layout is None:
            self._page_layout = page_layout(self.read_pages([0]))
        return self._page_layout

    def write_pages(self, page_ids: Sequence[int], contents: list[PageContents], keys: Sequence[int]) -> None:
        """Put back what `read_pages` gave, to other pages.

        Args:
          page_ids: where to; a page of -1 is left out.
          contents: a group for every `PAGES_A_CALL` of them.
          keys: of what the pages hold (`Request.keys`); the last page may have room for more.
        """
        for ids, group in zip(_padded_groups(page_ids), contents, strict=True):
            self._replace_cache(device.write_pages(self.state.cache, ids, group, layout=self._cache_layout))
            if self.host is not None:
                self.host.write(ids, group)
        page_size = self.written.shape[1]
        for block, page in enumerate(page_ids):
            if page >= 0:
                held = keys[block * page_size : (block + 1) * page_size]
                self.written[page, : len(held)] = held

    @property
    def _host_pages(self) -> HostStacks | None:
        return None if self.host is None else self.host.pages

    def _flush_host(self) -> None:
        """Move what a call has written to host memory, where the cache is offloaded."""
        if self.host is not None:
            self._replace_cache(self.host.flush(self.state.cache))

    def _replace_cache(self, cache: PagedCache) -> None:
        self.state = replace(self.state, cache=cache)


def on_host(new: device.NewTokens) -> device.NewTokens:
    """Return new tokens on the host; their records are large and waited for by nobody, and are on their way there."""
    for record in new.records.values():
        record.copy_to_host_async()
    return replace(jax.device_get(replace(new, records={})), records=new.records)


def _committed(tree: _Tree) -> _Tree:
    """Return arrays committed to the devices where they lie, without a copy; what has no numbers stays as it is."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding) if isinstance(x, jax.Array) else x, tree)


def _mode(model: TargetModel) -> device.Mode:
    """Return the mode ("invariant", "narrow" or "wide") that the compiler's options of a model's programs depend on."""
    if is_invariant(model):
        return "invariant"
    return "narrow" if any(leaf.dtype.itemsize < 4 for leaf in jax.tree.leaves(model)) else "wide"


def _listed(sizes: Sequence[int]) -> str:
    """Return sizes as the name of a program lists them."""
    return " and ".join(map(str, sizes))


def _padded_groups(page_ids: Sequence[int]) -> list[Int32[np.ndarray, "C"]]:
    """Return page ids in groups of one size, the last one padded with -1, so that one compiled program serves all."""
    groups = [page_ids[first : first + PAGES_A_CALL] for first in range(0, len(page_ids), PAGES_A_CALL)]
    return [np.array([*group, *[-1] * (PAGES_A_CALL - len(group))], np.int32) for group in groups]
