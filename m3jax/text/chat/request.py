"""Normalisation of a request so that a template shows all of it: what a template would drop in silence is an error.

Templates are programs that look for the fields they know: a part of another type or a message of another role is
nothing to them, arguments that are JSON text end them, and results are linked to calls by their order alone. Clients
send all of that.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from m3jax.messages import shown
from m3jax.text.chat.calls import linked_results, ordered_calls, ordered_tools
from m3jax.text.chat.content import ordered_content, ordered_result, reasoning_and_content
from m3jax.text.chat.fields import check_fields

__all__ = ["ordered_messages", "ordered_tools"]

# The fields of each role's messages.
FIELDS = {
    **dict.fromkeys(("root", "system", "developer", "user"), ("role", "content")),
    "assistant": ("role", "content", "reasoning_content", "reasoning", "tool_calls"),
    "tool": ("role", "content", "tool_call_id", "name"),
}


def ordered_messages(messages: Any) -> list[dict[str, Any]]:
    """Put a conversation in the order and spelling of templates; the caller's own is left as it was.

    - Parts of media and text have one spelling each: "image_url" and "input_image" become "image".
    - The assistant's reasoning is `reasoning_content`, a text, whether it came so, as `reasoning` or in the content.
    - Arguments of calls are objects, and each turn's results stand in the order of its calls.
    - Of several system or developer messages the first stays if it stands in front; M3's template, which clients send
      several, shows no other.

    Args:
        messages: dicts with a role: at most one "root" and then a "system" or "developer" in front; "user";
            "assistant", whose content may be null; "tool", the result of a call of the assistant's message before. The
            calls of the last message may lack their results.

    Returns:
        The messages, each with the fields that templates read.

    Raises:
        ValueError: not such a list, or a field that the model would not see. It says which message, from 1.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages is a list of messages, got {shown(messages)}")
    ordered = [_ordered_message(message, number) for number, message in enumerate(messages, 1)]
    system_number = 2 if ordered and ordered[0]["role"] == "root" else 1
    for number, message in enumerate(ordered, 1):
        if message["role"] == "root" and number > 1:
            raise ValueError(f"message {number} (root): only the first message can be root")
    shown_messages = [
        message
        for number, message in enumerate(ordered, 1)
        if message["role"] not in ("system", "developer") or number == system_number
    ]
    return _with_results_in_order(shown_messages)


def _ordered_message(message: Any, number: int) -> dict[str, Any]:
    """Return one message with the fields that templates read."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number}: a message is an object with a role, got {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in FIELDS:
        raise ValueError(f"message {number}: role = {shown(role)}: must be one of {', '.join(FIELDS)}")
    location = f"message {number} ({role})"
    check_fields(message, FIELDS[role], location, "such a message")
    content = message.get("content")
    if content is None and role != "assistant":
        raise ValueError(f"{location}: has no content; give a text, which may be empty")
    in_order = ordered_result if role == "tool" else ordered_content
    ordered = {"role": role, "content": in_order("" if content is None else content, location)}
    if role == "assistant":
        reasoning, ordered["content"] = reasoning_and_content(message, ordered["content"], location)
        ordered["reasoning_content"] = reasoning
        if calls := ordered_calls(message.get("tool_calls"), location):
            ordered["tool_calls"] = calls
    if role == "tool":
        for name in ("tool_call_id", "name"):
            if not isinstance(message.get(name), str | None) or message.get(name) == "":
                raise ValueError(f"{location}: {name} = {shown(message[name])}: must be a text, and not empty")
            if message.get(name) is not None:
                ordered[name] = message[name]
    return ordered


def _with_results_in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, with each turn's results in the order of its calls."""
    ordered: list[dict[str, Any]] = []
    while (count := len(ordered)) < len(messages):
        rest = (messages[i] for i in range(count, len(messages)))  # a slice a turn would make this quadratic
        results = list(takewhile(lambda message: message["role"] == "tool", rest))
        calls = ordered[-1].get("tool_calls", []) if ordered else []
        if results and not calls:
            raise ValueError(
                f"message {count + 1} (tool): the message before it calls no tool; a result follows its call"
            )
        ordered += linked_results(calls, results, f"message {count} (assistant)")
        ordered += messages[len(ordered) : len(ordered) + 1]
    return ordered
