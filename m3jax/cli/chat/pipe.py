"""A chat in a pipe: lines in, answers out, as plain text or as JSON."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from m3jax.cli.chat.pictures import KINDS, Pictures
from m3jax.cli.chat.shown import visible
from m3jax.console import say, write
from m3jax.dialogue import Dialogue, Reply, open_calls
from m3jax.messages import printable


def answer_lines(dialogue: Dialogue, is_json: bool) -> None:
    """Answer what comes on stdin, until it ends.

    As plain text a line is a message of the user, an empty one is none; "/image FILE" and "/video FILE" are no
    messages, the next one shows these. Of an answer its text is printed, then a line for each tool call; the next lines
    are then the results, one for each. What the model thinks is printed only as JSON: there a line is a message, or a
    list of them, and an answer an object with its message, why it ended, and counts.

    Args:
      dialogue: that they go to.
      is_json: JSON in and out.

    Raises:
      ValueError: a line that is no UTF-8, no JSON, or cannot be sent; it is named by its number.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    pending: list[dict[str, Any]] = []
    pictures = Pictures(dialogue)
    number = 0
    for number, line in _lines():
        try:
            pending += _json_messages(line) if is_json else _plain_message(line, dialogue, pending, pictures)
            if not _is_due(dialogue, pending):
                continue
            events = dialogue.send(*pending)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        pending = []
        pictures.clear()
        if is_json:
            *_, reply = events
            _write_json(reply)
        else:
            _write_plain(events)
    if pictures.names:
        raise ValueError(f"the input ends at line {number} with {pictures.names[-1]} and no message that shows it")
    if is_json and pending:
        raise ValueError(f"the input ends at line {number} with nothing to answer: end it with the user's message, or "
                         "with the results of all calls")  # fmt: skip


def _lines() -> Iterator[tuple[int, str]]:
    """The lines of stdin that hold something, with their numbers from 1, as they come."""
    if sys.stdin is None:
        raise ValueError("standard input is closed: give one message a line")
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8 text: byte {error.start} of it is wrong") from error
        if text.strip():
            yield number, text


def _plain_message(
    line: str, dialogue: Dialogue, pending: list[dict[str, Any]], pictures: Pictures
) -> list[dict[str, Any]]:
    """The message that a line of text is: the result of the first call that has none yet, else what the user says.

    None where it names a file for the next message to show.
    """
    if calls := open_calls([*dialogue.messages, *pending]):
        return [{"role": "tool", "tool_call_id": calls[0]["id"], "content": line}]
    command, _, argument = line.partition(" ")
    if command in KINDS:
        say(f"m3jax.chat: note: {pictures.add(command, argument)}")
        return []
    return [pictures.message(line)]


def _json_messages(line: str) -> list[dict[str, Any]]:
    """The messages of a line of JSON."""
    try:
        parsed = json.loads(line)
    except RecursionError:
        raise ValueError("lists and objects nest too deep") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    messages = parsed if isinstance(parsed, list) else [parsed]
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise ValueError('give a message, as in {"role": "user", "content": "Hello"}, or a list of messages')
    return messages


def _is_due(dialogue: Dialogue, pending: list[dict[str, Any]]) -> bool:
    """Whether the model is to answer now: the user has said something, or no call waits for its result any more."""
    last_role = pending[-1]["role"] if pending else None
    return last_role == "user" or (last_role == "tool" and not open_calls([*dialogue.messages, *pending]))


def _write_plain(events: Iterator[Any]) -> None:
    """An answer's text as it comes, and a line for each of its calls."""
    text = visible if sys.stdout.isatty() else str
    ends_line = True
    for event in events:
        if event.kind == "content":
            write(text(event.text))
            ends_line = event.text.endswith("\n")
        elif event.kind == "reply":
            write("" if ends_line and (event.content or event.tool_calls) else "\n")
            for call in event.tool_calls:
                write(f"{printable(call.name)} {json.dumps(call.arguments, ensure_ascii=False)}\n")
            if event.finish_reason == "length":
                say(f"m3jax.chat: note: cut after {event.new_tokens} tokens; --max-new-tokens allows more")


def _write_json(reply: Reply) -> None:
    """An answer as one object: its message, which a later line could give back, and what is known of it."""
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "new_tokens": reply.new_tokens,
    }
    answer = {"message": reply.message, "finish_reason": reply.finish_reason, "usage": usage}
    write(json.dumps(answer, ensure_ascii=not _is_utf8(), allow_nan=False) + "\n")


def _is_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
