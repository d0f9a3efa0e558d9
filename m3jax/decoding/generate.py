"""Continue a few prompts and return: an engine made to measure."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from m3jax.decoding.engine import DRAFT_TOKENS, PREFILL_CHUNK, Engine
from m3jax.decoding.request import Generation, Params, as_prompts, check_prompt
from m3jax.decoding.sampling import HostOrDevice, Sampling
from m3jax.decoding.speculative import Drafter

_MIN_TOKENS = 256  # of a row: shorter ones share one program
_PREFILL_TOKENS = 4 * PREFILL_CHUNK  # of all rows in one prefill call
_STEPS = 64


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
    draft: Drafter | None = None,
    draft_tokens: int = DRAFT_TOKENS,
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
      draft: proposes tokens that the model then verifies (`m3jax.decoding.speculative`).
      draft_tokens: proposals of a round.

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
    knobs = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty)
    params = [
        Params(max_new_tokens=max_new_tokens, sampling=Sampling(**knobs, seed=s), stop_ids=stop) for s in seeds
    ]  # fmt: skip
    engine = engine_for(model, prompts, params, draft=draft, draft_tokens=draft_tokens)
    handles = [engine.add(p, q) for p, q in zip(prompts, params, strict=True)]
    results = engine.run()
    rows = [results[handle] for handle in handles]
    check_logits(rows)
    return [row.tokens for row in rows]


def engine_for(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: Sequence[Params],
    *,
    steps_per_call: int | None = None,
    draft: Drafter | None = None,
    draft_tokens: int = DRAFT_TOKENS,
) -> Engine:
    """An engine in which all these prompts run at once, compiled.

    Args:
      model: from `m3jax.load`.
      prompts: token ids.
      params: one a prompt.
      steps_per_call: decode steps of a device call; by default as many as are wanted, up to 64.
      draft: as in `generate`.
      draft_tokens: as in `generate`.

    Raises:
      ValueError: no prompts, or one that the model cannot serve.
    """
    if not prompts:
        raise ValueError("no prompts: give at least one")
    for row, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        check_prompt(prompt, p, model.config, f"prompt {row}")
    size, longest = model.config.index_block_size, max(map(len, prompts))
    needed = [len(prompt) + p.max_new_tokens for prompt, p in zip(prompts, params, strict=True)]
    blocks = _bucket(math.ceil(max(_MIN_TOKENS, *needed) / size), 1)
    rows, chunk = _bucket(len(prompts), 1), min(PREFILL_CHUNK, _bucket(longest, 16))
    engine = Engine(
        model,
        pages=max(blocks, _bucket(sum(math.ceil(n / size) for n in needed), 1)),
        max_batch=rows,
        prefill_chunk=chunk,
        prefill_rows=max(1, min(rows, _PREFILL_TOKENS // chunk)),
        max_length=blocks * size,
        steps_per_call=steps_per_call or min(_STEPS, _bucket(max(p.max_new_tokens for p in params), 16)),
        max_stop_ids=_bucket(max(len(p.stop_ids) for p in params), 4),
        draft=draft,
        draft_tokens=draft_tokens,
    )
    engine.warmup()
    return engine


def check_logits(rows: Sequence[Generation]) -> None:
    """Raise if some row ended because its logits had no distribution.

    Raises:
      FloatingPointError: names the first such row and how far it came.
    """
    for row, generation in enumerate(rows):
        if generation.stop_reason == "nan":
            raise FloatingPointError(
                f"prompt {row}: after {len(generation.tokens)} new tokens the model's logits were NaN or infinite; "
                "check the checkpoint for NaN weights, or load it with dtype float32"
            )


def _bucket(number: int, smallest: int) -> int:
    """The power of two (times `smallest`) that holds `number`."""
    return smallest * 2 ** max(0, math.ceil(math.log2(max(number, 1) / smallest)))
