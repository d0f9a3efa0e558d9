"""Grammars as the engine's guides: which tokens may come next, by llguidance, on the host."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from m3jax.messages import printable, shortened
from m3jax.serve.constraints.structural import structural_grammar
from m3jax.text import Tokenizer
from m3jax.text.output.marks import END_THINK, NAMESPACE, THINK

_TURN = "]~b]"  # opens each turn of a dialogue
# Room for what models write between the parts of JSON, on one line or indented. Without a limit a small model can
# write blanks until its tokens run out.
_JSON_SPACE = {"whitespace_pattern": r"[ \t]{0,2}|\r?\n[ \t]{0,32}"}
_MOST_MESSAGE = 600


class Constraints:
    """Constraints for one model's vocabulary. llguidance reads the tokenizer once, at the first use or in `prepare`.

    Args:
      tokenizer: the model's.
      vocab_size: V of the model, which may be more than the tokenizer's.
      eos_ids: that may come where a grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._lock = threading.Lock()
        self._llguidance: Any = None
        token_id = tokenizer.backend.token_to_id
        self._think, self._end_think, self._turn = token_id(THINK), token_id(END_THINK), token_id(_TURN)

    def prepare(self) -> Any:
        """Return llguidance's view of the vocabulary; the first call makes it, in seconds for 200,000 tokens."""
        with self._lock:
            if self._llguidance is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
                self._llguidance = LLTokenizer(
                    TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=list(self._eos_ids)
                )
            return self._llguidance

    def guide(
        self, kind: str, constraint: Any, prompt: Sequence[int], from_first_token: bool = False
    ) -> "GrammarGuide | None":
        """Return the guide of a request.

        Args:
          kind: a field of the protocol's `constraint`: json_schema, regex, grammar (Lark, or GBNF), structural_tag,
            json_object, choice.
          constraint: its value; of choice the list of texts.
          prompt: token ids, by which it is told whether the answer begins with reasoning.
          from_first_token: do not wait for the reasoning's end.

        Returns:
          The guide; None where json_object is false.

        Raises:
          ValueError: a constraint that llguidance does not take, with its reason.
        """
        if kind == "json_object" and not constraint:
            return None
        matcher = self.matcher(kind, constraint)
        phase = "grammar" if from_first_token else self._phase(prompt)
        return GrammarGuide(matcher, phase, self._vocab_size, self._think, self._end_think, self._eos_ids)

    def matcher(self, kind: str, constraint: Any) -> Any:
        """Return llguidance's matcher of a constraint, at its start; arguments and errors are those of `guide`."""
        from llguidance import LLMatcher

        try:
            grammar = _grammar(kind, constraint)
            matcher = LLMatcher(self.prepare(), grammar, log_level=0)
        except (
            AttributeError,
            KeyError,
            TypeError,
        ) as error:  # a structural tag of another form
            raise ValueError(f"{kind} cannot be read: {printable(repr(error))}") from error
        except ValueError as error:
            message = str(error) if str(error).startswith(kind) else f"{kind}: {error}"
            raise ValueError(shortened(printable(message), _MOST_MESSAGE)) from error
        if matcher.is_error():
            raise ValueError(shortened(f"{kind}: {printable(matcher.get_error())}", _MOST_MESSAGE))
        return matcher

    def _phase(self, prompt: Sequence[int]) -> str:
        """Return "reasoning", "grammar", or "open" where the model may begin with either.

        The last turn decides: the template's instructions at the beginning of each prompt have both marks, too.
        """
        if None in (self._think, self._end_think):
            return "grammar"
        for token in reversed(prompt):
            if token in (self._think, self._end_think):
                return "reasoning" if token == self._think else "grammar"
            if token == self._turn:
                return "open"
        return "grammar"  # no dialogue


class GrammarGuide:
    """A guide (`m3jax.decoding.Guide`) that lets a request reason, and then holds it to a grammar.

    Reasoning may be anything but an end of the answer. One guide serves all requests of a group: it keeps a matcher for
    each continuation that it was asked about lately, and finds the one whose tokens are the beginning of what is asked.

    Args:
      matcher: llguidance's, at its start.
      phase: in which the answer begins: "reasoning", "grammar" or "open".
      vocab_size: V.
      think, end_think: ids of the marks; None where the vocabulary has none.
      eos_ids: that end an answer.
    """

    def __init__(
        self,
        matcher: Any,
        phase: str,
        vocab_size: int,
        think: int | None,
        end_think: int | None,
        eos_ids: Sequence[int],
    ):
        self._start, self._phase = matcher, phase
        self._num_words = -(-vocab_size // 32)
        self._think, self._end_think, self._eos_ids = think, end_think, eos_ids
        self._matchers: list[tuple[tuple[int, ...], Any]] = []  # (tokens consumed, matcher), the newest use last

    def bits(self, new: Sequence[int]) -> UInt32[np.ndarray, " W"] | None:
        """Return the tokens that may come next, as `Guide.bits` says; none where llguidance gave up."""
        new = tuple(new)
        begin = self._grammar_begin(new)
        if begin is None:
            free = np.full(self._num_words, 0xFFFFFFFF, np.uint32)
            return _without(free, self._eos_ids)
        matcher = self._matcher(new[begin:])
        words = np.frombuffer(matcher.compute_bitmask(), "<u4")[: self._num_words].copy()
        if matcher.is_error():  # a limit of llguidance's, which then lets the answer end as if it were whole
            return np.zeros(self._num_words, np.uint32)
        if self._phase == "open" and not new:
            words = _with(words, (self._think, self._end_think))
        return words

    def _grammar_begin(self, new: tuple[int, ...]) -> int | None:
        """Return the index of the first token that belongs to the grammar; None in the reasoning."""
        reasons = self._phase == "reasoning" or (self._phase == "open" and new[:1] == (self._think,))
        if reasons:
            return new.index(self._end_think) + 1 if self._end_think in new else None
        return 1 if self._phase == "open" and new[:1] == (self._end_think,) else 0

    def _matcher(self, tokens: tuple[int, ...]) -> Any:
        """Return a matcher that has consumed these tokens of the grammar."""
        fitting = [entry for entry in self._matchers if tokens[: len(entry[0])] == entry[0]]
        if fitting:
            entry = max(fitting, key=lambda each: len(each[0]))
            self._matchers.remove(entry)
            consumed, matcher = entry
        else:
            consumed, matcher = (), self._start.deep_copy()
        # A token that ends the answer is no part of the grammar.
        following = [token for token in tokens[len(consumed) :] if token not in self._eos_ids]
        if following:
            matcher.consume_tokens(following)
        self._matchers = [*self._matchers[-_MOST_MATCHERS:], (tokens, matcher)]
        return matcher


_MOST_MATCHERS = 127  # of one guide, beside the newest: a group of more begins some of them again


class _Vocabulary:
    """The vocabulary as llguidance asks for it.

    The namespace marker and the marks of reasoning are ordinary text here, whatever the tokenizer's file calls them: a
    grammar of tool calls has them as text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        self.tokens, special = tokenizer.vocabulary_bytes(vocab_size)
        texts = {tokenizer.backend.token_to_id(text) for text in (NAMESPACE, THINK, END_THINK)}
        self.special_token_ids = sorted((special | set(eos_ids)) - texts)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


def _grammar(kind: str, constraint: Any) -> str:
    """Return a constraint as llguidance's grammar."""
    from llguidance import LLMatcher, grammar_from

    if kind in ("json_schema", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else _schema(constraint)
        return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_SPACE)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(constraint)
    if kind == "grammar":
        return grammar_from("grammar", constraint)
    if kind == "structural_tag":
        grammar = structural_grammar(constraint)
        return grammar if grammar.startswith("{") else LLMatcher.grammar_from_lark(grammar)
    if kind == "choice":
        if not constraint or not all(constraint):
            raise ValueError("choice: give at least one text, and none that is empty")
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    raise ValueError(f"{kind}: no such constraint")


def _schema(text: str) -> Any:
    """Return a schema that came as JSON; True, which takes anything, as the object that says so."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is no JSON: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError("json_schema is no schema, which is an object or a boolean")
    return {} if schema is True else schema


def _with(words: UInt32[np.ndarray, " W"], tokens: Sequence[int | None]) -> UInt32[np.ndarray, " W"]:
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def _without(words: UInt32[np.ndarray, " W"], tokens: Sequence[int]) -> UInt32[np.ndarray, " W"]:
    for token in tokens:
        words[token // 32] &= ~np.uint32(1 << token % 32)
    return words
