"""A request on the host: its parameters, its state in an engine, and its continuation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, Shaped, UInt32

from m3jax.decoding.engine.media import PlacedSegment
from m3jax.decoding.protocols import RECORDS, TargetConfig
from m3jax.decoding.sampling import MASK_BITS, MAX_TOP_LOGPROBS, HostOrDevice, Sampling
from m3jax.decoding.steering import Steer
from m3jax.messages import shown


@dataclass(frozen=True, kw_only=True)
class Params:
    """The parameters of a prompt's continuation.

    Attributes:
      max_new_tokens: at least 1.
      sampling: how tokens are drawn.
      stop_ids: a request ends with the first of these; that token is part of the continuation.
      min_tokens: none of the stop ids is drawn before the continuation has so many tokens.
      ignore_eos: of the stop ids, the EOS ids of the model's configuration do not count.
      top_logprobs: how many of the most probable tokens `Generation.top_logprobs` has of each new one, 0 to 20; 0 is
        off.
      prompt_logprobs: how many of the most probable tokens `Generation.prompt_logprobs` has in the place of each token
        of the prompt but the first, 0 to 20; None for no such list. Such a request computes its whole prompt.
      record: what comes back of each new token (`Generation.records`): the layers' choices, "expert_ids" and "blocks";
        the tokens that could have been drawn in its place, "support", and its log-probability among them,
        "drawn_logprobs".
      capture: names of other values that come back with them, as `m3jax.model.M3.intermediates` has them, such as
        "layers.3.output"; "layers.*." for all layers that have the value.
    """

    max_new_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    record: tuple[str, ...] = ()
    capture: tuple[str, ...] = ()

    @property
    def recorded(self) -> tuple[str, ...]:
        """The names of all that comes back for each new token."""
        return (*self.record, *self.capture)

    def stops(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the stop ids that count for a model of these EOS ids."""
        return tuple(token for token in self.stop_ids if not (self.ignore_eos and token in eos_ids))


@runtime_checkable
class Guide(Protocol):
    """A rule that says which tokens a continuation may go on with, as a grammar does.

    It is asked on the host before each new token of its request, which therefore gets one token in a call of the
    device, whatever the others get.
    """

    def bits(self, new: Sequence[int]) -> UInt32[np.ndarray, " W"] | None:
        """Return a bit for each token of the vocabulary, 1 where it may come next; None where all may.

        A request is taken back, copied and begun again, so the answer must follow from the tokens alone.

        Args:
          new: token ids of the continuation so far, without the prompt.

        Returns:
          uint32 of W = ceil(V / 32) words; token i is bit i % 32 of word i // 32. Bits past the vocabulary mean
          nothing. If no bit is set the request ends with the stop reason "no_token".
        """
        ...


@dataclass(frozen=True)
class RequestTimings:
    """The seconds that a request spent, by what it waited for.

    Attributes:
      queue_seconds: from `add` until it first had a row.
      prompt_seconds: from then until its first new token.
      decode_seconds: from its first new token to its newest.
      preemptions: how often it had to give its row back.
    """

    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
      tokens: new token ids only, with the stop id or the token that completed a stop string as the last.
      logprobs: natural logarithm of each token's probability under the model's own logits, before any knob.
      stop_reason: "length", "stop_id", "stop_string", "nan" (the logits had no distribution), "no_token" (the guide and
        the knobs ruled every token out), "deadline", "aborted", or "unfinished".
      prompt_tokens: length of the prompt.
      cached_tokens: of these, those that the prefix cache had when the request first got its pages.
      text: the decoded continuation, without the stop id and cut before a stop string; None where no text was
        asked for.
      top_logprobs: of each new token its `Params.top_logprobs` most probable alternatives as {id: log-probability},
        best first, under the model's own logits as `logprobs`; the token itself comes last if it is none of them. []
        where none were asked for.
      prompt_logprobs: of each token of the prompt but the first the same, with the `Params.prompt_logprobs` most
        probable in its place; as many as are computed so far, [] where none were asked for.
      versions: of the weights that drew each token (`Engine.update`); no part of what makes two generations equal.
      timings: the seconds that it took so far; likewise.
      records: what `Params.record` and `Params.capture` asked for, by name, first axis new tokens: the choices and
        values that the layers had at the position whose logits drew the token. "expert_ids" are [X L A] of the L layers
        that have experts, best first, "blocks" [X L K J] of the sparse layers; int16, or int32 where a request can have
        more than 32,767 blocks; `m3jax.model.Choices.of_records` gives them to a call of the model. "support" is the
        set of tokens that the knobs left, [X W] int32 with the bits of `Guide.bits`, and "drawn_logprobs" [X] float32
        the token's log-probability after every knob, where `logprobs` has it before them (`m3jax.decoding.support`).
        Other values have the axes that `intermediates` gives them but the batch, tokens first: "layers.3.q" [X N H],
        "layers.3.block_scores" [X K M], in their own dtype. A token that was not recorded has -1, or NaN.
      drafted: tokens that a draft proposed for it; no part of what makes two generations equal.
      accepted: of these, those that the model accepted; likewise.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    prompt_tokens: int
    text: str | None = None
    cached_tokens: int = 0
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list, compare=False)
    timings: RequestTimings | None = field(default=None, compare=False)
    records: dict[str, Shaped[np.ndarray, "X ..."]] = field(default_factory=dict, compare=False)
    drafted: int = field(default=0, compare=False)
    accepted: int = field(default=0, compare=False)

    def cut(self, keep: int, stop_reason: str) -> "Generation":
        """Return the first `keep` tokens, with another reason to stop there."""
        lists = ("tokens", "logprobs", "top_logprobs", "versions")
        kept = {name: getattr(self, name)[:keep] for name in lists}
        kept["records"] = {name: record[:keep] for name, record in self.records.items()}
        return replace(self, stop_reason=stop_reason, **kept)


@dataclass(frozen=True)
class TokenEvent:
    """The news of one request after a round of work.

    Attributes:
      handle: of the request.
      start: new tokens that it had before these. After `truncate` that is fewer than were given out: what came at and
        behind this place counts no more.
      tokens: the new tokens of this round; none where the request only ended.
      logprobs: of these tokens, as in `Generation`.
      top_logprobs: likewise; empty where none were asked for.
      versions: of the weights that drew each.
      stop_reason: "unfinished", or the reason for which the request has ended; then this is its last event.
      generation: with the last event, all of it; None before.
      cached_tokens: as in `Generation`.
      prompt_logprobs: as in `Generation`, with the first of the new tokens; empty elsewhere.
    """

    handle: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[int, float], ...]
    versions: tuple[int, ...]
    stop_reason: str
    generation: Generation | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[dict[int, float], ...] = ()


@dataclass(eq=False)
class PromptScores:
    """The log-probabilities of a prompt's tokens, which the requests of a group have in common.

    Attributes:
      known: as in `Generation.prompt_logprobs`: of the first tokens, in order, as far as they are computed.
    """

    known: list[dict[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """A request in an engine. Its tokens are the prompt and what was generated; the last one is not in the cache.

    Attributes:
      handle: its number; an older request has a smaller one.
      prompt: token ids.
      params: how it goes on.
      segments: its images and chunks of videos, until it has ended.
      prompt_keys: the keys of its prompt's pages; the prompt itself if it has no segments.
      new: token ids generated so far.
      logprobs: of them.
      top_logprobs: as in `Generation`.
      guide: says which tokens may come next, if there is one.
      edits: how values are changed in it, by name; None for not at all.
      key_offset: of the key of its first token (`m3jax.decoding.steering.KeyOffsets`).
      recorded: of `records` what each call gave, in order.
      unread_records: what the latest call gave, on its way from the device, as arguments of `note_records`.
      row: its place in the decode batch; None while it waits for one.
      page_handle: the allocator's handle of its pages; None while it has none.
      cached: tokens of it in the cache.
      found: of its tokens those that were in the prefix cache when it first got pages; None before.
      is_decoding: whether its prompt is through.
      stop_reason: that of `Generation`; "unfinished" while it goes on.
      versions: of the weights that drew each new token.
      priority: requests of a higher one are served first.
      deadline: `time.perf_counter()` at which it ends, done or not; None for none.
      group: number that the requests of one `add` share.
      prompt_scores: of its prompt.
      reported: new tokens that events have given out.
      passes: how often a younger request got a row while this one waited for pages.
      common: while it waits, with how many tokens its prompt and those of others begin alike, by their handles.
      preemptions: how often it had to give its row back.
      drafted: tokens that a draft proposed for it.
      accepted: of these, those that the model accepted.
      added_at: `time.perf_counter()` when it was added.
      row_at: when it first got a row; None before.
      first_token_at: when its first token came; None before.
      last_token_at: when its newest token came; None before the first.
    """

    handle: int
    prompt: tuple[int, ...]
    params: Params
    segments: tuple[PlacedSegment, ...] = ()
    prompt_keys: tuple[int, ...] = ()
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    guide: Guide | None = None
    edits: Mapping[str, Steer] | None = None
    key_offset: int = 0
    recorded: list[dict[str, Shaped[np.ndarray, "X ..."]]] = field(default_factory=list)
    unread_records: tuple[Mapping[str, Shaped[HostOrDevice, "B W ..."]], int, int] | None = None
    row: int | None = None
    page_handle: int | None = None
    cached: int = 0
    found: int | None = None
    is_decoding: bool = False
    stop_reason: str = "unfinished"
    versions: list[int] = field(default_factory=list)
    priority: int = 0
    deadline: float | None = None
    group: int | None = None
    prompt_scores: PromptScores = field(default_factory=PromptScores)
    reported: int = 0
    passes: int = 0
    common: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    added_at: float = field(default_factory=perf_counter)
    row_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def order(self) -> tuple[int, float, int]:
        """The order of service: the higher priority, then the earlier deadline, then the older request."""
        return -self.priority, math.inf if self.deadline is None else self.deadline, self.handle

    @property
    def generation(self) -> Generation:
        """The continuation so far."""
        return Generation(
            tokens=list(self.new),
            logprobs=list(self.logprobs),
            stop_reason=self.stop_reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            top_logprobs=list(self.top_logprobs),
            prompt_logprobs=list(self.prompt_scores.known),
            versions=list(self.versions),
            timings=self.timings,
            records=self.records,
            drafted=self.drafted,
            accepted=self.accepted,
        )

    @property
    def cached_tokens(self) -> int:
        """The number of the prompt's tokens that were in the prefix cache when it first got pages; 0 before."""
        return min(self.found or 0, len(self.prompt))

    @property
    def timings(self) -> RequestTimings:
        """The seconds that the request has taken so far."""
        now = perf_counter()
        row_at = now if self.row_at is None else self.row_at
        first_at = now if self.first_token_at is None else self.first_token_at
        return RequestTimings(
            queue_seconds=row_at - self.added_at,
            prompt_seconds=max(0.0, first_at - row_at),
            decode_seconds=0.0 if self.last_token_at is None else self.last_token_at - first_at,
            preemptions=self.preemptions,
        )

    def news(self) -> TokenEvent:
        """Return what came since the last call, which is reported with it."""
        start, self.reported = self.reported, len(self.new)
        has_ended = self.stop_reason != "unfinished"
        return TokenEvent(
            handle=self.handle,
            start=start,
            tokens=tuple(self.new[start:]),
            logprobs=tuple(self.logprobs[start:]),
            top_logprobs=tuple(self.top_logprobs[start:]),
            versions=tuple(self.versions[start:]),
            stop_reason=self.stop_reason,
            generation=self.generation if has_ended else None,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=tuple(self.prompt_scores.known) if start == 0 and self.new else (),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the new tokens."""
        return (*self.prompt, *self.new)

    @property
    def token_array(self) -> Int32[np.ndarray, " N"]:
        """The prompt and the new tokens as an array."""
        return np.concatenate([self._prompt_array, np.array(self.new, np.int32)])

    @cached_property
    def _prompt_array(self) -> Int32[np.ndarray, " P"]:
        """The prompt; a long one takes longer to copy from a tuple than a call of its tokens to launch."""
        return np.array(self.prompt, np.int32)

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys of the request's pages: tokens, and keys of features (`m3jax.decoding.engine.media`)."""
        return (*self.prompt_keys, *self.new)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and the continuation."""
        return len(self.prompt) + len(self.new)

    def keys_between(self, start: int, end: int) -> tuple[int, ...]:
        """Return `keys[start:end]` without making a tuple of all keys: a long prompt has many more."""
        count = len(self.prompt_keys)
        return (*self.prompt_keys[start:end], *self.new[max(start - count, 0) : max(end - count, 0)])

    def segments_in(self, count: int) -> list[PlacedSegment]:
        """Return the segments that have features among the next `count` tokens that are not in the cache."""
        return [placed for placed in self.segments if placed.is_in(self.cached, self.cached + count)]

    def append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top_ids: Sequence[Sequence[int]],
        top_logprobs: Sequence[Sequence[float]],
        version: int,
    ) -> None:
        """Add new tokens; of the most probable ones in their places those that were asked for are kept."""
        self.new += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)
        if asked := self.params.top_logprobs:
            of_tokens = zip(tokens, logprobs, top_ids, top_logprobs, strict=True)
            self.top_logprobs += [_alternatives(asked, *of_token) for of_token in of_tokens]

    @property
    def has_scores(self) -> bool:
        """True if all is known of its prompt's tokens that it asks for."""
        return self.params.prompt_logprobs is None or len(self.prompt_scores.known) >= len(self.prompt) - 1

    def note_scores(
        self,
        logprobs: Sequence[float],
        top_ids: Sequence[Sequence[int]],
        top_logprobs: Sequence[Sequence[float]],
    ) -> None:
        """Note the scores of the tokens behind each of the next ones after `cached`; past the prompt there are none."""
        following = self.prompt[self.cached + 1 : self.cached + 1 + len(logprobs)]
        scores = zip(following, logprobs, top_ids, top_logprobs, strict=False)
        found = [_alternatives(self.params.prompt_logprobs, *of_token) for of_token in scores]
        self.prompt_scores.known[self.cached : self.cached + len(found)] = found

    def keep(self, count: int) -> None:
        """Drop all new tokens but the first ones, and all that is known of them."""
        records = {name: record[:count] for name, record in self.records.items()}
        self.recorded = [records] if records and count else []
        del self.new[count:], self.logprobs[count:], self.top_logprobs[count:], self.versions[count:]
        self.reported = min(self.reported, count)

    def note_records(self, records: Mapping[str, Shaped[HostOrDevice, "B W ..."]], index: int, count: int) -> None:
        """Note what a call recorded of this request's new tokens; they are read when the next call has come.

        Args:
          records: of all rows, by name, on the device.
          index: the request's row in them.
          count: its new tokens.
        """
        if self.params.recorded and count:
            self._read_records()
            self.unread_records = records, index, count

    def _read_records(self) -> None:
        """Wait for what the latest call recorded. It is cut on the host: the device would compile for each count."""
        if self.unread_records is not None:
            records, index, count = self.unread_records
            of_row = lambda name: np.asarray(records[name])[index, :count].copy()  # of the whole nothing is held
            self.recorded.append({name: of_row(name) for name in self.params.recorded})
            self.unread_records = None

    @property
    def records(self) -> dict[str, Shaped[np.ndarray, "X ..."]]:
        """The values that were recorded for the new tokens, as in `Generation`; {} before the first."""
        self._read_records()
        if not self.recorded:
            return {}
        whole = {name: np.concatenate([of_call[name] for of_call in self.recorded]) for name in self.recorded[0]}
        # Tokens that were taken over from a request that recorded nothing come first.
        missing = {name: len(self.new) - len(values) for name, values in whole.items()}
        nothing = lambda dtype: np.nan if jnp.issubdtype(dtype, jnp.floating) else -1
        fill = lambda name, values: np.full((missing[name], *values.shape[1:]), nothing(values.dtype), values.dtype)
        whole = {name: np.concatenate([fill(name, values), values]) for name, values in whole.items()}
        self.recorded = [whole]
        return dict(whole)

    def continue_from(
        self,
        new: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[dict[int, float]],
        versions: Sequence[int],
        records: Mapping[str, Shaped[np.ndarray, "X ..."]],
    ) -> None:
        """Take over the new tokens of another request; where it asked for no alternatives a token is its own."""
        kept = {name: records[name] for name in self.params.recorded if name in records}
        self.recorded = [kept] if len(kept) == len(self.params.recorded) > 0 else []
        self.new, self.logprobs, self.versions = list(new), list(logprobs), list(versions)
        if self.params.top_logprobs:
            own = [{token: logprob} for token, logprob in zip(new, logprobs, strict=True)]
            self.top_logprobs = list(top_logprobs) or own

    @property
    def mask(self) -> UInt32[np.ndarray, " W"] | None:
        """The tokens that may come next as its guide's bits; None where all may."""
        return None if self.guide is None else self.guide.bits(tuple(self.new))

    @property
    def new_remaining(self) -> int:
        """The number of new tokens that the request may still get."""
        return self.params.max_new_tokens - len(self.new)

    @property
    def uncached(self) -> int:
        """The number of tokens that are not in the cache yet."""
        return self.num_tokens - self.cached


def _alternatives(
    count: int, token: int, logprob: float, ids: Sequence[int], logprobs: Sequence[float]
) -> dict[int, float]:
    """Return the `count` most probable tokens of a place, best first, and the token that stands there, with theirs."""
    best = {i: value for i, value in zip(ids[:count], logprobs, strict=False) if i >= 0}
    return best if token in best else best | {token: logprob}


def check_prompt(prompt: Sequence[int], params: Params, config: TargetConfig, name: str = "prompt") -> None:
    """Raise ValueError for a prompt or params that the model cannot serve.

    Args:
      prompt: token ids.
      params: how it goes on.
      config: of the model.
      name: what the prompt is called in an error.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, more tokens than the context, or no `Params`.
    """
    if not isinstance(params, Params) or not isinstance(params.sampling, Sampling):
        given = params.sampling if isinstance(params, Params) else params
        raise ValueError(f"params: got {shown(given)}; give Params(max_new_tokens=..., sampling=Sampling(...))")
    if isinstance(params.stop_ids, str) or not isinstance(params.stop_ids, Sequence):
        raise ValueError(f"stop_ids = {shown(params.stop_ids)}: must be a tuple of token ids, () for none")
    if not len(prompt):
        raise ValueError(f"{name} is empty: give it at least one token")
    check_ids(name, prompt, config.vocab_size)
    check_ids("stop_ids", params.stop_ids, config.vocab_size)
    check_ids("logit_bias", [token for token, _ in params.sampling.logit_bias or ()], config.vocab_size)
    check_ids("bad_words", [token for word in params.sampling.bad_words or () for token in word], config.vocab_size)
    if not _is_integer(params.min_tokens) or params.min_tokens < 0:
        raise ValueError(f"min_tokens = {shown(params.min_tokens)}: must be an integer of at least 0")
    if not isinstance(params.ignore_eos, bool):
        raise ValueError(f"ignore_eos = {shown(params.ignore_eos)}: must be True or False")
    if not _is_integer(params.top_logprobs) or not 0 <= params.top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"top_logprobs = {shown(params.top_logprobs)}: must be an integer from 0 to {MAX_TOP_LOGPROBS}"
        )
    asked = params.prompt_logprobs
    if asked is not None and (not _is_integer(asked) or not 0 <= asked <= MAX_TOP_LOGPROBS):
        raise ValueError(
            f"prompt_logprobs = {shown(asked)}: must be an integer from 0 to {MAX_TOP_LOGPROBS}, or None for no list"
        )
    if not isinstance(params.record, tuple) or any(name not in RECORDS for name in params.record):
        raise ValueError(f"record = {shown(params.record)}: must be a tuple of {', '.join(RECORDS)}; () for none")
    if not isinstance(params.capture, tuple) or not all(isinstance(name, str) for name in params.capture):
        raise ValueError(f"capture = {shown(params.capture)}: must be a tuple of names of values; () for none")
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
    if params.min_tokens > asked:
        raise ValueError(f"min_tokens = {params.min_tokens}: at most max_new_tokens = {asked}")


def check_guide(guide: object) -> None:
    """Raise ValueError for what is no `Guide`; None is none."""
    if guide is not None and not callable(getattr(guide, "bits", None)):
        raise ValueError(f"guide is {shown(guide)}: give an object with a method bits(new tokens), or None")


def check_bits(bits: object, handle: int, vocab: int) -> None:
    """Raise ValueError for a mask that is not as `Guide.bits` says; None is all tokens."""
    words = -(-vocab // MASK_BITS)
    if bits is None or (isinstance(bits, np.ndarray) and bits.dtype == np.uint32 and bits.shape == (words,)):
        return
    given = f"{bits.dtype} {list(bits.shape)}" if isinstance(bits, np.ndarray) else shown(bits)
    raise ValueError(
        f"the guide of request {handle} gave {given}: a mask of {vocab} tokens is a numpy array of {words} uint32"
    )


def check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    """Raise ValueError for the first of some numbers that is not a token id of the vocabulary.

    Raises:
      ValueError: the first such one, under this name.
    """
    # Long prompts are the rule: the whole is looked at first, and one by one only to name what is wrong.
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab)):
        return
    for token in ids:
        if not _is_integer(token) or not 0 <= token < vocab:
            raise ValueError(f"{name}: {shown(token)} is no token id; they are integers from 0 to {vocab - 1}")


def as_prompt(prompt: Sequence[int] | HostOrDevice) -> tuple[int, ...]:
    """Return a list, a tuple or a 1-D array of token ids as a tuple; whether they are ids is not checked.

    Raises:
      ValueError: text, or something that is not a list, a tuple or a 1-D array.
    """
    if isinstance(prompt, str | bytes):
        raise ValueError("the prompt is text: encode it with the model's tokenizer first")
    if isinstance(prompt, list | tuple) and prompt and type(prompt[0]) is int:  # a flat one; `check_ids` walks it
        return tuple(prompt)
    # As objects, so that what is no integer stays what it is until it is refused by name.
    array = np.asarray(prompt if hasattr(prompt, "__len__") else None, dtype=object)
    if array.ndim != 1:
        raise ValueError(f"the prompt is {shown(prompt)}: give one list of token ids")
    return tuple(array.tolist())


def as_prompts(prompts: Sequence[Sequence[int] | HostOrDevice]) -> list[tuple[int, ...]]:
    """Return lists, tuples or 1-D arrays of token ids as tuples; anything else is refused with the reason.

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
