"""A text as its tokens come, up to a stop string."""

from collections.abc import Sequence

from m3jax.text.stream import TextStream


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
      stop_string: that one; None before.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()):
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop = {stop!r}: must be a list of strings, none of them empty")
        self.text = ""
        self.tokens = 0
        self.stopped = False
        self.stop_string: str | None = None
        self._stream = stream
        self._stop_strings = tuple(stop)
        self._held_back = ""

    def push(self, token: int) -> str:
        """Take one token, and return the text that can be given out once it is known."""
        self.tokens += 1
        return self._give_out(self._stream.push(token))

    def push_all(self, tokens: Sequence[int]) -> str:
        """Take several tokens, up to one that completes a stop string; return the text that can be given out then."""
        if not self._stop_strings:
            self.tokens += len(tokens)
            return self._give_out(self._stream.push_all(tokens))
        pieces = []
        for token in tokens:
            if self.stopped:
                break
            pieces.append(self.push(token))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text still held back, now that no token follows."""
        piece = self._give_out(self._stream.flush())
        held_back, self._held_back = self._held_back, ""
        self.text += held_back
        return piece + held_back

    def _give_out(self, new: str) -> str:
        """Return the pending text up to a stop string, or up to where one may have begun; hold the rest back."""
        if not self._stop_strings:
            self.text += new
            return new
        pending = self._held_back + new
        # Of several stop strings the one that begins first ends the text, whatever their order in the list.
        stops = [(position, stop) for stop in self._stop_strings if (position := pending.find(stop)) >= 0]
        self.stopped = bool(stops)
        if stops:
            position, self.stop_string = min(stops)
            piece, self._held_back = pending[:position], ""
        else:
            cut = len(pending) - self._begun(pending)
            piece, self._held_back = pending[:cut], pending[cut:]
        self.text += piece
        return piece

    def _begun(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stop_strings))
        # The longest end first: of a text that ends in two line breaks both wait for the third of "\n\n\n".
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop_strings):
                return size
        return 0
