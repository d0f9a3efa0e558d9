"""Decoding of token ids to text as they come, up to a stop string."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from m3jax.decoding import Engine, Generation, TokenEvent
from m3jax.text import StoppableText, Tokenizer


def stream_text(engine: Engine, texts: Mapping[int, StoppableText]) -> Iterator[tuple[int, str, Generation | None]]:
    """Run the engine until some requests have ended, yielding their text as it comes.

    Args:
      engine: has the requests, of which no event was given out yet.
      texts: of each request, by its handle; they grow, and where one meets a stop string its request ends.

    Yields:
      A handle, the next piece of its text, and when the request has ended its result, with all of the text.

    Raises:
      ValueError: a token id that the tokenizer does not know.
    """
    running = set(texts)
    while running:
        for event in engine.step():
            if event.handle not in running:
                continue
            text, result = texts[event.handle], None
            piece = "" if text.stopped else _push(event, text)
            if text.stopped:
                # A device call draws several tokens: those after the one that completed the stop string do not count.
                engine.stop(event.handle, text.tokens)
            if event.generation is not None:
                running.remove(event.handle)
                result = replace(engine.result(event.handle), text=text.text)
            if piece or result is not None:
                yield event.handle, piece, result


def generate_text(
    engine: Engine,
    handles: Sequence[int],
    tokenizer: Tokenizer,
    *,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> list[Generation]:
    """Run the engine until these requests have ended, and return their text.

    Args:
      engine: has the requests.
      handles: of the requests.
      tokenizer: the checkpoint's.
      stop: a request ends when its text contains one of these, be it in one token or across several.
      on_text: called with the handle and each new piece of its text.

    Returns:
      One a request, with its text.

    Raises:
      ValueError: an empty stop string, or a token id that the tokenizer does not know.
    """
    texts = {handle: StoppableText(tokenizer.stream(), stop) for handle in handles}
    results: dict[int, Generation] = {}
    for handle, piece, result in stream_text(engine, texts):
        if on_text is not None and piece:
            on_text(handle, piece)
        if result is not None:
            results[handle] = result
    return [results[handle] for handle in handles]


def _push(event: TokenEvent, text: StoppableText) -> str:
    """Return the text of a request's new tokens, up to a stop string."""
    piece = ""
    # A stop id is a token of the continuation, and no part of its text.
    for token in event.tokens[:-1] if event.stop_reason == "stop_id" else event.tokens:
        piece += text.push(token)
        if text.stopped:
            return piece
    return piece if event.generation is None else piece + text.finish()
