"""One answer to a list of messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

from m3jax.completion import check_model
from m3jax.decoding import Drafter, Engine, Params, Sampling, engine_for
from m3jax.decoding.engine import DRAFT_TOKENS, check_prompt
from m3jax.decoding.protocols import TargetConfig, TargetModel, sees
from m3jax.decoding.sampling import SamplingKnobs, as_sampling
from m3jax.dialogue.answer import answer, stop_ids
from m3jax.dialogue.media import dialogue_tokens
from m3jax.dialogue.reply import Reply
from m3jax.messages import shown
from m3jax.text import ChatTemplate, Event, OutputParser, Tokenizer, ordered_messages

MOST_NEW_TOKENS = 4096  # of an answer, if the caller gives no number
_STREAM_STEPS = 4  # tokens in one device call of a stream


def chat(
    model: TargetModel,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    thinking_mode: str | None = "adaptive",
    stream: bool = True,
    template: ChatTemplate | str | PathLike[str] | None = None,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    stop_at: Sequence[int] | None = None,
    engine: Engine | None = None,
    draft: Drafter | str | PathLike[str] | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    progress: bool = True,
    **knobs: Unpack[SamplingKnobs],
) -> Iterator[Event | Reply] | Reply:
    """Answer the last of some messages.

    What is wrong with the arguments is raised at the call, before anything runs. A dialogue of many turns is better
    held by `m3jax.dialogue.Dialogue`, whose engine keeps what it has read.

    Args:
      model: from `m3jax.load`.
      tokenizer: of the same folder.
      messages: of a history, in OpenAI's layout; the roles are those that the template knows. A part of a content
        {"type": "image", "image": source} shows an image, {"type": "video", "video": source} a video, where source is a
        path or a data URL as text, a `Path`, bytes, a Pillow image, an array, or frames of a video. "image_url" and
        "input_image" of OpenAI's clients mean the same.
      tools: that the model may call, each {"type": "function", "function": {"name", "parameters": a JSON schema}}, or a
        Python function with annotations and a docstring that describes it and, under "Args:", its parameters. Calls are
        returned, not run.
      thinking_mode: "enabled", "disabled", or "adaptive", where the model decides; None does not tell the template.
      stream: give events as they come, else the whole answer.
      template: the chat template or its file; None is that of the tokenizer's folder.
      max_new_tokens: of the answer; None is 4,096, or less where the model's context has no room for more.
      sampling: the way tokens are drawn; None takes it from the keywords.
      stop: a text, or several, before which the answer ends.
      stop_at: token ids that end the answer besides the end of a turn; None is the model's EOS.
      engine: one to run on, which finds in its prefix cache what it read before; None makes one for this call.
      draft: as in `m3jax.generate`; for the engine that is made here.
      draft_tokens: as in `m3jax.generate`.
      progress: as in `m3jax.generate`.
      **knobs: the attributes of `Sampling`, in place of one: temperature (0 is greedy), top_k, top_p, min_p,
        repetition_penalty, presence_penalty, frequency_penalty, logit_bias, bad_words, seed.

    Returns:
      The answer. With `stream` an iterator of events, of kind "reasoning", "content" (their `text` is the next piece),
      "tool_call" (`index`, `id`, `name`), "arguments" (`index`, and in `text` a piece of their JSON), "tool_call_end";
      the last is the whole answer, of kind "reply", with its finish reason and token counts.

    Raises:
      TypeError: an unknown keyword.
      ValueError: a bad argument, messages that ask nothing or that the template cannot take, or more tokens than
        the context has.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    check_model(model)
    sampling = as_sampling(sampling, knobs, called=chat)
    template = as_template(template, tokenizer)
    parser = OutputParser(tools=tools, thinking_mode=thinking_mode)
    stop = as_stop(stop)
    check_question(messages)
    prompt, media = dialogue_tokens(
        template, tokenizer, messages, tools, thinking_mode, can_see=sees(model), progress=progress
    )
    room = model.config.max_position_embeddings if engine is None else engine.max_length
    params = Params(
        max_new_tokens=new_tokens_within(len(prompt), room, max_new_tokens),
        sampling=sampling,
        stop_ids=stop_ids(tokenizer, model.config.eos_token_id if stop_at is None else stop_at),
    )
    check_answer(prompt, params, model.config, room)
    if engine is None:
        steps = _STREAM_STEPS if stream else None
        engine = engine_for(
            model, [prompt], [params], media=[media], steps_per_call=steps, draft=draft, draft_tokens=draft_tokens,
            progress=progress,
        )  # fmt: skip
    elif draft is not None:
        raise ValueError("draft with an engine: the engine has its own draft, or none; leave one of the two out")
    events = answer(engine, tokenizer, parser, prompt, params, media, stop=stop, progress=progress)
    if stream:
        return events
    *_, reply = events
    return reply


def as_template(template: ChatTemplate | str | PathLike[str] | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template itself, the one in a file, or for None that of the folder that the tokenizer was read from.

    Raises:
      ValueError: no template, or a broken one.
    """
    if isinstance(template, ChatTemplate):
        return template
    if template is not None:
        return ChatTemplate.from_file(Path(template))
    if tokenizer.folder is None:
        raise ValueError("the tokenizer was not read from a folder, so it has no chat template: give template=FILE")
    return ChatTemplate.from_folder(tokenizer.folder)


def as_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return one text before which an answer ends, or several, as several.

    Raises:
      ValueError: an empty one, or none of text.
    """
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop = {shown(text)}: must be a text of at least one character, or several of them")
    return texts


def new_tokens_within(prompt_tokens: int, room: int, asked: int | None) -> int:
    """Return the most tokens of an answer: the number asked for, else what is left of the room, at most 4,096."""
    return max(1, min(MOST_NEW_TOKENS, room - prompt_tokens)) if asked is None else asked


def check_question(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if there is nothing to answer; a template would render it, as training needs, and a model guess.

    Args:
      messages: of a history, in OpenAI's layout. Its last message must not be the assistant's, nor a user's that has
        neither text nor pictures.
    """
    ordered = ordered_messages(messages)
    if not ordered:
        raise ValueError("messages is empty: give at least one, such as {'role': 'user', 'content': 'Hello'}")
    last, which = ordered[-1], f"message {len(ordered)} ({ordered[-1]['role']})"
    if last["role"] == "assistant":
        raise ValueError(
            f"{which}: the last message is an answer, so there is nothing to answer: "
            + (
                "add the results of its calls"
                if last.get("tool_calls")
                else "add a message of the user, or leave it out"
            )
        )
    if last["role"] == "user" and _is_blank(last["content"]):
        raise ValueError(f"{which}: its content is empty, so there is nothing to answer: write a text")


def _is_blank(content: str | Sequence[str | Mapping[str, Any]]) -> bool:
    """Return True for a content, in the spelling of templates, without a picture and with no text but white space."""
    parts = [content] if isinstance(content, str) else content
    texts = [part if isinstance(part, str) else part.get("text", "") for part in parts]
    shows_media = any(not isinstance(part, str) and part["type"] != "text" for part in parts)
    return not shows_media and not "".join(texts).strip()


def check_answer(prompt: Sequence[int], params: Params, config: TargetConfig, room: int) -> None:
    """Raise ValueError if a dialogue and its answer exceed the room, or if the model does not have the tokens.

    Args:
      prompt: token ids of the dialogue.
      params: limits, sampling and stop ids of the answer.
      config: of the model.
      room: tokens that a request can have.
    """
    check_prompt(prompt, params, config, "the dialogue")
    if len(prompt) + params.max_new_tokens > room:
        raise ValueError(
            f"the dialogue has {len(prompt)} tokens, which with an answer of {params.max_new_tokens} are more than the "
            f"{room} that there is room for: shorten the messages or the answer, or make more room"
        )
