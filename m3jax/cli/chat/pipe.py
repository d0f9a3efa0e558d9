"""A chat in a pipe: lines from stdin are answered on stdout, as plain text or as JSON."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from m3jax.cli.chat.attachments import KINDS, Attachments
from m3jax.cli.chat.display import problems_of_calls
from m3jax.cli.chat.shown import visible
from m3jax.console import say, write
from m3jax.dialogue import Dialogue, Reply, open_calls
from m3jax.messages import counted, printable


def answer_lines(dialogue: Dialogue, is_json: bool) -> None:
    """Answer the messages on stdin until it ends.

    As plain text each line that is not empty is a message of the user; the lines "/image FILE" and "/video FILE" name
    files that the next message shows. An answer is printed as its text and a line for each tool call; the lines that
    follow are then the results, one for each call. Reasoning is printed only as JSON: there a line is a message or a
    list of messages, and an answer is an object with its message, its finish reason and counts.

    Args:
      dialogue: the dialogue that the messages are sent to.
      is_json: True for JSON in and out.

    Raises:
      ValueError: a line that is no UTF-8, no JSON, or cannot be sent; it is named by its number.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    pending: list[dict[str, Any]] = []
    attachments = Attachments(dialogue)
    number = 0
    for number, line in _lines():
        try:
            pending += _json_messages(line) if is_json else _plain_message(line, dialogue, pending, attachments)
            if not _is_due(dialogue, pending):
                continue
            events = dialogue.send(*pending)  # checks the messages at once; the answer is computed as it is read below
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        pending = []
        attachments.clear()
        if is_json:
            *_, reply = events
            _write_json(reply)
        else:
            _write_plain(events)
    if attachments.names:
        raise ValueError(f"the input ends at line {number} with {attachments.names[-1]} and no message that shows it")
    if is_json and pending:
        raise ValueError(f"the input ends at line {number} with nothing to answer: end it with the user's message, or "
                         "with the results of all calls")  # fmt: skip


def _lines() -> Iterator[tuple[int, str]]:
    """Yield the lines of stdin that are not blank, with their numbers from 1, as they arrive."""
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
    line: str, dialogue: Dialogue, pending: list[dict[str, Any]], attachments: Attachments
) -> list[dict[str, Any]]:
    """Return the message in a line of text: the result of the first open call, else a message of the user.

    The list is empty for a line that names a file for the next message to show.
    """
    # While calls wait, every line is a result, also one that looks like a command.
    if calls := open_calls([*dialogue.messages, *pending]):
        return [{"role": "tool", "tool_call_id": calls[0]["id"], "content": line}]
    command, _, argument = line.partition(" ")
    if command in KINDS:
        say(f"m3jax.chat: note: {attachments.add(command, argument)}")
        return []
    return [attachments.message(line)]


def _json_messages(line: str) -> list[dict[str, Any]]:
    """Return the messages in a line of JSON."""
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
    """True if the model is to answer now: the last message is the user's, or the last result of all open calls."""
    last_role = pending[-1]["role"] if pending else None
    return last_role == "user" or (last_role == "tool" and not open_calls([*dialogue.messages, *pending]))


def _write_plain(events: Iterator[Any]) -> None:
    """Print an answer's text as it streams, and a line for each of its calls."""
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
            for line in problems_of_calls(event):
                say(f"m3jax.chat: note: {line}")
            if event.finish_reason == "length":
                count = counted(event.new_tokens, "token")
                say(f"m3jax.chat: note: cut after {count}; --max-new-tokens allows more")


def _write_json(reply: Reply) -> None:
    """Print an answer as one JSON object: its message, in a form that a later line may send back, and its counts."""
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "new_tokens": reply.new_tokens,
    }
    answer = {"message": reply.message, "finish_reason": reply.finish_reason, "usage": usage}
    if problems := {call.id: call.problems for call in reply.tool_calls if call.problems}:
        answer["problems"] = problems
    write(json.dumps(answer, ensure_ascii=not _is_utf8(), allow_nan=False) + "\n")


def _is_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
