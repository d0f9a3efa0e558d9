"""The host side of generation: shapes in buckets, prompts through prefill, the loop in slices or in one go."""

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m3jax.cache import Cache
from m3jax.decoding import loop
from m3jax.decoding.request import Generation, Request, Timings, as_prompts, check_requests
from m3jax.decoding.sampling import HostOrDevice, Sampling, SamplingParams
from m3jax.parallel import sharding

PREFILL_CHUNK = 2048
_MIN_CACHE = 256
_REASONS = {
    loop.LIVE: "unfinished",
    loop.LENGTH: "length",
    loop.STOP_ID: "stop_id",
    loop.STOP_STRING: "stop_string",
    loop.BAD_LOGITS: "nan",
}


def generate(
    model: Any,
    prompts: Sequence[Sequence[int] | HostOrDevice],
    *,
    max_new_tokens: int,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    min_p: float | int | None = None,
    repetition_penalty: float | int | None = None,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue prompts of token ids.

    Rows may differ in length; none influences another. Shapes are rounded up to powers of two, so that a call
    with other lengths, knobs, seeds or stop ids of the same buckets compiles nothing.

    Args:
      model: from `m3jax.load`.
      prompts: B lists of token ids.
      max_new_tokens: of each row.
      temperature: 0 is greedy. This and the other knobs are those of `Sampling`.
      top_k: None is off.
      top_p: None is off.
      min_p: None is off.
      repetition_penalty: None is off.
      seed: one for all rows, or one a row; equal prompts with equal seeds get equal tokens.
      stop_ids: a row ends with the first of these; None is the model's EOS, [] is none.

    Returns:
      B lists of the new token ids only. A row that met a stop id has it as its last token.

    Raises:
      ValueError: a bad argument.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    prompts = as_prompts(prompts)
    seeds = [seed] * len(prompts) if isinstance(seed, int | np.integer) else list(seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"seed has {len(seeds)} entries for {len(prompts)} prompts: give one number or one a prompt")
    stop = tuple(model.config.eos_token_id if stop_ids is None else stop_ids)
    knobs = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    requests = [
        Request(prompt=p, max_new_tokens=max_new_tokens, sampling=Sampling(**knobs, seed=s), stop_ids=stop)
        for p, s in zip(prompts, seeds, strict=True)
    ]
    batch = Batch(model, requests)
    batch.prefill()
    batch.advance(max_new_tokens)
    batch.check_logits()
    return batch.tokens()


class Batch:
    """Prompts that are continued together: `prefill` once, then `advance` while `live`.

    Cutting the work differently (other chunks, other slices) gives the same tokens. Between two calls every
    array is on the device, and the cache is never copied.

    Args:
      model: from `m3jax.load`.
      requests: one a row.
      prefill_chunk: prompt tokens of a row in one device call; it bounds the memory of prefill.

    Raises:
      ValueError: a request that the model cannot serve, with the reason.
    """

    def __init__(self, model: Any, requests: Sequence[Request], *, prefill_chunk: int = PREFILL_CHUNK):
        check_requests(requests, model.config)
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk = {prefill_chunk}: must be at least 1")
        self.model = model
        self.requests = tuple(requests)
        self.timings = Timings(prompt_tokens=sum(len(r.prompt) for r in requests))
        self._rows = _row_bucket(len(requests), model)
        self._chunk = min(prefill_chunk, _bucket(max(len(r.prompt) for r in requests), 16))
        self._plan = _plan(requests, self._rows)
        self._state: loop.State | None = None
        self._layout: loop.Layout | None = None
        self._counts = np.zeros(self._rows, np.int32)
        self._reasons = np.full(self._rows, loop.LIVE, np.int32)
        self._taken = [0] * len(requests)

    @property
    def live(self) -> bool:
        """Whether some row goes on."""
        return self._state is None or bool(np.any(self._reasons == loop.LIVE))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, all devices together; 0 before prefill."""
        return 0 if self._state is None else sum(x.nbytes for x in jax.tree.leaves(self._state.cache))

    def prefill(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Run the prompts through the model and choose each row's first token.

        Args:
          on_progress: called after each chunk with the prompt tokens done and their total.
        """
        if self._state is not None:
            raise ValueError("prefill ran already: call advance, or make a new Batch")
        tokens, lengths = self._padded_prompts()
        room = _bucket(max(r.max_new_tokens for r in self.requests), 16)
        part = self._warm_up(tokens[:, : self._chunk], room)
        began = perf_counter()
        for start in range(0, tokens.shape[1], self._chunk):
            end = start + self._chunk
            columns = tokens[:, start:end]
            part = loop.prefill_chunk(self.model, part, columns, np.int32(start), lengths, layout=self._layout)
            if on_progress is not None:
                jax.block_until_ready(part.logits)
                on_progress(int(np.minimum(lengths, end).sum()), self.timings.prompt_tokens)
        self._state = self._first_token(part, lengths, room)
        self._read()
        self.timings.prefill_seconds = perf_counter() - began

    def advance(self, steps: int) -> None:
        """Append up to `steps` tokens to every live row; does not come back before they are there."""
        state = self._require_prefill()
        if steps < 1:
            raise ValueError(f"steps = {steps}: must be at least 1")
        before, began = int(self._counts.sum()), perf_counter()
        self._state = loop.decode(self.model, state, self._plan, np.int32(steps), layout=self._layout)
        self._read()
        self.timings.decode_seconds += perf_counter() - began
        self.timings.decoded_tokens += int(self._counts.sum()) - before

    def stop(self, keep: Mapping[int, int]) -> None:
        """End rows at a stop string.

        Args:
          keep: for each row that ends, how many of its new tokens stay.
        """
        counts, stopped = self._counts.copy(), np.zeros(self._rows, bool)
        for row, count in keep.items():
            counts[row], stopped[row] = count, True
        self._state = loop.stop_rows(self._require_prefill(), counts, stopped, layout=self._layout)
        self._read()

    def take(self) -> list[list[int]]:
        """The new tokens of each row since the last `take`."""
        rows = [tokens[start:] for tokens, start in zip(self.tokens(), self._taken, strict=True)]
        self._taken = [start + len(new) for start, new in zip(self._taken, rows, strict=True)]
        return rows

    def tokens(self) -> list[list[int]]:
        """All new tokens of each row."""
        tokens = np.asarray(self._require_prefill().tokens)
        return [tokens[row, : self._counts[row]].tolist() for row in range(len(self.requests))]

    def reasons(self) -> list[str]:
        """Why each row stopped; "unfinished" if it goes on."""
        return [_REASONS[int(self._reasons[row])] for row in range(len(self.requests))]

    def results(self) -> list[Generation]:
        """What each row has so far, without text."""
        logprobs = np.asarray(self._require_prefill().logprobs)
        return [
            Generation(tokens, logprobs[row, : len(tokens)].tolist(), reason, len(self.requests[row].prompt))
            for row, (tokens, reason) in enumerate(zip(self.tokens(), self.reasons(), strict=True))
        ]

    def check_logits(self) -> None:
        """Raise if some row ended because its logits had no distribution.

        Raises:
          FloatingPointError: names the first such row and how far it came.
        """
        for row, reason in enumerate(self.reasons()):
            if reason == _REASONS[loop.BAD_LOGITS]:
                raise FloatingPointError(
                    f"prompt {row}: after {self._counts[row]} new tokens the model's logits were NaN or infinite; "
                    "check the checkpoint for NaN weights, or load it with dtype float32"
                )

    def _require_prefill(self) -> loop.State:
        if self._state is None:
            raise ValueError("nothing to continue yet: call prefill first")
        return self._state

    def _padded_prompts(self) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.zeros(self._rows, np.int32)
        lengths[: len(self.requests)] = [len(r.prompt) for r in self.requests]
        tokens = np.zeros((self._rows, _round_up(int(lengths.max()), self._chunk)), np.int32)
        for row, request in enumerate(self.requests):
            tokens[row, : lengths[row]] = request.prompt
        return tokens, lengths

    def _cache_length(self) -> int:
        config = self.model.config
        needed = max(len(r.prompt) + r.max_new_tokens for r in self.requests)
        blocks = _bucket(math.ceil(max(needed, _MIN_CACHE) / config.index_block_size), 1)
        return min(blocks * config.index_block_size, config.max_position_embeddings)

    def _warm_up(self, tokens: np.ndarray, room: int) -> loop.Prefill:
        """Compile all that this batch will run, by running it on no rows; returns what prefill begins with."""
        began = perf_counter()
        nothing = np.zeros(self._rows, np.int32)
        part, self._layout = _empty_prefill(self.model, self._rows, self._cache_length())
        part = loop.prefill_chunk(self.model, part, tokens, np.int32(0), nothing, layout=self._layout)
        state = self._first_token(part, nothing, room)
        state = loop.decode(self.model, state, self._plan, np.int32(0), layout=self._layout)
        jax.block_until_ready(state.counts)
        self.timings.compile_seconds = perf_counter() - began
        return loop.Prefill(state.cache, state.seen, part.logits)

    def _first_token(self, part: loop.Prefill, lengths: np.ndarray, room: int) -> loop.State:
        args = part.cache, part.seen, part.logits, lengths, self._plan
        return loop.first_token(*args, room=room, layout=self._layout)

    def _read(self) -> None:
        state = self._require_prefill()
        self._counts, self._reasons = (np.asarray(x) for x in jax.device_get((state.counts, state.reasons)))


def _empty_prefill(model: Any, rows: int, length: int) -> tuple[loop.Prefill, loop.Layout | None]:
    cache = Cache.init(model.config, rows, length, str(model.dtype), model.mesh)
    vocab = model.config.vocab_size
    place = sharding((rows,), ("batch",), model.mesh)
    seen = jnp.zeros((rows, vocab), bool, device=place)
    logits = jnp.zeros((rows, vocab), jnp.float32, device=place)
    places = tuple(x.sharding for x in jax.tree.leaves(cache))
    layout = None if model.mesh is None else loop.Layout(places, place)
    return loop.Prefill(cache, seen, logits), layout


def _row_bucket(rows: int, model: Any) -> int:
    """A power of two that the mesh can divide."""
    return _round_up(_bucket(rows, 1), 1 if model.mesh is None else model.mesh.shape.get("data", 1))


def _plan(requests: Sequence[Request], rows: int) -> loop.Plan:
    padding = [Sampling.greedy()] * (rows - len(requests))
    width = _bucket(max(len(r.stop_ids) for r in requests), 4)
    stop_ids, limits = np.full((rows, width), -1, np.int32), np.zeros(rows, np.int32)
    for row, request in enumerate(requests):
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        limits[row] = request.max_new_tokens
    return loop.Plan(SamplingParams.stack([r.sampling for r in requests] + padding), stop_ids, limits)


def _bucket(number: int, smallest: int) -> int:
    """The power of two (times `smallest`) that holds `number`."""
    return smallest * 2 ** max(0, math.ceil(math.log2(max(number, 1) / smallest)))


def _round_up(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit
