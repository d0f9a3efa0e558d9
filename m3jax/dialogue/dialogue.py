"""A dialogue of many turns: its messages, and an engine that keeps what it has read of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from m3jax.completion import check_model
from m3jax.decoding import Drafter, Engine, Params, Sampling, build_engine
from m3jax.decoding.engine import DRAFT_TOKENS
from m3jax.decoding.protocols import TargetModel, sees
from m3jax.dialogue.answer import answer, stop_ids
from m3jax.dialogue.chat import as_stop, as_template, check_answer, check_question, new_tokens_within
from m3jax.dialogue.media import dialogue_tokens, forget_changed, read_part
from m3jax.dialogue.reply import Reply
from m3jax.media import ProcessedImage, ProcessedVideo
from m3jax.messages import shown
from m3jax.text import ChatTemplate, Event, OutputParser, Tokenizer, ordered_messages

MOST_CONTEXT = 32768  # tokens of a dialogue, if the caller gives no number
_STEPS = 4  # tokens in one device call: few, because a user watches the answer
_STOP_IDS = 8


class Dialogue:
    """Messages, and an engine whose prefix cache keeps the tokens of all turns so far.

    A turn is rendered and tokenised from its beginning, as by `m3jax.chat`; what it has in common with the turn before
    is in the cache, and only the rest is computed. What cannot be sent leaves the messages as they were.

    Args:
      model: from `m3jax.load`.
      tokenizer: of the same folder.
      tools: as in `m3jax.chat`.
      thinking_mode: as in `m3jax.chat`.
      template: as in `m3jax.chat`.
      messages: a history to go on from; images and videos are parts of a content, as in `m3jax.chat`.
      max_new_tokens: of an answer; None is 4,096, or less where there is no room for more.
      sampling: the way tokens are drawn; None draws by the model's own probabilities.
      stop: a text, or several, before which an answer ends.
      stop_at: token ids that end an answer besides the end of a turn; None is the model's EOS.
      context: tokens that the dialogue can have; None is the model's context, at most 32,768. Its cache is allocated at
        once.
      draft: as in `m3jax.generate`.
      draft_tokens: as in `m3jax.generate`.
      progress: whether compiling, and reading a turn, are shown (`m3jax.progress`).

    Attributes:
      messages: the history, in OpenAI's layout; answers are in it too.
      tools: of the answers from now on, as `thinking_mode`, `sampling` and `max_new_tokens` are.

    Raises:
      ValueError: a template that is missing or broken, tools that are none, or a context beyond the model's.

    Example:
      dialogue = m3jax.dialogue.Dialogue(model, tokenizer, tools=tools)
      for event in dialogue.send({"role": "user", "content": "What is harbor?"}):
          ...
    """

    def __init__(
        self,
        model: TargetModel,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        thinking_mode: str | None = "adaptive",
        template: ChatTemplate | str | PathLike[str] | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_at: Sequence[int] | None = None,
        context: int | None = None,
        draft: Drafter | str | PathLike[str] | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        progress: bool = True,
    ):
        check_model(model)
        self.messages = [dict(message) for message in messages]
        self.tools, self.thinking_mode = tools, thinking_mode
        self._model, self._tokenizer, self._progress = model, tokenizer, progress
        self._known_media: dict[Any, Any] = {}  # images and videos of the history, by their sources
        self.max_new_tokens, self.sampling, self._stop = max_new_tokens, sampling or Sampling(), as_stop(stop)
        self._template = as_template(template, tokenizer)
        self._stop_ids = stop_ids(tokenizer, model.config.eos_token_id if stop_at is None else stop_at)
        OutputParser(tools=tools, thinking_mode=thinking_mode)  # raises ValueError for bad tools
        longest = min(model.config.max_position_embeddings, MOST_CONTEXT) if context is None else context
        self._engine = _engine(model, longest, len(self._stop_ids), draft, draft_tokens, progress)

    @property
    def context(self) -> int:
        """The most tokens that the dialogue can have."""
        return self._engine.max_length

    @property
    def can_see(self) -> bool:
        """True if messages may show images and videos."""
        return sees(self._model)

    def read(self, part: Mapping[str, Any]) -> ProcessedImage | ProcessedVideo:
        """Read an image or a video before a message shows it, so that what is wrong with it is known before.

        Args:
          part: of a content, as in `m3jax.chat`: {"type": "image", "image": source}.

        Returns:
          It as the model takes it. A message that has the same part takes this and reads nothing.

        Raises:
          ValueError: it cannot be used, the part is none, the model sees nothing, or the file has changed and a message
            shows it as it was.
        """
        (message,) = ordered_messages([{"role": "user", "content": [part]}])
        (part,) = message["content"]
        if isinstance(part, str) or part["type"] == "text":
            raise ValueError(f"{shown(part)} is text: give an image or a video")
        forget_changed(part, self._known_media, self.messages)
        return read_part(part, self._known_media, can_see=self.can_see, progress=self._progress)

    def send(
        self, *messages: Mapping[str, Any], is_interrupted: Callable[[], bool] = lambda: False
    ) -> Iterator[Event | Reply]:
        """Add messages, and have them answered.

        They are in `messages` once the answer begins, and the answer is once it has ended. An answer that is
        interrupted is kept as far as it came, without calls. If nothing came, the model's logits were NaN, or the
        iterator is closed, the messages are as before.

        Args:
          *messages: the next messages: the user's, or the results of all open calls.
          is_interrupted: called after each device call; if it returns True, the answer ends there.

        Returns:
          Events as from `m3jax.chat`, the whole answer last.

        Raises:
          ValueError: messages that ask nothing, that the template cannot take, or that do not fit; nothing was added.
          FloatingPointError: the model's logits were NaN or infinite.
        """
        history = [*self.messages, *map(dict, messages)]
        check_question(history)
        prompt, media = dialogue_tokens(
            self._template, self._tokenizer, history, self.tools, self.thinking_mode,
            can_see=self.can_see, known=self._known_media, progress=self._progress,
        )  # fmt: skip
        limit = new_tokens_within(len(prompt), self.context, self.max_new_tokens)
        params = Params(max_new_tokens=limit, sampling=self.sampling, stop_ids=self._stop_ids)
        check_answer(prompt, params, self._model.config, self.context)
        parser = OutputParser(tools=self.tools, thinking_mode=self.thinking_mode)
        events = answer(
            self._engine, self._tokenizer, parser, prompt, params, media,
            stop=self._stop, is_interrupted=is_interrupted, progress=self._progress,
        )  # fmt: skip
        return self._kept(events, history)

    def _kept(self, events: Iterator[Event | Reply], history: list[dict[str, Any]]) -> Iterator[Event | Reply]:
        """Yield the events unchanged; set `messages` to history and answer, or back to what it was if none comes."""
        before, self.messages = self.messages, history
        has_answer = False
        try:
            for event in events:
                if event.kind == "reply":
                    message = event.message
                    # Calls of an answer that the user stopped are not to be run: the history goes on without them.
                    if event.finish_reason == "interrupted":
                        message.pop("tool_calls", None)
                    has_answer = event.finish_reason != "interrupted" or bool(event.content or event.reasoning)
                    self.messages += [message] if has_answer else []
                yield event
        finally:
            if not has_answer:
                self.messages = before

    def undo(self) -> list[dict[str, Any]]:
        """Take back what the user said last, and all that followed; what was read of it stays in the cache.

        Returns:
          The messages that were taken back.

        Raises:
          ValueError: the user has said nothing.
        """
        places = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise ValueError("nothing to undo: no message of yours is left")
        taken_back, self.messages = self.messages[places[-1] :], self.messages[: places[-1]]
        return taken_back


def open_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of the last answer that have no result yet.

    Args:
      messages: a history.

    Returns:
      The calls as they stand in their message, in its order.
    """
    answered = set()
    for message in reversed(messages):  # back over the results to the answer that they belong to
        if message["role"] != "tool":
            return [call for call in message.get("tool_calls") or () if call["id"] not in answered]
        answered.add(message.get("tool_call_id"))
    return []


def _engine(
    model: TargetModel,
    context: int,
    stop_ids: int,
    draft: Drafter | str | PathLike[str] | None,
    draft_tokens: int,
    progress: bool,
) -> Engine:
    """Return an engine for one dialogue of so many tokens, in which a text as long as one before compiles nothing."""
    # Most dialogues have no images, and many begin with one line, so the tower, and prefill of more than the smallest
    # chunk, are compiled with the first message that needs them (`answer`).
    return build_engine(
        model, rows=1, length=context, steps_per_call=_STEPS, max_stop_ids=max(_STOP_IDS, stop_ids), draft=draft,
        draft_tokens=draft_tokens, programs=("prefill", "decode", "pages"), longest=1, progress=progress,
    )  # fmt: skip
