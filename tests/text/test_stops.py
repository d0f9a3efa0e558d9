"""A text up to a stop string: nothing of one is ever given out, and all else is, as soon as it can be told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3jax.text import StoppableText

# The detokenizer here is none; hypothesis runs many examples in one test, so the fixture holds for all of them.
pytestmark = pytest.mark.usefixtures("unchecked")
pieces_of = st.lists(st.sampled_from(["", "a", "b", "ab", "ba", "aab", "\n", "\n\n"]), max_size=8)
stops_of = st.lists(st.sampled_from(["b", "ab", "aab", "ba", "\n\n\n", "abab"]), max_size=3)


class Pieces:
    """A detokenizer whose token i is piece i; its last piece comes with the end."""

    def __init__(self, pieces, last=""):
        self.pieces, self.last = pieces, last

    def push(self, token):
        return self.pieces[token]

    def push_all(self, tokens):
        return "".join(map(self.push, tokens))

    def flush(self):
        return self.last


def until(text, stops):
    """Return the text before the stop string that begins first, and that string; of two at one place the lesser."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return (text, None) if not found else (text[: min(found)[0]], min(found)[1])


@given(pieces_of, stops_of, st.sampled_from(["", "a", "b", "\n"]))
def test_a_text_ends_before_the_first_of_its_stop_strings(pieces, stops, last):
    """Token by token, by the definition on the text so far; what is held back is what may yet become a stop string."""
    text, given_out = StoppableText(Pieces(pieces, last), stops), ""
    for token in range(len(pieces)):
        so_far = "".join(pieces[: token + 1])
        given_out += text.push(token)
        before, stop = until(so_far, stops)
        assert (text.stopped, text.stop_string, text.tokens) == (stop is not None, stop, token + 1)
        held = 0
        if stop is None:
            held = max((n for s in stops for n in range(len(s)) if n and so_far.endswith(s[:n])), default=0)
        assert given_out == text.text == before[: len(before) - held]
        if stop is not None:
            break
    if not text.stopped:
        given_out += text.finish()
        before, stop = until("".join(pieces) + last, stops)
        assert (given_out, text.text, text.stopped, text.stop_string) == (before, before, stop is not None, stop)
        assert text.finish() == last or stops  # nothing is held any more


@given(pieces_of, stops_of)
def test_tokens_that_come_together_are_tokens_one_by_one(pieces, stops):
    one, together = (StoppableText(Pieces(pieces), stops) for _ in range(2))
    alone = []
    for token in range(len(pieces)):
        if not one.stopped:
            alone.append(one.push(token))
    assert together.push_all(range(len(pieces))) == "".join(alone)
    for name in ("text", "tokens", "stopped", "stop_string"):
        assert getattr(one, name) == getattr(together, name), name


def test_stop_strings_that_are_none():
    for stop in ("end", ["a", ""]):
        with pytest.raises(ValueError, match="must be a list of strings, none of them empty"):
            StoppableText(Pieces([]), stop)
