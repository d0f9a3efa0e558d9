"""The gateway's state, and the way of a request through it that all protocols share."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from smg_grpc_proto import vllm_engine_pb2 as pb

from m3jax.messages import shown
from m3jax.serve.gateway.answers import AnswerReader, Ask, CallRule, End, Piece, new_id, now
from m3jax.serve.gateway.errors import ApiError, refused
from m3jax.serve.gateway.fields import Fields, FlagField, IntegerField, ObjectField, RequestField, Table, TextField
from m3jax.serve.gateway.figures import Figures
from m3jax.serve.gateway.journal import Journal
from m3jax.serve.gateway.prompts import EncodedPrompt, Renderer
from m3jax.serve.gateway.sampling import MAX_TOP_LOGPROBS, Model, check_constraints, limit_tokens
from m3jax.serve.gateway.workers import Workers

_PROGRESS_SECONDS = 0.25  # between two looks at how much of a prompt is read
THINKING_MODES = ("adaptive", "enabled", "disabled")
# How much a client wants the model to think, in the three modes that M3 was trained with.
_MODE_OF_EFFORT = {
    "none": "disabled",
    **dict.fromkeys(("minimal", "low", "medium"), "adaptive"),
    **dict.fromkeys(("high", "xhigh", "max"), "enabled"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a gateway.

    Attributes:
      api_key: that each request must have; None asks for none.
      max_requests: that are worked on at once; one more is answered with 429.
      max_body_bytes: of a request.
      deadline_seconds: after which a request ends with 504; infinite by default.
      ping_seconds: of silence in a stream, after which it says that it is alive.
      origins: of pages in browsers that may ask (CORS); none by default.
      most_prompts: of one completion request.
    """

    api_key: str | None = None
    max_requests: int = 256
    max_body_bytes: int = 64 << 20
    deadline_seconds: float = math.inf
    ping_seconds: float = 10.0
    origins: tuple[str, ...] = ()
    most_prompts: int = 1024


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A chat request, whatever its protocol.

    Attributes:
      messages: in OpenAI's layout; not checked yet, as the tools are not.
      tools: in OpenAI's layout; None for none.
      choice: "auto", "none", "required", or the name of the tool that must be called.
      is_parallel: True if several tools may be called in one answer.
      thinking_mode: of the template.
      params: how tokens are drawn.
      max_tokens: that the client allows; None for as many as there is room for.
      top_logprobs: how many alternatives of each token; None for no log-probabilities at all.
      wants_blocks: True if the blocks that each new token read come back.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] | None
    choice: str = "auto"
    is_parallel: bool = True
    thinking_mode: str = "adaptive"
    params: pb.SamplingParams = field(default_factory=pb.SamplingParams)
    max_tokens: int | None = None
    top_logprobs: int | None = None
    wants_blocks: bool = False


@dataclass(frozen=True)
class Progress:
    """A prompt on its way through the model, in the names that llama.cpp's server has for it.

    Attributes:
      total: tokens of the prompt.
      cache: of these, those that were in the prefix cache.
      processed: of these, those that are through, the cached ones included.
      time_ms: milliseconds since the request went to the worker.
    """

    total: int
    cache: int
    processed: int
    time_ms: int


@dataclass(eq=False, kw_only=True)
class Gateway:
    """The gateway while it serves.

    Attributes:
      settings: of it.
      figures: that /metrics shows.
      workers, model, renderer: None while they are loaded.
      state: "loading", "ready", "failed", or "draining", when no new request is taken.
      headers: that each answer has.
      journal: of requests; None keeps none.
      running: requests that are worked on.
      started: Unix time in seconds.
    """

    settings: Settings
    figures: Figures = field(default_factory=Figures)
    workers: Workers | None = None
    model: Model | None = None
    renderer: Renderer | None = None
    state: Literal["loading", "ready", "failed", "draining"] = "loading"
    headers: Mapping[str, str] = field(default_factory=dict)
    journal: Journal | None = None
    running: int = 0
    started: int = field(default_factory=now)
    _tables: dict[Callable[[Model], Table], Table] = field(default_factory=dict)

    def check_ready(self) -> None:
        """Raise ApiError unless requests can be served."""
        if self.state != "ready":
            raise ApiError(503, f"the server is {self.state}", code=self.state, retry_after=2)
        if not self.workers.is_up:
            raise ApiError(503, "no worker can be reached", code="worker_lost", retry_after=5)

    def table(self, of_model: Callable[[Model], Table]) -> Table:
        """Return the table of an endpoint's fields for the model that is served, which is made once."""
        if of_model not in self._tables:
            self._tables[of_model] = of_model(self.model)
        return self._tables[of_model]

    def read(self, body: Mapping[str, Any], of_model: Callable[[Model], Table]) -> Fields:
        """Return a request's fields, checked.

        Args:
          body: its JSON object.
          of_model: makes the table of the endpoint's fields.

        Raises:
          ApiError: 404 for another model, before all else; 400 for a field that is wrong.
        """
        if isinstance(name := body.get("model"), str):
            self.check_model(name)
        return Fields(body, self.table(of_model))

    def check_model(self, name: str) -> str:
        """Return a model's name if it is the one that is served.

        Raises:
          ApiError: 404 for another model.
        """
        if name != self.model.name:
            raise ApiError(
                404, f"model {shown(name)} is not served here: ask for {self.model.name}", "model", "model_not_found"
            )
        return name

    async def ask(self, turn: Turn) -> Ask:
        """Return what a chat request asks the worker.

        Raises:
          ApiError: messages or tools that cannot be shown to the model, or a prompt that is too long.
        """
        has_tools = bool(turn.tools)
        if turn.choice not in ("auto", "none") and not has_tools:
            raise refused("tool_choice", f"tool_choice = {shown(turn.choice)} needs tools: give at least one")
        # A model that sees tools wants to call them, so where it must not it sees none.
        tools = turn.tools if turn.choice != "none" else None
        prompt = await self.renderer.render(turn.messages, tools, turn.thinking_mode)
        request = self._request(prompt, turn.params, turn.max_tokens, "messages", turn.top_logprobs, "chatcmpl-")
        if has_tools and turn.choice not in ("auto", "none"):
            self._force(request.sampling_params, turn)
        most = 0 if turn.choice == "none" else None if turn.is_parallel else 1
        return Ask(
            request=request,
            tokenizer=self.renderer.tokenizer,
            stop_ids=self.stop_ids(request.sampling_params),
            tools=tools,
            thinking_mode=turn.thinking_mode,
            rule=CallRule(most),
            wants_logprobs=turn.top_logprobs is not None,
            notes={} if turn.wants_blocks else None,
        )

    def ask_plain(
        self, prompt: Sequence[int], params: pb.SamplingParams, max_tokens: int, field: str, skip_special: bool
    ) -> Ask:
        """Return what a completion of token ids asks the worker.

        Args:
          prompt: token ids.
          params: with log-probabilities, if they are wanted.
          max_tokens: at least 1.
          field: of the prompt, for errors.
          skip_special: leave special tokens out of the text.
        """
        own = pb.SamplingParams()
        own.CopyFrom(params)
        request = self._request(EncodedPrompt(prompt), own, max_tokens, field, None, "cmpl-")
        return Ask(
            request=request,
            tokenizer=self.renderer.tokenizer,
            stop_ids=self.stop_ids(own),
            is_chat=False,
            wants_logprobs=own.HasField("logprobs") and params.HasField("logprobs"),
            skip_special=skip_special,
        )

    def stop_ids(self, params: pb.SamplingParams) -> frozenset[int]:
        """Return the tokens that may end an answer."""
        eos = () if params.ignore_eos else self.model.eos_ids
        return frozenset((*eos, *params.stop_token_ids))

    async def run(self, ask: Ask, route: str) -> AsyncIterator[Piece | End | pb.InputLogProbs]:
        """Run a request and yield its answers, as `AnswerReader` reads them; leaving the iterator ends it.

        Args:
          ask: of it.
          route: under which its figures are counted.

        Raises:
          ApiError: the worker refused the request, failed, or was lost.
        """
        with self.figures.timed(route) as clock:
            responses = self.workers.generate(ask.request, ask.notes)
            if self.journal is not None:
                responses = self.journal.kept(ask.request, responses)
            reader = AnswerReader(ask)
            async with aclosing(responses) as stream:
                async for response in stream:
                    clock.note(response)
                    for news in reader.read(response):
                        yield news
            reader.check_whole()

    async def run_with_progress(
        self, ask: Ask, route: str
    ) -> AsyncIterator["Progress | Piece | End | pb.InputLogProbs"]:
        """As `run`, and before the first news yield how much of the prompt is read, whenever that has changed.

        Raises:
          ApiError: 400, the worker is in another process, and its protocol has no place for this.
        """
        started, request_id = time.monotonic(), ask.request.request_id
        events = self.run(ask, route)
        first = asyncio.ensure_future(anext(events))
        try:
            last = None
            while not first.done():
                await asyncio.wait({first}, timeout=_PROGRESS_SECONDS)
                found = None if first.done() else await self.workers.progress(request_id)
                if found not in (None, last):
                    last, milliseconds = found, round(1000 * (time.monotonic() - started))
                    yield Progress(*found, milliseconds)
            yield first.result()
            async for event in events:
                yield event
        finally:
            if not first.done():
                first.cancel()
                with suppress(BaseException):
                    await first
            await events.aclose()

    def _request(
        self,
        prompt: EncodedPrompt,
        params: pb.SamplingParams,
        max_tokens: int | None,
        field: str,
        top_logprobs: int | None,
        prefix: str,
    ) -> pb.GenerateRequest:
        limit_tokens(params, self.model, len(prompt.ids), max_tokens, field)
        if top_logprobs is not None:
            params.logprobs = top_logprobs
        elif self.journal is not None and not params.HasField("logprobs"):
            params.logprobs = 0  # those of the tokens themselves, which the journal keeps
        request = pb.GenerateRequest(request_id=new_id(prefix), sampling_params=params, stream=True)
        prompt.set_in(request)
        return request

    def _force(self, params: pb.SamplingParams, turn: Turn) -> None:
        """Constrain an answer to calls of the tools."""
        from m3jax.serve.constraints import tool_grammar

        check_constraints(params, has_forced_call=True)
        names = [tool["function"]["name"] for tool in turn.tools]
        if turn.choice != "required" and turn.choice not in names:
            raise refused("tool_choice", f"tool_choice: no tool is called {shown(turn.choice)}")
        try:
            params.grammar = tool_grammar(turn.tools, turn.choice, turn.is_parallel)
        except ValueError as error:
            raise refused("tools", str(error)) from None


_MODES = ", ".join(THINKING_MODES)
THINKING_FIELDS: Mapping[str, RequestField] = {
    "chat_template_kwargs": ObjectField(
        inside={
            "properties": {"thinking_mode": {"enum": list(THINKING_MODES)}, "enable_thinking": {"type": "boolean"}},
            "additionalProperties": False,
        },
        about="arguments of the chat template: thinking_mode, or enable_thinking, which says it in two words",
    ),
    "thinking": ObjectField(
        inside={"properties": {"type": {"enum": list(THINKING_MODES)}}, "required": ["type"]},
        about="the same as thinking_mode, which comes first",
    ),
    "reasoning_effort": TextField(about=f"{', '.join(_MODE_OF_EFFORT)}; the last way that is looked at"),
}


def thinking_mode(fields: Fields, default: str, effort: str | None = None) -> str:
    """Return the thinking mode that a request asks for, in one of the ways that clients have.

    They are, the first that is given counting: `chat_template_kwargs.thinking_mode`, `thinking.type`,
    `chat_template_kwargs.enable_thinking`, `reasoning_effort`.

    Args:
      fields: of the request, `THINKING_FIELDS` among them.
      default: where it asks for none.
      effort: in place of `reasoning_effort`.

    Raises:
      ApiError: an unknown mode, an argument that the template does not have, or reasoning_effort "none" where thinking
        is enabled.
    """
    found: str | None = None
    kwargs = fields["chat_template_kwargs"] or {}
    for name, value in kwargs.items():
        if name == "enable_thinking" and isinstance(value, bool):
            found = found or ("enabled" if value else "disabled")
        elif name == "thinking_mode" and value in THINKING_MODES:
            found = value
        elif name == "thinking_mode":
            raise refused(
                "chat_template_kwargs", f"chat_template_kwargs: thinking_mode = {shown(value)}: one of {_MODES}"
            )
        else:
            raise refused("chat_template_kwargs", f"chat_template_kwargs: {shown(name)} is not read: thinking_mode is")
    thinking = fields["thinking"]
    if thinking is not None and "thinking_mode" not in kwargs:
        if thinking.get("type") not in THINKING_MODES:
            raise refused("thinking", f"thinking: type = {shown(thinking.get('type'))}: one of {_MODES}")
        found = thinking["type"]
    effort = fields["reasoning_effort"] if effort is None else effort
    if effort == "none" and found == "enabled":
        raise refused("reasoning_effort", "reasoning_effort = 'none', and thinking is enabled: give one of the two")
    return found or _MODE_OF_EFFORT.get(effort, default)


LOGPROBS_FIELDS: Mapping[str, RequestField] = {
    "logprobs": FlagField(about="give each token's log-probability"),
    "top_logprobs": IntegerField(least=0, most=MAX_TOP_LOGPROBS, about="alternatives of each token; needs logprobs"),
}


def top_logprobs(fields: Fields) -> int | None:
    """Return how many alternatives a chat request wants of each token; None for no log-probabilities.

    Raises:
      ApiError: `top_logprobs` without `logprobs`.
    """
    count = fields["top_logprobs"]
    if fields["logprobs"]:
        return count or 0
    if count:
        raise refused("top_logprobs", "top_logprobs needs logprobs: true")
    return None


@dataclass(eq=False)
class Collected:
    """One whole answer, put together from its events."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    end: End | None = None

    def add(self, news: Piece | End) -> None:
        """Take the next news of this answer."""
        if isinstance(news, End):
            self.end = news
            return
        self.logprobs += news.logprobs
        for event in news.events:
            if event.kind == "tool_call":
                self.calls.append({"id": event.id, "name": event.name, "arguments": ""})
            elif event.kind == "arguments":
                self.calls[event.index]["arguments"] += event.text
            elif event.kind in ("content", "reasoning"):
                setattr(self, event.kind, getattr(self, event.kind) + event.text)


async def collected(events: AsyncIterator[Piece | End | pb.InputLogProbs]) -> dict[int, Collected]:
    """Return the whole answers of a request, by index."""
    found: dict[int, Collected] = {}
    async with aclosing(events) as stream:
        async for news in stream:
            if isinstance(news, Piece | End):
                found.setdefault(news.index, Collected()).add(news)
    return dict(sorted(found.items()))


async def within(seconds: float, work: Any) -> Any:
    """Return what a coroutine returns, or raise ApiError 504 once it has taken so many seconds."""
    try:
        async with asyncio.timeout(None if math.isinf(seconds) else seconds):
            return await work
    except TimeoutError:
        raise deadline_error(seconds) from None


def deadline_error(seconds: float) -> ApiError:
    """Return the error of a request that took too long."""
    return ApiError(504, f"the request took more than {seconds:g} seconds", code="deadline_exceeded")
