"""Training rows of dialogues, in which what the assistant writes counts most, beside rows of the older data."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from tiny.corpus import Corpus
from tiny.data import Batch, RecallBatches
from tiny.dialogues.tasks import draw_task

from m3jax.text import ChatTemplate, Tokenizer

END_OF_TURN = "[e~["
_FEWEST_DOCUMENT_TOKENS = 32
_ROOM_FOR_DIALOGUE = 448  # tokens around a document: the tools, the questions, the answers
_SHORT_DOCUMENT = 256  # tokens of what a third of the documents has at most, so that a row has many dialogues
# In the loss, of a token that the assistant writes; any other counts 1. A name that only the schema of a tool says is
# two or three tokens of a hundred, and may be thousands of tokens away: at the weight of the others it is guessed.
WRITTEN_WEIGHT, NAME_WEIGHT = 6.0, 30.0
_NAME_OF_CALL = re.compile(r'<invoke name="([^"]+)"|\]<\]minimax\[>\[<(?!invoke|tool_call)(\w+)>')


@dataclass(frozen=True)
class DialogueBatches:
    """Random training batches; batch i is a function of (seed, i) alone, so a run can resume.

    `batches[i]` has the arrays of `RecallBatches`, and `kept` [B T], the targets that a teacher may give: all that the
    assistant does not write and that is not recalled. Rows of dialogues come first: as many dialogues as find room,
    with documents of all lengths, then code. There a weight is `WRITTEN_WEIGHT` where the target is the assistant's own
    word, the end of its turn included, `NAME_WEIGHT` where that is a tool's or a parameter's name, and 1 elsewhere, so
    that code is not forgotten; none is recalled.

    Args:
      corpus: where the code comes from.
      tokenizer: the corpus's.
      template: how a dialogue becomes text.
      seq_len: T, at least 512.
      batch_size: B.
      seed: of all batches, not negative.
      dialogue_fraction: share of rows with dialogues; the others are those of `RecallBatches`.
      shares: of the kinds of dialogues, as in `draw_task`.
      long_fraction: share of documents that have any length; of the others half are short, and half have any order of
        magnitude.

    Raises:
      ValueError: `dialogue_fraction` is not between 0 and 1.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    template: ChatTemplate
    seq_len: int
    batch_size: int
    seed: int
    dialogue_fraction: float = 0.5
    shares: tuple[float, ...] | None = None
    long_fraction: float = 1 / 3

    def __post_init__(self):
        if not 0 <= self.dialogue_fraction <= 1:
            raise ValueError(f"dialogue_fraction {self.dialogue_fraction} is not between 0 and 1")

    def __getitem__(self, index: int) -> Batch:
        num_dialogues = round(self.dialogue_fraction * self.batch_size)
        rng = np.random.default_rng([self.seed, index, 1])
        rows = [self._row(rng) for _ in range(num_dialogues)]
        parts = [{name: np.stack([row[name] for row in rows]) for name in rows[0]}] if rows else []
        if num_dialogues < self.batch_size:
            older = RecallBatches(self.corpus, self.seq_len, self.batch_size - num_dialogues, self.seed)[index]
            parts.append(older | {"kept": ~older["recall"]})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _row(self, rng: np.random.Generator) -> Batch:
        """Return a row of dialogues, and code after them, in T + 1 tokens."""
        length = self.seq_len + 1
        tokens, written, named = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, bool)
        while (room := length - len(tokens) - _ROOM_FOR_DIALOGUE) >= _FEWEST_DOCUMENT_TOKENS:
            tokens_of_document = _document_tokens(rng, room, self.long_fraction)
            task = draw_task(rng, self.corpus, self.tokenizer, tokens_of_document, shares=self.shares)
            ids, is_written, is_name = written_tokens(
                self.template, self.tokenizer, task.messages, task.tools, task.thinking_mode
            )
            if len(tokens) + len(ids) > length:
                break
            tokens = np.concatenate([tokens, ids])
            written, named = np.concatenate([written, is_written]), np.concatenate([named, is_name])
        code_length = length - len(tokens)
        start = self.corpus.draw_start(rng, max(code_length, 1))
        code = self.corpus.tokens[start : start + code_length].astype(np.int32)
        written, named = (np.concatenate([mask, np.zeros(code_length, bool)])[1:] for mask in (written, named))
        return {
            "tokens": np.concatenate([tokens, code]),
            "weights": np.where(named, NAME_WEIGHT, np.where(written, WRITTEN_WEIGHT, 1.0)).astype(np.float32),
            "recall": np.zeros(self.seq_len, bool),
            "kept": ~written,
            "distance": np.zeros(self.seq_len, np.int32),
            "recent": np.zeros(self.seq_len, np.int32),
        }


def _document_tokens(rng: np.random.Generator, room: int, long_fraction: float) -> int:
    """Draw a document's length: uniformly, or log-uniformly up to a short length or up to `room`."""
    fewest = _FEWEST_DOCUMENT_TOKENS
    if rng.random() < long_fraction:
        return int(rng.integers(fewest, room + 1))
    most = min(room, _SHORT_DOCUMENT) if rng.random() < 0.5 else room
    return int(np.exp(rng.uniform(np.log(fewest), np.log(most + 1))))


def written_tokens(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    thinking_mode: str,
) -> tuple[Int32[np.ndarray, " T"], Bool[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """A dialogue's tokens, which of them the assistant writes, and which of those name a tool or a parameter.

    Those are the tokens from where a prompt for the answer ends to the end of the turn, which is one of them. Each part
    is tokenised by itself, as it is when the model answers.

    Args:
      template: how a dialogue becomes text.
      tokenizer: of the model.
      messages: of the dialogue, answers included.
      tools: that it declares.
      thinking_mode: under which it is held; it decides what the prompt for an answer ends in.

    Returns:
      The ids of the whole dialogue; for each whether the assistant writes it; and whether it writes there a name in a
      call, which it has to have from the tools.

    Raises:
      ValueError: a template whose history of an answer does not begin as the prompt for that answer.
    """
    render = lambda count, prompts: template.render(
        list(messages[:count]), tools=tools, thinking_mode=thinking_mode, add_generation_prompt=prompts
    )
    whole = render(len(messages), False)
    parts: list[tuple[str, bool]] = []
    done = 0
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render(place, True)
            if not whole.startswith(prompt):
                raise ValueError(f"message {place + 1}: the history does not begin as the prompt for this answer does")
            end = whole.index(END_OF_TURN, len(prompt)) + len(END_OF_TURN)
            parts += [(whole[done : len(prompt)], False), (whole[len(prompt) : end], True)]
            done = end
    parts.append((whole[done:], False))
    encoded = tokenizer.encode_batch([text for text, _ in parts])
    ids = np.concatenate([np.array(part, np.int32) for part in encoded])
    is_written = np.repeat([is_written for _, is_written in parts], [len(part) for part in encoded])
    is_name = [
        _spells_name(tokenizer, text, part) if written else np.zeros(len(part), bool)
        for (text, written), part in zip(parts, encoded, strict=True)
    ]
    return ids, is_written, np.concatenate(is_name)


def _spells_name(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> Bool[np.ndarray, " T"]:
    """Return True for each token of an answer that holds characters of a tool's or a parameter's name."""
    ends = np.cumsum([len(tokenizer.decode([token], skip_special_tokens=False)) for token in ids])
    is_name = np.zeros(len(ids), bool)
    for found in _NAME_OF_CALL.finditer(text):
        begin, end = found.span(found.lastindex)
        first, last = np.searchsorted(ends, (begin, end - 1), "right")
        is_name[first : last + 1] = True
    return is_name
