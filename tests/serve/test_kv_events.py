"""Page events for gateways: whoever joins, whenever, knows what the engine knows, and pictures keep their names."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from m3jax.cache import PageEvent
from m3jax.serve.worker import kv_events
from m3jax.serve.worker.kv_events import KvEvents, NamedSegments
from m3jax.serve.worker.tensors import SentMedium

pytestmark = pytest.mark.usefixtures("unchecked")  # segments here have no patches


class Reader:
    """A gateway that keeps the pages that it is told of, by the names of the protocol: their parents and tokens."""

    def __init__(self, events: KvEvents, start: int = 0):
        self.pages, self.numbers, self.parts = {}, [], 0
        self.task = asyncio.ensure_future(self._read(events.subscribe(start)))

    async def _read(self, stream):
        async for batch in stream:
            self.numbers.append(batch.sequence_number)
            assert batch.timestamp > 1.7e9 and batch.dp_rank == 0
            if batch.HasField("snapshot"):
                self._check_part(batch)
            for event in batch.events:
                if event.HasField("cleared"):
                    self.pages.clear()
                elif event.HasField("removed"):
                    for name in event.removed.block_hashes:
                        del self.pages[name]
                else:
                    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                    for block in event.stored.blocks:
                        assert block.block_size == 2 and block.block_hash not in self.pages
                        self.pages[block.block_hash] = (parent, tuple(block.token_ids))

    def _check_part(self, batch):
        """Check that each part of a state says which it is, and how many blocks all of them have."""
        part = batch.snapshot
        assert part.index == self.parts and part.index < part.count
        self.parts = (part.index + 1) % part.count
        if part.index == 0:
            self.blocks = -1  # the first event is that all is cleared
        self.blocks += len(batch.events)
        assert self.parts or self.blocks == part.blocks

    async def end(self):
        self.task.cancel()
        await asyncio.wait({self.task})
        assert self.task.cancelled()


async def all_run():
    for _ in range(20):
        await asyncio.sleep(0)


def stored(number: int, parent: int | None = None) -> PageEvent:
    return PageEvent("stored", number, parent, (number, 7))


@pytest.mark.parametrize("seed", range(4))
def test_whoever_joins_knows_what_the_engine_knows(monkeypatch, seed):
    """After any events, in numbered batches without a gap; also who left and comes back with the last that it has."""
    monkeypatch.setattr(kv_events, "_CHUNK", 4)
    monkeypatch.setattr(kv_events, "_MOST_BATCHES", 6)
    rng = np.random.default_rng(seed)

    async def run():
        events, known, readers, left = KvEvents(2), {}, [], []
        for number in range(60):
            kind = rng.random()
            leaves = [name for name in known if name + 1 not in {parent for parent, _ in known.values()}]
            if kind < 0.03:
                known.clear()
                events.note(PageEvent("cleared"))
            elif kind < 0.3 and leaves:
                gone = int(rng.choice(leaves))
                del known[gone]
                events.note(PageEvent("evicted", gone))
            else:
                parent = int(rng.choice(list(known))) if known and kind < 0.8 else None
                known[number] = (None if parent is None else parent + 1, (number, 7))
                events.note(stored(number, parent))
            if number % 5 == 0:
                await all_run()
            if number % 11 == 3:
                readers.append(Reader(events))
            if number % 13 == 12 and readers:
                await all_run()
                left.append((readers.pop(0), number))
                await left[-1][0].end()
            if left and number == left[0][1] + 1 + 9 * (seed % 2):  # soon, or after more than is kept
                gone, _ = left.pop(0)
                back = Reader(events, gone.numbers[-1])
                back.pages = gone.pages
                readers.append(back)
        await all_run()
        expected = {number + 1: page for number, page in known.items()}
        assert len(readers) > 2
        for reader in readers:
            assert reader.pages == expected
            assert reader.numbers == list(range(reader.numbers[0], readers[0].numbers[-1] + 1))
        for reader in (*readers, *(reader for reader, _ in left)):
            await reader.end()

    asyncio.run(run())


def test_what_is_missed_is_sent_again_as_long_as_it_is_kept(monkeypatch):
    """Three batches are: who has the one before them gets these; who has an older one, or one to come, the state."""
    monkeypatch.setattr(kv_events, "_MOST_BATCHES", 3)

    async def run():
        events = KvEvents(2)
        empty = Reader(events)
        await all_run()
        assert not empty.numbers  # there is nothing to tell
        for number in range(5):
            events.note(stored(number))
            await all_run()
        await empty.end()
        for start, numbers in ((0, [5]), (1, [5]), (2, [3, 4, 5]), (4, [5]), (5, []), (6, [5])):
            reader = Reader(events, start)
            await all_run()
            assert reader.numbers == numbers and len(reader.pages) == {0: 5, 1: 5, 6: 5}.get(start, 5 - start), start
            await reader.end()

    asyncio.run(run())


def test_without_subscribers_events_are_kept_in_batches(monkeypatch):
    monkeypatch.setattr(kv_events, "_CHUNK", 4)

    async def run():
        events = KvEvents(2)
        for number in range(9):
            events.note(stored(number))
        reader = Reader(events, 1)
        await all_run()
        assert reader.numbers == [2, 3] and len(reader.pages) == 5
        await reader.end()

    asyncio.run(run())


def test_pictures_without_a_hash_and_what_follows_them_are_not_told():
    async def run():
        events = KvEvents(2)
        reader = Reader(events)
        await all_run()
        for event in (
            PageEvent("stored", 0, None, (5, 6)), PageEvent("stored", 1, 0, (-7, -8)),
            PageEvent("stored", 2, 1, (5, 6)), PageEvent("stored", 3, None, (9, 9)), PageEvent("evicted", 1),
            PageEvent("evicted", 0),
        ):  # fmt: skip
            events.note(event)
        await all_run()
        assert reader.pages == {4: (None, (9, 9))}
        await reader.end()

    asyncio.run(run())


def test_a_subscriber_that_does_not_read_gets_the_state_instead():
    async def run():
        events = KvEvents(1)
        events.note(PageEvent("stored", 0, None, (5,)))
        stream = events.subscribe(0)
        await anext(stream)
        for number in range(1, 1500):
            events.note(PageEvent("stored", number, None, (number,)))
            await asyncio.sleep(0)  # each is a batch of its own
        batch = await anext(stream)
        assert batch.HasField("snapshot") and batch.snapshot.blocks == 1500
        blocks = len(batch.events) - 1
        for _ in range(batch.snapshot.count - 1):
            batch = await anext(stream)
            blocks += len(batch.events)
        assert blocks == 1500 and batch.sequence_number == 1500
        await stream.aclose()

    asyncio.run(run())


def segment(number: int, places: list[int], num_patches: int) -> SimpleNamespace:
    return SimpleNamespace(
        number=number, places=np.array(places, np.int32), segment=SimpleNamespace(patches=range(num_patches))
    )


def test_pictures_keep_their_names():
    """Features become the gateway's placeholders; a picture begins before its page, or in it; a video has two parts."""
    names = NamedSegments()
    image, nameless = SentMedium("image", 3, 90, 8), SentMedium(None, 8, 90, 4)
    video = SentMedium("video", 12, 91, 8)
    segments = [
        segment(10, [4, 5], 8), segment(20, [9], 4), segment(30, [14, 15], 4), segment(40, [18, 19, 20], 4),
    ]  # fmt: skip
    names.note(segments, [image, nameless, video])
    key = lambda number, feature: -2 - (number + feature)
    for keys, expected in (
        ([1, 2, 3, key(10, 0)], ([1, 2, 3, 90], [("image", 2)])),  # place 4 of the prompt, whose picture begins at 3
        ([key(10, 1), 6], ([90, 6], [("image", -2)])),
        ([key(10, 0), key(10, 1)], ([90, 90], [("image", -1)])),
        ([key(30, 1), 0, 0, key(40, 0)], ([91, 0, 0, 91], [("video", -3)])),
        ([key(40, 1), key(40, 2)], ([91, 91], [("video", -7)])),
        ([1, 2], ([1, 2], [])), ([0], ([0], [])),
        ([1, key(20, 0)], None), ([key(10, 2)], None), ([key(9, 0)], None), ([key(40, 3)], None), ([-1], None),
    ):  # fmt: skip
        assert names.named(keys) == expected, keys


def test_the_names_of_the_oldest_pictures_are_forgotten(monkeypatch):
    monkeypatch.setattr(kv_events, "_MOST_SEGMENTS", 2)
    names = NamedSegments()
    note = lambda number: names.note([segment(number, [1], 4)], [SentMedium(f"{number}", 0, 90, 4)])
    for number in (30, 10, 30, 20):  # 30 was used again after 10
        note(number)
    assert [names.named([-2 - number]) is not None for number in (10, 20, 30)] == [False, True, True]
