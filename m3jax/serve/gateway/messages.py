"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from m3jax.messages import shown
from m3jax.serve.gateway.answers import Ask, End, Piece, Usage, new_id
from m3jax.serve.gateway.chat_completions import MODEL_FIELD, MOST_TOKENS
from m3jax.serve.gateway.errors import refused
from m3jax.serve.gateway.fields import (
    Fields,
    FixedField,
    FlagField,
    IntegerField,
    ListField,
    ObjectField,
    RequestField,
    UnionField,
    UnreadField,
)
from m3jax.serve.gateway.gateway import THINKING_MODES, Collected, Gateway, Turn, collected
from m3jax.serve.gateway.http import data_event
from m3jax.serve.gateway.sampling import Model, sampling_fields, sampling_params
from m3jax.text import Event

# The protocol has a signature on each thought, by which Anthropic knows its own; here it only says who wrote it.
_SIGNATURE = "m3jax"
_STOP_FIELD = "stop_sequences"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_EFFORTS = {"low": "adaptive", "medium": "adaptive", "high": "enabled", "xhigh": "enabled", "max": "enabled"}
_NO_EDIT = ([], [{"type": "clear_thinking_20251015", "keep": "all"}])  # all thoughts are kept in any case


def fields_of_messages(model: Model) -> dict[str, RequestField]:
    """Return the fields of POST /v1/messages."""
    limit = IntegerField(is_required=True, least=1, most=MOST_TOKENS, about="say how many tokens the answer may have")
    return {**fields_of_count(model), "max_tokens": limit}


def fields_of_count(model: Model) -> dict[str, RequestField]:
    """Return the fields of POST /v1/messages/count_tokens, which are those of a request but the limit."""
    text_block = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    return {
        "model": MODEL_FIELD,
        "messages": ListField(
            is_required=True,
            least=1,
            of={
                "type": "object",
                "properties": {
                    "role": {"enum": ["user", "assistant", "system"]},
                    "content": {"type": ["string", "array"]},
                },
                "required": ["role", "content"],
            },
            about="the conversation, its question last",
        ),
        "system": UnionField(
            schemas=({"type": "string"}, {"type": "array", "items": text_block}), about="first of all"
        ),
        "tools": ListField(
            of={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            about="that the model may call",
        ),
        "tool_choice": ObjectField(
            inside={"properties": {"type": {"enum": ["auto", "any", "none", "tool"]}}, "required": ["type"]},
            about="whether tools are called",
        ),
        "max_tokens": IntegerField(least=1, most=MOST_TOKENS),
        "stream": FlagField(about="answer by server-sent events as tokens come"),
        **sampling_fields(model, _STOP_FIELD, max_temperature=1.0),
        "n": IntegerField(default=1, least=1, most=1, about="this protocol has one answer"),
        "thinking": ObjectField(
            inside={
                "properties": {
                    "type": {"enum": list(THINKING_MODES)},
                    "budget_tokens": {"type": ["integer", "null"], "minimum": 1},
                },
                "required": ["type"],
            },
            about="disabled where it is not given; the model has no budget, so one only has to be a number",
        ),
        "output_config": ObjectField(about="effort: low, medium, high, xhigh or max, where thinking is not given"),
        "context_management": ObjectField(about="edits may only keep all thinking, as happens in any case"),
        "service_tier": FixedField(allowed=("auto", "standard_only"), about="there is one tier: leave it out"),
        "metadata": UnreadField(),
    }


async def messages(gateway: Gateway, fields: Fields, route: str) -> dict[str, Any] | AsyncIterator[str]:
    """Answer a list of messages, whole or as a stream."""
    ask = await gateway.ask(_turn(fields, gateway.model))
    ask.request.request_id = new_id("msg_")
    head = {"id": ask.request.request_id, "type": "message", "role": "assistant", "model": gateway.model.name}
    if fields["stream"]:
        return _events(gateway, ask, head, route)
    answer = (await collected(gateway.run(ask, route)))[0]
    return {
        **head,
        "content": _blocks(answer),
        **_stop(answer.end),
        "usage": _usage(answer.end.usage),
    }


async def count_tokens(gateway: Gateway, fields: Fields, route: str) -> dict[str, Any]:
    """Return how many tokens a list of messages has as a prompt."""
    turn = _turn(fields, gateway.model)
    tools = None if turn.choice == "none" else turn.tools
    prompt = await gateway.renderer.render(turn.messages, tools, turn.thinking_mode)
    return {"input_tokens": len(prompt.ids)}


def _turn(fields: Fields, model: Model) -> Turn:
    """Return what a request says, its messages and tools in OpenAI's layout."""
    choice, is_parallel = _tool_choice(fields)
    edits = (fields["context_management"] or {}).get("edits", [])
    if edits not in _NO_EDIT:
        raise refused("context_management", f"context_management: edits = {shown(edits)}: the context is kept whole")
    return Turn(
        messages=[*_system(fields["system"]), *_openai_messages(fields["messages"])],
        tools=_tools(fields["tools"]),
        choice=choice,
        is_parallel=is_parallel,
        thinking_mode=_thinking_mode(fields),
        params=sampling_params(fields, model, _STOP_FIELD),
        max_tokens=fields["max_tokens"],
    )


def _thinking_mode(fields: Fields) -> str:
    """Return the thinking mode: off where nothing is said. The model has no budget, so one only has to be a number."""
    effort = (fields["output_config"] or {}).get("effort")
    thinking = fields["thinking"]
    if thinking is None:
        return _EFFORTS.get(effort, "disabled") if isinstance(effort, str) else "disabled"
    mode, budget = thinking.get("type"), thinking.get("budget_tokens")
    if mode not in THINKING_MODES:
        raise refused("thinking", f"thinking: type = {shown(mode)}: must be one of {', '.join(THINKING_MODES)}")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise refused("thinking", f"thinking: budget_tokens = {shown(budget)}: must be an integer of at least 1")
    return mode


def _system(given: Any) -> list[dict[str, Any]]:
    """Return the system prompt, a text or blocks of text, as a message; [] for none."""
    if given is None or given == []:
        return []
    texts = [given] if isinstance(given, str) else [_text_of(block, "system") for block in _list_of(given, "system")]
    return [{"role": "system", "content": "\n".join(texts)}]


def _openai_messages(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's layout: results of tools are messages of their own, and thoughts a field."""
    out: list[dict[str, Any]] = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise refused("messages", f"{where}: role = {shown(role)}: must be user, assistant or system")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list_of(content, where)
        for block in blocks:
            if not isinstance(block, Mapping):
                raise refused("messages", f"{where}: {shown(block)} is no content block")
        if role == "system":
            # The template shows one system message, in front. What an agent says later reaches the model within a
            # user's message, between the marks in which such agents write it themselves.
            text = "\n".join(_text_of(block, where) for block in blocks)
            out.append({"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"})
        else:
            out += _user(blocks, where) if role == "user" else [_assistant(blocks, where)]
    return out


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the messages of a user's turn: first the results of tools, then what the user says."""
    results, parts = [], []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            inner = content if isinstance(content, str) else [_part(each, where) for each in _list_of(content, where)]
            if block.get("is_error"):  # the template has no place for it, so the text says it
                inner = f"Error: {inner}" if isinstance(inner, str) else [{"type": "text", "text": "Error: "}, *inner]
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": inner})
        else:
            parts.append(_part(block, where))
    if len(parts) == 1 and parts[0]["type"] == "text":
        return [*results, {"role": "user", "content": parts[0]["text"]}]
    return [*results, {"role": "user", "content": parts}] if parts or not results else results


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Return the message of an assistant's turn."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(_text_of(block, where))
            case "thinking" if isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input", {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case other:
                raise refused("messages", f"{where}: a block of type {shown(other)} would not reach the model")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _part(block: Any, where: str) -> dict[str, Any]:
    """Return a block of text or an image as a part of OpenAI's."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": _text_of(block, where)}
    if kind != "image":
        raise refused("messages", f"{where}: a block of type {shown(kind)} would not reach the model")
    source = block.get("source")
    match source:
        case {"type": "base64", "data": str(data)}:
            return {"type": "image", "image": f"data:{source.get('media_type', 'image/png')};base64,{data}"}
        case {"type": "url", "url": str(url)}:
            return {"type": "image", "image": url}
    raise refused("messages", f"{where}: an image's source has type base64 with data, or type url with url")


def _text_of(block: Any, where: str) -> str:
    text = block.get("text") if isinstance(block, Mapping) and block.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise refused(where.split("[")[0], f"{where}: {shown(block)} is no block of text")
    return text


def _list_of(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise refused(where.split("[")[0], f"{where}: content = {shown(value)}: must be a text or a list of blocks")
    return value


def _tools(given: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Return tools in OpenAI's layout."""
    tools = []
    for number, tool in enumerate(given or ()):
        where = f"tools[{number}]"
        if not isinstance(tool, Mapping) or tool.get("type", "custom") not in ("custom", None):
            raise refused("tools", f"{where}: {shown(tool)}: only tools of the client's own can be called")
        function = {"name": tool.get("name")}
        if tool.get("description"):
            function["description"] = tool["description"]
        if tool.get("input_schema") is not None:
            function["parameters"] = tool["input_schema"]
        tools.append({"type": "function", "function": function})
    return tools or None


def _tool_choice(fields: Fields) -> tuple[str, bool]:
    """Return the choice in OpenAI's words, and whether several tools may be called in one answer."""
    given = {"type": "auto"} if fields["tool_choice"] is None else fields["tool_choice"]
    is_parallel = given.get("disable_parallel_tool_use") is not True
    kind = {"auto": "auto", "none": "none", "any": "required"}.get(given.get("type"))
    if given.get("type") == "tool" and isinstance(given.get("name"), str):
        kind = given["name"]
    if kind is None:
        raise refused("tool_choice", f"tool_choice = {shown(given)}: type must be auto, any, none, or tool with a name")
    return kind, is_parallel


def _blocks(answer: Collected) -> list[dict[str, Any]]:
    """Return the content blocks of a whole answer."""
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": _SIGNATURE})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            continue  # the answer broke off in this call: the protocol has only whole ones
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments})
    return blocks


def _stop(end: End) -> dict[str, Any]:
    """Return why an answer ended."""
    if end.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    return {"stop_reason": _STOP_REASONS[end.reason], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the counts as the protocol has them: tokens from the cache are not input tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


class _Blocks:
    """The content blocks of a stream, of which at most one is open."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def events(self, event: Event) -> list[str]:
        """Return what a client is told of an event of the parser."""
        match event.kind:
            case "content":
                empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": event.text}
            case "reasoning":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": event.text}
            case "tool_call":
                empty = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                return self.close() + self._open(empty)
            case "arguments":
                return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
            case _:
                return self.close()
        opened = [] if self._kind == empty["type"] else self.close() + self._open(empty)
        return [*opened, self._delta(delta)]

    def close(self) -> list[str]:
        """Return the events that end the open block; none where none is open."""
        kind, self._kind = self._kind, ""
        if not kind:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": _SIGNATURE})] if kind == "thinking" else []
        return [*signed, _event("content_block_stop", index=self._index)]

    def _open(self, empty: dict[str, Any]) -> list[str]:
        self._index, self._kind = self._index + 1, empty["type"]
        return [_event("content_block_start", index=self._index, content_block=empty)]

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)


async def _events(gateway: Gateway, ask: Ask, head: dict[str, Any], route: str) -> AsyncIterator[str]:
    """Yield the events of a stream."""
    blocks = _Blocks()
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
    has_begun = False
    async with aclosing(gateway.run(ask, route)) as news:
        async for each in news:
            lines: list[str] = []  # that one write sends
            if not has_begun:
                has_begun = True
                cached = each.cached if isinstance(each, Piece) else each.usage.cached
                usage = _usage(Usage(len(ask.request.tokenized.input_ids), cached))
                lines.append(_event("message_start", message={**begun, "usage": usage}))
            if isinstance(each, Piece):
                for event in each.events:
                    lines += blocks.events(event)
            elif isinstance(each, End):
                lines += blocks.close()
                lines.append(_event("message_delta", delta=_stop(each), usage=_usage(each.usage)))
                lines.append(_event("message_stop"))
            yield "".join(lines)


def _event(name: str, /, **fields: Any) -> str:
    return data_event({"type": name, **fields}, name)
