"""OpenAI's completions: POST /v1/completions. A text goes on; nothing is parsed in it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from m3jax.serve.gateway.answers import Ask, End, Piece, TokenLogprob, Usage, new_id, now, token_text
from m3jax.serve.gateway.chat_completions import (
    MODEL_FIELD,
    MOST_TOKENS,
    STREAM_FIELDS,
    UNREAD_FIELDS,
    includes_usage,
    usage_object,
)
from m3jax.serve.gateway.errors import refused
from m3jax.serve.gateway.fields import Fields, FixedField, FlagField, IntegerField, RequestField, UnionField
from m3jax.serve.gateway.gateway import Gateway
from m3jax.serve.gateway.http import EventOfText, data_event
from m3jax.serve.gateway.prompts import tokens_of
from m3jax.serve.gateway.sampling import (
    CONSTRAINT_FIELDS,
    MAX_N,
    MAX_TOP_LOGPROBS,
    Model,
    sampling_fields,
    sampling_params,
    set_constraints,
)
from m3jax.text import Tokenizer

NEW_TOKENS = 16  # where a request does not say, as OpenAI has it
_AT_ONCE = 32  # prompts of one request that are on the workers at once


@dataclass(frozen=True, kw_only=True)
class _Order:
    """One request for completions.

    Attributes:
      asks: one a prompt.
      n: continuations of each.
      echoes: True if the prompt comes back in front.
      has_new: False if no new token is wanted, as `max_tokens: 0` with echo says; the worker draws one all the same.
      skip_special: leave special tokens out of texts.
    """

    asks: Sequence[Ask]
    n: int
    echoes: bool
    has_new: bool
    skip_special: bool


@dataclass(eq=False)
class _Choice:
    """One completion while it comes.

    Attributes:
      text: of a stream what it has not given out yet.
      tokens: with their log-probabilities, where these are asked for; the prompt's first, if it is echoed.
      tokens_sent: of these, those that a stream has given out.
      has_prompt: True once the prompt that is echoed stands in front.
      has_prompt_logprobs: True once its log-probabilities do.
      end: None while it goes on.
    """

    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    tokens_sent: int = 0
    has_prompt: bool = False
    has_prompt_logprobs: bool = False
    end: End | None = None


def fields_of_completions(model: Model) -> dict[str, RequestField]:
    """Return the fields of POST /v1/completions."""
    return {
        "model": MODEL_FIELD,
        "prompt": prompt_field(model),
        **STREAM_FIELDS,
        "max_tokens": IntegerField(
            default=NEW_TOKENS,
            least=0,
            most=MOST_TOKENS,
            about="of each continuation; 0 where the prompt is echoed alone",
        ),
        **sampling_fields(model),
        **CONSTRAINT_FIELDS,
        "echo": FlagField(about="put the prompt in front"),
        "logprobs": IntegerField(
            least=0, most=MAX_TOP_LOGPROBS, about="give log-probabilities, with so many alternatives of each token"
        ),
        "skip_special_tokens": FlagField(default=True, about="leave special tokens out of texts"),
        "best_of": IntegerField(least=1, most=MAX_N, about="as n: all answers that are drawn come back"),
        "suffix": FixedField(allowed=("",), about="the model cannot fill in the middle: leave it out"),
        "add_special_tokens": FlagField(about="the tokenizer adds none either way"),
        **UNREAD_FIELDS,
    }


def prompt_field(model: Model) -> RequestField:
    """Return the field of prompts: a text, token ids, or a list of either."""
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}, "minItems": 1}
    several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1}
    return UnionField(
        is_required=True, schemas=(text, ids, several), about="a text, token ids, or several of them; none is empty"
    )


async def completions(gateway: Gateway, fields: Fields, route: str) -> dict[str, Any] | AsyncIterator[str]:
    """Continue one prompt or several, whole or as a stream."""
    order = await _order(gateway, fields)
    wants_usage = includes_usage(fields)
    head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": gateway.model.name}
    for number, ask in enumerate(order.asks):
        ask.request.request_id = head["id"] if len(order.asks) == 1 else f"{head['id']}-{number}"
    if fields["stream"]:
        return _chunks(gateway, order, head, route, wants_usage)
    choices: dict[int, _Choice] = {}
    usage = Usage()
    async with aclosing(_all_news(gateway, order, route)) as events:
        async for index, news in events:
            _note(choices.setdefault(index, _Choice()), news, order, index)
            if isinstance(news, End):
                usage = _added(usage, news.usage, index % order.n == 0, order.has_new)
    listed = [_object(index, choices[index], order) for index in sorted(choices)]
    return {**head, "choices": listed, "usage": usage_object(usage)}


async def _order(gateway: Gateway, fields: Fields) -> _Order:
    """Return what a request asks for."""
    params = sampling_params(fields, gateway.model)
    set_constraints(fields, params)
    echoes, max_tokens, logprobs = fields["echo"], fields["max_tokens"], fields["logprobs"]
    if max_tokens == 0 and not echoes:
        raise refused("max_tokens", "max_tokens = 0: must be at least 1, unless the prompt comes back (echo: true)")
    if fields["best_of"] not in (None, 1, params.n):
        raise refused("best_of", f"best_of = {fields['best_of']}: n answers are drawn, and all come back: leave it out")
    skip_special = fields["skip_special_tokens"]
    params.skip_special_tokens = skip_special
    if logprobs is not None:
        params.logprobs = logprobs
        if echoes:
            params.prompt_logprobs = logprobs
    sizes = gateway.model.vocab_size, gateway.model.context
    prompts = await asyncio.to_thread(tokens_of, gateway.renderer.tokenizer, fields["prompt"], "prompt", *sizes)
    if len(prompts) > gateway.settings.most_prompts:
        raise refused("prompt", f"prompt: {len(prompts)} prompts: at most {gateway.settings.most_prompts} at once")
    asks = [gateway.ask_plain(prompt, params, max(max_tokens, 1), "prompt", skip_special) for prompt in prompts]
    return _Order(asks=asks, n=params.n, echoes=echoes, has_new=max_tokens > 0, skip_special=skip_special)


def _all_news(gateway: Gateway, order: _Order, route: str) -> AsyncIterator[tuple[int, Piece | End | pb.InputLogProbs]]:
    """Return the news of all prompts as they come, with the number of the completion: prompt by prompt, n of each."""
    if len(order.asks) == 1:  # a single prompt needs no queue, nor a task that fills it
        return _news_of(gateway, order, route, 0)
    return _news_of_several(gateway, order, route)


async def _news_of(
    gateway: Gateway, order: _Order, route: str, number: int
) -> AsyncIterator[tuple[int, Piece | End | pb.InputLogProbs]]:
    """Yield the news of the prompt of this number."""
    first = number * order.n
    async with aclosing(gateway.run(order.asks[number], route)) as events:
        async for news in events:
            if isinstance(news, pb.InputLogProbs):  # those of all its continuations
                for index in range(order.n):
                    yield first + index, news
            else:
                yield first + news.index, news


async def _news_of_several(
    gateway: Gateway, order: _Order, route: str
) -> AsyncIterator[tuple[int, Piece | End | pb.InputLogProbs]]:
    """Yield the news of prompts that go on side by side."""
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(maxsize=256)
    places = asyncio.Semaphore(_AT_ONCE)

    async def run(number: int) -> None:
        async with places, aclosing(_news_of(gateway, order, route, number)) as events:
            async for numbered in events:
                await queue.put(numbered)

    tasks = [asyncio.create_task(run(number)) for number in range(len(order.asks))]
    gathered = asyncio.gather(*tasks)
    gathered.add_done_callback(lambda _: queue.put_nowait((-1, None)) if not queue.full() else None)
    try:
        while not (gathered.done() and queue.empty()):
            if gathered.done() and gathered.exception() is not None:
                break
            index, news = await queue.get()
            if index >= 0:
                yield index, news
        await gathered
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _chunks(
    gateway: Gateway, order: _Order, head: dict[str, Any], route: str, wants_usage: bool
) -> AsyncIterator[str]:
    """Yield the events of a stream, one for each piece of text."""
    choices: dict[int, _Choice] = {}
    usage = Usage()
    if wants_usage:
        head = {**head, "usage": None}
    plain: dict[int, EventOfText] = {}  # by completion, of text that comes without log-probabilities
    async with aclosing(_all_news(gateway, order, route)) as events:
        async for index, news in events:
            choice = choices.setdefault(index, _Choice())
            _note(choice, news, order, index)
            if isinstance(news, End):
                usage = _added(usage, news.usage, index % order.n == 0, order.has_new)
            # A prompt's log-probabilities stand before those of new tokens. Our worker tells them with the first of
            # these, others may do so at the end.
            is_scored = order.echoes and order.asks[index // order.n].wants_logprobs
            waits = is_scored and not choice.has_prompt_logprobs
            has_news = bool(choice.text) or len(choice.tokens) > choice.tokens_sent
            if choice.end is None and (waits or not has_news):
                continue
            if choice.end is None and not order.asks[index // order.n].wants_logprobs:
                if index not in plain:
                    listed = _object(index, choice, order)
                    plain[index] = EventOfText(
                        lambda text, listed=listed: {**head, "choices": [{**listed, "text": text}]}
                    )
                yield plain[index].filled(choice.text)
            else:
                yield data_event({**head, "choices": [_object(index, choice, order)]})
            choice.text, choice.tokens_sent = "", len(choice.tokens)
    counts = data_event({**head, "choices": [], "usage": usage_object(usage)}) if wants_usage else ""
    yield f"{counts}data: [DONE]\n\n"


def _note(choice: _Choice, news: Piece | End | pb.InputLogProbs, order: _Order, index: int) -> None:
    """Add news to a completion; the prompt that is echoed goes in front of them all."""
    ask = order.asks[index // order.n]
    if order.echoes and not choice.has_prompt:
        choice.has_prompt = True
        choice.text = ask.tokenizer.decode(ask.request.tokenized.input_ids, skip_special_tokens=order.skip_special)
    if isinstance(news, pb.InputLogProbs):
        choice.tokens = [*prompt_logprobs(news), *choice.tokens]
        choice.has_prompt_logprobs = True
    elif isinstance(news, Piece) and order.has_new:
        choice.text += "".join(event.text for event in news.events)
        choice.tokens += news.logprobs if ask.wants_logprobs else ()
    elif isinstance(news, End):
        choice.end = news


def prompt_logprobs(found: pb.InputLogProbs) -> list[TokenLogprob]:
    """Return the log-probabilities of a prompt's tokens; the first has none, which is NaN here."""
    tops = [dict(zip(top.token_ids, top.values, strict=True)) for top in found.top_logprobs]
    values = [each.value if each.HasField("value") else float("nan") for each in found.token_logprobs]
    return [
        TokenLogprob(token, value, tops[place] if place < len(tops) else {})
        for place, (token, value) in enumerate(zip(found.token_ids, values, strict=True))
    ]


def _added(total: Usage, usage: Usage, is_first: bool, has_new: bool) -> Usage:
    """Return counts with those of one more completion; a prompt counts once, whatever the number of its completions."""
    return Usage(
        total.prompt + is_first * usage.prompt,
        total.cached + is_first * usage.cached,
        total.completion + has_new * usage.completion,
    )


def _object(index: int, choice: _Choice, order: _Order) -> dict[str, Any]:
    """Return a completion; of a stream what it has not given out yet."""
    ask = order.asks[index // order.n]
    logprobs = None
    if ask.wants_logprobs:
        logprobs = listed_logprobs(ask.tokenizer, choice.tokens, choice.tokens_sent, order.skip_special)
    reason = None if choice.end is None else "length" if not order.has_new else choice.end.reason
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": reason}


def listed_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], start: int, skip_special: bool
) -> dict[str, list[Any]]:
    """Return log-probabilities as OpenAI's completions have them: lists, with each token's place in the text.

    Of two alternatives that are written alike the more probable one is kept, so the largest value is always there.

    Args:
      tokenizer: of the model.
      tokens: of the whole completion, with the prompt if it is echoed.
      start: those before it were given out.
      skip_special: whether the text has special tokens.
    """
    name = lambda token: token_text(tokenizer, token)[0]
    stream, offsets, length = tokenizer.stream(skip_special_tokens=skip_special), [], 0
    for each in tokens:
        offsets.append(length)
        length += len(stream.push(each.token))
    top_logprobs: list[Mapping[str, float] | None] = []
    for each in tokens[start:]:
        named: dict[str, float] = {}
        for token, value in (*each.top.items(), (each.token, each.logprob)):
            named[name(token)] = max(value, named.get(name(token), value))
        top_logprobs.append(None if each.logprob != each.logprob else named)
    return {
        "tokens": [name(each.token) for each in tokens[start:]],
        "token_logprobs": [None if each.logprob != each.logprob else each.logprob for each in tokens[start:]],
        "top_logprobs": top_logprobs,
        "text_offset": offsets[start:],
    }
