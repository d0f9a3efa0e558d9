"""OpenAI's responses: POST /v1/responses, as far as it goes without a store: text, reasoning, function calls."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from m3jax.messages import shown
from m3jax.serve.gateway.answers import Ask, End, Piece, Usage, new_id, now
from m3jax.serve.gateway.chat_completions import (
    MODEL_FIELD,
    MOST_TOKENS,
    STREAM_FIELDS,
    TOOL_CHOICE_FIELD,
    UNREAD_FIELDS,
    includes_usage,
    tool_choice,
)
from m3jax.serve.gateway.errors import ApiError, refused
from m3jax.serve.gateway.fields import (
    Fields,
    FixedField,
    FlagField,
    IntegerField,
    ListField,
    ObjectField,
    RequestField,
    TextField,
    UnionField,
    UnreadField,
)
from m3jax.serve.gateway.gateway import THINKING_FIELDS, Collected, Gateway, Turn, collected, thinking_mode
from m3jax.serve.gateway.http import data_event
from m3jax.serve.gateway.sampling import Model, response_format, sampling_fields, sampling_params
from m3jax.text import Event

_STATELESS = "nothing is stored here: send the whole conversation as input"


def fields_of_responses(model: Model) -> dict[str, RequestField]:
    """Return the fields of POST /v1/responses."""
    return {
        "model": MODEL_FIELD,
        "input": UnionField(
            is_required=True,
            schemas=({"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}),
            about="a text, or a list of items: message, reasoning, function_call, function_call_output",
        ),
        "instructions": TextField(about="the system prompt"),
        "tools": ListField(
            of={
                "type": "object",
                "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
                "required": ["type", "name"],
            },
            about="functions that the model may call",
        ),
        "tool_choice": TOOL_CHOICE_FIELD,
        "parallel_tool_calls": FlagField(default=True, about="allow several calls in one answer"),
        **STREAM_FIELDS,
        "max_output_tokens": IntegerField(
            least=1, most=MOST_TOKENS, about="of the answer; cut to what there is room for"
        ),
        **sampling_fields(model),
        "n": IntegerField(default=1, least=1, most=1, about="this protocol has one answer"),
        "text": ObjectField(
            inside={"properties": {"format": {"type": ["object", "null"]}}}, about="format: as response_format"
        ),
        "reasoning": ObjectField(about="effort: as reasoning_effort"),
        **THINKING_FIELDS,
        "previous_response_id": FixedField(about=_STATELESS),
        "conversation": FixedField(about=_STATELESS),
        "prompt": FixedField(about=_STATELESS),
        "store": FixedField(allowed=(False,), about=_STATELESS),
        "background": FixedField(allowed=(False,), about="answers come with the request: leave it out"),
        "truncation": FixedField(allowed=("disabled",), about="the input is never cut: leave it out"),
        "include": FixedField(
            allowed=([], ["reasoning.encrypted_content"]), about="there is nothing else to include: leave it out"
        ),
        "service_tier": FixedField(allowed=("auto", "default"), about="there is one tier: leave it out"),
        "client_metadata": UnreadField(),
        **UNREAD_FIELDS,
    }


async def responses(gateway: Gateway, fields: Fields, route: str) -> dict[str, Any] | AsyncIterator[str]:
    """Answer an input, whole or as a stream."""
    turn = _turn(fields, gateway.model)
    includes_usage(fields)  # to check the options: the last event has the counts in any case
    try:
        ask = await gateway.ask(turn)
    except ApiError as error:
        # The input has become messages by now; the client knows it by its own name.
        if error.field != "messages":
            raise
        raise refused("input", str(error), error.code) from None
    ask.request.request_id = new_id("resp_")
    response = {
        "id": ask.request.request_id,
        "object": "response",
        "created_at": now(),
        "model": gateway.model.name,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": fields["instructions"],
        "metadata": fields["metadata"] or {},
        "output": [],
        "parallel_tool_calls": turn.is_parallel,
        "temperature": turn.params.temperature,
        "top_p": turn.params.top_p,
        "tool_choice": fields["tool_choice"],
        "tools": fields["tools"] or [],
        "store": False,
        "usage": None,
    }
    if fields["stream"]:
        return _events(gateway, ask, response, route)
    answer = (await collected(gateway.run(ask, route)))[0]
    return _ended(response, _items(answer), answer.end)


def _turn(fields: Fields, model: Model) -> Turn:
    """Return what a request says, its input as messages."""
    params = sampling_params(fields, model)
    format_given = (fields["text"] or {}).get("format")
    if not isinstance(format_given, dict | None):
        raise refused("text", f"text: format = {shown(format_given)}: must be an object")
    response_format(format_given, params, "text")
    effort = (fields["reasoning"] or {}).get("effort")
    if not isinstance(effort, str | None):
        raise refused("reasoning", f"reasoning: effort = {shown(effort)}: must be a text")
    instructions, given = fields["instructions"], fields["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    return Turn(
        messages=messages,
        tools=_tools(fields["tools"]),
        choice=tool_choice(fields),
        is_parallel=fields["parallel_tool_calls"],
        thinking_mode=thinking_mode(fields, "adaptive", effort),
        params=params,
        max_tokens=fields["max_output_tokens"],
    )


def _messages(items: Any) -> list[dict[str, Any]]:
    """Return input items as messages; reasoning and calls that follow one another are one assistant's turn."""
    if not isinstance(items, list) or not items:
        raise refused("input", "input: must be a text or a list of at least one item")
    messages: list[dict[str, Any]] = []

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for number, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message" and item.get("role") == "assistant":
            turn = assistant()
            if turn["content"] or turn.get("tool_calls"):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            turn["content"] = _content(item.get("content"), number)
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), number)})
        elif kind == "reasoning":
            parts = [*(item.get("content") or ()), *(() if item.get("content") else item.get("summary") or ())]
            thought = "\n".join(part["text"] for part in parts if isinstance(part, Mapping) and "text" in part)
            messages.append({"role": "assistant", "content": "", **({"reasoning_content": thought} if thought else {})})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _content(output, number)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise refused(
                "input", f"input[{number}]: {shown(item)}: items are message, reasoning, function_call(_output)"
            )
    return messages


def _content(content: Any, number: int) -> Any:
    """Return a message's content in OpenAI's chat layout."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused("input", f"input[{number}]: content = {shown(content)}: must be a text or a list of parts")
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif isinstance(part, Mapping) and part.get("type") == "input_image" and isinstance(part.get("image_url"), str):
            detail = {} if part.get("detail") is None else {"detail": part["detail"]}
            parts.append({"type": "image", "image": part["image_url"], **detail})
        else:
            raise refused("input", f"input[{number}]: a part {shown(part)} would not reach the model")
    return parts


def _tools(given: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Return tools, which this protocol writes flat, in the layout of OpenAI's chat."""
    tools = []
    for number, tool in enumerate(given or ()):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise refused("tools", f"tools[{number}]: {shown(tool)}: only functions of the client's own can be called")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools or None


def _items(answer: Collected) -> list[dict[str, Any]]:
    """Return the output items of a whole answer."""
    items = []
    if answer.reasoning:
        items.append(_reasoning_item(answer.reasoning))
    if answer.content:
        items.append(_message_item(answer.content))
    items += [_call_item(call) for call in answer.calls]
    return items


def _reasoning_item(text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": content, "status": status}


def _message_item(text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}] if text else []
    return {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": status, "content": content}


def _call_item(call: Mapping[str, str], status: str = "completed") -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": new_id("fc_"),
        "call_id": call["id"],
        "name": call["name"],
        "arguments": call["arguments"],
        "status": status,
    }


def _ended(response: dict[str, Any], items: list[dict[str, Any]], end: End) -> dict[str, Any]:
    """Return the whole response."""
    usage = end.usage
    is_cut = end.reason == "length"
    return {
        **response,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


class _Items:
    """The output items of a stream, of which at most one is open, and the numbers of its events."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        self._number = -1

    def event(self, name: str, /, **fields: Any) -> str:
        """Return the next event of the stream."""
        self._number += 1
        return data_event({"type": name, "sequence_number": self._number, **fields}, name)

    def events(self, event: Event) -> list[str]:
        """Return what a client is told of an event of the parser."""
        lines: list[str] = []
        match event.kind:
            case "content" | "reasoning":
                kind = "message" if event.kind == "content" else "reasoning"
                if self._open is None or self._open["type"] != kind:
                    item = _message_item("", "in_progress") if kind == "message" else _reasoning_item("", "in_progress")
                    lines = self.close() + self._begin(item)
                name = "output_text" if kind == "message" else "reasoning_text"
                return [*lines, self._delta(name, event.text)]
            case "tool_call":
                call = {"id": event.id, "name": event.name, "arguments": ""}
                return self.close() + self._begin(_call_item(call, "in_progress"))
            case "arguments":
                return [self._delta("function_call_arguments", event.text)]
        return self.close()

    def close(self) -> list[str]:
        """Return the events that end the open item; none where none is open."""
        item, self._open = self._open, None
        if item is None:
            return []
        text, self._text = "".join(self._text), []
        where = {"item_id": item["id"], "output_index": len(self.done)}
        item = {**item, "status": "completed"}
        if item["type"] == "function_call":
            item["arguments"] = text
            lines = [self.event("response.function_call_arguments.done", **where, name=item["name"], arguments=text)]
        else:
            part = self._part(item["type"], text)
            name = part["type"]
            item["content"] = [part]
            where["content_index"] = 0
            logprobs = {"logprobs": []} if name == "output_text" else {}
            lines = [
                self.event(f"response.{name}.done", **where, text=text, **logprobs),
                self.event("response.content_part.done", **where, part=part),
            ]
        lines.append(self.event("response.output_item.done", output_index=len(self.done), item=item))
        self.done.append(item)
        return lines

    def _begin(self, item: dict[str, Any]) -> list[str]:
        self._open = item
        lines = [self.event("response.output_item.added", output_index=len(self.done), item=item)]
        if item["type"] != "function_call":
            part = self._part(item["type"], "")
            where = {"item_id": item["id"], "output_index": len(self.done), "content_index": 0}
            lines.append(self.event("response.content_part.added", **where, part=part))
        return lines

    def _delta(self, name: str, text: str) -> str:
        self._text.append(text)
        where = {"item_id": self._open["id"], "output_index": len(self.done)}
        if name != "function_call_arguments":
            where["content_index"] = 0
        logprobs = {"logprobs": []} if name == "output_text" else {}
        return self.event(f"response.{name}.delta", **where, delta=text, **logprobs)

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "message":
            return {"type": "output_text", "text": text, "annotations": []}
        return {"type": "reasoning_text", "text": text}


async def _events(gateway: Gateway, ask: Ask, response: dict[str, Any], route: str) -> AsyncIterator[str]:
    """Yield the events of a stream."""
    items = _Items()
    has_begun = False
    try:
        async with aclosing(gateway.run(ask, route)) as news:
            async for each in news:
                lines: list[str] = []  # that one write sends
                if not has_begun:
                    has_begun = True
                    lines.append(items.event("response.created", response=response))
                    lines.append(items.event("response.in_progress", response=response))
                if isinstance(each, Piece):
                    for event in each.events:
                        lines += items.events(event)
                elif isinstance(each, End):
                    lines += items.close()
                    whole = _ended(response, items.done, each)
                    lines.append(items.event(f"response.{whole['status']}", response=whole))
                yield "".join(lines)
    except ApiError as error:
        if not has_begun:
            raise
        failed = {"code": error.code or "server_error", "message": error.message}
        yield items.event("response.failed", response={**response, "status": "failed", "error": failed})
