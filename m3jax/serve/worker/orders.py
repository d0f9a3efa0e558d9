"""From a message of the protocol to what the engine takes: prompt, parameters, pictures, a guide."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from smg_grpc_proto import vllm_engine_pb2 as protocol

from m3jax.decoding import Guide, Media, Params, Sampling
from m3jax.messages import shown
from m3jax.serve.constraints import Constraints
from m3jax.serve.worker.fields import check_fields
from m3jax.serve.worker.tensors import MediaReader, SentMedium
from m3jax.text import Tokenizer

_PROTOCOL_NAMES = {"max_new_tokens": "max_tokens", "stop_ids": "stop_token_ids", "top_logprobs": "logprobs"}
_ENGINE_NAME = re.compile(rf"\b(?:{'|'.join(_PROTOCOL_NAMES)})\b")


@dataclass(frozen=True)
class Order:
    """A request as the worker carries it out.

    Attributes:
      prompt: token ids.
      params: how it goes on.
      media: images and videos of the prompt.
      sent_media: the images and then the videos, as the gateway knows them.
      guide: of its constraint; None without one.
      n: continuations that are wanted.
      stop: strings that end a continuation.
      skip_special_tokens: whether special tokens have no text in which a stop string could be.
      wants_logprobs: whether the log-probabilities of new tokens are told.
      is_streamed: whether tokens are told as they come.
    """

    prompt: tuple[int, ...]
    params: Params
    media: Media | None
    sent_media: tuple[SentMedium, ...]
    guide: Guide | None
    n: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    wants_logprobs: bool
    is_streamed: bool


@dataclass(frozen=True)
class OrderReader:
    """A reader of requests for one model and engine.

    Attributes:
      tokenizer: the model's.
      eos_ids: that end a continuation.
      max_length: tokens that prompt and continuation can have together.
      max_stop_ids: that a request can have, EOS ids included.
      constraints: of the model's vocabulary.
      media: reads images and videos.
    """

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    max_length: int
    max_stop_ids: int
    constraints: Constraints
    media: MediaReader

    def read(self, request: protocol.GenerateRequest) -> Order:
        """Return what a request asks for.

        Raises:
          ValueError: what cannot be carried out, with the field's name.
        """
        check_fields(request)
        asked = request.sampling_params
        if request.data_parallel_rank:
            raise ValueError(f"data_parallel_rank = {request.data_parallel_rank}: this worker has rank 0 alone")
        prompt = self._prompt(request)
        batches = [*([request.mm_inputs] if request.HasField("mm_inputs") else []), *request.extra_mm_inputs]
        prompt, media, sent_media = self.media.read(batches, prompt)
        return Order(
            prompt=prompt,
            params=self._params(asked, len(prompt)),
            media=media,
            sent_media=sent_media,
            guide=self._guide(asked, prompt),
            n=asked.n or 1,
            stop=_stop_strings(asked.stop),
            skip_special_tokens=asked.skip_special_tokens,
            wants_logprobs=asked.HasField("logprobs"),
            is_streamed=request.stream,
        )

    def _guide(self, asked: protocol.SamplingParams, prompt: tuple[int, ...]) -> Guide | None:
        """Return the guide of a request's constraint; None where it has none."""
        kind = asked.WhichOneof("constraint")
        if kind is None:
            return None
        if asked.ignore_eos:
            raise ValueError(f"ignore_eos beside {kind}: an answer under a constraint ends with EOS; leave one out")
        constraint = getattr(asked, kind)
        if kind == "choice":
            constraint = list(constraint.choices)
        return self.constraints.guide(kind, constraint, prompt, asked.grammar_from_first_token)

    def _prompt(self, request: protocol.GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's ids, encoded if it came as text, and cut from the left if that was asked for.

        A text that has too many tokens in any case is refused before it is encoded, which would take minutes. It is so
        where it would be cut, too: where a token begins depends on all of the text before it.
        """
        kind = request.WhichOneof("input")
        if kind is None:
            raise ValueError("the request has no prompt: give tokenized or text")
        if kind == "text" and (fewest := self.tokenizer.fewest_tokens(request.text)) > self.max_length:
            raise ValueError(
                f"text: the prompt has {fewest} tokens or more, and the request can have {self.max_length}: shorten it"
            )
        ids = request.tokenized.input_ids if kind == "tokenized" else self.tokenizer.encode(request.text)
        asked = request.sampling_params
        if not asked.HasField("truncate_prompt_tokens"):
            return tuple(ids)
        most = asked.truncate_prompt_tokens
        if most == -1:
            most = self.max_length - (asked.max_tokens or 1)
        if most < 1:
            raise ValueError(
                f"truncate_prompt_tokens = {asked.truncate_prompt_tokens}: must be at least 1, or -1 for as many as "
                f"fit into {self.max_length} beside max_tokens"
            )
        return tuple(ids)[-most:]

    def _params(self, asked: protocol.SamplingParams, prompt_tokens: int) -> Params:
        """Return the parameters of the continuation; a number of 0 that proto3 does not tell from none is off."""
        sampling = Sampling(
            temperature=asked.temperature if asked.HasField("temperature") else 1.0,
            top_k=asked.top_k or None,
            top_p=asked.top_p or None,
            min_p=asked.min_p or None,
            repetition_penalty=asked.repetition_penalty or None,
            presence_penalty=asked.presence_penalty or None,
            frequency_penalty=asked.frequency_penalty or None,
            logit_bias=dict(asked.logit_bias) or None,
            # Without a seed two equal requests are two draws.
            seed=asked.seed % 2**32 if asked.HasField("seed") else secrets.randbits(32),
        )
        stop_ids = tuple(dict.fromkeys((*(() if asked.ignore_eos else self.eos_ids), *asked.stop_token_ids)))
        if len(stop_ids) > self.max_stop_ids:
            raise ValueError(
                f"stop_token_ids: {len(stop_ids)} ids with those of EOS, and this engine takes {self.max_stop_ids}"
            )
        if asked.logprobs < 0:
            raise ValueError(f"logprobs = {asked.logprobs}: must be from 0 to 20; all of the vocabulary are not told")
        return Params(
            max_new_tokens=asked.max_tokens
            if asked.HasField("max_tokens")
            else max(1, self.max_length - prompt_tokens),
            sampling=sampling,
            stop_ids=stop_ids,
            min_tokens=asked.min_tokens,
            top_logprobs=asked.logprobs,
            prompt_logprobs=asked.prompt_logprobs if asked.HasField("prompt_logprobs") else None,
        )


def in_protocol_names(error: ValueError) -> ValueError:
    """Return what the engine says is wrong with a request in the words of the protocol's fields.

    Args:
      error: of `Engine.add`.
    """
    return ValueError(_ENGINE_NAME.sub(lambda match: _PROTOCOL_NAMES[match[0]], str(error)))


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if not all(stop):
        raise ValueError(f"stop = {shown(list(stop))}: a stop string cannot be empty; leave it out")
    return tuple(stop)
