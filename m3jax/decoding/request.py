"""What is asked of the model and what comes back, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3jax.decoding.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Params:
    """How a prompt is continued.

    Attributes:
      max_new_tokens: at least 1.
      sampling: how tokens are drawn.
      stop_ids: a request ends with the first of these; that token is part of the continuation.
    """

    max_new_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
      tokens: new token ids only, with the stop id or the token that completed a stop string as the last.
      logprobs: natural logarithm of each token's probability under the model's own logits, before any knob.
      stop_reason: "length", "stop_id", "stop_string", "nan" (the logits had no distribution), "aborted", or
        "unfinished".
      prompt_tokens: length of the prompt.
      text: the decoded continuation, without the stop id and cut before a stop string; None where no text was
        asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    prompt_tokens: int
    text: str | None = None


@dataclass
class Timings:
    """Where the seconds of an engine went.

    Attributes:
      compile_seconds: tracing and compiling, in no other number here; about 0 for a shape met before.
      prefill_seconds: the prompts, up to and with each one's first new token.
      decode_seconds: the new tokens after the first.
      prompt_tokens: that went through the model; those found in the prefix cache did not.
      decoded_tokens: new tokens of all rows after each one's first.
    """

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    decoded_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens a second, all rows together; None before prefill."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """New tokens a second after the first, all rows together; None where there are none."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else None


@dataclass
class Drafting:
    """What came of proposals.

    Attributes:
      draft_tokens: K, proposals of a round; 0 without a drafter.
      forwards: calls of the target that verified proposals, counted for each row that took part.
      accepted: of these, those in which the first proposal was accepted, the first two, and so on up to K.
    """

    draft_tokens: int
    forwards: int = 0
    accepted: tuple[int, ...] = ()

    def add(self, rounds: Any) -> None:
        """Count those of one call (`device.Rounds`)."""
        self.forwards += int(rounds.forwards)
        before = self.accepted or (0,) * self.draft_tokens
        self.accepted = tuple(a + int(b) for a, b in zip(before, rounds.accepted, strict=True))

    @property
    def acceptance(self) -> tuple[float, ...] | None:
        """Share of the target's calls that accepted the first proposal, the first two, and so on; None before any."""
        return tuple(n / self.forwards for n in self.accepted) if self.forwards else None

    @property
    def mean_length(self) -> float | None:
        """Tokens of one verification, the target's own one counted, were no row to end; None before any."""
        return 1 + sum(self.acceptance) if self.forwards else None


def check_prompt(prompt: Sequence[int], params: Params, config: Any, name: str = "prompt") -> None:
    """Refuse what the model cannot do.

    Args:
      prompt: token ids.
      params: how it goes on.
      config: has vocab_size and max_position_embeddings.
      name: what the prompt is called in an error.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, or more tokens than the context.
    """
    if not len(prompt):
        raise ValueError(f"{name} is empty: give it at least one token")
    _check_ids(name, prompt, config.vocab_size)
    _check_ids("stop_ids", params.stop_ids, config.vocab_size)
    limit, asked = config.max_position_embeddings, params.max_new_tokens
    if not _is_integer(asked) or asked < 1:
        raise ValueError(f"max_new_tokens = {asked!r}: must be an integer of at least 1")
    if len(prompt) >= limit:
        raise ValueError(f"{name} has {len(prompt)} tokens and the model's context is {limit}: shorten the prompt")
    if len(prompt) + asked > limit:
        raise ValueError(
            f"{name} has {len(prompt)} tokens, which with max_new_tokens = {asked} is more than the model's context of "
            f"{limit}: ask for at most {limit - len(prompt)} new tokens"
        )


def _check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    for token in ids:
        if not _is_integer(token) or not 0 <= token < vocab:
            raise ValueError(f"{name}: {token!r} is no token id; they are integers from 0 to {vocab - 1}")


def as_prompts(prompts: Any) -> list[tuple[int, ...]]:
    """Lists, tuples or 1-D arrays of token ids as tuples; anything else is refused with the reason.

    Raises:
      ValueError: text, or one prompt where a list of prompts belongs.
    """
    if isinstance(prompts, str) or any(isinstance(p, str) for p in prompts):
        raise ValueError("prompts are lists of token ids, got text: encode it with the model's tokenizer first")
    # As objects, so that what is no integer stays what it is until it is refused by name.
    arrays = [np.asarray(p, dtype=object) for p in prompts]
    if any(a.ndim != 1 for a in arrays):
        raise ValueError("prompts is a list of prompts, each a list of token ids: wrap a single prompt as [prompt]")
    return [tuple(a.tolist()) for a in arrays]


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
