"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from m3jax.messages import shown
from m3jax.serve.gateway.answers import Ask, End, Piece, TokenLogprob, Usage, now, token_text
from m3jax.serve.gateway.blocks import blocks_of
from m3jax.serve.gateway.errors import refused
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
from m3jax.serve.gateway.gateway import (
    LOGPROBS_FIELDS,
    THINKING_FIELDS,
    Collected,
    Gateway,
    Progress,
    Turn,
    collected,
    thinking_mode,
    top_logprobs,
)
from m3jax.serve.gateway.http import EventOfText, data_event
from m3jax.serve.gateway.sampling import CONSTRAINT_FIELDS, Model, sampling_fields, sampling_params, set_constraints
from m3jax.text import Event, Tokenizer

MOST_TOKENS = 1 << 24  # that a client may ask for; more than there is room for is cut
UNREAD_FIELDS: Mapping[str, RequestField] = {
    "metadata": UnreadField(),
    "prompt_cache_key": UnreadField(),
    "prompt_cache_retention": UnreadField(),
    "safety_identifier": UnreadField(),
    "user": UnreadField(),
    "verbosity": UnreadField(),
}


def fields_of_chat(model: Model) -> dict[str, RequestField]:
    """Return the fields of POST /v1/chat/completions."""
    return {
        "model": MODEL_FIELD,
        "messages": MESSAGES_FIELD,
        "tools": TOOLS_FIELD,
        "tool_choice": TOOL_CHOICE_FIELD,
        "parallel_tool_calls": FlagField(default=True, about="allow several calls in one answer"),
        **STREAM_FIELDS,
        **TOKEN_LIMIT_FIELDS,
        **sampling_fields(model),
        **LOGPROBS_FIELDS,
        **CONSTRAINT_FIELDS,
        **THINKING_FIELDS,
        "return_blocks": FlagField(about="say which blocks each new token read; gateway and worker in one process"),
        "return_progress": FlagField(
            about="in a stream: say how much of a long prompt is read; gateway and worker in one process"
        ),
        "service_tier": FixedField(allowed=("auto", "default"), about="there is one tier: leave it out"),
        "store": FixedField(allowed=(False,), about="nothing is stored: leave it out"),
        "modalities": FixedField(allowed=(["text"],), about="answers are text"),
        "reasoning_split": FixedField(
            allowed=(True,), about="reasoning is always apart, in reasoning_content: leave it out"
        ),
        "skip_special_tokens": FlagField(about="marks are parsed in any case"),
        "functions": FixedField(about=_REPLACED),
        "function_call": FixedField(about=_REPLACED),
        **UNREAD_FIELDS,
    }


_REPLACED = "it was replaced by tools and tool_choice: use those"
MODEL_FIELD = TextField(about="the one that is served, which is also meant where none is named")
MESSAGES_FIELD = ListField(
    is_required=True, least=1, of={"type": "object", "required": ["role"]}, about="the conversation, its question last"
)
TOOLS_FIELD = ListField(
    of={
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
        "required": ["type", "function"],
    },
    about="functions that the model may call",
)
TOOL_CHOICE_FIELD = UnionField(
    default="auto",
    schemas=(
        {"enum": ["auto", "none", "required"]},
        {"type": "object", "properties": {"type": {"const": "function"}}, "required": ["type"]},
    ),
    about="whether tools are called: auto, none, required, or the one that must be",
)
# OpenAI pads its streams against eavesdroppers (obfuscation); here nothing is padded either way.
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")
STREAM_FIELDS: Mapping[str, RequestField] = {
    "stream": FlagField(about="answer by server-sent events as tokens come"),
    "stream_options": ObjectField(
        inside={"properties": {name: {"type": "boolean"} for name in _STREAM_OPTIONS}, "additionalProperties": False},
        about="include_usage: counts in the last chunk",
    ),
}
TOKEN_LIMIT_FIELDS: Mapping[str, RequestField] = {
    "max_completion_tokens": IntegerField(
        least=1, most=MOST_TOKENS, about="of the answer; cut to the room that there is"
    ),
    "max_tokens": IntegerField(least=1, most=MOST_TOKENS, about="the same, where max_completion_tokens is not given"),
}


async def chat_completions(gateway: Gateway, fields: Fields, route: str) -> dict[str, Any] | AsyncIterator[str]:
    """Answer a chat request, whole or as a stream."""
    turn = _turn(fields, gateway.model)
    wants_usage = includes_usage(fields)
    ask = await gateway.ask(turn)
    head = {"id": ask.request.request_id, "created": now(), "model": gateway.model.name}
    is_named = turn.choice not in ("auto", "none", "required")
    if fields["stream"]:
        return _chunks(gateway, ask, head, route, is_named, wants_usage, fields["return_progress"])
    if fields["return_progress"]:
        raise refused("return_progress", "return_progress needs stream: true")
    answers = await collected(gateway.run(ask, route))
    usage = sum((answer.end.usage for answer in answers.values()), Usage())
    return {
        **head,
        "object": "chat.completion",
        "choices": [_choice(gateway, index, answer, ask, is_named) for index, answer in answers.items()],
        "usage": usage_object(usage),
    }


def includes_usage(fields: Fields) -> bool:
    """Return True if a stream's last chunk is to have the counts.

    Args:
      fields: of the request, `STREAM_FIELDS` among them.

    Raises:
      ApiError: options of a stream, and none is asked for; an option that is not known.
    """
    options = fields["stream_options"]
    if options is None:
        return False
    if not fields["stream"]:
        raise refused("stream_options", "stream_options needs stream: true")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS or not isinstance(value, bool):
            known = " and ".join(_STREAM_OPTIONS)
            raise refused("stream_options", f"stream_options: {shown(name)} = {shown(value)}: {known} are flags")
    return options.get("include_usage", False)


def _turn(fields: Fields, model: Model) -> Turn:
    """Return what a chat request says, apart from how it is answered."""
    params = sampling_params(fields, model)
    set_constraints(fields, params)
    return Turn(
        messages=fields["messages"],
        tools=fields["tools"] or None,
        choice=tool_choice(fields),
        is_parallel=fields["parallel_tool_calls"],
        thinking_mode=thinking_mode(fields, "adaptive"),
        params=params,
        max_tokens=fields["max_completion_tokens"] or fields["max_tokens"],
        top_logprobs=top_logprobs(fields),
        wants_blocks=fields["return_blocks"],
    )


def tool_choice(fields: Fields) -> str:
    """Return "auto", "none", "required", or the name of the tool that must be called."""
    given = fields["tool_choice"]
    if isinstance(given, str) and given in ("auto", "none", "required"):
        return given
    function = given.get("function", given) if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refused(
            "tool_choice",
            f"tool_choice = {shown(given)}: must be auto, none, required, or an object of type function with a name",
        )
    return function["name"]


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the counts of a request as OpenAI's protocol has them; no counter is ever null."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _choice(gateway: Gateway, index: int, answer: Collected, ask: Ask, is_named: bool) -> dict[str, Any]:
    """Return one whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls and not answer.content:
        message["content"] = None
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {key: call[key] for key in ("name", "arguments")}}
            for call in answer.calls
        ]
    choice = {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer.logprobs, ask),
        "finish_reason": finish_reason(answer.end, is_named),
    }
    return choice | blocks_of(gateway, ask, index)


def finish_reason(end: End, is_named: bool) -> str:
    """Return the reason in OpenAI's words: a call that the client named itself ends with "stop"."""
    return "stop" if end.reason == "tool_calls" and is_named else end.reason


async def _chunks(
    gateway: Gateway,
    ask: Ask,
    head: dict[str, Any],
    route: str,
    is_named: bool,
    wants_usage: bool,
    wants_progress: bool,
) -> AsyncIterator[str]:
    """Yield the events of a stream: text, reasoning and calls as they come, a reason for each answer, counts last."""
    head = {**head, "object": "chat.completion.chunk"}
    if wants_usage:
        head["usage"] = None
    has_role: set[int] = set()
    plain: dict[tuple[int, str], EventOfText] = {}  # by answer and kind, of text without log-probabilities
    usage = Usage()

    def value(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**head, "choices": [choice]}

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> str:
        if index not in has_role:
            has_role.add(index)
            delta = {"role": "assistant", **delta}
        return data_event(value(index, delta, **more))

    def text_chunk(index: int, event: Event) -> str:
        if index not in has_role:
            return chunk(index, _delta(event))
        key = index, event.kind
        if key not in plain:
            plain[key] = EventOfText(lambda text: value(index, _delta(Event(event.kind, text))))
        return plain[key].filled(event.text)

    running = gateway.run_with_progress(ask, route) if wants_progress else gateway.run(ask, route)
    async with aclosing(running) as events:
        async for news in events:
            if isinstance(news, Progress):
                yield data_event({**head, "choices": [], "prompt_progress": asdict(news)})
            elif isinstance(news, End):
                usage += news.usage
                yield chunk(
                    news.index, {}, finish_reason=finish_reason(news, is_named), **blocks_of(gateway, ask, news.index)
                )
            elif isinstance(news, Piece):
                # The log-probabilities of a piece go with its first delta; one without text has them alone.
                logprobs = _logprobs(news.logprobs, ask)
                chunks = []
                for event in news.events:
                    if logprobs is None and event.kind in ("content", "reasoning"):
                        chunks.append(text_chunk(news.index, event))
                    elif (delta := _delta(event)) is not None:
                        chunks.append(chunk(news.index, delta, logprobs=logprobs))
                        logprobs = None
                if logprobs is not None:
                    chunks.append(chunk(news.index, {}, logprobs=logprobs))
                if chunks:
                    yield "".join(chunks)
    counts = data_event({**head, "choices": [], "usage": usage_object(usage)}) if wants_usage else ""
    yield f"{counts}data: [DONE]\n\n"


def _delta(event: Event) -> dict[str, Any] | None:
    """Return an event as a delta; None for one that says nothing to a client."""
    match event.kind:
        case "content":
            return {"content": event.text}
        case "reasoning":
            return {"reasoning_content": event.text, "reasoning": event.text}
        case "tool_call":
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case "arguments":
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def _logprobs(logprobs: Sequence[TokenLogprob], ask: Ask) -> dict[str, Any] | None:
    """Return log-probabilities as OpenAI's chat has them; None where they were not asked for."""
    params = ask.request.sampling_params
    if not logprobs or not ask.wants_logprobs:
        return None
    described = [
        {
            **_described(ask.tokenizer, each.token, each.logprob),
            "top_logprobs": [
                _described(ask.tokenizer, token, value) for token, value in list(each.top.items())[: params.logprobs]
            ],
        }
        for each in logprobs
    ]
    return {"content": described, "refusal": None}


def _described(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text, raw = token_text(tokenizer, token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": raw}
