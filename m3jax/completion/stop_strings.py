"""Decoding of token ids to text as they come, up to a stop string."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from m3jax.decoding import Engine, Generation, TokenEvent
from m3jax.text import TextStream, Tokenizer


class StoppableText:
    """One request's text, token by token, with nothing at or past a stop string.

    Text is held back while it ends in an unfinished character or in what may become a stop string.

    Args:
      stream: the detokenizer of this request.
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
        self._stop_strings = tuple(stop)
        self._held_back = ""

    def push(self, token: int) -> str:
        """Take one token, and return the text that can be given out once it is known."""
        self.tokens += 1
        return self._give_out(self._stream.push(token))

    def finish(self) -> str:
        """Return the text still held back, now that no token follows."""
        piece = self._give_out(self._stream.flush())
        held_back, self._held_back = self._held_back, ""
        self.text += held_back
        return piece + held_back

    def _give_out(self, new: str) -> str:
        """Return the pending text up to a stop string, or up to where one may have begun; hold the rest back."""
        pending = self._held_back + new
        # Of several stop strings the one that begins first ends the text, whatever their order in the list.
        stops = [position for position in map(pending.find, self._stop_strings) if position >= 0]
        self.stopped = bool(stops)
        if stops:
            piece, self._held_back = pending[: min(stops)], ""
        else:
            cut = len(pending) - self._begun(pending)
            piece, self._held_back = pending[:cut], pending[cut:]
        self.text += piece
        return piece

    def _begun(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        # The longest end first: of a text that ends in two line breaks both wait for the third of "\n\n\n".
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop_strings):
                return size
        return 0


def stream_text(engine: Engine, texts: Mapping[int, StoppableText]) -> Iterator[tuple[int, str, Generation | None]]:
    """Run the engine until some requests have ended, yielding their text as it comes.

    Args:
      engine: has the requests, of which no event was given out yet.
      texts: of each request, by its handle; they grow, and where one meets a stop string its request ends.

    Yields:
      A handle, the next piece of its text, and when the request has ended its result, with all of the text.

    Raises:
      ValueError: a token id that the tokenizer does not know.
    """
    running = set(texts)
    while running:
        for event in engine.step():
            if event.handle not in running:
                continue
            text, result = texts[event.handle], None
            piece = "" if text.stopped else _push(event, text)
            if text.stopped:
                # A device call draws several tokens: those after the one that completed the stop string do not count.
                engine.stop(event.handle, text.tokens)
            if event.generation is not None:
                running.remove(event.handle)
                result = replace(engine.result(event.handle), text=text.text)
            if piece or result is not None:
                yield event.handle, piece, result


def generate_text(
    engine: Engine,
    handles: Sequence[int],
    tokenizer: Tokenizer,
    *,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> list[Generation]:
    """Run the engine until these requests have ended, and return their text.

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
    results: dict[int, Generation] = {}
    for handle, piece, result in stream_text(engine, texts):
        if on_text is not None and piece:
            on_text(handle, piece)
        if result is not None:
            results[handle] = result
    return [results[handle] for handle in handles]


def _push(event: TokenEvent, text: StoppableText) -> str:
    """Return the text of a request's new tokens, up to a stop string."""
    piece = ""
    # A stop id is a token of the continuation, and no part of its text.
    for token in event.tokens[:-1] if event.stop_reason == "stop_id" else event.tokens:
        piece += text.push(token)
        if text.stopped:
            return piece
    return piece if event.generation is None else piece + text.finish()
