"""A thread that reads prompts with an engine, and gives out their pages while it goes on."""

import hashlib
import math
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Num, Shaped

from m3jax.decoding import Engine, Media, Params, Sampling
from m3jax.decoding.engine.exchange import PAGES_A_CALL
from m3jax.decoding.protocols import PageContents
from m3jax.transfer.frames import Frame, TransferError
from m3jax.transfer.identity import transfer_identity

# Pages of a prompt that wait to be sent: for a slow receiver no more is copied beside the cache.
_MOST_READY = 4 * PAGES_A_CALL
# A receiver hears so often from a prompt of which no page is ready, and one that is gone is noticed.
ALIVE_SECONDS = 1.0


@dataclass(eq=False)
class _Reading:
    """A prompt that is read for a receiver.

    Attributes:
      prompt: token ids.
      num_sent: pages that were put into `ready`, and those that the receiver has.
      num_taken: of these, those that are on their way.
      media: images and videos of the prompt; None for text alone.
      next_token: the token behind the prompt; None where no scores are asked for.
      num_alternatives: `Params.prompt_logprobs`.
      num_scored: tokens whose scores were put into `ready`.
      ready: groups of pages to send, as (first page, count, contents), and frames of scores; then the tokens that were
        in the prefix cache, or what went wrong.
      handle: of its request in the engine; None before it is there.
      is_cancelled: whether the receiver is gone.
    """

    prompt: tuple[int, ...]
    num_sent: int
    num_taken: int
    media: Media | None = None
    next_token: int | None = None
    num_alternatives: int | None = None
    num_scored: int = 0
    ready: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    handle: int | None = None
    is_cancelled: bool = False

    @property
    def can_send(self) -> bool:
        return self.num_sent - self.num_taken < _MOST_READY


class Prefiller:
    """An engine that reads prompts and draws nothing: their pages go to engines that decode.

    All pages of a prompt but those of its last token are read here. That token is computed where the answer is drawn,
    whose engine so draws every new token by itself: no fresh token has to be handed over (T50), and seeds, grammars and
    log-probabilities of the answer need no word in the protocol. Those of the prompt's own tokens are computed here,
    where the prompt is, and travel beside the pages. Pages stay in this engine's prefix cache.

    A chunk of a prompt is one call of the device. Pages are read behind it in the device's own order, so none can leave
    before it is written (T50), and they travel to the host and on while the next chunk is computed.

    Args:
      engine: from now on the prefiller's alone.
      max_requests: prompts that are read or wait at once.

    Attributes:
      identity: what the engine says of itself to receivers (`transfer_identity`).
    """

    def __init__(self, engine: Engine, max_requests: int = 256):
        self.engine, self.identity = engine, transfer_identity(engine)
        self._page_size, self._max_requests = engine.config.index_block_size, max_requests
        self._changed = threading.Condition()
        self._new: deque[_Reading] = deque()
        self._readings: list[_Reading] = []  # the thread's alone
        self._num_open = 0
        self._is_woken = self._is_closing = self._can_go_on = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="m3jax prefill", daemon=True)
        self._thread.start()

    def read(
        self,
        prompt: Sequence[int],
        left_out: int = 0,
        alive_seconds: int | float = ALIVE_SECONDS,
        media: Media | None = None,
        next_token: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Iterator[Frame]:
        """Yield the frames of a prompt's pages as they are ready, on the caller's thread, which waits for each.

        Closing the iterator ends the request and frees its pages.

        Args:
          prompt: token ids; pages of all of them are sent,
          left_out: but those of so many at the beginning, which the receiver has: whole pages.
          alive_seconds: after so many seconds without a page a frame says that there is more to come.
          media: images and videos of the prompt, which the tower reads here: what it found is in the pages.
          next_token: the token behind the prompt, where scores are asked for: it is computed too, and no page of it is
            sent.
          prompt_logprobs: as in `Params`: frames have the scores of all tokens but the first, and of `next_token`. A
            prompt whose scores are asked for takes nothing from the prefix cache. None sends no scores.

        Raises:
          ValueError: a prompt that the engine refuses, tokens left out that are no whole pages of it, or one of
            `next_token` and `prompt_logprobs` without the other.
          TransferError: too many prompts, or the engine failed.
        """
        if not 0 <= left_out <= len(prompt) or left_out % self._page_size:
            raise ValueError(f"left_out = {left_out}: whole pages of {self._page_size} of {len(prompt)} tokens")
        if (next_token is None) != (prompt_logprobs is None):
            raise ValueError("next_token and prompt_logprobs: give both, or neither for no scores")
        num_known = left_out // self._page_size
        reading = _Reading(
            tuple(map(int, prompt)), num_sent=num_known, num_taken=num_known, media=media,
            next_token=None if next_token is None else int(next_token), num_alternatives=prompt_logprobs,
        )  # fmt: skip
        with self._changed:
            if self._is_closing:
                raise TransferError("the engine that reads prompts has ended") from self._error
            if self._num_open >= self._max_requests:
                raise TransferError(f"{self._num_open} prompts are read or wait, and no more are taken: try again")
            self._num_open += 1
            self._new.append(reading)
            self._wake()
        try:
            ids = np.asarray(reading.prompt, np.int64)
            fields = dict(tokens=len(ids), identity=self.identity, prompt=hashlib.sha256(ids.tobytes()).hexdigest())
            yield Frame("hello", fields)
            while True:
                try:
                    ready = reading.ready.get(timeout=alive_seconds)
                except queue.Empty:
                    yield Frame("alive")
                    continue
                if isinstance(ready, BaseException):
                    raise ready
                if isinstance(ready, Frame):
                    yield ready
                    continue
                if isinstance(ready, int):
                    yield Frame("end", {"cached_tokens": ready})
                    return
                first, count, contents = ready
                yield from page_frames(contents, first, count)
                with self._changed:
                    reading.num_taken += count
                    self._wake()
        finally:
            with self._changed:
                reading.is_cancelled = True
                self._num_open -= 1
                self._wake()

    def close(self) -> None:
        """End the thread, and every transfer that goes on."""
        with self._changed:
            self._is_closing = True
            self._wake()
        self._thread.join()

    # On the engine's thread

    def _wake(self) -> None:
        self._is_woken = True
        self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._can_go_on or self._is_woken

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work)
                    self._is_woken = False
                    new, self._new = list(self._new), deque()
                    if self._is_closing:
                        raise TransferError("the engine that reads prompts was stopped")
                for reading in new:
                    self._begin(reading)
                for reading in [reading for reading in self._readings if reading.is_cancelled]:
                    self._end(reading)
                has_prompts = self.engine.prefill(decode_follows=False)
                # Each is asked: one that ends gives its row to the next.
                has_moved = [self._advance(reading) for reading in list(self._readings)]
                self._can_go_on = has_prompts or any(has_moved)
        except BaseException as error:  # whatever the engine raised: every receiver is told, none waits for ever
            with self._changed:
                self._error, self._is_closing = error, True
                self._readings += self._new
            for reading in list(self._readings):
                reading.ready.put(TransferError(f"the prompt was lost: {error}"))
                with suppress(Exception):  # of an engine that failed
                    self._end(reading)

    def _begin(self, reading: _Reading) -> None:
        """Hand a prompt to the engine."""
        if reading.is_cancelled:
            return
        try:
            # Of two tokens the engine draws the first with the last chunk, and waits with it: nothing ends the request
            # before its pages are read.
            params = Params(max_new_tokens=2, sampling=Sampling.greedy(), prompt_logprobs=reading.num_alternatives)
            behind = () if reading.next_token is None else (reading.next_token,)
            reading.handle = self.engine.add((*reading.prompt, *behind), params, reading.media)
            self._readings.append(reading)
        except ValueError as error:
            reading.ready.put(error)

    def _advance(self, reading: _Reading) -> bool:
        """Have pages and scores of a prompt that are ready read; return True if there were any."""
        if not reading.can_send:
            return False
        num_pages = math.ceil(len(reading.prompt) / self._page_size)
        num_scores = 0 if reading.next_token is None else len(reading.prompt)
        try:
            count, scores = 0, []
            if reading.num_sent < num_pages:
                count, contents = self.engine.export_pages(reading.handle, reading.num_sent)
                count = min(count, num_pages - reading.num_sent)  # the token behind the prompt may begin a page
            if count:
                reading.ready.put((reading.num_sent, count, contents))
                reading.num_sent += count
            if reading.num_scored < num_scores:
                scores = self.engine.prompt_logprobs(reading.handle, reading.num_scored)
            if scores:
                reading.ready.put(score_frame(scores, reading.num_scored))
                reading.num_scored += len(scores)
            if (reading.num_sent, reading.num_scored) == (num_pages, num_scores):
                reading.ready.put(self.engine.prompt_progress(reading.handle)[0])
                self._end(reading)
                return True
            return count > 0 or bool(scores)
        except ValueError:  # it has ended: there is no other reason for one that draws a token and stops nowhere
            reading.ready.put(TransferError("the prompt's logits are no numbers (NaN): its pages are not sent"))
            self._end(reading)
            return True

    def _end(self, reading: _Reading) -> None:
        """Free what a prompt has; known pages stay in the prefix cache."""
        if reading in self._readings:
            self._readings.remove(reading)
        if reading.handle is not None:
            if self.engine.reason(reading.handle) == "unfinished":
                self.engine.abort(reading.handle)
            self.engine.forget(reading.handle)
            reading.handle = None


def score_frame(scores: Sequence[Mapping[int, float]], first: int) -> Frame:
    """Return the frame of some scores of a prompt's tokens.

    Args:
      scores: an entry a token, as in `Generation.prompt_logprobs`.
      first: index of the first among all entries of the prompt.
    """
    ids, logprobs = ([x for entry in scores for x in part(entry)] for part in (Mapping.keys, Mapping.values))
    arrays = {
        "counts": np.array([len(entry) for entry in scores], np.int32),
        "ids": np.array(ids, np.int32),
        "logprobs": np.array(logprobs, np.float64),
    }
    return Frame("scores", {"first": first}, arrays)


def page_frames(contents: PageContents, first: int, count: int) -> Iterator[Frame]:
    """Yield the frames of a group of pages, layer by layer, and of each layer what every device has of its heads.

    Keys, values and index keys of a layer are in one frame, so that none travels without the others (T16).

    Args:
      contents: as an entry of `Snapshot.pages`: of each stack k, v [L C K P H] and index keys [L C P I] or None.
      first: index of the first page in its prompt.
      count: pages that are sent, of C.
    """
    for stack, (k, v, index_k) in enumerate(contents):
        keys, values = _by_heads(k), _by_heads(v)
        index_k = None if index_k is None else np.asarray(index_k)
        for layer in range(k.shape[0]):
            for first_head, some_keys in keys.items():
                arrays = {"k": some_keys[layer, :count], "v": values[first_head][layer, :count]}
                if index_k is not None and first_head == 0:
                    arrays["index_k"] = index_k[layer, :count]
                fields = dict(stack=stack, layer=layer, first=first, first_head=first_head)
                yield Frame("pages", fields, arrays)


def _by_heads(pages: Num[jax.Array | np.ndarray, "L C K P H"]) -> dict[int, Shaped[np.ndarray, "L C Z P H"]]:
    """Return pages on the host as the devices divide their heads, by the first head of each part (T49)."""
    if not isinstance(pages, jax.Array):
        return {0: pages}
    parts = {}
    for shard in pages.addressable_shards:
        heads = shard.index[2]
        if shard.data.shape[:2] != pages.shape[:2]:
            return {0: np.asarray(pages)}  # pages are divided too: the whole array says which is which
        if (heads.start or 0) not in parts:  # devices of other axes have the same heads
            parts[heads.start or 0] = np.asarray(shard.data)
    return parts
