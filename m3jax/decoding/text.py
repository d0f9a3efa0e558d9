"""From token ids to text as they come, ending at a stop string."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from m3jax.decoding.engine import Engine
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
    engine: Engine,
    handles: Sequence[int],
    tokenizer: Tokenizer,
    *,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> list[Generation]:
    """Work until these requests have ended, decoding to text as it goes.

    Args:
      engine: has the requests.
      handles: of the requests.
      tokenizer: the checkpoint's.
      stop: a request ends when its text contains one of these, be it in one token or across several.
      on_text: called with the handle and each new piece of its text.

    Returns:
      One a request, with its text.

    Raises:
      ValueError: an empty stop string, or a token id that the tokenizer does not know.
    """
    texts = {handle: StoppableText(tokenizer.stream(), stop) for handle in handles}
    running = set(handles)
    while running:
        running -= {handle for handle in sorted(running) if _push_new(engine, handle, texts[handle], on_text)}
        if running:
            engine.step()
    return [replace(engine.result(handle), text=texts[handle].text) for handle in handles]


def _push_new(engine: Engine, handle: int, text: StoppableText, on_text: Callable[[int, str], None] | None) -> bool:
    """Turn a request's latest tokens into text; whether it has ended."""
    tokens, reason = engine.take(handle), engine.reason(handle)
    piece = _push_row(text, tokens, reason)
    if text.stopped:
        engine.stop(handle, text.tokens)
    if piece and on_text is not None:
        on_text(handle, piece)
    return text.stopped or reason != "unfinished"


def _push_row(text: StoppableText, tokens: list[int], reason: str) -> str:
    given = ""
    for token in tokens[:-1] if reason == "stop_id" else tokens:
        given += text.push(token)
        if text.stopped:
            return given
    return given if reason == "unfinished" else given + text.finish()
