"""M3's turns as text: what a template has to write, said once more and in Python, from a request as clients send it."""

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

NAMESPACE = "]<]minimax[>["


def spelled(value: Any) -> str:
    """A JSON value between its tags."""
    if isinstance(value, dict):
        members = ((key, member) for key, member in value.items() if member is not None)
        return "".join(f"{NAMESPACE}<{key}>{spelled(member)}{NAMESPACE}</{key}>" for key, member in members)
    if isinstance(value, list):
        return "".join(f"{NAMESPACE}<item>{spelled(item)}{NAMESPACE}</item>" for item in value)
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def said(content: Any) -> str:
    """A text, or the parts of a list."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        part if isinstance(part, str) else part["text"] if "text" in part["type"] else _medium(part["type"])
        for part in content
    )


def _medium(kind: str) -> str:
    return "]<]video[>[" if "video" in kind else "]<]image[>["


def call_block(calls: list[Mapping[str, Any]]) -> str:
    """The calls of one turn."""
    written = ""
    for call in calls:
        arguments = call["function"]["arguments"]
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        written += f'{NAMESPACE}<invoke name="{call["function"]["name"]}">{spelled(value)}{NAMESPACE}</invoke>\n'
    return f"{NAMESPACE}<tool_call>\n{written}{NAMESPACE}</tool_call>" if calls else ""


def turns(messages: list[Mapping[str, Any]]) -> str:
    """All turns of users, the assistant and tools, each to its end."""
    text, calls, results = "", [], {}
    for message, following in zip_longest(messages, messages[1:]):
        role, content = message["role"], said(message.get("content"))
        if role == "user":
            text += f"]~b]user\n{content}[e~[\n"
        if role == "assistant":
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            calls, results = message.get("tool_calls", []), {}
            thought = f"<mm:think>{reasoning}</mm:think>" if reasoning else "</mm:think>"
            text += f"]~b]ai\n{thought}{content}{call_block(calls)}[e~[\n"
        if role == "tool":
            results[message["tool_call_id"]] = f"\n<response>{content}</response>"
            if following is None or following["role"] != "tool":
                text += "]~b]tool" + "".join(results[call["id"]] for call in calls) + "[e~[\n"
    return text


def embedded_prompt(
    messages: list[Mapping[str, Any]], tools: list[Mapping[str, Any]], thinking_mode: str, is_asked: bool
) -> str:
    """All that the embedded checkpoint's template writes.

    Args:
        messages: of a request.
        tools: of a request.
        thinking_mode: "enabled", "disabled" or "adaptive".
        is_asked: end with the beginning of an assistant's turn.
    """
    told = {message["role"]: message.get("content") for message in messages}
    developer = next((told[role] for role in ("system", "developer") if role in told), "")
    word, opened = {"enabled": ("on", "<mm:think>"), "disabled": ("off", "</mm:think>"), "adaptive": ("auto", "")}[
        thinking_mode
    ]
    text = f"]~!b[]~b]system\n{said(told.get('root')) or 'm3jax'}\nthink: {word}[e~[\n"
    if developer or tools:
        listed = "".join(f"\n<tool>{json.dumps(tool['function'], ensure_ascii=False)}</tool>" for tool in tools)
        text += "]~b]developer" + (f"\n{said(developer)}" if developer else "") + f"{listed}[e~[\n"
    return text + turns(messages) + (f"]~b]ai\n{opened}" if is_asked else "")
