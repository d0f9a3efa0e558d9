"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from m3jax.messages import shown
from m3jax.serve.gateway.answers import Ask, End, Piece, TokenLogprob, Usage, now, token_text
from m3jax.serve.gateway.blocks import blocks_of
from m3jax.serve.gateway.errors import refused
from m3jax.serve.gateway.fields import Fields
from m3jax.serve.gateway.gateway import Collected, Gateway, Turn, collected, thinking_mode, top_logprobs
from m3jax.serve.gateway.http import data_event
from m3jax.serve.gateway.sampling import constraint_fields, response_format, sampling_params
from m3jax.text import Event, Tokenizer

MOST_TOKENS = 1 << 24  # that a client may ask for; more than there is room for is cut
# Fields that say something about the client, its account or its cache, and nothing about the answer.
PASSED_OVER = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user", "verbosity")


async def chat_completions(gateway: Gateway, body: dict[str, Any], route: str) -> dict[str, Any] | AsyncIterator[str]:
    """Answer a chat request, whole or as a stream."""
    fields = Fields(body)
    model = gateway.check_model(fields)
    turn = chat_turn(gateway, fields)
    is_stream, options = fields.flag("stream"), fields.object("stream_options")
    if options is not None and not is_stream:
        raise refused("stream_options", "stream_options needs stream: true")
    fields.finish()
    ask = await gateway.ask(turn)
    head = {"id": ask.request.request_id, "created": now(), "model": model}
    is_named = turn.choice not in ("auto", "none", "required")
    if is_stream:
        wants_usage = bool((options or {}).get("include_usage"))
        return _chunks(gateway, ask, head, route, is_named, wants_usage)
    answers = await collected(gateway.run(ask, route))
    usage = sum((answer.end.usage for answer in answers.values()), Usage())
    return {
        **head,
        "object": "chat.completion",
        "choices": [_choice(gateway, index, answer, ask, is_named) for index, answer in answers.items()],
        "usage": usage_object(usage),
    }


def chat_turn(gateway: Gateway, fields: Fields) -> Turn:
    """Return what a chat request says, apart from how it is answered.

    Raises:
      ApiError: a field that is wrong.
    """
    messages = fields.list("messages")
    if not messages:
        raise refused("messages", "messages: must be a list of at least one message")
    params = sampling_params(fields, gateway.model)
    response_format(fields, params)
    constraint_fields(fields, params)
    limits = [fields.integer(name, None, 1, MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
    fields.pass_over(*PASSED_OVER)
    fields.only("service_tier", ("auto", "default"), "there is one tier: leave it out")
    fields.only("store", (False,), "nothing is stored: leave it out")
    fields.only("modalities", (["text"],), "answers are text")
    fields.only("reasoning_split", (True,), "reasoning is always apart, in reasoning_content")
    fields.only("skip_special_tokens", (True, False), "must be true or false")  # marks are always parsed
    for name in ("functions", "function_call"):
        fields.only(name, (), "it was replaced by tools and tool_choice: use those")
    return Turn(
        messages=messages,
        tools=fields.list("tools") or None,
        choice=tool_choice(fields),
        is_parallel=fields.flag("parallel_tool_calls", True),
        thinking_mode=thinking_mode(fields, "adaptive"),
        params=params,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        top_logprobs=top_logprobs(fields),
        wants_blocks=fields.flag("return_blocks"),
    )


def tool_choice(fields: Fields) -> str:
    """Return "auto", "none", "required", or the name of the tool that must be called."""
    given = fields.take("tool_choice", "auto")
    if given in ("auto", "none", "required"):
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
    gateway: Gateway, ask: Ask, head: dict[str, Any], route: str, is_named: bool, wants_usage: bool
) -> AsyncIterator[str]:
    """Yield the events of a stream: text, reasoning and calls as they come, a reason for each answer, counts last."""
    head = {**head, "object": "chat.completion.chunk"}
    if wants_usage:
        head["usage"] = None
    has_role: set[int] = set()
    usage = Usage()

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> str:
        if index not in has_role:
            has_role.add(index)
            delta = {"role": "assistant", **delta}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return data_event({**head, "choices": [choice]})

    async with aclosing(gateway.run(ask, route)) as events:
        async for news in events:
            if isinstance(news, End):
                usage += news.usage
                yield chunk(
                    news.index, {}, finish_reason=finish_reason(news, is_named), **blocks_of(gateway, ask, news.index)
                )
            elif isinstance(news, Piece):
                # The log-probabilities of a piece go with its first delta; one without text has them alone.
                logprobs = _logprobs(news.logprobs, ask)
                deltas = [delta for event in news.events if (delta := _delta(event)) is not None]
                for delta in deltas or ([{}] if logprobs else []):
                    yield chunk(news.index, delta, logprobs=logprobs)
                    logprobs = None
    if wants_usage:
        yield data_event({**head, "choices": [], "usage": usage_object(usage)})
    yield "data: [DONE]\n\n"


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
