"""One answer, from the prompt's tokens to events: the loop that `chat` and `Dialogue` share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from m3jax.compile_cache import compile_cache
from m3jax.completion import StoppableText, stream_text
from m3jax.decoding import Engine, Generation, Media, Params, check_logits
from m3jax.dialogue.reply import Reply
from m3jax.platform import platform
from m3jax.progress import Activity, activity
from m3jax.text import Event, Message, OutputParser, Tokenizer

END_OF_TURN = "[e~["
_FINISH_REASONS = {"length": "length", "aborted": "interrupted"}


def stop_ids(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that end a turn: those of the model, and the tokenizer's own end of a turn.

    Args:
      tokenizer: of the model.
      eos_ids: of the model's configuration, or of its folder's generation_config.json.
    """
    of_tokenizer = (tokenizer.eos_id, tokenizer.backend.token_to_id(END_OF_TURN))
    return tuple(dict.fromkeys((*eos_ids, *(token for token in of_tokenizer if token is not None))))


def answer(
    engine: Engine,
    tokenizer: Tokenizer,
    parser: OutputParser,
    prompt: Sequence[int],
    params: Params,
    media: Media | None = None,
    *,
    stop: Sequence[str] = (),
    is_interrupted: Callable[[], bool] = lambda: False,
    progress: bool = True,
) -> Iterator[Event | Reply]:
    """Run one request of an engine, and yield its output as events.

    Special tokens are part of the text, because the markers of reasoning and calls may be special. No event ends within
    a character, and an answer that is cut within one ends before it. Closing the iterator ends the request.

    Args:
      engine: the engine to run on; its other requests advance too.
      tokenizer: of the model.
      parser: a new one, which knows the tools and the thinking mode.
      prompt: token ids, checked already.
      params: limits, sampling and stop ids of the request.
      media: images and videos of the prompt.
      stop: texts before which the answer ends.
      is_interrupted: called after each device call; if it returns True, the answer ends there.
      progress: whether reading the prompt is shown (`m3jax.progress`).

    Yields:
      The parser's events, and last the whole answer.

    Raises:
      FloatingPointError: the model's logits were NaN or infinite.
    """
    handle = engine.add(prompt, params, media)
    try:
        with activity(progress, about=(platform(), engine.config, engine.shapes)) as line:
            engine.warmup_for(handle, partial(_compiling, line))  # before the first call, so that its wait has a name
            line.say("reading the dialogue")
            # A long document takes many calls; an interrupt is noticed between two of them.
            while engine.prefill() and not is_interrupted():
                done, total = engine.prefilled
                line.say(f"reading the dialogue: {done} of {total} tokens")
        if is_interrupted() and engine.reason(handle) == "unfinished":
            engine.abort(handle)
        text = StoppableText(tokenizer.stream(skip_special_tokens=False, show_unfinished=False), stop)
        events: list[Event] = []
        result: Generation | None = None
        for _, piece, ended in stream_text(engine, {handle: text}):
            result = ended
            new = list(parser.feed(piece))
            events += new
            yield from new
            if is_interrupted() and engine.reason(handle) == "unfinished":
                engine.abort(handle)
        check_logits([result])
        last = list(parser.finish(is_cut=result.stop_reason in _FINISH_REASONS))
        yield from last
        parsed = Message.of([*events, *last])
        has_calls = any(call.is_whole for call in parsed.tool_calls)
        yield Reply(
            parsed=parsed,
            finish_reason=_FINISH_REASONS.get(result.stop_reason) or ("tool_calls" if has_calls else "stop"),
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            new_tokens=len(result.tokens),
        )
    finally:
        # Reached too where the iterator is closed, or the logits are NaN: the request must not keep its row and pages.
        if engine.reason(handle) == "unfinished":
            engine.abort(handle)
        engine.forget(handle)


@contextmanager
def _compiling(line: Activity, names: str) -> Iterator[None]:
    """Show that programs with these names are compiled inside the block, and keep them for the next process."""
    with compile_cache(), line.timed(f"compiling {names}"):
        yield
