"""From token ids to text as they come, ending at a stop string."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from m3jax.decoding.batch import Batch
from m3jax.decoding.request import Generation
from m3jax.text import TextStream, Tokenizer


class StoppableText:
    """One row's text, token by token, with nothing at or past a stop string.

    Text is held back while it ends in an unfinished character or in what may become a stop string.

    Args:
      stream: the detokenizer of this row.
      stop: strings that end the text and are no part of it.

    Attributes:
      text: what was given out so far.
      tokens: how many were pushed.
      stopped: whether a stop string was met.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()):
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop = {stop!r}: must be a list of strings, none of them empty")
        self.text = ""
        self.tokens = 0
        self.stopped = False
        self._stream = stream
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token: int) -> str:
        """The text that can be given out once this token is known."""
        self.tokens += 1
        return self._give(self._stream.push(token))

    def finish(self) -> str:
        """The text still held back, now that no token follows."""
        given = self._give(self._stream.flush())
        held, self._held = self._held, ""
        self.text += held
        return given + held

    def _give(self, new: str) -> str:
        pending, self._held = self._held + new, ""
        met = [at for at in (pending.find(s) for s in self._stop) if at >= 0]
        cut = min(met) if met else len(pending) - _begun(pending, self._stop)
        self.stopped = bool(met)
        self._held = "" if met else pending[cut:]
        self.text += pending[:cut]
        return pending[:cut]


def _begun(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max((len(s) - 1 for s in stop), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-size:]) for s in stop):
            return size
    return 0


def generate_text(
    batch: Batch,
    tokenizer: Tokenizer,
    *,
    stop: Sequence[str] = (),
    steps_per_call: int = 16,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Generation]:
    """Continue a batch after its prefill, decoding to text as it goes.

    Args:
      batch: prefilled.
      tokenizer: the checkpoint's.
      stop: a row ends when its text contains one of these, be it in one token or across several.
      steps_per_call: tokens of a row in one device call. More is faster; fewer show text sooner,
        and fewer tokens are computed past a stop string, only to be dropped.
      on_text: called with the row and each new piece of its text.

    Returns:
      One a row, with its text.

    Raises:
      ValueError: an empty stop string, or a token id that the tokenizer does not know.
    """
    texts = [StoppableText(tokenizer.stream(), stop) for _ in batch.requests]
    running = set(range(len(texts)))
    while True:
        running -= _push_new(batch, texts, running, on_text)
        if not batch.live:
            return [replace(g, text=t.text) for g, t in zip(batch.results(), texts, strict=True)]
        batch.advance(steps_per_call)


def _push_new(
    batch: Batch,
    texts: Sequence[StoppableText],
    running: set[int],
    on_text: Callable[[int, str], None] | None,
) -> set[int]:
    """Turn the tokens of the last slice into text; returns the rows that ended with it."""
    reasons, new = batch.reasons(), batch.take()
    keep = {}
    for row in sorted(running):
        piece = _push_row(texts[row], new[row], reasons[row])
        if texts[row].stopped:
            keep[row] = texts[row].tokens
        if piece and on_text is not None:
            on_text(row, piece)
    if keep:
        batch.stop(keep)
    return keep.keys() | {row for row in running if reasons[row] != "unfinished"}


def _push_row(text: StoppableText, tokens: list[int], reason: str) -> str:
    given = ""
    for token in tokens[:-1] if reason == "stop_id" else tokens:
        given += text.push(token)
        if text.stopped:
            return given
    return given if reason == "unfinished" else given + text.finish()
