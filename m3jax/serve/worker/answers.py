"""From the engine's events to messages of the protocol, with the stop strings that the engine does not know."""

from collections.abc import Iterator, Mapping, Sequence

from smg_grpc_proto import vllm_engine_pb2 as protocol

from m3jax.decoding import TokenEvent
from m3jax.serve.worker.orders import Order
from m3jax.text import TextStream

# A reason of the engine's, and how the protocol calls it. Without a distribution (NaN), or with every token ruled out,
# there is no answer that the client could have asked for.
_FINISH_REASONS = {
    **{"length": "length", "stop_id": "stop", "stop_string": "stop", "aborted": "abort", "deadline": "abort"},
    **{"nan": "error", "no_token": "error"},
}


class StopFinder:
    """A search for stop strings in a text that comes token by token.

    Args:
      text: the detokenizer of this continuation.
      stop: the strings.
      min_tokens: a string that is complete before the continuation has more tokens than this does not count.
    """

    def __init__(self, text: TextStream, stop: Sequence[str], min_tokens: int = 0):
        self._text, self._stop, self._min_tokens = text, tuple(stop), min_tokens
        self._kept = max(map(len, stop), default=1) - 1  # characters that a later match can begin in
        self._end = ""  # of the text so far
        self._num_tokens = 0

    def push(self, token: int) -> str | None:
        """Take the next token, and return the stop string that it completes; of several the one that begins first."""
        if not self._stop:
            return None
        self._num_tokens += 1
        text = self._end + self._text.push(token)
        self._end = text[max(0, len(text) - self._kept) :]
        if self._num_tokens <= self._min_tokens:
            return None
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        return min(found, key=lambda match: match[0])[1] if found else None


class Answer:
    """One continuation of a request on its way to the client.

    Args:
      order: the request.
      index: of the continuation among the request's.
      text: a detokenizer, for stop strings.

    Attributes:
      stop_string: the one that ended the continuation; None while there is none.
    """

    def __init__(self, order: Order, index: int, text: TextStream):
        self.stop_string: str | None = None
        self._order, self._index = order, index
        self._finder = StopFinder(text, order.stop, order.params.min_tokens)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[Mapping[int, float]] = []

    def messages(self, event: TokenEvent) -> Iterator[protocol.GenerateResponse]:
        """Yield what the client is told after an event; the last one has `complete`.

        Tokens behind a stop string count no more: a device call draws several at once.
        """
        start = len(self._tokens)
        if self.stop_string is None:
            tokens = self._until_stop(event)
            self._tokens += tokens
            self._logprobs += event.logprobs[: len(tokens)]
            self._top_logprobs += event.top_logprobs[: len(tokens)]
        if self._order.is_streamed and len(self._tokens) > start:
            yield protocol.GenerateResponse(chunk=self._chunk(event, start))
        if event.generation is not None:
            yield protocol.GenerateResponse(complete=self._complete(event))

    def _until_stop(self, event: TokenEvent) -> tuple[int, ...]:
        """Return an event's tokens up to the one that completes a stop string, which is noted."""
        for number, token in enumerate(event.tokens, 1):
            if event.stop_reason == "stop_id" and number == len(event.tokens):
                break  # a stop id is no part of the text
            self.stop_string = self._finder.push(token)
            if self.stop_string is not None:
                return event.tokens[:number]
        return event.tokens

    def _chunk(self, event: TokenEvent, start: int) -> protocol.GenerateStreamChunk:
        return protocol.GenerateStreamChunk(
            token_ids=self._tokens[start:],
            prompt_tokens=len(self._order.prompt),
            completion_tokens=len(self._tokens) - start,  # of this chunk, as vLLM's servicer counts
            cached_tokens=event.cached_tokens,
            output_logprobs=self._output_logprobs(start),
            input_logprobs=None if start else self._input_logprobs(event.prompt_logprobs),
            index=self._index,
        )

    def _complete(self, event: TokenEvent) -> protocol.GenerateComplete:
        """Return the last message; a streamed answer's log-probabilities came with its chunks, the prompt's with the
        first.
        """
        came_with_chunks = self._order.is_streamed and bool(self._tokens)
        matched = {}
        if self.stop_string is not None:
            reason, matched = "stop_string", {"matched_stop_str": self.stop_string}
        else:
            reason = event.stop_reason
            matched = {"matched_token_id": self._tokens[-1]} if reason == "stop_id" else {}
        return protocol.GenerateComplete(
            output_ids=self._tokens,
            finish_reason=_FINISH_REASONS[reason],
            prompt_tokens=len(self._order.prompt),
            completion_tokens=len(self._tokens),
            cached_tokens=event.generation.cached_tokens,
            output_logprobs=None if self._order.is_streamed else self._output_logprobs(0),
            input_logprobs=None if came_with_chunks else self._input_logprobs(event.generation.prompt_logprobs),
            index=self._index,
            spec_draft_tokens=event.generation.drafted,
            spec_accepted_tokens=event.generation.accepted,
            **matched,
        )

    def _input_logprobs(self, known: Sequence[Mapping[int, float]]) -> protocol.InputLogProbs | None:
        """Return the log-probabilities of the prompt; None where they were not asked for. The first token has none.

        Args:
          known: as `Generation.prompt_logprobs`; a request that was aborted before its prompt was through has fewer.
        """
        prompt, num_top = self._order.prompt[: len(known) + 1], self._order.params.prompt_logprobs
        if num_top is None:
            return None
        scores = zip(prompt[1:], known, strict=True)
        return protocol.InputLogProbs(
            token_logprobs=[
                protocol.InputTokenLogProb(),
                *(protocol.InputTokenLogProb(value=of_token[token]) for token, of_token in scores),
            ],
            token_ids=prompt,
            top_logprobs=[
                protocol.TopLogProbs(),
                *(top_logprobs(of_token, num_top) for of_token in known),
            ],
        )

    def _output_logprobs(self, start: int) -> protocol.OutputLogProbs | None:
        """Return the log-probabilities of the tokens from `start` on; None where they were not asked for."""
        if not self._order.wants_logprobs:
            return None
        num_top = self._order.params.top_logprobs
        return protocol.OutputLogProbs(
            token_logprobs=self._logprobs[start:],
            token_ids=self._tokens[start:],
            top_logprobs=[top_logprobs(of_token, num_top) for of_token in self._top_logprobs[start:]],
        )


def top_logprobs(of_token: Mapping[int, float], most: int) -> protocol.TopLogProbs:
    """Return the alternatives of a token as a message.

    Args:
      of_token: {id: log-probability}, best first; the token itself comes last if it is none of the best.
      most: how many were asked for.
    """
    best = list(of_token.items())[:most]
    return protocol.TopLogProbs(values=[value for _, value in best], token_ids=[token for token, _ in best])
