"""Engines sized for the requests that they will serve, with their programs compiled."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import jax
import jax.numpy as jnp

from m3jax.cache.device import page_shards, pages_of_rows
from m3jax.compile_cache import compile_cache
from m3jax.decoding.engine import (
    DRAFT_TOKENS,
    PROGRAMS,
    Engine,
    EngineKnobs,
    Generation,
    Media,
    Params,
    check_prompt,
    prefill_chunks,
)
from m3jax.decoding.protocols import TargetModel
from m3jax.decoding.sampling import count_bad_words, count_biases
from m3jax.decoding.speculation import Drafter
from m3jax.media.packing import bucket_size
from m3jax.platform import platform
from m3jax.progress import activity

# Tokens of a prompt and its continuation: shorter ones share one program. On a CPU a program takes 10 to 20 s to
# compile, and a step of the embedded model 2 ms more with four times the room.
_MIN_TOKENS, _MIN_TOKENS_ON_CPU = 256, 1024
_PREFILL_TOKENS = 8192  # of all prompts in one prefill call
_STEPS = 64
# On a CPU a prompt of up to so many tokens is read in chunks of one size, for which one program is compiled.
_CHUNKED_TOKENS, _CHUNK = 2048, 256
_TOWER_SIZES_ON_CPU = (256, 1024, 2304)  # patches; 2,304 is the hub's largest image


def build_engine(
    model: TargetModel,
    *,
    rows: int,
    length: int,
    programs: Sequence[str] = PROGRAMS,
    longest: int | None = None,
    all_record: bool = False,
    progress: bool = True,
    draft: Drafter | str | Path | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    **knobs: Unpack[EngineKnobs],
) -> Engine:
    """Make an engine in which so many requests of so many tokens run at once, and compile what they run.

    What is compiled is kept in the user's cache folder (`m3jax.compile_cache`). On a CPU the pages of a bfloat16 model
    are float32, where nothing else is asked for: the same numbers, written faster.

    Args:
      model: from `m3jax.load`.
      rows: requests that decode together.
      length: tokens that each of them can have, its prompt included.
      programs: as in `Engine.warmup`.
      longest: as in `Engine.warmup`.
      all_record: as in `Engine.warmup`.
      progress: as in `generate`.
      draft: as in `generate`.
      draft_tokens: as in `generate`.
      **knobs: the attributes of `Storage` and of `Work`, as for `Engine`. Without `pages` the pool has as many as
        the rows can fill.

    Raises:
      ValueError: as `Engine`.
    """
    pages = pages_of_rows([math.ceil(length / model.config.index_block_size)] * rows, page_shards(model.mesh))
    with compile_cache():
        room = {"pages": pages, "max_batch": rows, "max_length": length}
        engine = Engine(model, draft=draft, draft_tokens=draft_tokens, **room | page_types(model) | knobs)
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(model)})
        about = (platform(), model.config, dtypes, engine.shapes, type(draft).__name__)
        with activity(progress, about) as line:
            engine.warmup(lambda names: line.timed(f"compiling {names}"), programs, longest, all_record)
    return engine


def page_types(model: TargetModel) -> EngineKnobs:
    """Return the types in which an engine of a model keeps its pages where nothing else is asked for, as keywords.

    XLA's CPU backend widens the whole pages of a stack for each token written to them in bfloat16, and narrows them
    again. In float32, which holds the same numbers, a token is written alone.

    Args:
      model: whose engine it is.
    """
    is_widened = platform() == "cpu" and any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(model))
    return {"kv_dtype": "float32", "index_dtype": "float32"} if is_widened else {}


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
    """Return an engine in which all these prompts run at once, with every program that they need compiled.

    Args:
      model: from `m3jax.load`.
      prompts: token ids.
      params: one a prompt.
      media: images and videos, one a prompt; None where no prompt has any.
      prefill_chunk: prompt tokens of a device call; by default as many as the longest prompt has, rounded up, at most
        2,048, on a GPU 8,192. On a CPU it is 256 for a single prompt of up to 2,048 tokens, so that all such prompts
        share a program; there a smaller value suits one long prompt among many short ones.
      steps_per_call: decode steps of a device call; by default as many as are wanted, up to 64, on a CPU always 64,
        of which only those that are wanted run.
      draft: as in `Engine`.
      draft_tokens: as in `Engine`.
      progress: say on stderr what is compiled (`m3jax.progress`).

    Raises:
      ValueError: no prompts, one that the model cannot serve, or media that it does not take.
    """
    if not prompts:
        raise ValueError("no prompts: give at least one")
    for number, (prompt, asked) in enumerate(zip(prompts, params, strict=True), 1):
        check_prompt(prompt, asked, model.config, f"prompt {number}")
    page_size, longest_prompt = model.config.index_block_size, max(map(len, prompts))
    lengths = [len(prompt) + asked.max_new_tokens for prompt, asked in zip(prompts, params, strict=True)]
    is_cpu = platform() == "cpu"
    least = _MIN_TOKENS_ON_CPU if is_cpu else _MIN_TOKENS
    blocks = _bucket(math.ceil(max(least, *lengths) / page_size), 1)
    blocks_of_rows = [math.ceil(length / page_size) for length in lengths]
    pages = _bucket(pages_of_rows(blocks_of_rows, page_shards(model.mesh)), 1)
    max_batch = _bucket(len(prompts), 1)
    chunk = prefill_chunks(_bucket(longest_prompt, 16))[-1] if prefill_chunk is None else prefill_chunk
    if prefill_chunk is None and is_cpu and len(prompts) == 1 and longest_prompt <= _CHUNKED_TOKENS:
        chunk = min(_CHUNK, _bucket(model.config.max_position_embeddings, 16))
    steps = _STEPS if is_cpu else min(_STEPS, _bucket(max(asked.max_new_tokens for asked in params), 16))
    found = [segment for given in media or () if given for segment in given.segments(model.config)]
    # One size of tower call, which holds the largest segment; none without images and videos.
    patches = (_tower_size(max(len(segment.patches) for segment in found)),) if found else ()
    # Prefill gives the first token. No pages are copied, because no prompt comes after another.
    programs = ["prefill", "tower"]
    if any(asked.max_new_tokens > 1 for asked in params):
        programs.append("decode")
    return build_engine(
        model,
        rows=max_batch,
        length=min(blocks * page_size, model.config.max_position_embeddings),
        pages=max(blocks, pages),
        prefill_chunk=chunk,
        prefill_rows=max(1, min(max_batch, _PREFILL_TOKENS // chunk)),
        steps_per_call=steps_per_call or steps,
        max_stop_ids=_bucket(max(len(asked.stop_ids) for asked in params), 4),
        max_biases=_bucket(max(count_biases(asked.sampling) for asked in params), 64),
        max_bad_words=_bucket(max(count_bad_words(asked.sampling) for asked in params), 16),
        media_patches=patches,
        draft=draft,
        draft_tokens=draft_tokens,
        programs=programs,
        progress=progress,
    )


def check_logits(generations: Sequence[Generation]) -> None:
    """Raise FloatingPointError if a continuation ended because its logits had no distribution.

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


def _tower_size(patches: int) -> int:
    """Return the patches in a call of the tower that holds so many: on a CPU few sizes, elsewhere four a doubling."""
    if platform() == "cpu":
        return next((size for size in _TOWER_SIZES_ON_CPU if size >= patches), bucket_size(patches))
    return bucket_size(patches)


def _bucket(number: int, smallest: int) -> int:
    """Return the least power of two, times `smallest`, that is at least `number`."""
    return smallest * 2 ** max(0, math.ceil(math.log2(max(number, 1) / smallest)))
