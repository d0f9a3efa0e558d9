"""The pages that a worker knows, told to gateways as they come and go, so that these send a prompt to its beginning."""

import asyncio
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32
from smg_grpc_proto.generated import common_pb2

from m3jax.cache import PageEvent
from m3jax.decoding.engine.media import PlacedSegment
from m3jax.serve.worker.tensors import SentMedium

_MOST_BATCHES = 4096  # that a subscriber can ask for again
_MOST_UNREAD = 1024  # batches that a subscriber may be behind before it is sent the state instead
_CHUNK = 512  # blocks of one message of a snapshot
_MOST_SEGMENTS = 4096  # images and chunks of videos whose names are remembered


@dataclass(frozen=True)
class _NamedSegment:
    """A segment that pages may hold.

    Attributes:
      digest: the gateway's hash of the picture.
      token: the gateway's placeholder.
      places: of the segment's features, counted from the picture's first token in the prompt.
    """

    digest: str
    token: int
    places: Int32[np.ndarray, " F"]


class NamedSegments:
    """The last images and chunks of videos that came with a hash, by the keys of their features."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # ascending
        self._segments: OrderedDict[int, _NamedSegment] = OrderedDict()  # by number, the oldest use first

    def note(self, segments: Sequence[PlacedSegment], media: Sequence[SentMedium]) -> None:
        """As `KvEvents.note_media`."""
        waiting, remaining = iter(media), 0  # patches of the medium that a segment belongs to
        for segment in segments:
            if not remaining:
                medium = next(waiting)
                remaining = medium.num_patches
            remaining -= len(segment.segment.patches)
            if not medium.digest:
                continue
            if segment.number not in self._segments:
                insort(self._numbers, segment.number)
            places = segment.places - np.int32(medium.offset)
            self._segments[segment.number] = _NamedSegment(medium.digest, medium.token, places)
            self._segments.move_to_end(segment.number)
        while len(self._segments) > _MOST_SEGMENTS:
            forgotten, _ = self._segments.popitem(last=False)
            del self._numbers[bisect_left(self._numbers, forgotten)]

    def named(self, keys: Sequence[int]) -> tuple[list[int], list[tuple[str, int]]] | None:
        """Return a page's tokens as the gateway has them, and its pictures; None if a picture has no name.

        Args:
          keys: of the page: tokens, and negative keys of features (`PlacedSegment.keys`).

        Returns:
          (token ids; of each picture its hash, and its first token's place counted from the page's).
        """
        tokens, pictures = list(keys), {}
        for index, key in enumerate(keys):
            if key >= 0:
                continue
            # A segment's keys are -2 less its number and those that follow: the number is the nearest one below.
            above = bisect_right(self._numbers, -2 - key)
            number = self._numbers[above - 1] if above else 0
            segment, feature = self._segments.get(number), -2 - key - number
            if segment is None or feature >= len(segment.places):
                return None
            tokens[index] = segment.token
            pictures[segment.digest, index - int(segment.places[feature])] = None
        return tokens, list(pictures)


class KvEvents:
    """The engine's page events as numbered batches, and all pages that are known, for whoever joins later.

    Events come in on the engine's thread (`note`) and go out on the event loop, all that are there in one batch. Pages
    with features of pictures have the gateway's own placeholders and, as vLLM's, each picture's hash and place in
    `extra_keys`. Those of a picture that came without a hash, and those behind it, are not told: the gateway has no
    name for them.

    Args:
      page_size: tokens of a page.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._lock = threading.Lock()
        self._media = NamedSegments()
        self._pending: list[common_pb2.KvCacheEvent] = []  # in no batch yet
        self._known: dict[int, common_pb2.KvCacheEvent] = {}  # by number; parents come before children
        self._sequence = 0
        self._batches: deque[common_pb2.KvEventBatch] = deque(maxlen=_MOST_BATCHES)
        self._subscribers: dict[asyncio.Queue, asyncio.AbstractEventLoop] = {}

    def note(self, event: PageEvent) -> None:
        """Take an event, on the engine's thread."""
        with self._lock:
            is_first = not self._pending
            self._pending += self._as_messages(event)
            if not self._subscribers:
                if len(self._pending) >= _CHUNK:
                    self._close_batch()
            elif is_first and self._pending:
                # What comes until the event loop gets to it is one batch.
                running = next(iter(self._subscribers.values()))
                with suppress(RuntimeError):  # the event loop is closed: nobody reads
                    running.call_soon_threadsafe(self._give_out)

    def note_media(self, segments: Sequence[PlacedSegment], media: Sequence[SentMedium]) -> None:
        """Learn the names of a request's pictures before its pages are stored, on the engine's thread.

        Args:
          segments: of the request, as `Engine.segments`.
          media: as the gateway knows them, in the same order; a video may have several segments.
        """
        self._media.note(segments, media)

    async def subscribe(self, start: int) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Yield batches for ever.

        Args:
          start: the last batch that the subscriber has; 0, or one that is too old, gives all known pages first.
        """
        unread: asyncio.Queue = asyncio.Queue()
        self._give_out()
        with self._lock:
            self._close_batch()
            self._subscribers[unread] = asyncio.get_running_loop()
            is_kept = self._sequence - len(self._batches) <= start <= self._sequence
            missed = [batch for batch in self._batches if batch.sequence_number > start]
            first = missed if start and is_kept else self._snapshot()
        try:
            for batch in first:
                yield batch
            while True:
                if unread.qsize() > _MOST_UNREAD:  # who is so far behind is better off with the state
                    while not unread.empty():
                        unread.get_nowait()
                    with self._lock:
                        state = self._snapshot()
                    for batch in state:
                        yield batch
                yield await unread.get()
        finally:
            del self._subscribers[unread]

    def _give_out(self) -> None:
        """Give what has come to all subscribers as one batch, on the event loop."""
        with self._lock:
            batch = self._close_batch()
            if batch is not None:
                for unread in self._subscribers:
                    unread.put_nowait(batch)

    def _close_batch(self) -> common_pb2.KvEventBatch | None:
        """Make a batch of what has come, with the lock held; None if nothing has."""
        if not self._pending:
            return None
        self._sequence += 1
        batch = common_pb2.KvEventBatch(
            sequence_number=self._sequence, timestamp=time.time(), events=self._pending, dp_rank=0
        )
        self._batches.append(batch)
        self._pending = []
        return batch

    def _as_messages(self, event: PageEvent) -> list[common_pb2.KvCacheEvent]:
        """Return an event as the protocol has it, and note what is known after it; [] for what is not told."""
        if event.what == "cleared":
            self._known.clear()
            return [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())]
        if event.what == "evicted":
            if self._known.pop(event.number, None) is None:
                return []
            removed = common_pb2.KvBlocksRemoved(block_hashes=[_hash(event.number)])
            return [common_pb2.KvCacheEvent(removed=removed)]
        named = self._media.named(event.tokens)
        if named is None or (event.parent is not None and event.parent not in self._known):
            return []
        tokens, pictures = named
        block = common_pb2.KvBlock(block_hash=_hash(event.number), token_ids=tokens, block_size=self._page_size)
        for digest, offset in pictures:
            block.extra_keys.add(multimodal=common_pb2.KvMultimodalKey(identifier=digest, offset=offset))
        parent = None if event.parent is None else _hash(event.parent)
        stored = common_pb2.KvBlocksStored(blocks=[block], parent_block_hash=parent)
        self._known[event.number] = common_pb2.KvCacheEvent(stored=stored)
        return [self._known[event.number]]

    def _snapshot(self) -> list[common_pb2.KvEventBatch]:
        """Return all known pages as the chunks of a snapshot, which end at the last batch's number; the lock is held.

        Before the first batch there is nothing to tell, and no number to tell it under.
        """
        if not self._sequence:
            return []
        events = [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()), *self._known.values()]
        # The numbers of the chunks end at this one, so there can be no more chunks than batches so far.
        size = max(_CHUNK, -(-len(events) // self._sequence))
        chunks = [events[first : first + size] for first in range(0, len(events), size)]
        first_number = self._sequence - len(chunks) + 1
        return [
            common_pb2.KvEventBatch(
                sequence_number=first_number + index,
                timestamp=time.time(),
                events=chunk,
                dp_rank=0,
                snapshot=common_pb2.KvSnapshotChunk(index=index, count=len(chunks), blocks=len(self._known)),
            )
            for index, chunk in enumerate(chunks)
        ]


def _hash(number: int) -> int:
    """Return the name of a page in the protocol: its number, from 1, since 0 is also what is not set."""
    return number + 1
