"""Text as an engine's tokens come: pieces side by side, stop strings, and the drafts and ids that are named for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from m3jax.completion import StoppableText, drafts, generate_text, stream_text
from m3jax.decoding.engine.request import Generation
from m3jax.dialogue.answer import stop_ids

pytestmark = pytest.mark.usefixtures("unchecked")  # the engines and tokenizers here are none


class Letters:
    """A stream of text in which a token is a letter, given out at once."""

    def push(self, token):
        return chr(token)

    def push_all(self, tokens):
        return "".join(map(chr, tokens))

    def flush(self):
        return "!"


class Scripted:
    """An engine whose rounds are written down: (handle, text, reason) each; what it is told to stop has ended."""

    def __init__(self, *rounds):
        self.rounds, self.stopped = [*rounds], {}

    def step(self):
        events = []
        for handle, text, reason in self.rounds.pop(0):
            is_last = reason != "unfinished" or handle in self.stopped
            events.append(
                SimpleNamespace(
                    handle=handle, tokens=tuple(map(ord, text)), stop_reason=reason, generation=is_last or None
                )
            )
        return events

    def stop(self, handle, tokens):
        self.stopped[handle] = tokens

    def result(self, handle):
        return Generation([handle], [0.0], "length", 1)


def test_text_comes_in_pieces_and_ends_before_a_stop_string():
    """Requests side by side; a stop id is no part of the text, and what follows a stop string is not either."""
    engine = Scripted(
        [(1, "ab", "unfinished"), (2, "x", "unfinished"), (9, "other", "length")],
        [(2, "y~", "stop_id")],
        [(1, "cENDde", "unfinished"), (2, "zz", "length")],
        [(1, "", "unfinished")],
    )
    texts = {handle: StoppableText(Letters(), ["END"]) for handle in (1, 2)}
    found = [(handle, piece, result and result.text) for handle, piece, result in stream_text(engine, texts)]
    assert found == [(1, "ab", None), (2, "x", None), (2, "y!", "xy!"), (1, "c", None), (1, "", "abc")]
    assert engine.stopped == {1: 6} and engine.rounds == []  # at the token that completed it


def test_texts_are_returned_in_the_order_that_was_asked_for():
    engine, heard = Scripted([(4, "a", "length"), (3, "b", "unfinished")], [(3, "", "length")]), []
    tokenizer = SimpleNamespace(stream=Letters)
    found = generate_text(engine, [3, 4], tokenizer, on_text=lambda *piece: heard.append(piece))
    assert [(each.tokens, each.text) for each in found] == [([3], "b!"), ([4], "a!")]
    assert heard == [(4, "a!"), (3, "b"), (3, "!")]


def test_ids_that_end_a_turn_come_once_each():
    tokenizer = SimpleNamespace(eos_id=7, backend=SimpleNamespace(token_to_id=lambda text: {"[e~[": 5}.get(text)))
    assert stop_ids(tokenizer, (3, 7, 3)) == (3, 7, 5)
    nothing = SimpleNamespace(eos_id=None, backend=SimpleNamespace(token_to_id=lambda text: None))
    assert stop_ids(nothing, (3,)) == (3,)


def test_a_draft_is_named_before_there_is_a_model(monkeypatch):
    loaded = []
    monkeypatch.setattr(drafts, "load_draft", lambda *given: loaded.append(given) or "draft")
    monkeypatch.setattr(drafts, "Eagle3Drafter", lambda draft: ("eagle3", draft))
    monkeypatch.setattr(drafts, "PromptLookup", lambda: "lookup")
    assert drafts.named_drafter("ngram", "config", "float32", "mesh") == "lookup" and loaded == []
    assert drafts.named_drafter("builtin", "config", "float32", "mesh") == ("eagle3", "draft")
    drafts.named_drafter(Path("folder"), "config", "bfloat16", None)
    assert loaded == [(None, "config", "float32", "mesh"), (Path("folder"), "config", "bfloat16", None)]
