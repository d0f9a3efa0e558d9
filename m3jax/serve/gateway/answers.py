"""A worker's tokens as answers: text, reasoning and tool calls as they come, with log-probabilities and counts."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

    def allowed(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events without those of calls that are one too many."""
        if self.most is None:
            return events
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

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], cached: int = 0) -> Piece | None:
        """Take new tokens, and return what is ready; None for nothing.

        Args:
          tokens: that were not pushed before.
          logprobs: of them; none where they were not asked for.
          cached: as in `Piece`.
        """
        self.tokens += tokens
        self._logprobs += logprobs
        ready: list[int] = []
        for token in tokens:
            if self._waiting is not None:  # another one follows, so it ended nothing
                ready.append(self._waiting)
                self._waiting = None
            if token in self.stop_ids:
                self._waiting = token
            else:
                ready.append(token)
        return self._piece(self._feed(ready), cached)

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
            events += self._feed((self._waiting,))
        if not self.text.stopped:
            events += self.parser.feed(self.text.finish())
        events += self.parser.finish(is_cut=is_cut)
        piece = self._piece(events, usage.cached, is_last=True)
        if reason == "stop" and self.has_calls:
            reason = "tool_calls"
        counted = Usage(usage.prompt, usage.cached, usage.completion, self.reasoning_tokens)
        end = End(self.index, reason, self.text.stop_string, counted)
        return [end] if piece is None else [piece, end]

    def _feed(self, tokens: Sequence[int]) -> list[Event]:
        """Return what the parser makes of tokens; those behind a stop string, drawn by the same call, do not count."""
        if isinstance(self.parser, PlainText):
            return self.parser.feed(self.text.push_all(tokens))
        events: list[Event] = []
        for token in tokens:  # one by one: which of them are reasoning, only the parser can tell
            if self.text.stopped:
                break
            found = self.parser.feed(self.text.push(token))
            for event in found:
                if event.kind in ("reasoning", "content", "tool_call"):
                    self._is_reasoning = event.kind == "reasoning"
            self.reasoning_tokens += self._is_reasoning
            events += found
        return events

    def _piece(self, events: Sequence[Event], cached: int, is_last: bool = False) -> Piece | None:
        events = self.rule.allowed(events)
        self.has_calls = self.has_calls or any(event.kind == "tool_call_end" for event in events)
        if not events and not (is_last and self._logprobs):
            return None
        logprobs, self._logprobs = self._logprobs, []
        return Piece(self.index, _joined(events), logprobs, cached)


def _joined(events: Sequence[Event]) -> Sequence[Event]:
    """Return events with texts of one kind that follow each other as one: a worker sends several tokens at once.

    A joined text has at most MOST_JOINED characters, so that a client has no jumps to show.
    """
    if len(events) < 2:
        return events
    out: list[Event] = []
    texts: list[str] = []  # of the last event in `out`, where it has a text that others may join
    for event in events:
        if texts and event.kind == out[-1].kind and sum(map(len, texts)) + len(event.text) <= MOST_JOINED:
            texts.append(event.text)
            continue
        if len(texts) > 1:
            out[-1] = Event(out[-1].kind, "".join(texts))
        out.append(event)
        texts = [event.text] if event.kind in ("content", "reasoning") else []
    if len(texts) > 1:
        out[-1] = Event(out[-1].kind, "".join(texts))
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


class AnswerReader:
    """A reader of a worker's responses to one request.

    Args:
      ask: what was asked.
    """

    def __init__(self, ask: Ask):
        self._ask = ask
        self._answers: dict[int, Answer] = {}
        self._ended = 0
        self._has_prompt_logprobs = False

    def read(self, response: pb.GenerateResponse) -> Iterator[Piece | End | pb.InputLogProbs]:
        """Yield the news of one response: pieces of answers, and the end of each.

        What comes first are the log-probabilities of the prompt, where they were asked for.

        Raises:
          ApiError: the worker failed.
        """
        kind = response.WhichOneof("response")
        news = getattr(response, kind)
        answer = self._answers.get(news.index)
        if answer is None:
            answer = self._answers[news.index] = self._ask.answer(news.index)
        if not self._has_prompt_logprobs and news.HasField("input_logprobs"):
            self._has_prompt_logprobs = True
            yield news.input_logprobs
        tokens, logprobs = news_of(news, kind, len(answer.tokens))
        piece = answer.push(tokens, logprobs, news.cached_tokens)
        if piece is not None:
            yield piece
        if kind == "complete":
            self._ended += 1
            usage = Usage(news.prompt_tokens, news.cached_tokens, news.completion_tokens)
            yield from answer.end(news.finish_reason, usage)

    def check_whole(self) -> None:
        """Raise ApiError unless all answers came to their end."""
        if self._ended < self._ask.request.sampling_params.n:
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
    if not news.HasField("output_logprobs"):
        return tokens, []
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
