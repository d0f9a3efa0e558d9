"""Dialogues with one right answer: keys of a document, look-ups and sums by tools, and both in a row.

A document is code with records, `# harbor -> lantern`, as in `tiny.data`: what the checkpoint has learned to
recall. What a tool would return is part of the task, and so is every word that the assistant is to write.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tiny.corpus import RECORD_LENGTH, Corpus
from tiny.data import scatter

from m3jax.evaluate.words import WORDS
from m3jax.text import Tokenizer

KINDS = ("document", "look-up", "sum", "document, then look-up", "two look-ups, then sum")
MODES = ("enabled", "disabled", "adaptive")
_MOST_RECORDS = 24
_SECOND_QUESTION = 0.3  # probability of one more exchange, which needs no document
# A tool is called what its schema says, which differs from dialogue to dialogue.
_LOOK_UP_NAMES, _KEY_NAMES = ("lookup", "find", "get_value"), ("key", "name", "word")
_SUM_NAMES, _TERM_NAMES = ("add", "sum", "plus"), (("a", "b"), ("x", "y"), ("first", "second"))


@dataclass(frozen=True)
class Task:
    """A dialogue with one right course.

    Attributes:
      kind: that of its first question, one of `KINDS`.
      messages: all of it, in OpenAI's layout, with the answers that are right.
      tools: that it declares; None for none.
      thinking_mode: one of `MODES`. In "enabled" every answer has reasoning, in "disabled" none, in "adaptive" those
        that need a document or a second step.
    """

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    thinking_mode: str


def draw_task(
    rng: np.random.Generator,
    corpus: Corpus,
    tokenizer: Tokenizer,
    document_tokens: int,
    kind: str | None = None,
    thinking_mode: str | None = None,
    shares: Sequence[float] | None = None,
) -> Task:
    """Draw a dialogue of a kind and thinking mode.

    Args:
      rng: the source of all that is random in it.
      corpus: where the code of a document comes from.
      tokenizer: the corpus's.
      document_tokens: length of a document, where the dialogue has one; at least 16.
      kind: of the first question; None draws it, and at times a second question.
      thinking_mode: None draws it.
      shares: how often each of `KINDS` is drawn; None for all alike.

    Returns:
      The dialogue; the same for an equal generator.
    """
    mode = MODES[rng.integers(len(MODES))] if thinking_mode is None else thinking_mode
    kinds = [KINDS[rng.choice(len(KINDS), p=shares)]] if kind is None else [kind]
    if kind is None and rng.random() < _SECOND_QUESTION:
        kinds.append(("look-up", "sum", "two look-ups, then sum")[rng.integers(3)])
    script = _Script.draw(rng, mode)
    for each in kinds:
        if each.startswith("document"):
            _ask_document(script, rng, corpus, tokenizer, document_tokens, looks_up=each != "document")
        elif each == "look-up":
            _ask_look_up(script)
        elif each == "sum":
            _ask_sum(script, rng)
        else:
            _ask_two_look_ups(script, rng)
    needs_tools = kinds != ["document"]
    return Task(kinds[0], script.messages, script.tools() if needs_tools or rng.random() < 0.5 else None, mode)


@dataclass
class _Script:
    """A dialogue while it is written: who says what, and what the tools are called in it."""

    mode: str
    words: list[str]  # no word means two things in one dialogue
    look_up: str
    key: str
    add: str
    terms: tuple[str, str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    _calls: int = 0

    @classmethod
    def draw(cls, rng: np.random.Generator, mode: str) -> "_Script":
        choose = lambda names: names[rng.integers(len(names))]
        words = [WORDS[place] for place in rng.permutation(len(WORDS))]
        return cls(mode, words, choose(_LOOK_UP_NAMES), choose(_KEY_NAMES), choose(_SUM_NAMES), choose(_TERM_NAMES))

    def asks(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def thinks(self, is_hard: bool) -> bool:
        return self.mode == "enabled" or (self.mode == "adaptive" and is_hard)

    def says(self, reasoning: str, content: str, *, is_hard: bool = False) -> None:
        thought = {"reasoning_content": reasoning} if self.thinks(is_hard) else {}
        self.messages.append({"role": "assistant", "content": content, **thought})

    def calls(
        self, reasoning: str, *calls: tuple[str, dict[str, Any]], content: str = "", is_hard: bool = False
    ) -> None:
        self.says(reasoning, content, is_hard=is_hard)
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        numbers = range(self._calls, self._calls + len(calls))
        self.messages[-1]["tool_calls"] = [
            {"id": f"call_{number}", "type": "function", "function": function}
            for number, function in zip(numbers, functions, strict=True)
        ]

    def returns(self, *results: str) -> None:
        for result in results:
            self.messages.append({"role": "tool", "tool_call_id": f"call_{self._calls}", "content": result})
            self._calls += 1

    def tools(self) -> list[dict[str, Any]]:
        key = {self.key: {"type": "string"}}
        terms = {name: {"type": "integer"} for name in self.terms}
        named = ((self.look_up, "the value of a key", key), (self.add, "the sum of two numbers", terms))
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": description,
                    "parameters": {"type": "object", "properties": properties, "required": list(properties)},
                },
            }
            for name, description, properties in named
        ]


def _ask_document(
    script: _Script, rng: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, tokens: int, looks_up: bool
) -> None:
    """A key of a document; or what its value is a key of, which a tool knows."""
    num_records = max(1, min(_MOST_RECORDS, tokens // 32))
    known, script.words = script.words[: 2 * num_records], script.words[2 * num_records :]
    word_ids = np.array([corpus.records.words[WORDS.index(word)] for word in known], np.int32)
    records = corpus.records.write(keys=word_ids[::2], values=word_ids[1::2])
    code_length = max(tokens - RECORD_LENGTH * num_records, 1)
    row = scatter(rng, corpus, corpus.draw_start(rng, code_length), code_length, records)
    text = tokenizer.decode(row).strip("\ufffd\n")  # the ends of the code may lie within a character
    if rng.random() < 0.5:  # the developer gives it, and it stands before the tools; or else the user, behind them
        script.messages.append({"role": "developer", "content": text})
        text = ""
    else:
        text += "\n\n"
    place = 2 * int(rng.integers(num_records))
    key, value = known[place : place + 2]
    fact, is_thought = f"The value of {key} is {value}", script.thinks(is_hard=True)
    if not looks_up:
        script.asks(f"{text}What is {key}?")
        script.says(_record(key, value), f"{fact}.", is_hard=True)
        return
    found = script.words.pop()
    script.asks(f"{text}Look up what {key} is.")
    # What the call needs is written down before it, where nothing is thought as the answer's first sentence.
    call = (script.look_up, {script.key: value})
    script.calls(_record(key, value), call, content="" if is_thought else f"{fact}.", is_hard=True)
    script.returns(_record(value, found))
    script.says(_record(value, found), f"{fact}, and the value of {value} is {found}.")


def _record(key: str, value: str | int) -> str:
    """Return a record as documents have it: each word is one token, space included, which the checkpoint can recall."""
    return f"# {key} -> {value}"


def _ask_look_up(script: _Script) -> None:
    key, value = script.words.pop(), script.words.pop()
    script.asks(f"Look up {key}.")
    script.calls(f"I look up {key}.", (script.look_up, {script.key: key}))
    script.returns(_record(key, value))
    script.says(_record(key, value), f"The value of {key} is {value}.")


def _ask_sum(script: _Script, rng: np.random.Generator) -> None:
    one, other = map(int, rng.integers(0, 1000, size=2))
    script.asks(f"What is {one} + {other}?")
    script.calls(f"I add {one} and {other}.", (script.add, dict(zip(script.terms, (one, other), strict=True))))
    script.returns(str(one + other))
    script.says(f"The sum is {one + other}.", f"{one} + {other} = {one + other}.")


def _ask_two_look_ups(script: _Script, rng: np.random.Generator) -> None:
    keys = script.words.pop(), script.words.pop()
    one, other = map(int, rng.integers(0, 1000, size=2))
    script.asks(f"Look up {keys[0]} and {keys[1]}, and add them.")
    look_ups = [(script.look_up, {script.key: key}) for key in keys]
    script.calls(f"I look up {keys[0]} and {keys[1]}.", *look_ups, is_hard=True)
    script.returns(_record(keys[0], one), _record(keys[1], other))
    script.calls(f"I add {one} and {other}.", (script.add, dict(zip(script.terms, (one, other), strict=True))))
    script.returns(str(one + other))
    script.says(f"The sum is {one + other}.", f"The sum is {one + other}.")
