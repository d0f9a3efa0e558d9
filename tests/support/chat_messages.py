"""Messages of a conversation, written in a word or two."""

from typing import Any

HI = {"role": "user", "content": "Hi"}


def user(content: Any) -> dict[str, Any]:
    """Return a user's message."""
    return {"role": "user", "content": content}


def assistant(content: Any = None, *calls: Any, **fields: Any) -> dict[str, Any]:
    """Return an assistant's message with its tool calls."""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **fields}


def call(call_id: str | None = "1", name: str = "f", arguments: Any = None) -> dict[str, Any]:
    """Return a tool call of a function, with {} if no arguments are given."""
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"type": "function", "function": function, **({} if call_id is None else {"id": call_id})}


def result(call_id: str | None = "1", content: Any = "r", **fields: Any) -> dict[str, Any]:
    """Return the message with the result of a tool call."""
    return {"role": "tool", "content": content, **fields, **({} if call_id is None else {"tool_call_id": call_id})}
