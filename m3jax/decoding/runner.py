"""The device's state, and the host's copies of what it needs to know: table, reasons, shapes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from m3jax.cache import HostMemory
from m3jax.decoding import device, rounds
from m3jax.decoding.request import Params
from m3jax.decoding.sampling import Sampling, SamplingParams
from m3jax.parallel import sharding

_PAGES_A_CALL = 8


@dataclass(frozen=True)
class Shapes:
    """What decides which programs are compiled.

    Attributes:
      batch: rows that decode together.
      prompts: prompts that share a prefill call.
      chunks: tokens of each in one call: the sizes that there are, ascending.
      steps: decode steps of one call, at most.
      stop_ids: of one row, at most.
      draft_tokens: K, proposals of a round; 0 without a drafter.
    """

    batch: int
    prompts: int
    chunks: tuple[int, ...]
    steps: int
    stop_ids: int
    draft_tokens: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of a row in one call, at most; a step is a round where there is a drafter."""
        return self.steps * (1 + self.draft_tokens)


@dataclass(frozen=True)
class Part:
    """What of a request goes into a prefill call: its row, all its tokens, how many are in the cache already."""

    row: int
    tokens: tuple[int, ...]
    cached: int
    params: Params
    new: int


class Runner:
    """Runs the engine's device calls and keeps their state.

    Args:
      model: from `m3jax.load`.
      cache: empty.
      shapes: fixed from here on.
      host: where the cache is offloaded, its host memory.
      drafter: proposes tokens, if there is one (`m3jax.decoding.speculative`).
    """

    def __init__(self, model: Any, cache: Any, shapes: Shapes, host: HostMemory | None = None, drafter: Any = None):
        self.model, self.shapes, self.host, self.drafter = model, shapes, host, drafter
        self.vocab = model.config.vocab_size
        self.table = np.array(cache.table)
        self._reasons = np.full(shapes.batch, device.IDLE, np.int32)
        self._stale = False
        place = lambda x: jax.device_put(x, sharding(x.shape, ("batch",) + (None,) * (x.ndim - 1), model.mesh))
        rows = jax.tree.map(place, self._stack([], shapes.batch))
        zeros = lambda: place(np.zeros(shapes.batch, np.int32))
        length = cache.table.shape[1] * model.config.index_block_size
        begin = None if drafter is None else jax.tree.map(place, drafter.begin(model, shapes.batch, length))
        self.state = device.State(cache, rows, zeros(), zeros(), place(self._reasons), begin)
        on_cpu = next(iter(self.state.lengths.devices())).platform == "cpu"
        self._prefill = device.prefill_on_cpu if on_cpu else device.prefill
        places = tuple(x.sharding for x in jax.tree.leaves(self.state))
        self._layout = None if model.mesh is None else places
        self._cache_layout = None if model.mesh is None else places[: len(jax.tree.leaves(cache))]

    def warmup(self) -> None:
        """Compile every program by running it on nothing."""
        self._stale = True
        for width in self.shapes.chunks:
            jax.device_get(self.prefill([], width))
        jax.device_get(self.decode(0))
        self._copy_some([])
        contents = self.read_pages([0])
        self.write_pages([-1], contents)
        if self.host is not None:
            self.state = replace(self.state, cache=self.host.warmup(self.state.cache))
        jax.block_until_ready(self.state.lengths)

    def prefill(self, parts: Sequence[Part], width: int) -> device.New:
        """Run a chunk of `width` tokens of some prompts; row i of the result is that of part i."""
        count = self.shapes.prompts
        slots, start, length = (np.full(count, x, np.int32) for x in (self.shapes.batch, 0, 0))
        tokens = np.zeros((count, width), np.int32)
        for i, part in enumerate(parts):
            piece = part.tokens[part.cached : part.cached + width]
            slots[i], start[i], length[i], tokens[i, : len(piece)] = part.row, part.cached, len(part.tokens), piece
        chunk = device.Chunk(slots, tokens, start, length, *self._for_drafter(parts, width))
        self._sync()
        args = self.model, self.state, chunk, self._stack(parts, count), self._host_pages
        self.state, new = self._prefill(*args, drafter=self.drafter, layout=self._layout)
        self._flush()
        return new

    def decode(self, steps: int) -> device.New:
        """Run decode steps of all live rows; what they gave, on the host."""
        self._sync()
        fixed = dict(room=self.shapes.steps, host=self._host_pages, layout=self._layout)
        if self.drafter is None:
            self.state, new = device.decode(self.model, self.state, np.int32(steps), **fixed)
        else:
            args = self.model, self.drafter, self.state, np.int32(steps), self.shapes.draft_tokens
            self.state, new = rounds.decode_in_rounds(*args, **fixed)
        self._flush()
        new = jax.device_get(new)
        self._reasons = np.array(new.reasons)
        return new

    def started(self, row: int, reason: int) -> None:
        """Note what prefill made of a row."""
        self._reasons[row] = reason

    def place(self, row: int, pages: np.ndarray) -> None:
        """Give a row its pages."""
        if (self.table[row] != pages).any():
            self.table[row], self._stale = pages, True

    def clear(self, row: int) -> None:
        """Take a row out: it goes on no further and owns nothing."""
        self.table[row], self._reasons[row], self._stale = -1, device.IDLE, True

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target), all layers."""
        for first in range(0, len(copies), _PAGES_A_CALL):
            self._copy_some(copies[first : first + _PAGES_A_CALL])

    def read_pages(self, pages: Sequence[int]) -> list[Any]:
        """The contents of pages on the host, `_PAGES_A_CALL` at a time."""
        return [self._read_some(np.maximum(ids, 0)) for ids in _padded(pages)]

    def write_pages(self, pages: Sequence[int], contents: list[Any]) -> None:
        """Put back what `read_pages` gave, to other pages."""
        for ids, values in zip(_padded(pages), contents, strict=True):
            cache = device.write_pages(self.state.cache, ids, values, layout=self._cache_layout)
            self.state = replace(self.state, cache=cache)
            if self.host is not None:
                self.host.write(ids, values)

    def _read_some(self, ids):
        contents = jax.device_get(device.read_pages(self.state.cache, ids))
        if self.host is None:
            return contents
        pairs = zip(contents, self.host.read(ids), strict=True)
        return [here if there is None else (*there, here[2]) for here, there in pairs]

    def _copy_some(self, copies):
        pairs = np.array([*copies, *[(0, -1)] * (_PAGES_A_CALL - len(copies))], np.int32)
        cache = device.copy_pages(self.state.cache, pairs[:, 0], pairs[:, 1], layout=self._cache_layout)
        self.state = replace(self.state, cache=cache)
        if self.host is not None:
            self.host.copy(copies)

    @property
    def _host_pages(self):
        return None if self.host is None else self.host.pages

    def _flush(self) -> None:
        if self.host is not None:
            self.state = replace(self.state, cache=self.host.flush(self.state.cache))

    def _for_drafter(self, parts: Sequence[Part], width: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What else a chunk brings where there is a drafter."""
        if self.drafter is None:
            return None, None
        following = np.zeros(self.shapes.prompts, np.int32)
        for i, part in enumerate(parts):
            following[i] = next(iter(part.tokens[part.cached + width :]), 0)
        if not self.drafter.reads_tokens:
            return following, None
        everything = np.zeros((self.shapes.prompts, self.state.draft.shape[1]), np.int32)
        for i, part in enumerate(parts):
            everything[i, : len(part.tokens)] = part.tokens
        return following, everything

    def _sync(self) -> None:
        """Send the table and the reasons if the host changed them; they are plain transfers, nothing is compiled."""
        if not self._stale:
            return
        put = lambda new, old: jax.device_put(new.copy(), old.sharding)
        cache = self.state.cache.replace(table=put(self.table, self.state.cache.table))
        self.state = replace(self.state, cache=cache, reasons=put(self._reasons, self.state.reasons))
        self._stale = False

    def _stack(self, parts: Sequence[Part], count: int) -> device.Rows:
        """The rows of some requests, padded to `count`."""
        stop_ids = np.full((count, self.shapes.stop_ids), -1, np.int32)
        limits, counts = np.zeros(count, np.int32), np.zeros(count, np.int32)
        seen = np.zeros((count, self.vocab), bool)
        for i, part in enumerate(parts):
            stop_ids[i, : len(part.params.stop_ids)] = part.params.stop_ids
            limits[i], counts[i] = part.params.max_new_tokens, part.new
            seen[i, list(part.tokens)] = True
        sampling = [p.params.sampling for p in parts] + [Sampling.greedy()] * (count - len(parts))
        return device.Rows(SamplingParams.stack(sampling), stop_ids, limits, counts, seen)


def _padded(pages: Sequence[int]) -> list[np.ndarray]:
    groups = [pages[i : i + _PAGES_A_CALL] for i in range(0, len(pages), _PAGES_A_CALL)]
    return [np.array([*group, *[-1] * (_PAGES_A_CALL - len(group))], np.int32) for group in groups]
