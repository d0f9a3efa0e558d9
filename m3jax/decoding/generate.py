"""Continue a few prompts and return: an engine made to measure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from m3jax.compile_cache import compile_cache
from m3jax.decoding.engine import (
    DRAFT_TOKENS,
    Engine,
    Generation,
    Media,
    Params,
    as_prompts,
    check_prompt,
    prefill_chunks,
)
from m3jax.decoding.protocols import TargetModel, sees
from m3jax.decoding.sampling import HostOrDevice, Number, Sampling
from m3jax.decoding.seen import read_media, with_placeholders
from m3jax.decoding.speculation import Drafter
from m3jax.media import bucket_size
from m3jax.platform import platform
from m3jax.progress import activity
from m3jax.text import Tokenizer

_MIN_TOKENS = 256  # of a prompt and its continuation: shorter ones share one program
_PREFILL_TOKENS = 8192  # of all prompts in one prefill call
_STEPS = 64


def generate(
    model: TargetModel,
    prompts: Sequence[Sequence[int] | HostOrDevice],
    *,
    max_new_tokens: int,
    temperature: Number = 1.0,
    top_k: Number | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    repetition_penalty: Number | None = None,
    seed: Number | Sequence[int] = 0,
    stop_ids: Sequence[int] | None = None,
    draft: Drafter | str | Path | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    images: Sequence[Sequence[Any]] | None = None,
    videos: Sequence[Sequence[Any]] | None = None,
    tokenizer: Tokenizer | None = None,
    progress: bool = True,
) -> list[list[int]]:
    """Continue prompts of token ids.

    Prompts may differ in length; none influences another. Shapes are rounded up to powers of two, so that a call
    with other lengths, knobs, seeds or stop ids of the same buckets compiles nothing. What is compiled is kept in the
    user's cache folder for the next process (`m3jax.compile_cache`); jax's settings are as before afterwards.

    With a draft sampled tokens keep their distribution, and greedy ones are the same in float32. In bfloat16, the
    default, a call that verifies several tokens rounds otherwise than one of a single token, and a near-tie can fall
    otherwise: of 32 greedy texts 5 changed with EAGLE3, 5 with prompt lookup, and 8 when they were batched; none in
    float32 (docs/speculative.md).

    Args:
      model: from `m3jax.load`.
      prompts: B lists of token ids.
      max_new_tokens: of each prompt.
      temperature: 0 is greedy. This and the other knobs are those of `Sampling`.
      top_k: None is off.
      top_p: None is off.
      min_p: None is off.
      repetition_penalty: None is off.
      seed: one for all, or one a prompt; equal prompts with equal seeds get equal tokens.
      stop_ids: a continuation ends with the first of these; None is the model's EOS, [] is none.
      draft: proposes tokens that the model then verifies: "builtin", "ngram", the folder of an EAGLE3 draft, or a
        drafter (`m3jax.decoding.speculation`).
      draft_tokens: proposals of a round.
      images: for each prompt a list of its images, each a path or a data URL as text, a `Path`, bytes, a Pillow image,
        an array, or what `m3jax.media.process_image` gave. The prompt has one placeholder (`]<]image[>[`) for each, or
        none at all, and then they stand in front.
      videos: the same for videos; of a video also frames can be given, or what `m3jax.media.process_video` gave.
      tokenizer: of the model; needed with images and videos, since it knows the tokens around them.
      progress: whether to say on stderr what is waited for: a moving line on a terminal, elsewhere a line every 1.5
        seconds, for as long as something is waited for (`m3jax.progress`).

    Returns:
      B lists of the new token ids only. One that met a stop id has it as its last token.

    Raises:
      ValueError: a bad argument.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    prompts = as_prompts(prompts)
    seeds = [seed] * len(prompts) if np.ndim(seed) == 0 else list(seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"seed has {len(seeds)} entries for {len(prompts)} prompts: give one number or one a prompt")
    stop = tuple(model.config.eos_token_id if stop_ids is None else stop_ids)
    knobs = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty)
    samplings = [Sampling(**knobs, seed=prompt_seed) for prompt_seed in seeds]
    params = [Params(max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop) for sampling in samplings]
    media = _media_of(prompts, images, videos, model, progress)
    prompts = [with_placeholders(prompt, seen, tokenizer) for prompt, seen in zip(prompts, media, strict=True)]
    engine = engine_for(model, prompts, params, media=media, draft=draft, draft_tokens=draft_tokens, progress=progress)
    handles = [engine.add(*request) for request in zip(prompts, params, media, strict=True)]
    with activity(progress) as line:
        line.say("generating")
        while engine.step():
            line.say(f"generating: {engine.timings.decoded_tokens} new tokens")
    results = engine.run()
    generations = [results[handle] for handle in handles]
    check_logits(generations)
    return [generation.tokens for generation in generations]


def engine_for(
    model: TargetModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[Params],
    *,
    media: Sequence[Media | None] | None = None,
    prefill_chunk: int | None = None,
    steps_per_call: int | None = None,
    draft: Drafter | str | Path | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    progress: bool = True,
) -> Engine:
    """An engine in which all these prompts run at once, with all compiled that they need.

    Args:
      model: from `m3jax.load`.
      prompts: token ids.
      params: one a prompt.
      media: images and videos, one a prompt; None where no prompt has any.
      prefill_chunk: prompt tokens of a device call; by default as many as the longest prompt has, rounded up, at most
        2,048, on a GPU 8,192. Who has one long prompt and many short ones on a CPU gives less.
      steps_per_call: decode steps of a device call; by default as many as are wanted, up to 64.
      draft: as in `generate`.
      draft_tokens: as in `generate`.
      progress: as in `generate`.

    Raises:
      ValueError: no prompts, one that the model cannot serve, or media that it does not take.
    """
    if not prompts:
        raise ValueError("no prompts: give at least one")
    for number, (prompt, asked) in enumerate(zip(prompts, params, strict=True), 1):
        check_prompt(prompt, asked, model.config, f"prompt {number}")
    page_size, longest_prompt = model.config.index_block_size, max(map(len, prompts))
    lengths = [len(prompt) + asked.max_new_tokens for prompt, asked in zip(prompts, params, strict=True)]
    blocks = _bucket(math.ceil(max(_MIN_TOKENS, *lengths) / page_size), 1)
    pages = _bucket(sum(math.ceil(length / page_size) for length in lengths), 1)
    max_batch = _bucket(len(prompts), 1)
    chunk = prefill_chunks(_bucket(longest_prompt, 16))[-1] if prefill_chunk is None else prefill_chunk
    found = [segment for given in media or () if given for segment in given.segments(model.config)]
    # One size of call, which holds the largest picture; no tower where there is none.
    patches = (bucket_size(max(len(segment.patches) for segment in found)),) if found else ()
    with compile_cache():
        engine = Engine(
            model,
            pages=max(blocks, pages),
            max_batch=max_batch,
            prefill_chunk=chunk,
            prefill_rows=max(1, min(max_batch, _PREFILL_TOKENS // chunk)),
            max_length=min(blocks * page_size, model.config.max_position_embeddings),
            steps_per_call=steps_per_call or min(_STEPS, _bucket(max(asked.max_new_tokens for asked in params), 16)),
            max_stop_ids=_bucket(max(len(asked.stop_ids) for asked in params), 4),
            media_patches=patches,
            draft=draft,
            draft_tokens=draft_tokens,
        )
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(model)})
        about = (platform(), model.config, dtypes, engine.shapes, type(draft).__name__)
        # The first token comes out of prefill; nothing is copied, for no prompt comes after another.
        programs = ["prefill", "tower"]
        if any(asked.max_new_tokens > 1 for asked in params):
            programs.append("decode")
        with activity(progress, about) as line:
            engine.warmup(lambda names: line.timed(f"compiling {names}"), programs)
    return engine


def _media_of(
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[Any]] | None,
    videos: Sequence[Sequence[Any]] | None,
    model: TargetModel,
    progress: bool,
) -> list[Media]:
    """What each prompt shows, read and processed; what cannot be is refused before anything runs."""
    shown = {"images": images, "videos": videos}
    for name, lists in shown.items():
        if lists is not None and len(lists) != len(prompts):
            raise ValueError(
                f"{name} has {len(lists)} lists for {len(prompts)} prompts: give a list for each, [] for none"
            )
    if any(lists is not None and any(map(len, lists)) for lists in shown.values()) and not sees(model):
        raise ValueError("the model has no vision tower: it takes text alone; leave the images and videos out")
    none = [[]] * len(prompts)
    every = zip(images or none, videos or none, strict=True)
    return [read_media(*of_prompt, progress=progress) for of_prompt in every]


def check_logits(generations: Sequence[Generation]) -> None:
    """Raise if some prompt's continuation ended because its logits had no distribution.

    Args:
      generations: one a prompt.

    Raises:
      FloatingPointError: names the first such prompt and how far it came.
    """
    for number, generation in enumerate(generations, 1):
        if generation.stop_reason == "nan":
            raise FloatingPointError(
                f"prompt {number}: after {len(generation.tokens)} new tokens the model's logits were NaN or infinite; "
                "check the checkpoint for NaN weights, or load it with dtype float32"
            )


def _bucket(number: int, smallest: int) -> int:
    """The power of two (times `smallest`) that holds `number`."""
    return smallest * 2 ** max(0, math.ceil(math.log2(max(number, 1) / smallest)))
