"""A worker's tokens as answers: text, reasoning and tool calls as they come, with log-probabilities and counts."""

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from smg_grpc_proto import vllm_engine_pb2 as pb

from m3jax.decoding import Generation
from m3jax.messages import shown
from m3jax.serve.gateway.errors import ApiError
from m3jax.text import Event, OutputParser, StoppableText, Tokenizer

MOST_JOINED = 200  # characters


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model's own logits, and those of the most probable tokens in its place."""

    token: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class Usage:
    """The tokens of a request.

    Attributes:
      prompt: of the prompt.
      cached: of these, those that were in the prefix cache.
      completion: of all answers together.
      reasoning: of these, those that came while the answer was reasoning.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        """Return the sum of two continuations of one prompt, which counts once."""
        return Usage(
            max(self.prompt, other.prompt),
            max(self.cached, other.cached),
            self.completion + other.completion,
            self.reasoning + other.reasoning,
        )


@dataclass(frozen=True)
class Piece:
    """News of one answer.

    Attributes:
      index: of the answer, from 0 to n - 1.
      events: what the parser made of the new text.
      logprobs: of tokens whose text is in these events or before; none where they were not asked for.
      cached: tokens of the prompt that were in the prefix cache, as far as the worker has said.
    """

    index: int
    events: Sequence[Event]
    logprobs: Sequence[TokenLogprob] = ()
    cached: int = 0


@dataclass(frozen=True)
class End:
    """The end of one answer.

    Attributes:
      index: of the answer.
      reason: "stop", "length", or "tool_calls" where it has whole calls.
      stop_string: the one that ended it, if one did.
      usage: of this answer.
    """

    index: int
    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None
    usage: Usage


class PlainText:
    """A parser that finds nothing in a text: all of it is content."""

    def feed(self, text: str) -> list[Event]:
        """Return the text as an event."""
        return [Event("content", text)] if text else []

    def finish(self, is_cut: bool = False) -> list[Event]:
        """Return nothing: no text waits."""
        return []


@dataclass(frozen=True)
class CallRule:
    """The tool calls that an answer may have.

    Attributes:
      most: how many; calls beyond are left out.
    """

    most: int | None = None

    def allowed(self, events: Sequence[Event]) -> list[Event]:
        """Return the events without those of calls that are one too many."""
        if self.most is None:
            return list(events)
        return [event for event in events if event.index is None or event.index < self.most]


@dataclass(eq=False)
class Answer:
    """One answer while it comes.

    The token that ends a turn is no part of its text. Since only what follows shows whether a token of its kind ended
    the turn (`min_tokens`, `ignore_eos`), the last such token waits.

    Args:
      index: from 0 to n - 1.
      text: the detokenizer, which also finds stop strings.
      parser: of the text.
      stop_ids: tokens that may end it.
      rule: which calls it may have.
    """

    index: int
    text: StoppableText
    parser: OutputParser | PlainText
    stop_ids: frozenset[int]
    rule: CallRule
    tokens: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    has_calls: bool = False
    _waiting: int | None = None
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _is_reasoning: bool = False

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Piece | None:
        """Take new tokens, and return what is ready; None for nothing."""
        self._logprobs += logprobs
        events: list[Event] = []
        for token in tokens:
            self.tokens.append(token)
            ready, self._waiting = self._waiting, None
            if token in self.stop_ids:
                self._waiting = token
                token = ready
            elif ready is not None:
                events += self._feed(ready)
            if token is not None:
                events += self._feed(token)
        return self._piece(events)

    def end(self, reason: str, usage: Usage) -> list[Piece | End]:
        """End the answer.

        Args:
          reason: the worker's: "stop", "length", "abort" or "error".
          usage: of this answer, without its reasoning.

        Raises:
          ApiError: the worker failed.
        """
        if reason == "error":
            raise ApiError(500, "the engine failed on this request: its logits were no numbers", code="engine_error")
        if reason == "abort":
            raise ApiError(503, "the request was ended by the server", code="aborted", retry_after=5)
        events: list[Event] = []
        is_cut = reason == "length"
        if self._waiting is not None and reason != "stop":
            events += self._feed(self._waiting)
        if not self.text.stopped:
            events += self.parser.feed(self.text.finish())
        events += self.parser.finish(is_cut=is_cut)
        piece = self._piece(events, is_last=True)
        if reason == "stop" and self.has_calls:
            reason = "tool_calls"
        counted = Usage(usage.prompt, usage.cached, usage.completion, self.reasoning_tokens)
        end = End(self.index, reason, self.text.stop_string, counted)
        return [end] if piece is None else [piece, end]

    def _feed(self, token: int) -> list[Event]:
        if self.text.stopped:  # a call of the device draws several tokens: those behind a stop string do not count
            return []
        events = self.parser.feed(self.text.push(token))
        for event in events:
            if event.kind in ("reasoning", "content", "tool_call"):
                self._is_reasoning = event.kind == "reasoning"
        self.reasoning_tokens += self._is_reasoning
        return events

    def _piece(self, events: Sequence[Event], is_last: bool = False) -> Piece | None:
        events = self.rule.allowed(events)
        self.has_calls = self.has_calls or any(event.kind == "tool_call_end" for event in events)
        if not events and not (is_last and self._logprobs):
            return None
        logprobs, self._logprobs = self._logprobs, []
        return Piece(self.index, _joined(events), logprobs)


def _joined(events: Sequence[Event]) -> list[Event]:
    """Return events with texts of one kind that follow each other as one: a worker sends several tokens at once.

    A joined text has at most MOST_JOINED characters, so that a client has no jumps to show.
    """
    out: list[Event] = []
    for event in events:
        is_text = event.kind in ("content", "reasoning")
        if out and is_text and event.kind == out[-1].kind and len(out[-1].text) + len(event.text) <= MOST_JOINED:
            out[-1] = Event(event.kind, out[-1].text + event.text)
        else:
            out.append(event)
    return out


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to the worker, and how its answers are read.

    Attributes:
      request: in the worker's protocol; it streams, whether the client does or not.
      tokenizer: of the model.
      stop_ids: tokens that may end an answer.
      tools: that the parser knows, in OpenAI's layout.
      thinking_mode: of the prompt.
      is_chat: True if the text is parsed; else all of it is content.
      skip_special: leave special tokens out of the text; only where it is not parsed.
      rule: which calls an answer may have.
      wants_logprobs: True if the client asked for log-probabilities.
      notes: as in `Worker.generate`.
    """

    request: pb.GenerateRequest
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    tools: Sequence[Mapping[str, Any]] | None = None
    thinking_mode: str | None = None
    is_chat: bool = True
    skip_special: bool = False
    rule: CallRule = CallRule()
    wants_logprobs: bool = False
    notes: dict[int, Generation] | None = None

    def answer(self, index: int) -> Answer:
        """Return a new answer."""
        stream = self.tokenizer.stream(skip_special_tokens=self.skip_special, show_unfinished=not self.is_chat)
        parser = OutputParser(self.tools, self.thinking_mode) if self.is_chat else PlainText()
        stop = list(self.request.sampling_params.stop)
        return Answer(index, StoppableText(stream, stop), parser, self.stop_ids, self.rule)


async def answers(
    responses: AsyncIterator[pb.GenerateResponse], ask: Ask
) -> AsyncIterator[Piece | End | pb.InputLogProbs]:
    """Read a worker's responses: the pieces of all answers as they come, and the end of each.

    Args:
      responses: of `Workers.generate`.
      ask: what was asked.

    Yields:
      First the log-probabilities of the prompt, where they were asked for.

    Raises:
      ApiError: the worker refused the request, failed, or was lost.
    """
    found: dict[int, Answer] = {}
    ended = 0
    has_prompt_logprobs = False
    async with aclosing(responses) as stream:
        async for response in stream:
            kind = response.WhichOneof("response")
            news = getattr(response, kind)
            answer = found.get(news.index)
            if answer is None:
                answer = found[news.index] = ask.answer(news.index)
            if news.HasField("input_logprobs") and not has_prompt_logprobs:
                has_prompt_logprobs = True
                yield news.input_logprobs
            tokens, logprobs = news_of(news, kind, len(answer.tokens))
            piece = answer.push(tokens, logprobs)
            if piece is not None:
                yield replace(piece, cached=news.cached_tokens)
            if kind == "complete":
                ended += 1
                usage = Usage(news.prompt_tokens, news.cached_tokens, news.completion_tokens)
                for last in answer.end(news.finish_reason, usage):
                    yield replace(last, cached=usage.cached) if isinstance(last, Piece) else last
    if ended < ask.request.sampling_params.n:
        raise ApiError(503, "the worker ended its stream too early", code="worker_lost", retry_after=5)


def news_of(
    news: pb.GenerateStreamChunk | pb.GenerateComplete, kind: str, known: int
) -> tuple[Sequence[int], list[TokenLogprob]]:
    """Return the tokens of a response that are new, with their log-probabilities if it has them.

    Args:
      news: a chunk has new tokens alone, the last message of a continuation all that it ever had.
      kind: "chunk" or "complete".
      known: tokens that came before.
    """
    tokens = news.token_ids if kind == "chunk" else news.output_ids[known:]
    listed = news.output_logprobs
    first = len(listed.token_logprobs) - len(tokens)  # those of the last message may be of all tokens, or of the new
    if first < 0 or not listed.token_logprobs:
        return tokens, []
    return tokens, [
        TokenLogprob(
            listed.token_ids[place],
            listed.token_logprobs[place],
            dict(zip(top.token_ids, top.values, strict=True)),
        )
        for place in range(first, len(listed.token_logprobs))
        for top in [listed.top_logprobs[place] if place < len(listed.top_logprobs) else pb.TopLogProbs()]
    ]


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Return a token's text and its bytes; bytes that are not UTF-8 are written as `bytes:\\xe2\\x82`.

    So two tokens that are parts of characters keep two names, as OpenAI's completions write them.
    """
    try:
        raw = tokenizer.token_bytes(token)
    except ValueError:
        raise ApiError(500, f"the worker gave the token {shown(token)}, which the tokenizer does not have") from None
    try:
        return raw.decode("utf-8"), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def new_id(prefix: str) -> str:
    """Return a new id, such as chatcmpl-0f3c..."""
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    """Return the Unix time in whole seconds."""
    return int(time.time())
