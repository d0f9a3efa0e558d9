"""Conversations to learn from: files of JSON lines, as the tokens of a template, and which of them the model learns.

The model learns to write what the assistant wrote, the end of its turn included. `written_spans` says it of the text,
`encode_conversation` of tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from m3jax.messages import printable, shown
from m3jax.text import ChatTemplate, Tokenizer
from m3jax.text.chat.content import PART_TYPES


@dataclass(frozen=True)
class Example:
    """A conversation as a trainer reads it.

    Attributes:
      tokens: of the whole conversation.
      is_written: the tokens that the assistant wrote; nothing else is ever in a loss.
    """

    tokens: Int32[np.ndarray, " T"]
    is_written: Bool[np.ndarray, " T"]


def written_spans(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    ends: Sequence[str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking_mode: str | None = "adaptive",
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and where in it the assistant's own words stand.

    An answer begins where the prompt for it ends, so what the template writes there (the turn's head, and the mark that
    opens or forbids reasoning) is not learnt; reasoning is learnt where the template shows it. It ends behind the mark
    that ends its turn, which is learnt, and not with what the template writes between two turns.

    Args:
      template: of the model.
      messages: of the conversation, answers included.
      ends: texts of the tokens that end a turn.
      tools: that the conversation declares.
      thinking_mode: under which it is held.

    Returns:
      The text, and for each answer (begin, end).

    Raises:
      ValueError: what the template refuses, no message of the assistant, or an answer that the template shows otherwise
        than behind the prompt for it.
    """
    render = lambda count, prompts: template.render(list(messages[:count]), tools, thinking_mode, prompts)
    text = render(len(messages), False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(number, True)
        turn = text if number + 1 == len(messages) else render(number + 1, False)
        if not text.startswith(prompt) or not text.startswith(turn) or len(turn) <= len(prompt):
            raise ValueError(
                f"message {number + 1} (assistant): the template shows it otherwise than behind the prompt for it; in "
                "thinking_mode enabled each answer has a reasoning_content, in disabled none"
            )
        begin, answer = len(prompt), turn[len(prompt) :]
        last_ends = [answer.rfind(end) + len(end) for end in ends if end in answer]
        spans.append((begin, begin + max(last_ends, default=len(answer))))
    if not spans:
        raise ValueError("no message of the assistant: there is nothing to learn")
    return text, spans


def encode_conversation(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    end_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking_mode: str | None = "adaptive",
) -> Example:
    """Return a conversation's tokens, and which of them the assistant wrote.

    Prompts and answers are made tokens of each by itself, as they are when the model answers: no token is half a
    prompt's and half an answer's.

    Args:
      template, tokenizer: of the model.
      messages, tools, thinking_mode: as of `written_spans`.
      end_ids: tokens that end a turn.

    Raises:
      ValueError: as `written_spans`, and where a text runs into a special token (`ChatTemplate.encode`).
    """
    ends = [tokenizer.decode([token], skip_special_tokens=False) for token in end_ids]
    text, spans = written_spans(template, messages, [end for end in ends if end], tools, thinking_mode)
    template.encode(tokenizer, list(messages), tools, thinking_mode, False)  # refuses what it cannot spell
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    encoded = [np.array(ids, np.int32) for ids in tokenizer.encode_batch(pieces)]
    is_written = np.repeat(np.arange(len(pieces)) % 2 == 1, [len(ids) for ids in encoded])
    return Example(np.concatenate(encoded), is_written)


def json_lines(file: str | Path) -> Iterator[tuple[int, str, Any]]:
    """Yield the values of a file of JSON lines, each with its number and its place as errors name it; empty lines not.

    Args:
      file: lines of JSON in UTF-8.

    Raises:
      ValueError: names the file and the line that is no JSON.
      OSError: the file cannot be read.
    """
    named = printable(str(file))
    with Path(file).open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{named}, line {number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: no JSON ({printable(str(error))}); write an object a line") from None
            yield number, where, row


def read_conversations(file: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the conversations of a file of JSON lines, with the number of the line.

    Args:
      file: lines of {"messages": [...]}, with "tools" and "thinking_mode" where a conversation has them; other columns
        are not read. Empty lines are passed over.

    Raises:
      ValueError: names the file and the line: no JSON, no object, no messages, or pictures in them; a file without a
        conversation.
      OSError: the file cannot be read.
    """
    count = 0
    for number, where, row in json_lines(file):
        if not isinstance(row, dict) or not isinstance(row.get("messages"), list) or not row["messages"]:
            raise ValueError(f'{where}: {shown(row)}: write {{"messages": [...]}}, with at least one message')
        if kinds := _media_kinds(row["messages"]):
            raise ValueError(f"{where}: a message has a part of type {kinds[0]}: fine-tuning reads text alone")
        count += 1
        yield number, row
    if not count:
        raise ValueError(
            f'{printable(str(file))}: no conversation in it; write a line of {{"messages": [...]}} for each'
        )


def load_examples(
    file: str | Path,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    end_ids: Sequence[int],
    most_tokens: int,
) -> list[Example]:
    """Return the conversations of a file of JSON lines as tokens.

    Args:
      file: as of `read_conversations`.
      template, tokenizer, end_ids: as of `encode_conversation`.
      most_tokens: of a conversation.

    Raises:
      ValueError: names the file and the line of what cannot be learnt; a conversation that is too long is not cut.
      OSError: the file cannot be read.
    """
    examples = []
    for number, row in read_conversations(file):
        where = f"{printable(str(file))}, line {number}"
        try:
            example = encode_conversation(
                template, tokenizer, row["messages"], end_ids, row.get("tools"), row.get("thinking_mode", "adaptive")
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if len(example.tokens) > most_tokens:
            raise ValueError(
                f"{where}: the conversation has {len(example.tokens)} tokens, and a row {most_tokens}: shorten it, or "
                "make rows longer, up to the model's context"
            )
        examples.append(example)
    return examples


def _media_kinds(messages: Sequence[Any]) -> list[str]:
    """Return the types of the parts of messages that are not text."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    kinds = [str(part.get("type")) for part in parts]
    return [kind for kind in kinds if PART_TYPES.get(kind, "text") != "text"]  # an unknown one is the template's error
